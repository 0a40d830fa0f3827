"""What the evaluations of a run cost, measured: on a sample before step 0, on the last evaluation after it.

Promise: measuring changes nothing in the run.
"""

from time import perf_counter

from fullrank.isolate import undisturbed
from fullrank.pooling import Pools, draw_pools, n_judged
from fullrank.ranks import current_ranks
from fullrank.schedule import Cost, Schedule, cost_line, cost_remedy
from fullrank.session import Session

__all__ = ["cost", "cost_before", "estimate", "remedy_if_dear"]

SAMPLE_SIZES = (8, 32, 128, 512)
SAMPLE_SECONDS = 0.3
"""A sample that took so long tells the speed; the first, smallest one only warms up."""


def cost_before(session: Session, schedule: Schedule) -> str | None:
    """Returns the line on what the evaluations will cost, or None where a sample cannot be encoded."""
    try:
        return cost_line(estimate(session, schedule.evaluations))
    except Exception:  # the evaluation that follows raises it on every rank alike
        return None


def remedy_if_dear(session: Session, schedule: Schedule, step_seconds: float) -> str | None:
    """Returns what would make the evaluations affordable, where they are not; ``step_seconds`` of training."""
    measured = cost(session, schedule.evaluations)
    return None if measured is None else cost_remedy(measured, schedule, step_seconds)


def estimate(session: Session, evaluations: int) -> Cost:
    """Returns what the evaluations will cost, from the time of a sample of the documents."""
    plan = next(iter(session.plans.values()))
    with undisturbed(session.model):
        for n in SAMPLE_SIZES:
            start = perf_counter()
            tokens = plan.sample(n, precision=session.precision)
            seconds = perf_counter() - start
            if n > SAMPLE_SIZES[0] and seconds >= SAMPLE_SECONDS:
                break
    return _cost(session, evaluations, seconds / max(1, tokens) / current_ranks().size)  # they share an evaluation


def cost(session: Session, evaluations: int) -> Cost | None:
    """Returns what the evaluations cost, from the time of the last that went well."""
    last = next((line.seconds for line in reversed(session.journal.lines) if line.status == "ok"), None)
    seconds = last if session.seconds is None else session.seconds
    return (
        None if seconds is None else _cost(session, evaluations, seconds / max(1, _sizes(session, _pools(session))[3]))
    )


def _pools(session: Session) -> Pools:
    """Returns the pools, before step 0 those of the same size without competitors."""
    return session.pools or (draw_pools(session.golden, session.pool or 0, {}) if session.pooled else {})


def _cost(session: Session, evaluations: int, seconds_per_token: float) -> Cost:
    documents, distinct, queries, tokens = _sizes(session, _pools(session))
    return Cost(
        documents,
        distinct,
        queries,
        tokens,
        tokens * seconds_per_token,
        evaluations,
        whole_corpora=tuple(len(golden.corpus) for golden in session.golden.values()),
        smallest_pool=max(map(n_judged, session.golden.values())),
        pooled=bool(session.pooled),
        # The base model, and what is kept at the end.
        n_whole=1 + session.keeper.store.keep_best,
        whole_seconds=_sizes(session, {})[3] * seconds_per_token,
    )


def _sizes(session: Session, pools: Pools) -> tuple[int, int, int, int]:
    """Returns documents, distinct texts, queries and tokens of all golden sets and guards together."""
    sizes = [plan.size(pools.get(name)) for name, plan in session.plans.items()]
    sizes += [plan.size() for plan in session.watch.plans.values()]
    queries = sum(len(plan.golden.queries) for plan in (*session.plans.values(), *session.watch.plans.values()))
    documents, distinct, tokens = (sum(column) for column in zip(*sizes, strict=True))
    return documents, distinct, queries, tokens
