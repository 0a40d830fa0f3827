"""What an evaluation reveals besides its score: collapse, and a general set that got worse.

Promise: pure functions of results; a Finding says what was measured, what was allowed and what to try.
"""

import math
from dataclasses import dataclass

from fullrank._errors import DataError, SettingError, first_few
from fullrank.checks import normalise
from fullrank.data import GoldenSet, refuse_other_than_golden
from fullrank.result import Finding, Result

__all__ = ["CollapseThresholds", "checked_confirm", "collapse_findings"]

ROUNDING = 1e-9
"""A difference of exactly the limit passes, whatever the last bit of a subtraction says."""
SAME_SET = 0.5
"""A second set that shares more than this of its queries with the one that chooses confirms nothing."""


@dataclass(frozen=True)
class CollapseThresholds:
    """From where on embeddings count as collapsing.

    Attributes:
        mean_cosine: mean pairwise cosine of a fixed sample of documents. Trained models lie below .9, also those
            whose cosines are all high.
        rise: by how much it may rise above that of the base model.
        tie_rate: mean share of the other documents that tie with a judged one.
    """

    mean_cosine: float = 0.95
    rise: float = 0.3
    tie_rate: float = 0.05

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise SettingError(f"CollapseThresholds: {name}={value!r} must be a number from 0 to 1")


def collapse_findings(
    result: Result, *, base: Result | None = None, thresholds: CollapseThresholds | None = None, name: str = "golden"
) -> list[Finding]:
    """Returns what speaks for collapsing embeddings: ``collapse-cosine`` and ``collapse-ties``, at most one each.

    Args:
        result: of an evaluation.
        base: of the base model on the same set; without it the rise is not looked at.
        thresholds: default `CollapseThresholds()`.
        name: of the golden set, for the message.
    """
    limits = thresholds or CollapseThresholds()
    remedy = "Embeddings are growing alike: try a lower learning rate, a larger batch or another temperature"
    findings = []
    alike, before = result.mean_cosine, None if base is None else base.mean_cosine
    if alike is not None and math.isfinite(alike):
        rise = 0.0 if before is None or not math.isfinite(before) else alike - before
        # A base model that is above the limit itself collapses only where it rises further.
        high = alike >= limits.mean_cosine and (before is None or before < limits.mean_cosine)
        if high or rise > limits.rise + ROUNDING:
            since = "" if before is None else f", {before:.3f} at step 0"
            message = f"documents of {name!r} have a mean pairwise cosine of {alike:.3f}{since}"
            findings.append(Finding("collapse-cosine", "warning", message, remedy=remedy))
    if result.collapsed or result.tie_rate >= limits.tie_rate:
        message = f"{100 * result.tie_rate:.0f} % of the documents of {name!r} score the same as an answer"
        findings.append(Finding("collapse-ties", "warning", message, remedy=remedy))
    return findings


def checked_confirm(confirm: GoldenSet, choosing: GoldenSet) -> Finding | None:
    """Returns a Finding where the set that confirms shares queries with the one that chooses.

    Raises:
        DataError: it is no golden set, has no answerable query, or shares more than half of its queries.
    """
    refuse_other_than_golden(confirm)
    confirm.require_answerable()
    known = set(map(normalise, choosing.query_texts))
    shared = [qid for qid, text in zip(confirm.query_ids, confirm.query_texts, strict=True) if normalise(text) in known]
    if not shared:
        return None
    n = len(confirm.queries)
    message = f"{len(shared)} of the {n} queries of confirm={confirm.name!r} also choose, in {choosing.name!r}"
    if len(shared) > SAME_SET * n:
        raise DataError(
            f"{message} ({first_few(shared)}): the confirmed score would flatter as the first one does. Give another "
            "split of held-out queries"
        )
    remedy = "Leave them out of one of the two sets"
    return Finding("confirm-shared", "warning", message, len(shared), tuple(shared[:5]), remedy)
