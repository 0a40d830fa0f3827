"""What in-batch numbers give away: when something is said, with which numbers, and that noise is not taken for it."""

import math
import random

import pytest

from fullrank._errors import SettingError
from fullrank.advice import diverging, low_mrr

FALLING = [(0, 0.40), (10, 0.45), (20, 0.44), (30, 0.42), (40, 0.39)]
RISING = [(5, 0.70), (10, 0.72), (15, 0.75), (20, 0.77), (25, 0.80), (30, 0.82), (35, 0.85), (40, 0.87)]


def test_low_mrr_after_warm_up_is_said_with_its_numbers():
    points = [(5, 0.1), (10, 0.2), (15, 0.35), (20, 0.41), (25, 0.38)]
    found = low_mrr(points, warmup_steps=10)
    assert (found.kind, found.severity, found.count) == ("low-in-batch-mrr", "warning", 3)
    assert str(found) == (
        "warning: in-batch MRR stays below 0.5 after warm-up: at most 0.410 between steps 15 and 25, now 0.380. Look "
        "for answers among the hard negatives (filter them by a margin, or use a guided loss), or try another "
        "temperature (scale)"
    )


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(15, 0.1), (20, 0.1)],
        [(1, 0.1), (5, 0.1), (10, 0.1), (15, 0.1), (20, 0.1)],
        [(15, 0.1), (20, 0.5), (25, 0.1), (30, 0.1)],
        [(15, 0.1), (20, 0.9), (25, 0.1), (30, 0.1)],
        [(15, 0.1), (20, 0.1), (25, None), (30, math.nan)],
        [(15, 0.1), (15, 0.1), (15, 0.1), (20, 0.1)],
    ],
    ids=["none", "too few", "in warm-up", "at the floor", "once high", "not finite", "one step twice"],
)
def test_low_mrr_says_nothing_without_three_low_points_after_warm_up(points):
    assert low_mrr(points, warmup_steps=10) is None


def test_low_mrr_goes_by_step_and_not_by_order():
    points = [(25, 0.38), (15, 0.35), (20, 0.41)]
    assert low_mrr(iter(points), warmup_steps=10) == low_mrr(sorted(points), warmup_steps=10)
    assert low_mrr(points, warmup_steps=20) is None
    assert low_mrr(points, warmup_steps=20, n_points=1).count == 1


@pytest.mark.parametrize("options", [{"warmup_steps": -1}, {"warmup_steps": 0, "n_points": 0}])
def test_low_mrr_refuses_settings_that_cannot_be(options):
    with pytest.raises(SettingError, match="must be"):
        low_mrr([], **options)


def test_a_falling_score_beside_a_rising_accuracy_is_said_with_the_numbers():
    found = diverging(FALLING, RISING, metric="recall@1")
    assert (found.kind, found.severity, found.count) == ("in-batch-diverges", "warning", 4)
    # The accuracy of an evaluation is the mean of the points since the one before: (.70 + .72) / 2 at step 10.
    assert found.message == (
        "between steps 10 and 40 in-batch accuracy rose from 0.710 to 0.860, while recall@1 fell from 0.4500 to 0.3900"
    )
    assert "stop at the best step" in found.remedy


@pytest.mark.parametrize("cut", range(5))
def test_it_takes_four_evaluations_that_fall(cut):
    assert diverging(FALLING[:cut], RISING) is None
    assert (diverging(FALLING[:cut], RISING, n_evaluations=3) is not None) is (cut == 4)


def test_one_step_the_other_way_is_enough_to_say_nothing():
    for at in (2, 3, 4):
        scores = list(FALLING)
        scores[at] = (scores[at][0], scores[at - 1][1])
        assert diverging(scores, RISING) is None
    for step in (20, 30, 40):
        accuracies = [(at, 0.0 if at in (step, step - 5) else value) for at, value in RISING]
        assert diverging(FALLING, accuracies) is None
    assert diverging([(s, -v) for s, v in FALLING], RISING) is None
    assert diverging(FALLING, [(s, -v) for s, v in RISING]) is None


def test_failed_evaluations_and_those_without_loss_lines_are_left_out():
    scores = [*FALLING, (22, None), (24, math.nan), (26, math.inf)]
    assert diverging(scores, RISING) == diverging(FALLING, RISING)
    between = [*FALLING, (41, 0.9)]  # no loss line since step 40
    assert diverging(between, RISING) == diverging(FALLING, RISING)
    assert diverging(FALLING, [(1, 0.5)]) is None
    assert diverging(FALLING, []) is None


def test_an_interval_takes_a_fall_that_is_not_steady():
    scores = [(10, 0.45), (20, 0.47), (30, 0.40), (40, 0.41)]
    assert diverging(scores, RISING) is None
    found = diverging(scores, RISING, interval=0.05)
    assert found.message.startswith("between steps 20 and 40 in-batch accuracy rose from 0.760 to 0.860")
    assert found.message.endswith("fell from 0.4700 to 0.4100")
    assert diverging(scores, RISING, interval=0.06) is None, "the latest is not more than that below"
    assert diverging(scores, RISING, interval=0.05, accuracy_rise=0.2) is None
    assert diverging(scores[:3], RISING, interval=0.05) is None, "one low evaluation may be noise"
    flat = [(step, 0.8) for step, _ in RISING]
    assert diverging(scores, flat, interval=0.05) is None
    assert diverging([], [], interval=0.0) is None


def test_noise_is_seldom_taken_for_it():
    rng = random.Random(0)
    alarms = 0
    for _ in range(500):
        scores = [(10 * i, rng.gauss(0.45, 0.01)) for i in range(1, 11)]
        accuracies = [(5 * i, rng.gauss(0.9, 0.02)) for i in range(1, 21)]
        # Half width of a 95 % interval of 2,000 queries at this noise: 1.96 * .01; of a difference: 1.4 times that.
        alarms += any(diverging(scores[:n], accuracies, interval=0.028) is not None for n in range(1, 11))
    assert alarms <= 0.03 * 500


@pytest.mark.parametrize("options", [{"n_evaluations": 2}, {"interval": -0.1}, {"accuracy_rise": -1.0}])
def test_diverging_refuses_settings_that_cannot_be(options):
    with pytest.raises(SettingError, match="must be"):
        diverging([], [], **options)
