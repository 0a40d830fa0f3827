"""From the race to what is said of it: the rows of the leaderboard, the choice, its comparison with the base.

Promise: a number that is a bound is marked as one; what failed has no number.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from fullrank.comparison import Comparison, compare
from fullrank.contest import Contestant
from fullrank.data import GoldenSet
from fullrank.evaluate import evaluate
from fullrank.guards import breach_of, passed_over
from fullrank.metrics import Metric
from fullrank.result import Result
from fullrank.ring import Ring, guard_name
from fullrank.selecting import TOLERANCE, Rule, objective_values, ruled, tied_with
from fullrank.selection import Row, Selection
from fullrank.stats import Interval, mean_interval

__all__ = ["standings", "tied_group"]

logger = logging.getLogger(__name__)

NOT_JUDGED = "not judged by the guards: it could not be chosen anyway"


def tied_group(best: Contestant, contestants: Sequence[Contestant]) -> list[Contestant]:
    """Returns the best and what cannot be told apart from it."""
    group = tied_with(best, contestants)
    return [best, *(c for c in contestants if c.order in group)]


def standings(
    ring: Ring,
    contestants: Sequence[Contestant],
    best: Contestant | None,
    rule: Rule,
    *,
    confirm: GoldenSet | None,
    tied: bool,
    base: Contestant | None,
    p_at_most: float | None = None,
) -> Selection:
    """Returns the selection once the race is over, and writes it to the journal.

    Args:
        ring: what the candidates share.
        contestants: all of them.
        best: what the race returned.
        rule: of the choice.
        confirm: the set on which the choice is scored again.
        tied: whether to name what cannot be told apart from the best.
        base: the base model, or None.
        p_at_most: of the choice against a base that was left at its bound.
    """
    winner = None if best is None else ruled(rule, best, contestants)
    group = tied_group(best, contestants) if best is not None and tied else []
    rows = {c.order: _row(c, ring, base, best, is_tied=c in group) for c in contestants}
    set_name, leading = ring.objective.leading
    result = _full(winner, set_name)
    base_result = _full(base, set_name)
    confirmed = base_confirmed = None
    if confirm is not None and winner is not None:
        confirmed = _confirmed(winner, confirm, ring)
        base_confirmed = confirmed if base is winner else _confirmed(base, confirm, ring) if base else None
    pair = (base_confirmed, confirmed) if confirmed is not None else (base_result, result)
    known = base is not None and not base.failed
    higher = winner is not None and (base is None or not known or winner.bound > base.bound + TOLERANCE)
    improved = winner is not base and higher
    row = None if winner is None else rows[winner.order]
    headline, interval = (None, None) if row is None else (row.score, row.interval)
    if confirmed is not None:
        headline, interval = confirmed[leading], confirmed.ci(leading)
    usable = [c for c in contestants if not c.failed]
    encoded = sum(sum(c.entry.seen.values()) for c in usable)
    corpora = [*ring.golden.values(), *(guard.golden for guard in ring.guards)]
    full = len(usable) * sum(len(g.corpus) for g in corpora)
    sizes = (f"{n}: {g.n_answerable:,} queries, {len(g.corpus):,} documents" for n, g in ring.golden.items())
    selection = Selection(
        winner=row,
        rows=tuple(sorted(rows.values(), key=_standing)),
        tied=tuple(c.candidate.name for c in group if c is not winner) if tied else None,
        base=None if base is None else rows[base.order],
        improved=improved,
        objective=ring.objective.label,
        rule=rule,
        headline=headline,
        headline_interval=interval,
        result=result,
        base_result=base_result,
        confirmed=confirmed,
        base_confirmed=base_confirmed,
        leading=str(leading),
        comparison=_comparison(*pair, leading),
        p_at_most=p_at_most,
        documents_encoded=encoded,
        documents_spent=sum(c.entry.n_encoded for c in contestants),
        share=encoded / full if full else 0.0,
        data="; ".join(sizes),
        journal=ring.journal.path,
        base_shape=str(base.shape.path) if base is not None and base.shape is not None else None,
        passed_over=_passed_over(contestants, winner, ring),
    )
    written = ring.journal.write({"selection": selection.as_dict()})
    return selection if written else replace(selection, journal=None)


def _row(contestant: Contestant, ring: Ring, base: Contestant | None, best: Contestant | None, *, is_tied: bool) -> Row:
    candidate = contestant.candidate
    path = contestant.source or str(candidate.path)
    row = Row(
        candidate.name, path, candidate.step, "failed", eligible=False, why=contestant.error, origin=candidate.origin
    )
    if contestant.failed:
        return row
    bound = contestant.bound
    row = replace(
        row,
        fingerprint=contestant.entry.fingerprint,
        bound=bound if math.isfinite(bound) else None,
        coverage=contestant.coverage,
        documents_per_second=contestant.documents_per_second,
        eligible=contestant.eligible if contestant.judged else None,
        why=contestant.entry.refused,
        tied=is_tied,
    )
    if not contestant.scored:
        return replace(row, status="pruned", why=row.why or _pruned(bound, best))
    delta = None if base is None or base is contestant or base.failed else bound - base.bound
    several = len(ring.golden) > 1
    metrics = {
        f"{name}/{m}" if several else m: value
        for name in ring.golden
        for m, value in contestant.results[name].metrics.items()
    }
    interval = _interval(contestant, ring)
    why = row.why if contestant.judged else NOT_JUDGED
    return replace(row, status="complete", score=bound, interval=interval, delta=delta, metrics=metrics, why=why)


def _pruned(bound: float, best: Contestant | None) -> str:
    if best is None:
        return "not finished"
    lower = bound < best.bound - TOLERANCE
    return "proved lower on these queries" if lower else "proved no higher on these queries, and later"


def _interval(contestant: Contestant, ring: Ring) -> Interval | None:
    """Returns the interval of the score; None for an objective over several sets, whose queries are not one sample."""
    if len(ring.objective.terms) == 1:
        name, metric, _ = ring.objective.terms[0]
        return contestant.results[name].ci(metric)
    values = objective_values(ring.objective, contestant.results)
    return mean_interval(values.flat, bounds=(0.0, values.most[0])) if len(values.parts) == 1 else None


def _standing(row: Row) -> tuple[int, float, float]:
    rank = ("complete", "pruned", "failed").index(row.status)
    return rank, -(row.bound if row.bound is not None else -math.inf), math.inf if row.step is None else row.step


def _full(contestant: Contestant | None, set_name: str) -> Result | None:
    if contestant is None or contestant.failed or not contestant.scored:
        return None
    return contestant.results[set_name]


def _confirmed(contestant: Contestant, confirm: GoldenSet, ring: Ring) -> Result | None:
    try:
        return evaluate(
            contestant.encoder(),
            confirm,
            metrics=ring.metrics,
            ties=ring.ties,
            precision=ring.precision,
            batch_tokens=ring.batch_tokens,
        )
    except Exception as error:
        logger.error("%s cannot be scored on the confirming queries: %s", contestant.candidate.name, error)
        return None


def _comparison(before: Result | None, after: Result | None, metric: Metric) -> Comparison | None:
    if before is None or after is None or before is after:
        return None
    return compare(before, after, metric)


def _passed_over(contestants: Sequence[Contestant], winner: Contestant | None, ring: Ring) -> str:
    """Returns the sentence on the best of those that scored higher than the choice and that a guard refused, or ""."""
    floor = -math.inf if winner is None else winner.bound
    refused = [c for c in contestants if c.scored and not c.failed and not c.eligible and c.bound > floor + TOLERANCE]
    if not refused:
        return ""
    highest = max(refused, key=lambda c: (c.bound, -c.order))
    name, step, best = highest.candidate.name, highest.candidate.step, None if winner is None else winner.candidate.step
    for i, guard in enumerate(ring.guards):
        now = highest.results.get(guard_name(i))
        breach = None if now is None else breach_of(guard, ring.guarded[i], now, step=step or 0)
        if breach is not None:
            text = passed_over(breach, score=highest.bound, metric=ring.objective.label, best=best)
            return text if step is not None else text.replace(f"Step {breach.step}", name, 1)
    return f"{name} scored higher, {ring.objective.label} {highest.bound:.4f}, but: {highest.entry.refused}."
