"""The model card of a chosen model: what chose it, on what, how sure that is, and how to measure it again.

Promise: Markdown as a pure function of results; names and ids stand there as text, whatever they contain.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from fullrank.result import Result

__all__ = ["FullCorpusRetrieval", "card_section", "with_section"]

BEGIN, END = "<!-- fullrank: begin -->", "<!-- fullrank: end -->"


@dataclass(frozen=True)
class FullCorpusRetrieval:
    """An evaluation as the model cards of sentence-transformers want to know it.

    Attributes:
        name: of the golden set.
        primary_metric: what chooses.
        description: the kind of evaluation.
    """

    name: str
    primary_metric: str
    description: str = "Full-Corpus Retrieval"


def card_section(
    metric: str,
    result: Result,
    *,
    golden: str,
    step: int,
    base: Result | None = None,
    chosen_by: str | None = None,
    confirmed: tuple[str, Result, Result | None] | None = None,
    among: str = "the run's evaluations",
    folder: str = ".",
    guards: Sequence[tuple[str, str, float]] = (),
) -> str:
    """Returns the section of a card that says how the model was chosen.

    Args:
        metric: that is shown: what chose, or the leading part of it.
        result: of the chosen step on the golden set that chose.
        golden: name of that set.
        step: training step.
        base: result of the base model on that set.
        chosen_by: the objective, where it is more than ``metric``.
        confirmed: the second golden set, the chosen model's result on it and the base model's.
        among: which scores it is the highest of.
        folder: of the model, for the command.
        guards: (golden set, metric, how far it might fall below the base model) of what had to be kept.
    """
    n = result.counts
    ties = result.provenance.get("ties")
    lines = [
        "## Chosen by full-corpus retrieval",
        "",
        f"Step {step} had the highest {_code(chosen_by or metric)} of {among} on the golden set "
        f"{_code(golden)}: {n.get('n_scored', len(result.query_ids)):,} held-out queries, each ranked against "
        f"{_ranked(result)}" + (f" (ties: {ties})." if ties else "."),
        "",
        f"| | golden set | {metric} | 95 % interval |",
        "|---|---|---|---|",
        _row("this model", golden, metric, result),
        *([] if base is None else [_row("base model (step 0)", golden, metric, base)]),
    ]
    if confirmed is not None:
        name, again, base_again = confirmed
        lines.append(_row("this model, confirmed", name, metric, again))
        lines += [] if base_again is None else [_row("base model (step 0)", name, metric, base_again)]
    if guards:
        kept = ", ".join(
            f"{_code(metric)} on {_code(name)} at most {100 * drop:g} points" for name, metric, drop in guards
        )
        lines += ["", f"Only steps were eligible that did not fall further below the base model than: {kept}."]
    flatters = (
        "The highest of several scores flatters: it was chosen on the same queries."
        if confirmed is None
        else "The confirmed score is the honest one: its queries took no part in the choice."
    )
    split = result.provenance.get("split")
    data = "GOLDEN_SET_FOLDER" + ("" if split is None else f" --split {shlex.quote(str(split))}")
    metrics = ",".join(_first([metric, *result.metrics]))
    lines += [
        "",
        flatters,
        "To measure again, with the golden set in a folder:",
        "",
        "```console",
        f"fullrank eval {folder} --data {data} --metrics {metrics}",
        "```",
    ]
    return "\n".join(lines) + "\n"


def with_section(card: str, section: str) -> str:
    """Returns the card with the section at its end, in the place of an earlier one.

    >>> with_section(with_section("# Model", "old"), "new") == with_section("# Model", "new")
    True
    """
    before, found, rest = card.partition(BEGIN)
    after = rest.partition(END)[2] if found else ""
    return f"{before.rstrip()}\n\n{BEGIN}\n{section.rstrip()}\n{END}\n{after.lstrip()}".lstrip()


def _ranked(result: Result) -> str:
    n = result.counts
    if result.bound:
        return f"a pool of {n['n_ranked']:,} of the {n['n_documents']:,} documents: upper bounds, not scores"
    return f"all {n.get('n_documents', 0):,} documents, exactly"


def _row(what: str, golden: str, metric: str, result: Result) -> str:
    if result.bound:
        return f"| {what} | {_code(golden)} | <= {result[metric]:.4f} | - |"
    low, high = result.ci(metric)
    return f"| {what} | {_code(golden)} | {result[metric]:.4f} | {low:.4f} to {high:.4f} |"


def _code(text: str) -> str:
    """Returns text as code: on one line, without the characters that would end the code or a cell of a table."""
    flat = " ".join(text.split())
    return "`" + flat.replace("`", "'").replace("|", "/") + "`"


def _first(names: Sequence[str], n: int = 5) -> list[str]:
    return list(dict.fromkeys(names))[:n]
