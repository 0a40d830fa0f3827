"""Did a result fall behind a baseline: the decision for continuous integration.

Promise: a metric fails only where it fell by more than the margin *and* the queries can carry that it fell at all;
what cannot be compared honestly is refused, never passed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fullrank._errors import DataError, SettingError
from fullrank.changes import Change, changes, common_metrics
from fullrank.comparison import Comparison, unlike
from fullrank.metrics import Metric
from fullrank.result import Result
from fullrank.settings import parsed

__all__ = ["TOLERANCE", "Check", "Gate", "fell_beyond", "gate", "refuse_no_margin"]

TOLERANCE = 1e-9
"""A fall of exactly the margin passes, whatever the last bits of the means are."""


@dataclass(frozen=True)
class Check:
    """The decision on one metric.

    Attributes:
        metric: the metric.
        before, after: means of the baseline and of the result.
        comparison: the paired comparison.
        adjusted_p: its p-value after Holm's correction over the metrics of the gate; for information, it decides
            nothing.
        failed: whether the metric fails the gate.
        reason: why, or why not.
    """

    metric: str
    before: float
    after: float
    comparison: Comparison
    adjusted_p: float
    failed: bool
    reason: str


@dataclass(frozen=True)
class Gate:
    """The decision over all metrics.

    Attributes:
        max_drop: the fall that is allowed, in the metrics' own unit (0.02 is 2 points).
        level: of the intervals.
        checks: one a metric.
    """

    max_drop: float
    level: float
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no metric failed."""
        return not any(check.failed for check in self.checks)


def gate(
    baseline: Result,
    candidate: Result,
    *,
    metrics: Sequence[str | Metric] | None = None,
    max_drop: float = 0.02,
    level: float = 0.95,
    seed: int = 0,
) -> Gate:
    """Returns whether ``candidate`` may take the place of ``baseline``.

    A metric fails where delta < -max_drop and interval.high < 0: the mean of the paired differences fell by more than
    the margin, and their interval lies wholly below 0, so that "no fall" is excluded. Each metric by itself: metrics
    of one ranking fall together, and a correction for their number would let certain falls pass. Where every query
    changed by the same amount there is no interval, and the p-value decides.

    Args:
        baseline, candidate: results on the same data by the same rules.
        metrics: which to check; default: all that both have.
        max_drop: the fall that is allowed; 0.02 is 2 points.
        level: of the intervals.
        seed: of the resampling.

    Raises:
        DataError: a result is a bound or not eligible, the two differ in data, queries, judgements or tie rule, one is
            of a run and the other of a full ranking, or a metric without a cut-off is one of a run.
        SettingError: unknown metric, or a margin outside [0, 1).
    """
    refuse_no_margin(max_drop)
    names = common_metrics(baseline, candidate) if metrics is None else [str(m) for m in parsed(metrics)]
    for which, result in (("baseline", baseline), ("result", candidate)):
        _refuse_unfit(which, result, names)
    differing = {what for name in names for what in unlike(baseline, candidate, Metric.parse(name))} - {"truncated_run"}
    if differing:
        raise DataError(
            f"the two results differ in {', '.join(sorted(differing))}: gate on results of the same data, made by the "
            "same rules"
        )
    if bool(baseline.provenance.get("truncated_run")) != bool(candidate.provenance.get("truncated_run")):
        raise DataError(
            "one result is of a run, whose lists end somewhere, and the other of a full ranking: gate like with like"
        )
    found = changes(baseline, candidate, metrics=names, level=level, seed=seed)
    return Gate(max_drop, level, tuple(_check(name, change, max_drop) for name, change in found.items()))


def fell_beyond(delta: float, max_drop: float) -> bool:
    """Returns whether a difference is a fall by more than ``max_drop``; a fall of exactly that much is not."""
    return delta < -max_drop - TOLERANCE


def refuse_no_margin(max_drop: float) -> None:
    """Raises `SettingError` for a margin outside [0, 1)."""
    if not 0 <= max_drop < 1:
        raise SettingError(f"max_drop={max_drop!r} must be at least 0 and below 1: 0.02 allows a fall of 2 points")


def _refuse_unfit(which: str, result: Result, names: Sequence[str]) -> None:
    if result.bound:
        raise DataError(
            f"the {which} is a bound: it saw only a part of the corpus, so its metrics are upper limits and no scores. "
            "Evaluate it on the full corpus"
        )
    if not result.eligible:
        n = result.counts.get("n_nonfinite_documents", 0) + result.counts.get("n_nonfinite_queries", 0)
        why = f": {n} of its embeddings are NaN or infinite" if n else ""
        raise DataError(f"the {which} is not eligible{why}. Gate on an evaluation whose embeddings are all finite")
    uncut = [name for name in names if Metric.parse(name).k is None]
    if uncut and result.provenance.get("truncated_run"):
        raise DataError(
            f"the {which} is of a run, whose lists end somewhere, so {', '.join(uncut)} depends on their length. "
            "Gate on metrics with a cut-off, such as ndcg@10"
        )


def _check(name: str, change: Change, max_drop: float) -> Check:
    failed, reason = _decision(change, max_drop)
    return Check(name, change.before, change.after, change.comparison, change.adjusted_p, failed, reason)


def _decision(change: Change, max_drop: float) -> tuple[bool, str]:
    """Returns whether the metric fails, and the sentence that says why or why not."""
    found = change.comparison
    if found.delta >= 0:
        return False, "did not fall"
    fell = f"fell by {-100 * found.delta:.2f} points ({100 * max_drop:.2f} allowed)"
    if not fell_beyond(found.delta, max_drop):
        return False, fell
    low, high = found.interval
    interval = f"{found.interval.level:.0%} interval [{100 * low:+.2f}, {100 * high:+.2f}]"
    alike = found.interval.method == "degenerate"
    if not (high < 0 or alike):
        return False, f"{fell}, but {interval} does not exclude no fall"
    p = found.p_value
    if alike and not p < 1 - found.interval.level:
        return False, f"{fell}, but p = {p:.4f} does not exclude no fall"
    return True, f"{fell}; {f'p = {p:.4f}' if alike else interval} excludes no fall"
