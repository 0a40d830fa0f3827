"""Intervals, the paired randomisation test and Holm's correction against enumerations and hand-computed values."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fullrank._errors import DataError
from fullrank.stats import Interval, holm, mean_interval, paired_p_value

# ---------------------------------------------------------------- intervals


def test_case_43_half_ones():
    interval = mean_interval([1.0] * 50 + [0.0] * 50)
    assert interval.low == pytest.approx(0.40, abs=0.015)
    assert interval.high == pytest.approx(0.60, abs=0.015)
    assert (interval.level, interval.method) == (0.95, "bootstrap")
    assert mean_interval([1.0] * 50 + [0.0] * 50) == interval


def test_case_43_all_ones_is_not_certain():
    # Wilson at 20 of 20: low = 1 / (1 + z^2 / n) = 1 / (1 + 1.959964^2 / 20) = 1 / 1.1920729
    interval = mean_interval([1.0] * 20)
    assert interval.low == pytest.approx(0.8388748, abs=1e-6)
    assert interval.high == 1
    assert interval.method == "wilson"
    zeros = mean_interval([0.0] * 20)
    assert (zeros.low, zeros.method) == (0, "wilson")
    assert zeros.high == pytest.approx(1 - 0.8388748, abs=1e-6)
    # at 80 %: z = 1.2815516, 1 / (1 + 1.6423744 / 5)
    assert mean_interval([1.0] * 5, level=0.8).low == pytest.approx(0.7527429, abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
def test_case_43_one_value_is_degenerate(value):
    interval = mean_interval([value])
    assert interval.method == "degenerate"
    assert interval.low < interval.high
    assert interval.low <= value <= interval.high


@pytest.mark.parametrize("value", [0.3, -0.5, -1.0])
def test_equal_values_are_never_reported_as_certain(value):
    interval = mean_interval([value] * 6)
    assert interval.method == "degenerate"
    assert interval.low < interval.high
    assert interval.low <= value <= interval.high


def test_unpacks():
    low, high = mean_interval([0.0, 0.5, 1.0])
    assert 0 <= low < 0.5 < high <= 1
    assert tuple(Interval(0.1, 0.2, 0.9, "wilson")) == (0.1, 0.2)


def test_seed_and_level():
    sample = np.random.default_rng(0).random(40)
    assert mean_interval(sample, seed=1) == mean_interval(sample, seed=1)
    assert mean_interval(sample, seed=1) != mean_interval(sample, seed=2)
    widths = [np.ptp(tuple(mean_interval(sample, level=level))) for level in (0.5, 0.8, 0.95, 0.99)]
    assert widths == sorted(set(widths))
    assert mean_interval(sample, level=0.8).level == 0.8


@pytest.mark.parametrize("seed", range(5))
def test_order_of_values_does_not_matter(seed):
    sample = np.random.default_rng(9).random(60)
    order = np.random.default_rng(seed).permutation(60)
    assert mean_interval(sample[order]) == mean_interval(sample)
    differences = sample - 0.47
    assert paired_p_value(differences[order]) == paired_p_value(differences)


def test_the_interval_does_not_touch_its_input_or_the_global_state():
    sample = np.random.default_rng(9).random(30)
    before = sample.copy()
    sample.setflags(write=False)
    state = np.random.get_state()[1].tobytes()  # noqa: NPY002
    mean_interval(sample)
    paired_p_value(sample)
    assert np.random.get_state()[1].tobytes() == state  # noqa: NPY002
    np.testing.assert_array_equal(sample, before)


def test_bounds_are_percentiles_of_resampled_means():
    # for n large the percentile interval is mean +- 1.96 standard errors
    sample = np.random.default_rng(3).normal(5, 2, 2000)
    error = sample.std() / math.sqrt(2000)
    low, high = mean_interval(sample, n_resamples=5000)
    assert low == pytest.approx(sample.mean() - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(sample.mean() + 1.96 * error, abs=0.15 * error)


@pytest.mark.parametrize("n", [60, 200])
def test_coverage_of_the_bootstrap(n):
    # reciprocal ranks: 1, 1/2, 1/3, 0 with probabilities .4, .2, .1, .3; mean .4 + .1 + .0333
    rng = np.random.default_rng(n)
    inside = 0
    for seed in range(300):
        sample = rng.choice([1, 1 / 2, 1 / 3, 0], size=n, p=[0.4, 0.2, 0.1, 0.3])
        low, high = mean_interval(sample, seed=seed, n_resamples=1000)
        inside += low <= 0.4 + 0.1 + 1 / 30 <= high
    assert 0.91 <= inside / 300 <= 0.98


@pytest.mark.parametrize("bad", [[], [math.nan], [0.5, math.nan], [math.inf, 0.5], [[0.5, 1.0]]])
def test_values_without_an_interval(bad):
    with pytest.raises(ValueError, match=r"an interval needs at least one|a flat list of numbers without NaN or inf"):
        mean_interval(bad)


@pytest.mark.parametrize("level", [0, 1, -0.5, 95, math.nan])
def test_a_level_that_is_none(level):
    with pytest.raises(ValueError, match=r"must lie between 0 and 1, for example 0\.95"):
        mean_interval([0.0, 1.0], level=level)


# ---------------------------------------------------------------- paired randomisation test


def enumerated(differences):
    """Share of all sign flips whose sum is at least as far from zero; exact in rationals."""
    exact = [Fraction(d).limit_denominator(10**6) for d in differences]
    observed = abs(sum(exact))
    flips = list(itertools.product([1, -1], repeat=len(exact)))
    return sum(abs(sum(s * d for s, d in zip(flip, exact, strict=True))) >= observed for flip in flips) / len(flips)


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([1.0], 1),  # both signs are as far
        ([1.0, 1.0], 2 / 4),
        ([1.0, 1.0, 1.0], 2 / 8),
        ([1.0] * 6, 2 / 64),
        ([-1.0] * 6, 2 / 64),
        ([1.0, 1.0, -1.0], 1),  # every sum is 1, 3, -1 or -3
        ([3.0, 1.0, 1.0], 2 / 8),
        ([0.5, 0.0], 1),
        ([0.0, 0.0, 1.0, 0.0], 1),  # one query changed
        ([1.0, 0.0, 1.0], 2 / 4),
        ([0.0, 0.0], 1),
        ([0.0], 1),
    ],
)
def test_exact_by_hand(differences, expected):
    assert paired_p_value(differences) == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.sampled_from([-1.0, -0.5, -1 / 3, -0.1, 0.0, 0.1, 0.2, 0.3, 1 / 3, 0.5, 1.0]), min_size=1, max_size=8)
)
def test_exact_for_few_pairs(differences):
    p = paired_p_value(differences)
    assert p == pytest.approx(enumerated(differences), abs=1e-12)
    assert p == pytest.approx(paired_p_value([-d for d in differences]), abs=1e-12)
    assert p == pytest.approx(paired_p_value(differences, seed=5), abs=1e-12)


def test_rounding_does_not_break_a_tie():
    # .1 + .2 - .3 is 5.6e-17 in float64: every flip is at least as far from zero
    assert paired_p_value([0.1, 0.2, -0.3]) == 1
    assert paired_p_value([0.1] * 3 + [0.3]) == pytest.approx(enumerated([0.1] * 3 + [0.3]))


def test_never_zero():
    # (0 + 1) / (9999 + 1): none of the flips reaches 200
    assert paired_p_value([1.0] * 200) == pytest.approx(1 / 10_000, abs=1e-12)
    assert paired_p_value([1.0] * 200, n_permutations=99) == pytest.approx(1 / 100, abs=1e-12)


def test_sampled_flips_approach_the_exact_value():
    # 40 differences of +-1 with sum 10: 2 P(Binomial(40, 1/2) >= 25), by scipy's binomial
    differences = [1.0] * 25 + [-1.0] * 15
    exact = 2 * stats.binom.sf(24, 40, 0.5)
    assert paired_p_value(differences) == pytest.approx(exact, abs=0.015)
    assert paired_p_value(differences, seed=3) == paired_p_value(differences, seed=3)
    assert (paired_p_value(differences, seed=3) * 10_000) % 1 == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("n", [10, 40])
def test_uniform_under_the_null(n):
    rng = np.random.default_rng(n)
    found = [paired_p_value(rng.normal(size=n), seed=i, n_permutations=1999) for i in range(300)]
    assert stats.kstest(found, "uniform").pvalue > 0.01
    assert 0.025 <= np.mean(np.array(found) < 0.05) <= 0.08


def test_a_clear_difference_is_found():
    rng = np.random.default_rng(0)
    assert paired_p_value(rng.normal(0.5, 1, 100)) < 0.001
    assert paired_p_value(rng.normal(0.0, 1, 100)) > 0.05


@pytest.mark.parametrize("bad", [[math.nan, 1.0, 0.5], [math.inf, 1.0, 0.5], [[1.0, 2.0], [0.5, 1.0]]])
def test_differences_without_a_p_value(bad):
    with pytest.raises(DataError):
        paired_p_value(bad)


# ---------------------------------------------------------------- Holm


def naive_holm(p_values):
    """Adjusted p = the largest of (m - j) p_(j) over the smaller ones and itself, at most 1."""
    ordered = sorted(p_values)
    steps = [(len(p_values) - j) * p for j, p in enumerate(ordered)]
    return [min(1.0, max(steps[: ordered.index(p) + ordered.count(p)])) for p in p_values]


@pytest.mark.parametrize(
    ("p_values", "expected"),
    [
        ([], []),
        ([0.03], [0.03]),
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),  # 3 * .01; 2 * .03; max(1 * .04, .06)
        ([0.04, 0.01, 0.03, 0.005], [0.06, 0.03, 0.06, 0.02]),  # 4*.005=.02, 3*.01=.03, 2*.03=.06, max(.04, .06)
        ([0.6, 0.6], [1, 1]),
        ([0.02, 0.02, 0.02], [0.06, 0.06, 0.06]),
        ([0.0, 1.0], [0, 1]),
    ],
)
def test_holm_by_hand(p_values, expected):
    assert holm(p_values) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.floats(0, 1) | st.sampled_from([0.0, 0.01, 0.02, 1.0]), max_size=12))
def test_holm_equals_the_naive_one(p_values):
    adjusted = holm(p_values)
    assert adjusted == pytest.approx(naive_holm(p_values), abs=1e-12)
    assert all(p <= a + 1e-15 <= 1 + 1e-9 for p, a in zip(p_values, adjusted, strict=True))


@pytest.mark.parametrize("bad", [[math.nan], [1.5], [-0.1], [0.5, math.inf]])
def test_p_values_that_are_none(bad):
    with pytest.raises(DataError):
        holm(bad)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1, 1).map(lambda v: round(v, 3)), min_size=2, max_size=60), st.randoms())
def test_neither_direction_nor_order_changes_a_p_value(differences, random):
    expected = paired_p_value(differences)
    shuffled = random.sample(differences, len(differences))
    assert paired_p_value([-d for d in differences]) == expected
    assert paired_p_value(shuffled) == expected
    assert 0 < expected <= 1
