"""One moment of a run, scored on every golden set: a value that chooses, or the reason why there is none.

Promise: an exception is an outcome, not a score; in a distributed run all processes hold the same outcome.
"""

import math
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from fullrank._errors import NonFiniteError
from fullrank.checkpoints import Evaluation
from fullrank.isolate import undisturbed
from fullrank.objective import Objective
from fullrank.plan import EvaluationPlan
from fullrank.result import Result
from fullrank.unison import all_or_none, of_the_writer

__all__ = ["Outcome", "score_all"]


@dataclass(frozen=True)
class Outcome:
    """What an evaluation came to.

    Attributes:
        seconds: how long it took.
        results: by golden set; empty where it failed.
        score: the value that chooses; None where it failed.
        error, trace: why it failed, and the traceback.
    """

    seconds: float
    results: dict[str, Result] = field(default_factory=dict)
    score: float | None = None
    error: Exception | None = None
    trace: str | None = None

    def line(self, step: int, epoch: float) -> Evaluation:
        """Returns the line of the journal."""
        if self.error is not None:
            return Evaluation(step, epoch, "failed", seconds=self.seconds, error=self.trace)
        metrics = {
            name if len(self.results) == 1 else f"{set_name}/{name}": value
            for set_name, result in self.results.items()
            for name, value in result.metrics.items()
        }
        return Evaluation(step, epoch, "ok", self.score, metrics, self.seconds)


def score_all(
    model: nn.Module, plans: Mapping[str, EvaluationPlan], objective: Objective | None, **options: Any
) -> Outcome:
    """Returns the outcome of evaluating the model as it stands; every process of the run calls it.

    Args:
        model: in training; its modes and the random states are left as they were.
        plans: by golden set.
        objective: what chooses; None where nothing is chosen.
        options: of `EvaluationPlan.run`.
    """
    start = time.perf_counter()

    def scored(plan: EvaluationPlan) -> Result:
        with undisturbed(model):  # an encoder of the user's own may not know that it runs in training
            return plan.run(**options)

    def value(results: Mapping[str, Result]) -> float | None:
        score = None if objective is None else objective.value(results)
        if objective is not None and score is not None and not math.isfinite(score):
            raise NonFiniteError(f"{objective.label} is {score}")
        return score

    try:
        # One set after another: the processes share each evaluation, so none may go on to the next alone.
        results = {name: all_or_none(partial(scored, plan)) for name, plan in plans.items()}
        score = all_or_none(partial(value, results))
    except Exception as error:
        return Outcome(time.perf_counter() - start, error=error, trace=traceback.format_exc())
    metrics, score, seconds = of_the_writer(
        ({name: result.metrics for name, result in results.items()}, score, time.perf_counter() - start)
    )
    results = {name: replace(result, metrics=metrics[name]) for name, result in results.items()}
    return Outcome(seconds, results, score)
