"""Tables and lines of what the command line compares: two results, a gate, a benchmark of many sets.

Promise: text is a pure function of results. Ids and texts of the data stand there as they are: neither markup nor
control characters in them reach a terminal.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fullrank.benchmarks import Outcome, average, forgotten
from fullrank.changes import Change, Flip
from fullrank.gating import Check, Gate
from fullrank.report import render, slim_table
from fullrank.result import Hit

__all__ = [
    "benchmark_table",
    "change_json",
    "changes_table",
    "flip_json",
    "flips_text",
    "forgotten_text",
    "gate_json",
    "gate_text",
    "latency_text",
    "plain",
]

TEXT_WIDTH = 100
LISTED = 3


def changes_table(changes: Mapping[str, Change], *, title: str | None = None, what: str = "metric") -> str:
    """Returns one row a metric or query type: before and after, delta in points, interval, p, wins and losses.

    Of query types p and verdict are those after Holm's correction: among many types one stands out by chance.
    """
    p = "p" if what == "metric" else "p Holm"
    heads = ("n", "base", "tuned", "points", _level(changes), p, "won/lost", "verdict")
    table = _table(title, what, *heads)
    for name, change in changes.items():
        found = change.comparison
        low, high = found.interval
        table.add_row(
            Text(plain(name) or "-"),
            f"{found.n:,}",
            f"{change.before:.4f}",
            f"{change.after:.4f}",
            f"{100 * found.delta:+.2f}",
            f"{100 * low:+.2f} to {100 * high:+.2f}",
            f"{found.p_value if what == 'metric' else change.adjusted_p:.4f}",
            f"{len(found.wins)} / {len(found.losses)}",
            found.verdict if what == "metric" else change.adjusted_verdict,
        )
    return render(table)


def flips_text(title: str, flips: Sequence[Flip], corpus: Mapping[str, str] | None = None) -> str:
    """Returns the queries that flipped: text, values, what was expected, and what was retrieved before and after.

    Args:
        title: the first line.
        flips: the queries.
        corpus: ``{document id: text}``; without it documents are named by id.
    """
    lines = [title]
    for flip in flips:
        kind = f" ({plain(flip.group)})" if flip.group else ""
        text = f": {plain(flip.query, TEXT_WIDTH)}" if flip.query else ""
        lines += [
            f"  {plain(flip.query_id)}{kind}{text}",
            f"    {flip.before:.4f} -> {flip.after:.4f}",
            f"    expected: {_documents([(d, None) for d in flip.expected], flip, corpus)}",
            f"    before:   {_documents(flip.retrieved_before, flip, corpus)}",
            f"    after:    {_documents(flip.retrieved_after, flip, corpus)}",
        ]
    return "\n".join(lines)


def gate_text(gate: Gate) -> str:
    """Returns one line a metric with the reason, and a last line with the decision."""
    width = max(len(check.metric) for check in gate.checks)
    lines = [
        f"{'FAILED' if check.failed else 'passed'}  {check.metric:<{width}}  {check.before:.4f} -> {check.after:.4f}: "
        f"{check.reason}"
        for check in gate.checks
    ]
    failed = ", ".join(check.metric for check in gate.checks if check.failed)
    allowed = f"allowed fall {100 * gate.max_drop:.2f} points, {gate.checks[0].comparison.n:,} queries"
    return "\n".join([*lines, f"Gate {f'FAILED: {failed}' if failed else 'passed'} ({allowed})"])


def benchmark_table(outcomes: Sequence[Outcome], metrics: Sequence[str], *, title: str | None = None) -> str:
    """Returns one row a set and the average; with a baseline, NDCG@10 of both and how it changed."""
    done = [outcome for outcome in outcomes if outcome.result is not None]
    if any(outcome.baseline is not None for outcome in done):
        return _base_against_tuned(done, title)
    table = _table(title, "set", "queries", "documents", *metrics)
    for outcome in done:
        assert outcome.result is not None  # of `done`
        n = outcome.result.counts
        values = [f"{outcome.result.metrics[name]:.4f}" for name in metrics]
        table.add_row(Text(plain(outcome.benchmark.name)), f"{n['n_scored']:,}", f"{n['n_documents']:,}", *values)
    results = [outcome.result for outcome in done if outcome.result is not None]
    table.add_section()
    table.add_row(f"average of {len(done)}", "", "", *(f"{average(results, name):.4f}" for name in metrics))
    return render(table)


def _base_against_tuned(done: Sequence[Outcome], title: str | None) -> str:
    table = _table(title, "set", "n", "base", "tuned", "points", "95% interval", "p", "verdict")
    paired = [(outcome, outcome.change) for outcome in done if outcome.change is not None]
    for outcome, change in paired:
        low, high = change.comparison.interval
        table.add_row(
            Text(plain(outcome.benchmark.name)),
            f"{change.comparison.n:,}",
            f"{change.before:.4f}",
            f"{change.after:.4f}",
            f"{100 * change.comparison.delta:+.2f}",
            f"{100 * low:+.2f} to {100 * high:+.2f}",
            f"{change.comparison.p_value:.4f}",
            change.comparison.verdict,
        )
    before, after = ([getattr(change, side) for _, change in paired] for side in ("before", "after"))
    table.add_section()
    mean = [math.fsum(values) / len(values) for values in (before, after)]
    table.add_row(
        f"average of {len(paired)}", "", f"{mean[0]:.4f}", f"{mean[1]:.4f}", f"{100 * (mean[1] - mean[0]):+.2f}"
    )
    return render(table)


def forgotten_text(outcomes: Sequence[Outcome], max_drop: float) -> str:
    """Returns the rule and which sets break it, with what to try."""
    rule = f"more than {100 * max_drop:.2f} points of NDCG@10 lost against the baseline"
    lost = forgotten(outcomes, max_drop)
    if not lost:
        return f"No set has {rule}."
    named = ", ".join(
        f"{plain(o.benchmark.name)} ({100 * change.comparison.delta:+.2f}, {change.comparison.verdict})"
        for o in lost
        if (change := o.change) is not None
    )
    return (
        f"Over-specialised: {rule} on {named}. Try a lower learning rate, fewer epochs, or mix general pairs into the "
        "training data."
    )


def latency_text(timing: Mapping[str, float]) -> str:
    """Returns p50 and p95 of one query in milliseconds."""
    return f"{timing['query_ms_p50']:.1f} / {timing['query_ms_p95']:.1f} ms"


def change_json(change: Change | Check) -> dict[str, Any]:
    """Returns a change as JSON holds it; all in the metric's own unit."""
    found = change.comparison
    return {
        "before": change.before,
        "after": change.after,
        "delta": found.delta,
        "interval": list(found.interval),
        "level": found.interval.level,
        "p_value": found.p_value,
        "adjusted_p_value": change.adjusted_p,
        "verdict": found.verdict,
        "n": found.n,
        "n_wins": len(found.wins),
        "n_losses": len(found.losses),
    }


def flip_json(flip: Flip) -> dict[str, Any]:
    """Returns a flip as JSON holds it."""
    return {
        **vars(flip),
        "retrieved_before": [list(hit) for hit in flip.retrieved_before],
        "retrieved_after": [list(hit) for hit in flip.retrieved_after],
    }


def gate_json(gate: Gate) -> dict[str, Any]:
    """Returns the decision as JSON holds it."""
    return {
        "passed": gate.passed,
        "max_drop": gate.max_drop,
        "metrics": {c.metric: {"failed": c.failed, "reason": c.reason, **change_json(c)} for c in gate.checks},
    }


def plain(text: str, width: int | None = None) -> str:
    """Returns text on one line, without the control characters that would steer a terminal.

    >>> plain("two" + chr(10) + "lines" + chr(27) + "[31m")
    'two lines?[31m'
    """
    flat = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return flat if width is None or len(flat) <= width else flat[: width - 1] + "…"


def _documents(hits: Sequence[Hit | tuple[str, None]], flip: Flip, corpus: Mapping[str, str] | None) -> str:
    """Returns the first documents of a list; those that answer the query carry a star."""
    shown = []
    for doc_id, score in hits[:LISTED]:
        text = "" if corpus is None or doc_id not in corpus else f" {plain(corpus[doc_id], 60)!r}"
        star = "*" if score is not None and doc_id in flip.expected else ""
        shown.append(f"{plain(doc_id)}{star}{'' if score is None else f' ({score:.3f})'}{text}")
    more = f", and {len(hits) - LISTED} more" if len(hits) > LISTED and hits[0][1] is None else ""
    return (", ".join(shown) or "-") + more


def _level(changes: Mapping[str, Change]) -> str:
    return f"{next(iter(changes.values())).comparison.interval.level:.0%} interval"


def _table(title: str | None, first: str, *columns: str) -> Table:
    table = slim_table(None)
    table.title = None if title is None else Text(plain(title))
    table.padding = (0, 0)  # with it, and words that may wrap, 80 columns are enough
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=name != "verdict")
    return table
