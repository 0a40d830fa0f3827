"""Is one result better than another: a paired comparison, query by query.

Promise: results of unlike data are not compared silently; a difference that the queries cannot carry is called so.
"""

import logging
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fullrank._errors import DataError
from fullrank.metrics import Metric
from fullrank.result import Result
from fullrank.stats import Interval, mean_interval, paired_p_value

__all__ = ["Comparison", "Paired", "Verdict", "compare", "compare_paired", "join", "unlike"]

logger = logging.getLogger(__name__)

Verdict = Literal["better", "worse", "not separable"]


@dataclass(frozen=True)
class Comparison:
    """A paired comparison of two results on the same queries.

    Attributes:
        metric: the metric.
        n: queries compared.
        delta: mean of candidate - baseline.
        interval: its interval.
        p_value: of the two-sided paired randomisation test.
        verdict: ``better`` or ``worse`` where p < 1 - level, else ``not separable``.
        wins, losses: ids of the queries that rose and fell.
    """

    metric: str
    n: int
    delta: float
    interval: Interval
    p_value: float
    verdict: Verdict
    wins: tuple[str, ...]
    losses: tuple[str, ...]


@dataclass(frozen=True)
class Paired:
    """The values of one metric in two results, joined by query id.

    Attributes:
        metric: the metric.
        ids: object [n], the queries that both have, in the order of the baseline.
        before, after: float64 [n], their values in the baseline and in the candidate.
    """

    metric: str
    ids: NDArray[np.object_]
    before: NDArray[np.float64]
    after: NDArray[np.float64]

    def __getitem__(self, rows: NDArray[np.bool_]) -> "Paired":
        return Paired(self.metric, self.ids[rows], self.before[rows], self.after[rows])


def compare(
    baseline: Result,
    candidate: Result,
    metric: str | Metric,
    *,
    level: float = 0.95,
    seed: int = 0,
    allow_other_data: bool = False,
) -> Comparison:
    """Returns the paired comparison of ``candidate`` with ``baseline``, joined by query id.

    Raises:
        DataError: one of them is a bound (`Result.bound`), there is no common query, or the two were made on unlike
            data or by unlike rules (allowed with ``allow_other_data=True``: then the common queries are compared).
        SettingError: the metric was not computed in both.
    """
    return compare_paired(join(baseline, candidate, metric, allow_other_data=allow_other_data), level=level, seed=seed)


def join(baseline: Result, candidate: Result, metric: str | Metric, *, allow_other_data: bool = False) -> Paired:
    """Returns the values of ``metric`` in both results, joined by query id; raises as `compare` does."""
    if not isinstance(baseline, Result) or not isinstance(candidate, Result):
        raise DataError("compare needs two results; read them back with fullrank.Result.load(path)")
    for side, result in (("baseline", baseline), ("candidate", candidate)):
        if result.bound:
            raise DataError(
                f"the {side} is a bound: it saw only a part of the corpus, so its metrics are upper limits and no "
                "scores. Evaluate it on the full corpus"
            )
    name = baseline.name_of(metric)
    candidate.name_of(metric)
    place = {qid: i for i, qid in enumerate(candidate.query_ids)}
    common = [(i, place[qid]) for i, qid in enumerate(baseline.query_ids) if qid in place]
    if not common:
        raise DataError("the two results have no query in common; they cannot be compared")
    differing = unlike(baseline, candidate, Metric.parse(name))
    if differing and not allow_other_data:
        raise DataError(
            f"the two results differ in {', '.join(differing)}: a difference between them would not be the model's. "
            "Evaluate both on the same data, or pass allow_other_data=True (--allow-other-data) for common queries"
        )
    before, after = (np.array(rows) for rows in zip(*common, strict=True))
    ids = np.array(baseline.query_ids, dtype=object)[before]
    return Paired(name, ids, baseline.per_query[name][before], candidate.per_query[name][after])


def compare_paired(paired: Paired, *, level: float = 0.95, seed: int = 0) -> Comparison:
    """Returns the comparison of values that are joined already; there must be at least one."""
    difference = paired.after - paired.before
    delta = math.fsum(difference) / len(difference)
    p_value = paired_p_value(difference, seed=seed)
    separable = p_value < 1 - level
    return Comparison(
        paired.metric,
        len(difference),
        delta,
        _interval(difference, level, seed),
        p_value,
        ("better" if delta > 0 else "worse") if separable else "not separable",
        tuple(paired.ids[difference > 0]),
        tuple(paired.ids[difference < 0]),
    )


def _positive(grades: dict[str, float]) -> dict[str, float]:
    return {doc_id: grade for doc_id, grade in grades.items() if grade > 0}


def _interval(difference: NDArray[np.float64], level: float, seed: int) -> Interval:
    if np.any(difference):
        return mean_interval(difference, level=level, seed=seed, bounds=(-1.0, 1.0))
    # No query differs; by Wilson's bound for 0 of n, so many queries of all could.
    most = mean_interval(np.zeros(len(difference)), level=level).high
    return Interval(-most, most, level, "wilson")


def unlike(baseline: Result, candidate: Result, metric: Metric) -> list[str]:
    """Returns what makes two results incomparable; a missing entry on either side says nothing.

    Without a cut-off a metric of a run is that of the list given, not of a full ranking.
    """
    found: list[str] = [
        key
        for key in ("data", "ties", *(() if metric.k else ("truncated_run",)))
        if key in baseline.provenance
        and key in candidate.provenance
        and baseline.provenance[key] != candidate.provenance[key]
    ]
    common = baseline.qrels.keys() & candidate.qrels.keys()
    if any(_positive(baseline.qrels[qid]) != _positive(candidate.qrels[qid]) for qid in common):
        found.append("judgements")
    if baseline.relevant_from != candidate.relevant_from:
        found.append("relevant_from")
    if not found and set(baseline.query_ids) != set(candidate.query_ids):
        found.append("queries")
    for key in ("prompts", "similarity", "precision", "max_length"):
        mine, other = baseline.provenance.get(key), candidate.provenance.get(key)
        if mine is not None and other is not None and mine != other:
            logger.warning("compared results differ in %s: %r and %r", key, mine, other)
    return found
