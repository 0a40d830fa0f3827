"""What people look at: console lines and tables, the TensorBoard layout.

Promise: text is a pure function of results; only `say` writes. Numbers are rounded here and nowhere before.
"""

import re
import string
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from fullrank.abstention import Abstention, Threshold, threshold_text
from fullrank.comparison import Comparison, compare
from fullrank.result import Finding, Miss, Result
from fullrank.stats import Interval

__all__ = [
    "abstention_line",
    "comparison_table",
    "completion",
    "confirmation",
    "evaluation_line",
    "findings_text",
    "literal",
    "result_table",
    "say",
    "slim_table",
    "tensorboard_layout",
    "tensorboard_scalars",
    "verdict",
    "worst_text",
]

PIPE_WIDTH = 120
SHOWN = ("recall@1", "recall@5", "ndcg@10", "mrr@10")


def say(text: str, *, file: IO[str] | None = None) -> None:
    """Prints a line without breaking a progress bar."""
    tqdm.write(text, file=file or sys.stdout)
    (file or sys.stdout).flush()


def render(table: Table) -> str:
    """Returns a table as text: no number is cut or wrapped, words wrap where they may; no colours in a pipe."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, force_jupyter=False)
    console.width = max(console.width, _needed_width(console, table))
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n"))


def _needed_width(console: Console, table: Table) -> int:
    """Returns the width at which no column that must not wrap is cut: rich cuts them where the terminal is narrow."""
    options, width = console.options.update(max_width=10_000), 1
    for column in table.columns:
        sizes = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
        width += 3 + max(size.maximum if column.no_wrap else size.minimum for size in sizes)
    return width


def evaluation_line(
    step: int,
    max_steps: int,
    result: Result,
    metric: str,
    *,
    logs: Mapping[str, float] | None = None,
    is_best: bool = False,
    also: str = "ndcg@10",
    of: str = "",
    composite: float | None = None,
) -> str:
    """Returns the line of one evaluation: step, loss, in-batch diagnostics, the objective with its interval.

    Args:
        step, max_steps: where in training.
        result, metric: what is shown.
        logs: the loss line of this step.
        is_best: whether it is the best so far.
        also: a second metric to show.
        of: name of the golden set, where there are several.
        composite: value of the weighted sum that chooses, where it is one.
    """
    logs = logs or {}
    parts = [f"step {step:>{len(str(max_steps))}}/{max_steps}", f"loss {_number(logs.get('loss'), 3)}"]
    if "in_batch_acc" in logs:
        parts.append(
            f"in-batch acc {logs['in_batch_acc']:.3f} mrr {logs['in_batch_mrr']:.3f} "
            f"(of {logs['in_batch_candidates']:.0f})"
        )
    else:
        parts.append("in-batch acc     - mrr     -")
    if composite is not None:
        parts.append(f"objective {composite:.4f}")
    n, mark, shown = result.counts, "_pool" if result.bound else "", f"{of}/{metric}" if of else metric
    if result.bound:
        parts.append(f"{shown}_pool {result.metrics[metric]:.4f} of {n['n_ranked']:,} of {n['n_documents']:,}")
    else:
        low, high = result.ci(metric)
        parts.append(f"{shown} {result.metrics[metric]:.4f} [{low:.3f}, {high:.3f}] of {n['n_documents']:,}")
    if also in result.metrics and also != metric:
        parts.append(f"{also}{mark} {result.metrics[also]:.4f}")
    return "  ".join(parts) + ("  * best" if is_best else "")


def result_table(result: Result, *, title: str | None = None, level: float = 0.95) -> str:
    """Returns the metrics of a result with their intervals; of a bound without, and marked as upper bounds."""
    if result.bound:
        n = result.counts
        part = f"upper bounds: {n['n_ranked']:,} of {n['n_documents']:,} documents were ranked"
        title = part if title is None else f"{title}; {part}"
    table = slim_table(title)
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
    table = slim_table(title)
    for name in ("metric", "base", "best", "points", "95 % interval", "p", "won / lost"):
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


def slim_table(title: str | None) -> Table:
    """Returns an empty table without edges."""
    # Without edges a comparison fits into 80 columns.
    shown = None if title is None else Text(title, style="table.title")  # as text: a name may look like markup
    return Table(title=shown, title_justify="left", show_edge=False, pad_edge=False)


def verdict(
    comparison: Comparison | None,
    *,
    improved: bool,
    step: int | None,
    metric: str,
    base_known: bool = True,
    composite: tuple[float | None, float, str] | None = None,
) -> str:
    """Returns the sentence that a run ends with.

    Args:
        comparison: of the best step with the base model.
        improved: whether it beat the base model.
        step: the best one; None where every evaluation failed.
        metric: what chose.
        base_known: False where the base model was never scored.
        composite: of a weighted sum: its value at the base model and at the best step, and which of its terms
            ``comparison`` is about.
    """
    if step is None:
        return "No evaluation succeeded: nothing was chosen, and the weights are those of the last step."
    if not base_known:
        return (
            f"Best: step {step} by {metric}. The base model was not scored in this run: whether it was improved is not "
            "known."
        )
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
    if composite is not None:
        before, after, term = composite
        rise = f"{after:.4f}" if before is None else f"{before:.4f} -> {after:.4f}"
        return (
            f"Best: step {step} by {metric}: {rise}. Of it {term}: {100 * comparison.delta:+.2f} points "
            f"[{100 * low:+.2f}, {100 * high:+.2f}], p = {comparison.p_value:.4f} over {comparison.n} queries: {sure}."
        )
    return (
        f"Best: step {step} by {metric}: {100 * comparison.delta:+.2f} points [{100 * low:+.2f}, {100 * high:+.2f}], "
        f"p = {comparison.p_value:.4f} over {comparison.n} queries: {sure}."
    )


def completion(values: Sequence[tuple[int, float, float]], *, metric: str, sizes: Sequence[tuple[int, int]]) -> str:
    """Returns what a run on a pool says at its end: the scores on the whole corpus that decided.

    Args:
        values: (step, score on the whole corpus, value on the pool), best first.
        metric: what chose.
        sizes: (documents of the pool, of the corpus) of each golden set that has one.
    """
    scored = ", ".join(f"step {step} {score:.4f} ({on_pool:.4f} on the pool)" for step, score, on_pool in values)
    pools = ", ".join(f"{part:,} of {whole:,}" for part, whole in sizes)
    return (
        f"Chosen on the whole corpus among the base model and the steps kept: {metric} {scored}. During the run a pool "
        f"was ranked, {pools} documents: those values are upper bounds."
    )


def abstention_line(found: Abstention, threshold: Threshold) -> str:
    """Returns one line on the queries without an answer: AUROC, and what the suggested threshold costs."""
    low, high = found.auroc_interval
    return (
        f"{len(found.unanswerable):,} queries without an answer: AUROC {found.auroc:.3f} [{low:.3f}, {high:.3f}]; "
        f"answering from a top score of {threshold_text(found, threshold)} on answers "
        f"{100 * threshold.false_answer_rate:.1f} % of them and {100 * threshold.answer_rate:.1f} % of the others"
    )


def confirmation(name: str, metric: str, result: Result, comparison: Comparison | None) -> str:
    """Returns the headline of a run with a second golden set: the score that was not chosen by."""
    low, high = result.ci(metric)
    text = f"Confirmed on {name!r}, which did not choose: {metric} {result[metric]:.4f} [{low:.3f}, {high:.3f}]"
    if comparison is None:
        return f"{text}."
    low, high = comparison.interval
    sure = comparison.verdict if comparison.verdict == "not separable" else f"{comparison.verdict} than the base model"
    return (
        f"{text}, {100 * comparison.delta:+.2f} points [{100 * low:+.2f}, {100 * high:+.2f}] to the base model, "
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
        return f"<code>{literal(doc_id)}</code>{score}: {literal(corpus.get(doc_id, ''), width)}"

    lines = []
    for miss in misses:
        lines += [f"**{literal(miss.query or miss.query_id)}**  ({miss.value:.2f})", ""]
        lines += [f"- expected {entry(doc_id)}" for doc_id in miss.expected]
        lines += [f"- {rank}\\. {entry(d, f' ({s:.3f})')}" for rank, (d, s) in enumerate(miss.retrieved[:3], 1)]
        lines.append("")
    return "\n".join(lines)


def literal(text: str, width: int | None = None) -> str:
    """Returns text on one line that neither HTML nor Markdown reads as anything but text."""
    flat = " ".join(text.split())
    if width is not None and len(flat) > width:
        flat = flat[: width - 1] + "…"
    return "".join(f"&#{ord(c)};" if c in string.punctuation else c for c in flat)


def tensorboard_layout(
    full_corpus: Sequence[str],
    *,
    intervals: Sequence[str] = (),
    guards: Sequence[str] = (),
    throughput: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the custom layout: loss, in-batch diagnostics and full-corpus curves in one view.

    Args:
        full_corpus: the tags of the full-corpus metrics, such as ``eval/recall@1``.
        intervals: those of them that come with the scalars of `tensorboard_scalars`: drawn with their interval as a
            band.
        guards: tags of guards, each with its floor under the same tag and ``_floor``.
        throughput: tags of rates, such as ``eval/documents_per_second``.
    """
    charts: dict[str, list[Any]] = {
        "training loss": _lines("train/loss"),
        "in-batch (diagnostic)": _lines("train/in_batch_acc", "train/in_batch_mrr"),
        "full corpus, held out": _lines(*full_corpus),
    }
    charts |= {f"{tag.rpartition('/')[2]} with its interval": ["Margin", [tag, *_bounds(tag)]] for tag in intervals}
    charts |= {f"guard {tag}": _lines(tag, f"{tag}_floor") for tag in guards}
    if throughput:
        charts["throughput"] = _lines(*throughput)
    return {"fullrank": charts}


def tensorboard_scalars(result: Result, metric: str, *, tag: str | None = None) -> dict[str, float]:
    """Returns the scalars that the layout needs beside the metrics: bounds of the interval, texts encoded per second.

    Args:
        result: of an evaluation.
        metric: what chooses.
        tag: under which its value is logged; default ``eval/METRIC``.
    """
    name = tag or f"eval/{metric}"
    rates = {f"eval/{key}": value for key, value in result.timing.items() if key.endswith("_per_second")}
    if result.bound:  # of a part of the corpus: it has no interval
        return rates
    return dict(zip(_bounds(name), map(float, result.ci(metric)), strict=True)) | rates


def _bounds(tag: str) -> tuple[str, str]:
    return f"{tag}_low", f"{tag}_high"


def _lines(*tags: str) -> list[Any]:
    # TensorBoard takes a tag for a regular expression that matches the beginning of others: recall@1 brings recall@10.
    return ["Multiline", [f"^{re.escape(tag)}$" for tag in tags]]


def _interval(interval: Interval) -> str:
    return f"{interval.low:.4f} to {interval.high:.4f}"


def _number(value: float | None, digits: int) -> str:
    return " " * (digits + 1) + "-" if value is None else f"{value:.{digits}f}"
