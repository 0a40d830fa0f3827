"""What the candidates of a selection share: data, settings, plans, the order of documents, the journal.

Promise: a plan is made once for each model in memory and golden set; what finished candidates ranked high comes first
for the others.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fullrank.anytime import Anytime, next_harmful
from fullrank.candidates import Loader
from fullrank.competitors import Rivals
from fullrank.data import GoldenSet
from fullrank.encode import Adapter, Precision
from fullrank.guards import Guard
from fullrank.metrics import Metric, TieRule
from fullrank.objective import Objective
from fullrank.plan import EvaluationPlan
from fullrank.result import Result
from fullrank.selection import SelectionJournal

__all__ = ["Ring", "guard_name"]

LIST_LENGTH = 100
"""Documents that rankings of finished candidates list for each query: what is ranked first for the others."""
FLUSH_SECONDS = 5.0


@dataclass
class Ring:
    """What the candidates of a selection share.

    Attributes:
        loader: puts weights into memory.
        golden: golden sets by name.
        objective: what chooses.
        metrics: to compute.
        ties, precision, batch_tokens: see `fullrank.evaluate`.
        guards: what candidates must not lose.
        journal: of the selection.
        remember_bounds: whether a bound in the journal is enough to leave a candidate alone; not for rules that look at
            single queries.
        progress: called with the documents encoded so far.
        guarded: the base's result on each guard, once it is known.
    """

    loader: Loader
    golden: dict[str, GoldenSet]
    objective: Objective
    metrics: Sequence[Metric]
    ties: TieRule
    precision: Precision | None
    batch_tokens: int | None
    guards: Sequence[Guard]
    journal: SelectionJournal
    remember_bounds: bool
    progress: Callable[[], None]
    guarded: list[Result] = field(default_factory=list)
    _plans: dict[tuple[str, str], EvaluationPlan] = field(default_factory=dict)
    _finished: dict[str, list[Result]] = field(default_factory=dict)
    _rivals: dict[str, Rivals] = field(default_factory=dict)
    _flushed: float = 0.0

    def session(self, key: str, encoder: Adapter, name: str, golden: GoldenSet) -> Anytime:
        """Returns a new bounded evaluation of the weights that are in memory now."""
        plan = self._plans.setdefault((key, name), EvaluationPlan(encoder, golden, self.batch_tokens))
        guards = [Metric.parse(g.metric) for i, g in enumerate(self.guards) if guard_name(i) == name]
        return plan.anytime(
            metrics=guards or self.metrics, ties=self.ties, precision=self.precision, list_length=LIST_LENGTH
        )

    def learn(self, name: str, result: Result) -> None:
        """Takes the ranking of a finished candidate into what the others are ranked by first."""
        self._finished.setdefault(name, []).append(result)
        self._rivals.pop(name, None)

    def next_block(self, name: str, session: Anytime, n: int) -> NDArray[np.int64]:
        """Returns the positions of the ``n`` documents that a candidate is extended by, going by the finished ones."""
        if name not in self._finished:
            return session.remaining[:n]
        if name not in self._rivals:
            self._rivals[name] = Rivals(self._finished[name], self.golden[name])
        weights = {str(metric): weight for set_name, metric, weight in self.objective.terms if set_name == name}
        harmful = next_harmful(session, self._rivals[name], weights, n, session.remaining)
        return harmful if len(harmful) else session.remaining[:n]

    def flush(self, *, now: bool = False) -> None:
        """Writes the journal, not more often than every few seconds unless ``now``."""
        if now or time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.journal.write()
            self._flushed = time.monotonic()


def guard_name(i: int) -> str:
    """Returns the name under which the results of a guard are kept."""
    return f"guard {i + 1}"
