"""How sure a number is: bootstrap intervals, paired tests, Holm's correction.

Promise: the same values and seed give the same bounds; a degenerate sample is widened openly, never called certain.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from fullrank._errors import DataError, SettingError, first_few

__all__ = ["Interval", "holm", "mean_interval", "paired_p_value"]

N_RESAMPLES = 2_000
N_PERMUTATIONS = 9_999
FLOAT_NOISE = 1e-9
"""Sums of the same numbers in another order differ by less."""


@dataclass(frozen=True)
class Interval:
    """A confidence interval of a mean.

    Attributes:
        low, high: the bounds.
        level: confidence, 0.95 for 95 %.
        method: ``bootstrap`` (percentile, Efron & Tibshirani 1993), ``wilson`` (values all at a bound, Wilson 1927)
            or ``degenerate`` (values all equal, so that nothing can be said).
    """

    low: float
    high: float
    level: float
    method: str

    def __iter__(self):  # type: ignore[no-untyped-def]  # unpacks as `low, high = interval`
        return iter((self.low, self.high))


def mean_interval(
    values: ArrayLike,
    *,
    level: float = 0.95,
    seed: int = 0,
    n_resamples: int = N_RESAMPLES,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Interval:
    """Returns the interval of the mean of ``values`` ([n]) by resampling them with replacement.

    Values that are all alike would give an interval without width, a claim of certainty. All at a bound: the Wilson
    interval; all at another value, or only one value: the whole range.

    Args:
        values: one a query.
        level: confidence.
        seed: of the resampling.
        n_resamples: how often.
        bounds: the range that values can lie in; (-1, 1) for differences of metrics.

    Raises:
        DataError: no values, or NaN or infinity among them.
        SettingError: ``level`` outside (0, 1).

    >>> low, high = mean_interval([0.0, 1.0] * 50)
    >>> 0.38 < low < 0.42 and 0.58 < high < 0.62
    True
    """
    sample = _checked(values)
    if not len(sample):
        raise DataError("an interval needs at least one value")
    if not 0 < level < 1:
        raise SettingError(f"level={level!r} must lie between 0 and 1, for example 0.95")
    if np.any(sample != sample[0]):
        means = _resampled_means(sample, seed, n_resamples)
        low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
        return Interval(float(low), float(high), level, "bootstrap")
    bottom, top = bounds
    if len(sample) == 1 or sample[0] not in bounds:
        return Interval(float(min(bottom, sample[0])), float(max(top, sample[0])), level, "degenerate")
    hits = len(sample) if sample[0] == top else 0
    share = stats.binomtest(hits, len(sample)).proportion_ci(level, method="wilson")
    low, high = (bottom + (top - bottom) * float(bound) for bound in (share.low, share.high))
    return Interval(low, high, level, "wilson")


def _checked(values: ArrayLike) -> NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not np.isfinite(sample).all():
        raise DataError("statistics need a flat list of numbers without NaN or infinity")
    return sample


def _resampled_means(sample: NDArray[np.float64], seed: int, n_resamples: int) -> NDArray[np.float64]:
    result = stats.bootstrap(
        (np.sort(sample),),  # sorted, so that the order of the queries changes no bound
        np.mean,
        n_resamples=n_resamples,
        method="percentile",
        rng=np.random.default_rng(seed),
        batch=max(1, 2_000_000 // len(sample)),
    )
    return np.asarray(result.bootstrap_distribution)


def paired_p_value(differences: ArrayLike, *, seed: int = 0, n_permutations: int = N_PERMUTATIONS) -> float:
    """Returns the two-sided p-value of the paired randomisation test that the mean difference is zero.

    The signs of the differences ([n], one a query) are flipped at random; p = (b + 1) / (permutations + 1) with b the
    permuted sums at least as far from zero (Smucker, Allan & Carterette, CIKM 2007). Few pairs are enumerated.

    Raises:
        DataError: NaN or infinity among the differences.
    """
    sample = _checked(differences)
    observed = round(abs(math.fsum(sample)), 10)
    # A zero has no sign to flip. Sizes alone, sorted: neither the order of the queries nor which of the two results is
    # called the baseline changes the draws.
    sizes = np.sort(np.abs(sample[sample != 0]))
    if len(sizes) < 2:
        return 1.0  # either sign of a single difference is as far from zero
    result = stats.permutation_test(
        (sizes,),
        _distance_from_zero,
        permutation_type="samples",
        alternative="greater",
        vectorized=True,
        n_resamples=n_permutations,
        batch=max(1, 2_000_000 // len(sizes)),
        rng=np.random.default_rng(seed),
    )
    found = result.null_distribution
    drawn = int(len(found) >= n_permutations and 2.0 ** len(sizes) > n_permutations)  # else all signs were enumerated
    return float((np.sum(found >= observed - FLOAT_NOISE) + drawn) / (len(found) + drawn))


def _distance_from_zero(sample: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    # Rounded: sums of the same numbers in another order differ in the last bits, and equal distances must tie.
    return np.asarray(np.round(np.abs(np.sum(sample, axis=axis)), 10), dtype=np.float64)


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns the p-values adjusted for how many there are (Holm 1979), in the order given.

    Raises:
        DataError: a value outside [0, 1].

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    if wrong := [p for p in p_values if not 0 <= p <= 1]:
        raise DataError(f"p-values lie between 0 and 1, got {first_few(wrong)}")
    order = np.argsort(p_values, kind="stable")
    adjusted, highest = [0.0] * len(p_values), 0.0
    for position, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - position) * p_values[int(index)]))
        adjusted[int(index)] = highest
    return adjusted
