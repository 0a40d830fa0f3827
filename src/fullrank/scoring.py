"""One moment of a run, scored on every golden set: a value that chooses, or the reason why there is none.

Promise: an exception is an outcome, not a score; in a distributed run all processes hold the same outcome.
"""

import math
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fullrank._errors import NonFiniteError
from fullrank.checkpoints import Evaluation
from fullrank.isolate import undisturbed
from fullrank.objective import Objective, pool_name
from fullrank.plan import EvaluationPlan, Progress
from fullrank.result import Result
from fullrank.unison import all_or_none, of_the_writer

__all__ = ["Outcome", "journal_names", "score_all"]


@dataclass(frozen=True)
class Outcome:
    """What an evaluation came to.

    Attributes:
        seconds: how long it took.
        results: by golden set; empty where it failed.
        score: the value that chooses; None where it failed.
        pooled: the golden sets of which a pool was ranked.
        error, trace: why it failed, and the traceback.
    """

    seconds: float
    results: dict[str, Result] = field(default_factory=dict)
    score: float | None = None
    pooled: frozenset[str] = frozenset()
    error: Exception | None = None
    trace: str | None = None

    def line(self, step: int, epoch: float) -> Evaluation:
        """Returns the line of the journal."""
        if self.error is not None:
            return Evaluation(step, epoch, "failed", seconds=self.seconds, error=self.trace)
        return Evaluation(step, epoch, "ok", self.score, journal_names(self.results, self.pooled), self.seconds)


def score_all(
    model: nn.Module,
    plans: Mapping[str, EvaluationPlan],
    objective: Objective | None,
    *,
    pools: Mapping[str, NDArray[np.int64]] | None = None,
    bars: Callable[[], AbstractContextManager[Progress]] | None = None,
    **options: Any,
) -> Outcome:
    """Returns the outcome of evaluating the model as it stands; every process of the run calls it.

    Args:
        model: in training; its modes and the random states are left as they were.
        plans: by golden set.
        objective: what chooses; None where nothing is chosen.
        pools: by golden set, the positions to stay within; the whole corpus of the others.
        bars: gives a progress callback for each set.
        options: of `EvaluationPlan.run`.
    """
    start = time.perf_counter()

    def scored(name: str, plan: EvaluationPlan) -> Result:
        part = options | ({"within": pools[name]} if pools and name in pools else {})
        # An encoder of the user's own may not know that it runs in training.
        with undisturbed(model), nullcontext() if bars is None else bars() as progress:
            return plan.run(progress=progress, **part)

    def value(results: Mapping[str, Result]) -> float | None:
        score = None if objective is None else objective.value(results)
        if objective is not None and score is not None and not math.isfinite(score):
            raise NonFiniteError(f"{objective.label} is {score}")
        return score

    try:
        # One set after another: the processes share each evaluation, so none may go on to the next alone.
        results = {name: all_or_none(partial(scored, name, plan)) for name, plan in plans.items()}
        score = all_or_none(partial(value, results))
    except Exception as error:
        return Outcome(time.perf_counter() - start, error=error, trace=traceback.format_exc())
    metrics, score, seconds = of_the_writer(
        ({name: result.metrics for name, result in results.items()}, score, time.perf_counter() - start)
    )
    results = {name: replace(result, metrics=metrics[name]) for name, result in results.items()}
    return Outcome(seconds, results, score, frozenset(pools or ()) & set(plans))


def journal_names(results: Mapping[str, Result], pooled: Collection[str] = ()) -> dict[str, float]:
    """Returns the metrics as the journal names them, those of the sets ``pooled`` marked."""
    several = len(results) > 1
    return {
        (f"{set_name}/" if several else "") + pool_name(name, set_name in pooled): value
        for set_name, result in results.items()
        for name, value in result.metrics.items()
    }
