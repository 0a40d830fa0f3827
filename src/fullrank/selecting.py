"""Choosing among candidates as decisions on plain data: bounds, rules, ties, and in which order to look.

Promise: the winner is that of evaluating every candidate in full; a candidate is left unfinished only where its bound
proves that finishing it could not change the answer; a failed candidate is failed, never 0.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from fullrank.objective import Objective
from fullrank.result import Result
from fullrank.settings import refuse_unknown
from fullrank.stats import holm, paired_p_value

__all__ = [
    "Contender",
    "Rule",
    "Values",
    "in_question",
    "objective_values",
    "race",
    "ruled",
    "settle",
    "tied_with",
    "winner_of",
]

Rule = Literal["max", "one-se"]
TOLERANCE = 1e-12
"""Scores closer than this are equal, and the earlier step wins: sums of equal values in another order differ less."""
LEVEL = 0.95
UNLIKELY = 2.0
"""Differences of fewer standard errors are not tested for separability: they are not separable, and a test costs."""


@dataclass(frozen=True)
class Values:
    """What each query contributes to an objective.

    Attributes:
        parts: float64 [queries] for each golden set, its weights multiplied in.
        most: the largest value that a query of each part can have.
    """

    parts: tuple[NDArray[np.float64], ...]
    most: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The value of the objective."""
        return math.fsum(math.fsum(part) / len(part) for part in self.parts)

    def minus(self, other: "Values") -> "Values":
        """Returns the paired differences."""
        return Values(tuple(a - b for a, b in zip(self.parts, other.parts, strict=True)), self.most)

    @property
    def standard_error(self) -> float:
        """Of the mean; 0 where no query differs from another."""
        return math.sqrt(sum(float(np.var(p, ddof=1)) / len(p) if len(p) > 1 else 0.0 for p in self.parts))

    @property
    def flat(self) -> NDArray[np.float64]:
        """All queries in one array whose mean is `mean`."""
        n = sum(map(len, self.parts))
        return np.concatenate([part * (n / len(part)) for part in self.parts])


class Contender(Protocol):
    """A candidate in the race. Its methods do the work, and put what fails into ``failed``."""

    order: int
    """Place by rising step; of equal scores the lower wins."""

    @property
    def bound(self) -> float:
        """Value of the objective over what was ranked so far: an upper bound, and the score once complete."""

    @property
    def complete(self) -> bool:
        """Whether the whole corpus was ranked, and what decides on eligibility is known."""

    @property
    def eligible(self) -> bool:
        """False where a guard has refused it."""

    @property
    def failed(self) -> bool:
        """Whether it cannot be evaluated."""

    @property
    def counts(self) -> bool:
        """Whether it is one of those of which the best so many are asked for."""

    def values(self) -> Values:
        """Returns the contributions of the queries to `bound`."""

    def open(self) -> None:
        """Ranks the relevant documents, from which the first bound comes."""

    def extend(self) -> None:
        """Ranks one more block of documents."""

    def finish(self) -> None:
        """Ranks all that is left."""


C = TypeVar("C", bound=Contender)


def winner_of(scores: Mapping[int, float]) -> int | None:
    """Returns the order of the highest score, the lowest order among equals, or None.

    >>> winner_of({0: 0.5, 1: 0.7, 2: 0.7})
    1
    """
    if not scores:
        return None
    top = max(scores.values())
    return min(order for order, score in scores.items() if score >= top - TOLERANCE)


def race(
    contenders: Sequence[C],
    open_question: Callable[[Contender, Contender | None], bool],
    *,
    first: C | None = None,
    exhaustive: bool = False,
) -> C | None:
    """Ranks documents for the contenders until no question is open, and returns the best.

    First a bound for each, then the most promising is finished, then always the one with the highest bound that is
    still in question goes on by a block.

    Args:
        contenders: the candidates.
        open_question: tells of an unfinished contender, and the best that is confirmed so far, whether finishing it
            could change what is asked.
        first: is finished whatever its bound, before the others: the base, with which all are compared.
        exhaustive: finish all.
    """
    for contender in contenders:
        contender.open()
    if first is not None:
        first.finish()
    finished = False
    while True:
        best = _best(contenders)
        running = [c for c in contenders if not (c.complete or c.failed) and c.eligible]
        if not exhaustive:
            running = [c for c in running if open_question(c, best)]
        if not running:
            return best
        leader = max(running, key=lambda c: (c.bound, -c.order))
        if exhaustive or best is None or (best is first and not finished):
            leader.finish()
            finished = True
        else:
            leader.extend()


def _best(contenders: Iterable[C]) -> C | None:
    confirmed = {c.order: c for c in contenders if c.complete and c.eligible and not c.failed}
    order = winner_of({order: c.bound for order, c in confirmed.items()})
    return None if order is None else confirmed[order]


def in_question(
    rule: Rule, *, ties: bool = False, keep: int = 0, contenders: Sequence[Contender]
) -> Callable[[Contender, Contender | None], bool]:
    """Returns the question of `race` for a rule.

    Args:
        rule: ``max`` or ``one-se``.
        ties: ask as well which candidates cannot be told apart from the best.
        keep: ask as well which are the best so many, of those that count.
        contenders: all of them.
    """
    refuse_unknown("rule", rule, get_args(Rule))

    def question(contender: Contender, best: Contender | None) -> bool:
        if best is None or _may_win(contender, best, contenders):
            return True
        if keep and _may_be_among(contender, contenders, keep):
            return True
        if rule == "one-se" and contender.order < best.order and not _outside_one_se(best, contender):
            return True
        return ties and not _surely_separable(best, contender, len(contenders) - 1)

    return question


def _may_win(contender: Contender, best: Contender, contenders: Iterable[Contender]) -> bool:
    if contender.order > best.order:
        return contender.bound > best.bound + TOLERANCE
    top = max(c.bound for c in contenders if c.complete and c.eligible and not c.failed)
    return contender.bound >= top - TOLERANCE


def _may_be_among(contender: Contender, contenders: Iterable[Contender], keep: int) -> bool:
    if not contender.counts:
        return False
    confirmed = (c for c in contenders if c.counts and c.complete and c.eligible and not c.failed)
    scores = sorted((c.bound for c in confirmed), reverse=True)
    return len(scores) < keep or contender.bound >= scores[keep - 1] - TOLERANCE


def _outside_one_se(best: Contender, contender: Contender) -> bool:
    """Returns whether no value below the bound could bring a contender within one standard error of the best.

    With d the paired differences to the bound, outside means mean(d) > SE(d), or sum(d^2) < sum(d)^2. Lower values
    raise some d_i; the right side then grows faster than the left wherever d_i <= sum(d), which holds for good once
    sum(d) has reached the largest value of a query.
    """
    difference = best.values().minus(contender.values())
    if len(difference.parts) > 1:
        return contender.complete
    far = math.fsum(difference.parts[0]) >= difference.most[0]
    return far and difference.mean > difference.standard_error


def _surely_separable(best: Contender, contender: Contender, n_comparisons: int) -> bool:
    difference = best.values().minus(contender.values())
    if difference.mean <= UNLIKELY * difference.standard_error:
        return False
    return paired_p_value(difference.flat) * max(1, n_comparisons) < 1 - LEVEL


def settle(winner: C, base: C) -> float | None:
    """Ranks on for the base until the winner is proved better at 95 %, or nothing is left; returns the p-value so far.

    None where the base was ranked whole or has failed. With a bound in the place of a score every difference is the
    least that it can be, and the p-value of the paired randomisation test the largest: higher differences never leave
    more sign patterns at least as far from zero.
    """
    while not (base.complete or base.failed):
        if _surely_separable(winner, base, 1):
            return paired_p_value(winner.values().minus(base.values()).flat)
        base.extend()
    return None


def ruled(rule: Rule, best: C, contenders: Iterable[C]) -> C:
    """Returns the choice of a rule, once `race` has answered its question.

    ``one-se``: the earliest candidate whose paired difference to the best is at most its standard error.
    """
    if rule == "max":
        return best
    close = [
        c
        for c in contenders
        if c.complete and c.eligible and not c.failed and c.order < best.order and _within_one_se(best, c)
    ]
    return min([*close, best], key=lambda c: c.order)


def _within_one_se(best: Contender, contender: Contender) -> bool:
    difference = best.values().minus(contender.values())
    return difference.mean <= max(difference.standard_error, TOLERANCE)


def tied_with(best: Contender, contenders: Sequence[Contender]) -> dict[int, float]:
    """Returns, by order, the p-values of the candidates that cannot be told apart from the best.

    Paired randomisation tests, adjusted for their number by Holm; of candidates left unfinished, the bound is tested.
    """
    others = [c for c in contenders if c is not best and not c.failed and c.eligible]
    adjusted = holm([paired_p_value(best.values().minus(c.values()).flat) for c in others])
    return {c.order: p for c, p in zip(others, adjusted, strict=True) if c.complete and p >= 1 - LEVEL}


def objective_values(objective: Objective, results: Mapping[str, Result]) -> Values:
    """Returns what each query contributes to the objective; ``results`` by golden set name."""
    parts: dict[str, NDArray[np.float64]] = {}
    most: dict[str, float] = {}
    for name, metric, weight in objective.terms:
        values = weight * results[name].per_query[str(metric)]
        parts[name] = parts[name] + values if name in parts else values
        most[name] = most.get(name, 0.0) + weight
    return Values(tuple(parts.values()), tuple(most.values()))
