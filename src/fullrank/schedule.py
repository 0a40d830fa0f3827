"""When a run evaluates, and what that costs: pure functions of counts and seconds.

Promise: a step is due by the same rule whoever asks, and a cost that is printed says what it was estimated from.
"""

import math
import statistics
import time
from dataclasses import dataclass
from typing import Literal

__all__ = ["Cost", "Schedule", "StepClock", "cost_line", "cost_remedy", "span"]

EVALUATIONS_A_RUN = 10
DEAR_SHARE = 0.2
"""Evaluations that take more of a run than this are worth a word."""
WORTH_SAYING_SECONDS = 10.0
"""A run that spends less on evaluations in all need not hear of it."""


@dataclass(frozen=True)
class Schedule:
    """When a run evaluates: step 0, every N optimizer steps or every epoch, and the end.

    Attributes:
        every: optimizer steps, or ``"epoch"``.
        max_steps: optimizer steps of the run.
        epochs: epochs of the run, rounded up.
    """

    every: int | Literal["epoch"]
    max_steps: int
    epochs: int = 1

    @classmethod
    def of(
        cls, every: int | Literal["epoch"] | None, *, eval_steps: int | None, max_steps: int, epochs: int = 1
    ) -> "Schedule":
        """Returns the schedule: ``every`` where given, else the trainer's ``eval_steps``, else ten a run."""
        return cls(every or eval_steps or max(1, max_steps // EVALUATIONS_A_RUN), max_steps, epochs)

    def due_after_step(self, step: int) -> bool:
        """Returns whether to evaluate when an optimizer step is done."""
        return self.every != "epoch" and (step % self.every == 0 or step >= self.max_steps)

    def due_after_epoch(self, step: int, *, stopping: bool) -> bool:
        """Returns whether to evaluate when an epoch is done, or was broken off by early stopping."""
        return stopping or self.every == "epoch" or step >= self.max_steps

    @property
    def evaluations(self) -> int:
        """How many a whole run makes."""
        later = self.epochs if self.every == "epoch" else math.ceil(self.max_steps / self.every)
        return 1 + later


@dataclass(frozen=True)
class Cost:
    """What the evaluations of a run cost.

    Attributes:
        documents, distinct, queries: of all golden sets and guards together; equal documents are encoded once.
        tokens: of the distinct documents and queries (characters where the model tokenises itself).
        seconds: of one evaluation.
        evaluations: in the whole run.
        unit: what ``tokens`` counts.
        whole_corpora: documents of each golden set.
        smallest_pool: how many of one of them are judged.
        pooled: whether the numbers above are of a pool; then ``n_whole`` evaluations on the whole corpus come on top,
            of ``whole_seconds`` each.
    """

    documents: int
    distinct: int
    queries: int
    tokens: int
    seconds: float
    evaluations: int
    unit: str = "tokens"
    whole_corpora: tuple[int, ...] = ()
    smallest_pool: int = 1
    pooled: bool = False
    n_whole: int = 2
    whole_seconds: float = 0.0

    def share(self, step_seconds: float, max_steps: int) -> float:
        """Returns the share of the run that goes into evaluations, given the seconds of one optimizer step."""
        whole = self.spent + step_seconds * max_steps
        return self.spent / whole if whole > 0 else 0.0

    @property
    def spent(self) -> float:
        """Seconds of all evaluations together."""
        return self.seconds * self.evaluations + (self.n_whole * self.whole_seconds if self.pooled else 0.0)

    def affordable_every(self, step_seconds: float, max_steps: int, *, share: float) -> int | None:
        """Returns the smallest interval, in steps, at which evaluations take at most ``share`` of the time.

        An interval of N steps costs N * step_seconds + seconds, so N >= seconds * (1 / share - 1) / step_seconds. What
        evaluations on the whole corpus take is shared by all steps. None where it is too much by itself.
        """
        left = step_seconds / (1 / share - 1) - (self.n_whole * self.whole_seconds / max_steps if self.pooled else 0.0)
        return max(1, math.ceil(self.seconds / left - 1e-9)) if left > 0 else None

    def affordable_pool(self, step_seconds: float, max_steps: int, *, share: float) -> int | None:
        """Returns the largest pool, to two digits, with which evaluations take at most ``share`` of the time.

        None where there is none that holds all judged documents, or where a pool is on already. The time of guards
        stays, and the base model and what is kept are evaluated on the whole corpus once.
        """
        if self.pooled or not self.whole_corpora:
            return None
        budget = step_seconds * max_steps / (1 / share - 1) - self.n_whole * self.seconds
        poolable = sum(self.whole_corpora)
        fixed = self.seconds * (1 - poolable / self.documents)
        documents = (budget / self.evaluations - fixed) * self.documents / self.seconds / len(self.whole_corpora)
        if not self.smallest_pool <= documents < max(self.whole_corpora):
            return None
        digits: int = 10 ** max(0, math.floor(math.log10(documents)) - 1)
        return max(self.smallest_pool, int(documents // digits) * digits)


def cost_line(cost: Cost) -> str:
    """Returns the line before step 0.

    >>> cost_line(Cost(5183, 5180, 300, 1_204_512, 41.0, 11))
    'Evaluations: 5,183 documents (5,180 distinct), 300 queries, 1,204,512 tokens: about 41 s each, 7 min 31 s for 11'
    """
    text = (
        f"Evaluations: {cost.documents:,} documents ({cost.distinct:,} distinct), {cost.queries:,} queries, "
        f"{cost.tokens:,} {cost.unit}: about {span(cost.seconds)} each, {span(cost.seconds * cost.evaluations)} for "
        f"{cost.evaluations}"
    )
    if not cost.pooled:
        return text
    return f"{text}; besides {cost.n_whole} on all {sum(cost.whole_corpora):,}, about {span(cost.whole_seconds)} each"


def cost_remedy(cost: Cost, schedule: Schedule, step_seconds: float) -> str | None:
    """Returns what to say once the time of a step is known: None where the evaluations are affordable.

    >>> cost_remedy(Cost(5183, 5180, 300, 1_204_512, 41.0, 11), Schedule(100, 1000), 0.5)
    'Evaluations take about 47 % of this run (41 s each, a step 0.50 s); every=328 would take 20 %'
    >>> cost_remedy(Cost(5183, 5180, 300, 1_204_512, 41.0, 51, whole_corpora=(5183,)), Schedule(100, 5000), 0.5)
    'Evaluations take about 46 % of this run (41 s each, a step 0.50 s); every=328 or pool=1300 would take 20 %'
    """
    share = cost.share(step_seconds, schedule.max_steps)
    if step_seconds <= 0 or share <= DEAR_SHARE or cost.spent < WORTH_SAYING_SECONDS:
        return None
    every = cost.affordable_every(step_seconds, schedule.max_steps, share=DEAR_SHARE)
    pool = cost.affordable_pool(step_seconds, schedule.max_steps, share=DEAR_SHARE)
    limit = f"{100 * DEAR_SHARE:.0f} %"
    ways = [f"every={every}"] if every is not None and every < schedule.max_steps else []
    ways += [] if pool is None else [f"pool={pool}"]
    remedy = (
        f"{' or '.join(ways)} would take {limit}"
        if ways
        else f"this run is too short for less than {limit}: every={schedule.max_steps} evaluates at step 0 and at the "
        "end only"
    )
    return (
        f"Evaluations take about {100 * share:.0f} % of this run ({span(cost.seconds)} each, a step "
        f"{span(step_seconds)}); {remedy}"
    )


def span(seconds: float) -> str:
    """Returns a time as people write it.

    >>> span(0.004), span(0.5), span(41.2), span(451), span(7260)
    ('4 ms', '0.50 s', '41 s', '7 min 31 s', '2 h 1 min')
    """
    if seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


class StepClock:
    """Times the first optimizer steps of a run, once."""

    WARM_UP, STEPS = 1, 5

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._started: float | None = None

    def start(self) -> None:
        """A step begins."""
        self._started = time.perf_counter()

    def stop(self) -> float | None:
        """A step has ended; returns the median seconds of a step, once, when enough have been seen."""
        if self._started is None or len(self._seconds) >= self.WARM_UP + self.STEPS:
            return None
        self._seconds.append(time.perf_counter() - self._started)
        self._started = None
        if len(self._seconds) < self.WARM_UP + self.STEPS:
            return None
        return statistics.median(self._seconds[self.WARM_UP :])
