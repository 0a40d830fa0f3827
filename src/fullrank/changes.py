"""What changed between two results: metric by metric, query type by query type, query by query.

Promise: every number is over the queries that both results have, and the values before and after are those of the
same queries.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fullrank._errors import DataError
from fullrank.comparison import Comparison, Paired, Verdict, compare_paired, join
from fullrank.metrics import Metric
from fullrank.result import Hit, Result
from fullrank.settings import parsed
from fullrank.stats import holm

__all__ = ["Change", "Flip", "changes", "changes_by_group", "common_metrics", "flips"]


@dataclass(frozen=True)
class Change:
    """How one metric changed.

    Attributes:
        before, after: means over the compared queries.
        comparison: the paired comparison.
        adjusted_p: its p-value after Holm's correction over what it was made beside (metrics, or query types).
    """

    before: float
    after: float
    comparison: Comparison
    adjusted_p: float

    @property
    def adjusted_verdict(self) -> Verdict:
        """The verdict by `adjusted_p`."""
        return self.comparison.verdict if self.adjusted_p < 1 - self.comparison.interval.level else "not separable"


@dataclass(frozen=True)
class Flip:
    """A query whose value changed.

    Attributes:
        query_id, query, group: the query, its text and its type; empty where the results do not hold them.
        before, after: its values.
        expected: ``{document id: grade}`` of its judged documents with a grade above 0.
        retrieved_before, retrieved_after: the tops of its rankings.
    """

    query_id: str
    query: str
    group: str
    before: float
    after: float
    expected: dict[str, float]
    retrieved_before: list[Hit]
    retrieved_after: list[Hit]


def common_metrics(baseline: Result, candidate: Result) -> list[str]:
    """Returns the metrics that both results have, in the order of the baseline; `DataError` where there is none."""
    names = [name for name in baseline.metrics if name in candidate.metrics]
    if not names:
        raise DataError(
            "the two results have no metric in common: one has "
            f"{', '.join(baseline.metrics)}, the other {', '.join(candidate.metrics)}"
        )
    return names


def changes(
    baseline: Result,
    candidate: Result,
    *,
    metrics: Sequence[str | Metric] | None = None,
    level: float = 0.95,
    seed: int = 0,
    allow_other_data: bool = False,
) -> dict[str, Change]:
    """Returns the change of every metric (default: all that both have), with p-values corrected over the metrics.

    Raises:
        DataError, SettingError: see `fullrank.compare`.
    """
    names = common_metrics(baseline, candidate) if metrics is None else [str(m) for m in parsed(metrics)]
    joined = {name: join(baseline, candidate, name, allow_other_data=allow_other_data) for name in names}
    return _changes(joined, level, seed)


def changes_by_group(
    baseline: Result,
    candidate: Result,
    metric: str | Metric,
    *,
    level: float = 0.95,
    seed: int = 0,
    allow_other_data: bool = False,
) -> dict[str, Change]:
    """Returns the change of ``metric`` for every query type, with p-values corrected over the types.

    Empty where the results hold no types. Queries without one are listed under ``""``.
    """
    groups = {**candidate.groups, **baseline.groups}
    if not groups:
        return {}
    paired = join(baseline, candidate, metric, allow_other_data=allow_other_data)
    kinds = np.array([groups.get(qid, "") for qid in paired.ids], dtype=object)
    return _changes({str(kind): paired[kinds == kind] for kind in sorted(set(kinds))}, level, seed)


def flips(
    baseline: Result,
    candidate: Result,
    metric: str | Metric,
    *,
    n: int | None = None,
    allow_other_data: bool = False,
) -> tuple[list[Flip], list[Flip]]:
    """Returns the queries that rose and those that fell, largest change first, at most ``n`` of each."""
    paired = join(baseline, candidate, metric, allow_other_data=allow_other_data)
    changed = [i for i in range(len(paired.ids)) if paired.before[i] != paired.after[i]]
    changed.sort(key=lambda i: (-abs(paired.after[i] - paired.before[i]), paired.ids[i]))
    found = [_flip(baseline, candidate, paired, i) for i in changed]
    return [f for f in found if f.after > f.before][:n], [f for f in found if f.after < f.before][:n]


def _flip(baseline: Result, candidate: Result, paired: Paired, i: int) -> Flip:
    qid = str(paired.ids[i])
    return Flip(
        qid,
        baseline.queries.get(qid) or candidate.queries.get(qid, ""),
        baseline.groups.get(qid) or candidate.groups.get(qid, ""),
        float(paired.before[i]),
        float(paired.after[i]),
        {doc_id: grade for doc_id, grade in baseline.qrels.get(qid, {}).items() if grade > 0},
        baseline.hits.get(qid, []),
        candidate.hits.get(qid, []),
    )


def _changes(joined: dict[str, Paired], level: float, seed: int) -> dict[str, Change]:
    compared = {key: compare_paired(paired, level=level, seed=seed) for key, paired in joined.items()}
    adjusted = holm([found.p_value for found in compared.values()])
    return {
        key: Change(
            math.fsum(paired.before) / len(paired.before),
            math.fsum(paired.after) / len(paired.after),
            compared[key],
            p,
        )
        for (key, paired), p in zip(joined.items(), adjusted, strict=True)
    }
