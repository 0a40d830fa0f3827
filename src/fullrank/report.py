"""What people look at: console lines and tables, the TensorBoard layout.

Promise: text is a pure function of results; only `say` writes. Numbers are rounded here and nowhere before.
"""

import string
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from fullrank.comparison import Comparison, compare
from fullrank.result import Finding, Miss, Result
from fullrank.stats import Interval

__all__ = [
    "comparison_table",
    "evaluation_line",
    "findings_text",
    "result_table",
    "say",
    "tensorboard_layout",
    "verdict",
    "worst_text",
]

SHOWN = ("recall@1", "recall@5", "ndcg@10", "mrr@10")


def say(text: str, *, file: IO[str] | None = None) -> None:
    """Prints a line without breaking a progress bar."""
    tqdm.write(text, file=file or sys.stdout)
    (file or sys.stdout).flush()


def render(table: Table, *, width: int | None = None) -> str:
    """Returns a table as text: in a pipe without colours, and wide enough that no number wraps."""
    console = Console(width=width or (None if sys.stdout.isatty() else 120), highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")


def evaluation_line(
    step: int,
    max_steps: int,
    result: Result,
    metric: str,
    *,
    logs: Mapping[str, float] | None = None,
    is_best: bool = False,
    also: str = "ndcg@10",
) -> str:
    """Returns the line of one evaluation: step, loss, in-batch diagnostics, the objective with its interval."""
    logs = logs or {}
    parts = [f"step {step:>{len(str(max_steps))}}/{max_steps}", f"loss {_number(logs.get('loss'), 3)}"]
    if "in_batch_acc" in logs:
        parts.append(
            f"in-batch acc {logs['in_batch_acc']:.3f} mrr {logs['in_batch_mrr']:.3f} "
            f"(of {logs['in_batch_candidates']:.0f})"
        )
    else:
        parts.append("in-batch acc     - mrr     -")
    low, high = result.ci(metric)
    parts.append(f"{metric} {result.metrics[metric]:.4f} [{low:.3f}, {high:.3f}] of {result.counts['n_documents']:,}")
    if also in result.metrics and also != metric:
        parts.append(f"{also} {result.metrics[also]:.4f}")
    return "  ".join(parts) + ("  * best" if is_best else "")


def result_table(result: Result, *, title: str | None = None, level: float = 0.95) -> str:
    """Returns the metrics of a result with their intervals; of a bound without, and marked as upper bounds."""
    if result.bound:
        n = result.counts
        part = f"upper bounds: {n['n_ranked']:,} of {n['n_documents']:,} documents were ranked"
        title = part if title is None else f"{title}; {part}"
    table = Table(title=title, title_justify="left")
    for name in ("metric", "value", f"{level:.0%} interval"):
        table.add_column(name, justify="left" if name == "metric" else "right", no_wrap=True)
    for name, value in result.metrics.items():
        if result.bound:
            table.add_row(name, f"<= {value:.4f}", "-")
        else:
            table.add_row(name, f"{value:.4f}", _interval(result.ci(name, level)))
    return render(table)


def comparison_table(base: Result, best: Result, *, metrics: Sequence[str] = SHOWN, title: str | None = None) -> str:
    """Returns the table base against best: values, delta in points with its interval, wins and losses."""
    table = Table(title=title, title_justify="left")
    for name in ("metric", "base", "best", "delta (points)", "95 % interval", "p", "won / lost"):
        table.add_column(name, justify="left" if name == "metric" else "right", no_wrap=True)
    for name in metrics:
        if name not in base.metrics or name not in best.metrics:
            continue
        found = compare(base, best, name)
        low, high = found.interval
        table.add_row(
            name,
            f"{base.metrics[name]:.4f}",
            f"{best.metrics[name]:.4f}",
            f"{100 * found.delta:+.2f}",
            f"{100 * low:+.2f} to {100 * high:+.2f}",
            f"{found.p_value:.4f}",
            f"{len(found.wins)} / {len(found.losses)}",
        )
    return render(table)


def verdict(comparison: Comparison | None, *, improved: bool, step: int | None, metric: str) -> str:
    """Returns the sentence that a run ends with."""
    if step is None:
        return "No evaluation succeeded: nothing was chosen, and the weights are those of the last step."
    if not improved:
        return (
            f"Nothing beat the base model: no step scored a higher {metric} than step 0. The base weights are "
            "restored. Try a lower learning rate, more or cleaner pairs, or harder negatives."
        )
    if comparison is None:
        return f"Best: step {step} by {metric}."
    low, high = comparison.interval
    sure = {
        "better": "better than the base model",
        "worse": "worse than the base model",
        "not separable": "not separable from the base model on these queries",
    }[comparison.verdict]
    return (
        f"Best: step {step} by {metric}: {100 * comparison.delta:+.2f} points [{100 * low:+.2f}, {100 * high:+.2f}], "
        f"p = {comparison.p_value:.4f} over {comparison.n} queries: {sure}."
    )


def findings_text(findings: Iterable[Finding]) -> str:
    """Returns one line a finding."""
    return "\n".join(str(finding) for finding in findings)


def worst_text(misses: Iterable[Miss], corpus: Mapping[str, str], *, width: int = 120) -> str:
    """Returns the worst queries as Markdown: what was asked, expected, and retrieved instead.

    Texts and ids stand there as they are, whatever HTML or Markdown they contain.
    """

    def entry(doc_id: str, score: str = "") -> str:
        return f"<code>{_literal(doc_id)}</code>{score}: {_literal(corpus.get(doc_id, ''), width)}"

    lines = []
    for miss in misses:
        lines += [f"**{_literal(miss.query or miss.query_id)}**  ({miss.value:.2f})", ""]
        lines += [f"- expected {entry(doc_id)}" for doc_id in miss.expected]
        lines += [f"- {rank}\\. {entry(d, f' ({s:.3f})')}" for rank, (d, s) in enumerate(miss.retrieved[:3], 1)]
        lines.append("")
    return "\n".join(lines)


def _literal(text: str, width: int | None = None) -> str:
    """Returns text on one line that neither HTML nor Markdown reads as anything but text."""
    flat = " ".join(text.split())
    if width is not None and len(flat) > width:
        flat = flat[: width - 1] + "…"
    return "".join(f"&#{ord(c)};" if c in string.punctuation else c for c in flat)


def tensorboard_layout(full_corpus: Sequence[str]) -> dict[str, Any]:
    """Returns the custom layout: loss, in-batch diagnostics and full-corpus curves in one view.

    Args:
        full_corpus: the tags of the full-corpus metrics, such as ``eval/recall@1``.
    """
    return {
        "fullrank": {
            "training loss": ["Multiline", ["train/loss"]],
            "in-batch (diagnostic)": ["Multiline", ["train/in_batch_acc", "train/in_batch_mrr"]],
            "full corpus, held out": ["Multiline", list(full_corpus)],
        }
    }


def _interval(interval: Interval) -> str:
    return f"{interval.low:.4f} to {interval.high:.4f}"


def _number(value: float | None, digits: int) -> str:
    return " " * (digits + 1) + "-" if value is None else f"{value:.{digits}f}"
