"""What a report says, as plain data: rows, texts and figures, before any markup.

Promise: every number comes from a result or the journal; a part that cannot be shown is left out and named in
``notes``; nothing here is escaped, that is the template's work.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fullrank import figures
from fullrank.abstention import MAX_FALSE_ANSWER_RATE, Abstention, Threshold, threshold_text
from fullrank.advice import diverging
from fullrank.checkpoints import NOT_ELIGIBLE, Evaluation
from fullrank.comparison import Comparison
from fullrank.data import GoldenSet
from fullrank.gating import fell_beyond
from fullrank.journal import ABANDONED
from fullrank.objective import pool_name
from fullrank.pagerows import (
    Row,
    abstention_row,
    band,
    candidate_rows,
    change_row,
    changes,
    compared,
    flat,
    group_rows,
    hole_row,
    percent,
    query_rows,
    swept,
    texts_of,
    value_rows,
    worst_rows,
)
from fullrank.report import confirmation, verdict
from fullrank.result import Finding, Result
from fullrank.runfolder import COMPOSITE, Run
from fullrank.stats import Interval

__all__ = ["PageData", "page_data"]

CHANGED, HOLES, NOTES, EVALUATIONS = 10, 20, 8, 2_000
ON_POOL = "During the run a pool of the corpus was ranked: the values of its evaluations are upper bounds."


@dataclass(frozen=True)
class PageData:
    """The content of a report, in the order in which it is read.

    Attributes:
        title, verdict, tone: heading, sentence, and ``good``, ``bad`` or ``flat``.
        headline: what a second golden set, which did not choose, says; empty without one.
        tiles: (label, value, remark) of the numbers on top.
        charts: ``{place: {"title", "alt", "svg"}}``.
        metrics: rows of base against best; with one result its values alone.
        candidates: rows of plain results; empty for a run.
        others: (set, rows) of the golden sets that did not choose.
        groups: rows by query type.
        wins, losses, worst: queries with what was retrieved.
        n_wins, n_losses: how many there are.
        abstention: rates and threshold, or None; ``abstention_missing`` says why.
        holes: rows of unjudged documents above the answers; ``n_holes`` and ``judged`` count all.
        guards: rows with their floor.
        findings: what checks found.
        timing, provenance: (name, value) pairs.
        evaluations, queries: rows of all.
        notes: what could not be read or shown.
        ranked: which part of the corpus the ranks are of.
    """

    title: str
    metric: str
    verdict: str
    tone: str
    headline: str
    tiles: list[tuple[str, str, str]]
    charts: dict[str, Row]
    metrics: list[Row]
    candidates: list[Row]
    others: list[tuple[str, list[Row]]]
    groups: list[Row]
    wins: list[Row]
    losses: list[Row]
    n_wins: int
    n_losses: int
    worst: list[Row]
    abstention: Row | None
    abstention_missing: str
    holes: list[Row]
    n_holes: int
    judged: float
    guards: list[Row]
    findings: list[Finding]
    timing: list[tuple[str, str]]
    provenance: list[tuple[str, str]]
    evaluations: list[Row]
    queries: list[Row]
    notes: list[str]
    ranked: str


def page_data(
    run: Run, *, golden: GoldenSet | None = None, max_false_answer_rate: float = MAX_FALSE_ANSWER_RATE
) -> PageData:
    """Returns what the report of ``run`` says; texts of documents where ``golden`` holds them.

    Raises:
        SettingError: a rate outside [0, 1].
    """
    notes = list(run.notes)
    shown = run.best if run.best is not None else run.base
    corpus = texts_of(golden, shown, notes)
    base = run.base if run.base is not run.best else None
    found, rows = compared(base, run.best, run.metric, notes)
    confirmed: Comparison | None = None
    confirmed_rows: list[Row] = []
    if run.confirmed is not None:
        _, now, before = run.confirmed
        confirmed, confirmed_rows = compared(before, now, run.metric, notes)
        confirmed_rows = confirmed_rows or value_rows(now)
    text, tone = _verdict(run, found)
    if shown is not None and shown.bound:
        text += f" {_ranked(shown)}"
    moved = changes(base, run.best, run.metric) if found else []
    sweep, missing = swept(shown, max_false_answer_rate)
    charts = _charts(run, [change for change, *_ in moved], sweep)
    holes = shown.holes() if shown else []
    losses, wins = [c for c in moved if c[0] < 0], [c for c in reversed(moved) if c[0] > 0]
    return PageData(
        title=run.name,
        metric=run.metric,
        verdict=text,
        tone=tone,
        headline=_headline(run, confirmed),
        tiles=_tiles(run, shown, found),
        charts=charts,
        metrics=rows or (value_rows(shown) if shown else []),
        candidates=candidate_rows(run, notes),
        others=[
            *([(f"{run.confirmed[0]}, which did not choose", confirmed_rows)] if run.confirmed else []),
            *((name, compared(b, a, run.metric, notes)[1]) for name, b, a in run.others),
        ],
        groups=group_rows(base if found else None, shown, run.metric),
        wins=[change_row(row, run.best, corpus) for row in wins[:CHANGED] if run.best],
        losses=[change_row(row, run.best, corpus) for row in losses[:CHANGED] if run.best],
        n_wins=len(wins),
        n_losses=len(losses),
        worst=worst_rows(shown, run.metric, corpus),
        abstention=sweep and abstention_row(*sweep),
        abstention_missing=missing,
        holes=[hole_row(shown, hole, corpus) for hole in holes[:HOLES] if shown],
        n_holes=len(holes),
        judged=shown.judged if shown else 0.0,
        guards=_guards(run),
        findings=_findings(run, shown, golden),
        timing=_timing(run, shown),
        provenance=_provenance(run, shown),
        evaluations=[_evaluation(line, run) for line in run.history[:EVALUATIONS]],
        queries=query_rows(base if found else None, shown, run.metric),
        notes=_cut(list(dict.fromkeys(notes))),
        ranked=_ranked(shown),
    )


# ------------------------------------------------------------------------------------------------ what it comes to


def _verdict(run: Run, found: Comparison | None) -> tuple[str, str]:
    tone = {"better": "good", "worse": "bad", "not separable": "flat"}.get(found.verdict if found else "", "flat")
    if run.history:
        if len(run.history) == 1 and run.best_step == 0:
            score = run.history[0].score
            return f"One evaluation, of the base model: {run.label} {score:.4f}. Nothing to choose from yet.", "flat"
        if run.best_step is None or not run.improved:
            tone = "bad"
        text = _passed_over(run)
        if run.best_step is not None or not text:
            words = verdict(
                found,
                improved=run.improved,
                step=run.best_step,
                metric=run.label,
                base_known=run.base_known,
                composite=run.composite,
            )
            # A step that scored higher and was not eligible makes "no step scored higher" untrue.
            text = f"{words.replace('no step scored', 'no eligible step scored') if text else words} {text}".rstrip()
        return text + (f" {ON_POOL}" if run.pooled else ""), tone
    shown = run.best or run.base
    if shown is None:
        return "No result could be read.", "bad"
    if found is None:
        n = len(shown.query_ids)
        if shown.bound:
            return f"{run.metric} at most {shown.metrics[run.metric]:.4f} over {n:,} queries.", "flat"
        low, high = shown.ci(run.metric)
        return f"{run.metric} {shown.metrics[run.metric]:.4f} [{low:.4f}, {high:.4f}] over {n:,} queries.", "flat"
    low, high = found.interval
    (first, _), *_ = run.candidates
    said = {"better": "better than", "worse": "worse than", "not separable": "on these queries not separable from"}
    return (
        f"{run.metric}: {100 * found.delta:+.2f} points [{100 * low:+.2f}, {100 * high:+.2f}], p = {found.p_value:.4f} "
        f"over {found.n:,} queries: {said[found.verdict]} {first}."
    ), tone


def _passed_over(run: Run) -> str:
    """Returns which step scored higher than the best one and why it was not eligible; empty where none did."""
    line = run.passed_over
    if line is None:
        return ""
    below = [name for name, floor in run.guards.items() if line.metrics.get(name, math.inf) < floor]
    breached = [text.removeprefix("warning: ") for text in line.findings if NOT_ELIGIBLE in text]
    why = breached or [f"{name} {line.metrics[name]:.4f} lies below its floor {run.guards[name]:.4f}" for name in below]
    instead = "No step was eligible: nothing was chosen"
    if run.best_step is not None:
        instead = f"Step {run.best_step} is the best eligible one"
    said = f"but was not eligible: {why[0].rstrip('.')}" if why else "but was not eligible"
    return f"Step {line.step} scored higher, {run.label} {line.score:.4f}, {said}. {instead}."


def _headline(run: Run, found: Comparison | None) -> str:
    return "" if run.confirmed is None else confirmation(run.confirmed[0], run.metric, run.confirmed[1], found)


def _tiles(run: Run, shown: Result | None, found: Comparison | None) -> list[tuple[str, str, str]]:
    tiles = []
    if run.confirmed is not None:
        low, high = band(run.confirmed[1], run.metric)
        value = f"{run.confirmed[1].metrics[run.metric]:.4f}"
        tiles.append((f"{run.metric}, confirmed", value, f"{low:.4f} to {high:.4f}"))
    for name, result in (("base", run.base), ("best", run.best if run.best is not run.base else None)):
        if result is not None and run.metric in result.metrics and result.query_ids:
            low, high = band(result, run.metric)
            label = run.metric if run.best is None and not run.history else f"{run.metric}, {name}"
            remark = "an upper bound" if low is None else f"{low:.4f} to {high:.4f}"
            tiles.append((label, f"{result.metrics[run.metric]:.4f}", remark))
    if found:
        low, high = found.interval
        remark = f"{100 * low:+.2f} to {100 * high:+.2f}, p = {found.p_value:.4f}"
        tiles.append(("difference in points", f"{100 * found.delta:+.2f}", remark))
    if shown:
        n = shown.counts
        without = f"{n.get('n_unanswerable', 0):,} more without an answer"
        tiles.append(("queries", f"{len(shown.query_ids):,}", without))
        if "n_documents" in n:
            tiles.append(("documents", f"{n['n_documents']:,}", f"{percent(shown.coverage)}% of them ranked"))
    return tiles


def _charts(run: Run, differences: list[float], sweep: "tuple[Abstention, Threshold] | None") -> dict[str, Row]:
    charts: dict[str, Row] = {}
    if run.history:
        n_failed = sum(line.status == "failed" for line in run.history)
        alt = (
            f"{run.label} on {'a pool' if run.pooled else 'the full corpus'} at {len(run.history)} evaluations, "
            f"of which {n_failed} failed; "
            f"{'no step was kept' if run.best_step is None else f'step {run.best_step} was kept'}. "
            f"Below: {', '.join(run.curves) or 'no in-batch curve is known'}."
        )
        svg = figures.curve_figure(
            run.history,
            label=pool_name(run.label, run.pooled),
            intervals=run.intervals,
            curves=run.curves,
            best=run.best_line,
        )
        charts["curve"] = {"title": "Curves", "alt": alt, "svg": svg}
    elif sum(not r.bound for _, r in run.candidates) > 1:
        rows = [
            (name, r.metrics[run.metric], r.ci(run.metric))
            for name, r in run.candidates
            if run.metric in r.metrics and not r.bound
        ][:50]
        alt = (
            f"{run.metric} of {len(rows)} results with their 95 % intervals; the values stand in the table of results."
        )
        charts["curve"] = {"title": "Results", "alt": alt, "svg": figures.results_figure(rows, metric=run.metric)}
    if any(differences):
        n_up, n_down = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
        alt = f"Change of {run.metric} of each query, sorted: {n_down} fell, {n_up} rose, of {len(differences)}."
        charts["differences"] = {"alt": alt, "svg": figures.differences_figure(differences, metric=run.metric)}
    if sweep:
        alt = (
            f"Answer rate against false-answer rate over all thresholds; AUROC {sweep[0].auroc:.3f}, suggested "
            f"threshold {threshold_text(*sweep)}."
        )
        charts["abstention"] = {"alt": alt, "svg": figures.abstention_figure(*sweep)}
    if run.guards:
        alt = f"{', '.join(run.guards)} over the steps, each with its floor."
        charts["guards"] = {"alt": alt, "svg": figures.guards_figure(run.history, run.guards, run.best_step)}
    return charts


# ------------------------------------------------------------------------------------------------ the run


def _guards(run: Run) -> list[Row]:
    rows = []
    for name, floor in run.guards.items():
        lines = [line for line in run.history if line.status == "ok" and name in line.metrics]
        values = {line.step: line.metrics[name] for line in lines if line.note != ABANDONED}
        best = None if run.best_line is None else run.best_line.metrics.get(name)
        below = [step for step, value in values.items() if fell_beyond(value - floor, 0.0)]
        rows.append({"guard": name, "base": values.get(0), "best": best, "floor": floor, "below": below})
    return rows


def _ranked(shown: Result | None) -> str:
    if shown is not None and shown.bound:
        return f"Upper bounds, not scores: {percent(shown.coverage)}% of the corpus was ranked."
    if shown is None or shown.provenance.get("truncated_run"):
        return "Ranks are those in the lists that were given."
    return "Every rank is that of the whole corpus."


def _cut(notes: list[str]) -> list[str]:
    return notes if len(notes) <= NOTES else [*notes[:NOTES], f"and {len(notes) - NOTES} more of this kind"]


def _findings(run: Run, shown: Result | None, golden: GoldenSet | None) -> list[Finding]:
    """Returns what stood out in the run, its results and the data, each once."""
    found = [*_advice(run), *(shown.findings if shown else ()), *(golden.check() if golden else ())]
    return list({(finding.kind, finding.message): finding for finding in found}.values())


def _advice(run: Run) -> list[Finding]:
    """Returns a warning where the in-batch numbers of the run go another way than its score."""
    scores = [(line.step, line.score) for line in run.history if line.note != ABANDONED]
    interval = None if run.best_line is None else _interval(run.best_line, run)
    half = None if interval is None else (interval.high - interval.low) / 2
    found = diverging(scores, run.curves.get("in-batch accuracy", ()), interval=half, metric=run.label)
    return [found] if found else []


def _interval(line: Evaluation, run: Run) -> Interval | None:
    """Returns the interval of a line: of two branches the step's own result is that of the later one."""
    if line is not run.best_line:
        return None if line.note == ABANDONED else run.intervals.get(line.step)
    if run.label == COMPOSITE or run.best is None or run.best.bound or run.metric not in run.best.metrics:
        return None
    return run.best.ci(run.metric)


def _evaluation(line: Evaluation, run: Run) -> Row:
    interval = _interval(line, run)
    error = (line.error or "").strip().splitlines()
    return {
        **vars(line),
        "interval": interval,
        "error": flat(error[-1]) if error else "",
        "findings": "; ".join(vars(line).get("findings", ())),
        "best": line is run.best_line,
    }


def _timing(run: Run, shown: Result | None) -> list[tuple[str, str]]:
    rows = []
    if run.history:
        rows.append(("all evaluations of the run", f"{sum(line.seconds for line in run.history):,.1f} s"))
    for name, value in (shown.timing if shown else {}).items():
        said = name.replace("_", " ")
        if name.endswith("_per_second"):
            rows.append((f"{said.removesuffix(' per second')} per second", f"{value:,.0f}"))
        elif name == "padding":
            rows.append(("padding, share of the encoded tokens", f"{value:.0%}"))
        elif "_ms_" in name:
            rows.append((f"one {said.replace(' ms ', ', ')}", f"{value:,.2f} ms"))
        else:
            rows.append((said, f"{value:,.2f} s"))
    return rows


def _provenance(run: Run, shown: Result | None) -> list[tuple[str, str]]:
    rows = [("best weights", str(run.folder))] if run.folder else []
    for name, value in (shown.provenance if shown else {}).items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        rows += [(f"{name} {key}".strip(), flat(str(v))) for key, v in inner]
    return rows + [
        (name.replace("n_", "").replace("_", " "), f"{n:,}") for name, n in (shown.counts if shown else {}).items()
    ]
