"""The race: the winner of an exhaustive evaluation, always, with less work; rules and ties as pure decisions."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank._errors import SettingError
from fullrank.selecting import (
    Values,
    in_question,
    race,
    ruled,
    settle,
    tied_with,
    winner_of,
)
from fullrank.stats import paired_p_value


@dataclass
class Fake:
    """A candidate in memory: scores of all documents for each query, the relevant document at position 0..q-1."""

    order: int
    scores: np.ndarray  # [q, n]
    how: str = "recall"
    block: int = 3
    allowed: bool = True
    broken: bool = False
    failed: bool = False
    counts: bool = True
    seen: set = field(default_factory=set)

    @property
    def complete(self):
        return len(self.seen) == self.scores.shape[1]

    @property
    def eligible(self):
        return self.allowed or not self.complete

    @property
    def bound(self):
        return self.values().mean if self.seen else math.inf

    def values(self):
        q = len(self.scores)
        seen = sorted(self.seen)
        own = self.scores[np.arange(q), np.arange(q)]
        better = (self.scores[:, seen] > own[:, None]).sum(axis=1)
        tied = (self.scores[:, seen] == own[:, None]).sum(axis=1)
        if self.how == "recall":
            got = np.where(better >= 1, 0.0, 1.0 / np.maximum(tied, 1))
        else:
            ranks = [np.arange(b + 1, b + t + 1) for b, t in zip(better, tied, strict=True)]
            got = np.array([np.mean(np.where(r <= 10, 1 / np.log2(r + 1), 0.0)) for r in ranks])
        return Values((got,), (1.0,))

    def open(self):
        self.failed = self.broken
        self.seen |= set(range(len(self.scores)))

    def extend(self):
        rest = [i for i in range(self.scores.shape[1]) if i not in self.seen]
        self.seen |= set(rest[: self.block])

    def finish(self):
        self.seen = set(range(self.scores.shape[1]))


def fakes(draw_seed, n_candidates, q, n, levels, how, closeness):
    rng = np.random.default_rng(draw_seed)
    common = rng.normal(size=(q, n))
    made = []
    for order in range(n_candidates):
        scores = common + closeness * rng.normal(size=(q, n))
        scores[np.arange(q), np.arange(q)] += rng.uniform(0, 2.5)
        made.append(Fake(order, np.round(scores * levels) / levels, how))
    return made


RANDOM = {
    "seed": st.integers(0, 10**6),
    "n_candidates": st.integers(1, 8),
    "q": st.integers(1, 9),
    "n_more": st.integers(0, 30),
    "levels": st.sampled_from([1, 3, 1000]),
    "how": st.sampled_from(["recall", "ndcg"]),
    "closeness": st.sampled_from([0.0, 0.2, 1.0]),
}


@settings(max_examples=300, deadline=None)
@given(**RANDOM, refused=st.sets(st.integers(0, 7), max_size=3), broken=st.sets(st.integers(0, 7), max_size=2))
def test_the_winner_is_that_of_an_exhaustive_evaluation(
    seed, n_candidates, q, n_more, levels, how, closeness, refused, broken
):
    made = {}
    for exhaustive in (False, True):
        candidates = fakes(seed, n_candidates, q, q + n_more, levels, how, closeness)
        for candidate in candidates:
            candidate.allowed, candidate.broken = candidate.order not in refused, candidate.order in broken
        best = race(candidates, in_question("max", contenders=candidates), exhaustive=exhaustive)
        made[exhaustive] = None if best is None else best.order
        for candidate in candidates:
            assert exhaustive <= (candidate.complete or candidate.failed)
        work = sum(len(c.seen) for c in candidates)
        assert work <= n_candidates * (q + n_more)
    scores = {c.order: c.bound for c in candidates if c.eligible and not c.failed}
    assert made[False] == made[True] == winner_of(scores)


@settings(max_examples=200, deadline=None)
@given(**RANDOM)
def test_rules_that_compare_candidates_give_the_answer_of_an_exhaustive_evaluation(
    seed, n_candidates, q, n_more, levels, how, closeness
):
    found = []
    for exhaustive in (False, True):
        candidates = fakes(seed, n_candidates, q, q + n_more, levels, how, closeness)
        best = race(candidates, in_question("one-se", contenders=candidates), exhaustive=exhaustive)
        found.append((best.order, ruled("one-se", best, candidates).order))
    assert found[0] == found[1]


@settings(max_examples=200, deadline=None)
@given(**RANDOM, lift=st.floats(0, 3))
def test_a_base_left_at_its_bound_is_beaten_for_certain(seed, n_candidates, q, n_more, levels, how, closeness, lift):
    base, winner = fakes(seed, 2, 2 * q, 2 * q + n_more, levels, how, closeness)
    winner.scores[np.arange(2 * q), np.arange(2 * q)] += lift
    base.open()
    winner.finish()
    p = settle(winner, base)
    if p is None:
        assert base.complete
        return
    base.finish()
    difference = winner.values().minus(base.values())
    assert difference.mean > 0
    assert paired_p_value(difference.flat) <= p + 0.01 < 0.07  # two draws of signs


def test_a_base_that_wins_or_fails_is_settled_by_looking_at_all_of_it():
    base, winner = fakes(0, 2, 4, 20, 1000, "recall", 0.0)
    winner.scores = base.scores.copy()
    base.open()
    winner.finish()
    assert settle(winner, base) is None
    assert base.complete
    base.failed, base.seen = True, set()
    assert settle(winner, base) is None
    assert not base.seen


@settings(max_examples=200, deadline=None)
@given(**RANDOM, keep=st.integers(2, 4))
def test_the_best_few_are_those_of_an_exhaustive_evaluation(
    seed, n_candidates, q, n_more, levels, how, closeness, keep
):
    found = []
    for exhaustive in (False, True):
        candidates = fakes(seed, n_candidates, q, q + n_more, levels, how, closeness)
        race(candidates, in_question("max", keep=keep, contenders=candidates), exhaustive=exhaustive)
        scores = {c.order: c.bound for c in candidates if c.complete}
        found.append(sorted(scores, key=lambda order: (-round(scores[order], 12), order))[:keep])
    assert found[0] == found[1]


def test_an_equal_bound_at_an_earlier_step_is_finished():
    # Both have recall@1 = 1 over everything. The later is finished first by its place in the list, not by its step.
    scores = np.array([[1.0, 0.0, 0.0, 0.0]])
    early, late = Fake(0, scores), Fake(1, scores)
    late.finish()
    best = race([late, early], in_question("max", contenders=[late, early]))
    assert best is early
    assert early.complete


def test_a_later_step_with_an_equal_bound_is_not_finished():
    scores = np.array([[1.0] + [0.0] * 20])
    early, late = Fake(0, scores), Fake(1, scores)
    assert race([early, late], in_question("max", contenders=[early, late])) is early
    assert len(late.seen) == 1


def test_what_lies_clearly_below_is_left_with_the_relevant_documents():
    good = np.zeros((4, 60))
    good[np.arange(4), np.arange(4)] = 1
    bad = good.copy()
    bad[0, 1] = bad[1, 2] = 2  # relevant documents of other queries are in the way
    candidates = [Fake(0, bad), Fake(1, good)]
    assert race(candidates, in_question("max", contenders=candidates)).order == 1
    assert len(candidates[0].seen) == 4
    assert candidates[0].bound == 0.5


def test_a_refused_leader_leaves_the_race_to_the_next():
    scores = np.eye(3, 12)
    worse = scores.copy()
    worse[0, 11] = 2
    candidates = [Fake(0, worse), Fake(1, scores, allowed=False)]
    assert race(candidates, in_question("max", contenders=candidates)).order == 0


def test_nobody_wins_where_all_failed():
    candidates = [Fake(0, np.eye(2), broken=True)]
    assert race(candidates, in_question("max", contenders=candidates)) is None
    assert race([], in_question("max", contenders=[])) is None


def values(*numbers):
    return Values((np.array(numbers, dtype=float),), (1.0,))


class Done:
    """A candidate that is complete."""

    complete = eligible = True
    failed = False

    def __init__(self, order, *numbers):
        self.order, self._values = order, values(*numbers)
        self.bound = self._values.mean

    def values(self):
        return self._values


def test_one_standard_error_is_that_of_the_paired_difference():
    # 40 of 100 against 38 of 100. The plain standard error of .40 is .049, so that even .36 would be "within".
    base = [1.0] * 40 + [0.0] * 60
    best = Done(3, *base)
    # Step 0 lost 6 queries and won none: difference .06, paired standard error sqrt(.06 * .94 / 99) = .0239: outside.
    worse = Done(0, *([0.0] * 6 + base[6:]))
    # Step 2 lost 2: difference .02, paired standard error sqrt(.02 * .98 / 99) = .0141: outside as well.
    near = Done(2, *([0.0] * 2 + base[2:]))
    # Step 1 lost 1: .01, standard error sqrt(.01 * .99 / 99) = .01: within, it is equal.
    nearest = Done(1, 0.0, *base[1:])
    assert ruled("one-se", best, [worse, nearest, near, best]) is nearest
    assert ruled("one-se", best, [worse, near, best]) is best
    assert ruled("max", best, [worse, nearest, near, best]) is best


def test_tied_are_those_whose_difference_the_queries_cannot_carry():
    best = Done(2, *([1.0] * 40 + [0.0] * 60))
    alike = Done(1, *([0.0] * 3 + [1.0] * 39 + [0.0] * 58))
    far = Done(0, *([0.0] * 30 + [1.0] * 10 + [0.0] * 60))
    found = tied_with(best, [far, alike, best])
    assert list(found) == [1]
    assert found[1] > 0.05


def test_holm_counts_the_comparisons():
    # Lost 6 of 100 and won none: p = 2 / 2^6 = .031 alone, and not separable among four comparisons.
    best = Done(9, *([1.0] * 40 + [0.0] * 60))
    lost = [Done(i, *([0.0] * 6 + [1.0] * 34 + [0.0] * 60)) for i in range(4)]
    assert tied_with(best, [lost[0], best]) == {}
    assert list(tied_with(best, [*lost, best])) == [0, 1, 2, 3]


def test_several_sets_are_weighted_by_set_not_by_query():
    both = Values((0.5 * np.ones(10), 0.5 * np.zeros(1000)), (0.5, 0.5))
    assert both.mean == 0.5
    assert math.isclose(float(np.mean(both.flat)), 0.5)
    assert both.standard_error == 0


def test_unknown_rule():
    with pytest.raises(SettingError, match="rule='best' is unknown; choose one of max, one-se"):
        in_question("best", contenders=[])
