"""One run of training as fullrank sees it: scores each moment, notes it, keeps the best weights.

Promise: a line of the journal, a score and stored weights belong to the same moment; all processes of a distributed run
go through the same moments and hold the same journal, and one of them writes.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

from torch import nn

from fullrank._errors import DataError, NonFiniteError
from fullrank.checkpoints import NOT_ELIGIBLE, best_of, since_best
from fullrank.encode import Precision
from fullrank.guarding import Look, Watch
from fullrank.guards import CollapseThresholds, collapse_findings
from fullrank.isolate import undisturbed
from fullrank.journal import Journal, read_result, result_name
from fullrank.keeper import Keeper
from fullrank.metrics import Metric, TieRule
from fullrank.objective import Objective
from fullrank.plan import EvaluationPlan
from fullrank.ranks import current_ranks
from fullrank.result import Finding, Result
from fullrank.schedule import Cost
from fullrank.scoring import Outcome, score_all
from fullrank.store import Stored
from fullrank.unison import all_or_none, of_the_writer

__all__ = ["CONFIRM_BASE_FILE", "CONFIRM_FILE", "Moment", "Session"]

logger = logging.getLogger(__name__)

CONFIRM_FILE, CONFIRM_BASE_FILE = "confirm.json", "confirm-base.json"
SAMPLE_SIZES = (8, 32, 128, 512)
SAMPLE_SECONDS = 0.3
"""A sample that took so long tells the speed; the first, smallest one only warms up."""


@dataclass(frozen=True)
class Moment:
    """What came of an evaluation.

    Attributes:
        outcome: results and score, or the error.
        is_best: whether its weights are the new best.
        findings: what stood out.
        look: what the guards said.
    """

    outcome: Outcome
    is_best: bool = False
    findings: tuple[Finding, ...] = ()
    look: Look = field(default_factory=Look)


@dataclass
class Session:
    """What a run holds from its begin to its end.

    Attributes:
        model: in training.
        plans: by golden set; ``confirm``: of the second one, which is scored at step 0 and at the end.
        objective, metrics, ties, precision: of the evaluations.
        keeper: stores and restores weights.
        watch: the guards.
        journal: what happened.
        writes: False on the ranks that only take part.
        step: of the last evaluation; -1 before the first.
        best: the best stored step, the same on all ranks.
        base_results: of step 0, by golden set; ``confirm_base`` likewise.
    """

    model: nn.Module
    plans: Mapping[str, EvaluationPlan]
    confirm: EvaluationPlan | None
    objective: Objective
    metrics: Sequence[Metric]
    ties: TieRule
    precision: Precision | None
    thresholds: CollapseThresholds
    keeper: Keeper
    watch: Watch
    journal: Journal
    writes: bool
    step: int = -1
    best: Stored | None = None
    base_results: dict[str, Result] = field(default_factory=dict)
    confirm_base: Result | None = None

    @property
    def folder(self) -> Path:
        """Where the run keeps its journal."""
        return self.journal.folder

    def resume(self, step: int) -> None:
        """Goes on where the journal ends, cut back to ``step``.

        Raises:
            DataError: a resumed run has other golden sets than it began with.
        """
        all_or_none(lambda: self._read_back(step) if self.writes else None)
        (self.journal.lines, self.best, self.base_results, self.confirm_base, self.watch.bases) = of_the_writer(
            (self.journal.lines, self.keeper.store.best, self.base_results, self.confirm_base, self.watch.bases)
        )

    def _read_back(self, step: int) -> None:
        for name, plan in self.plans.items():
            base = read_result(self.folder / result_name("step-0", name if len(self.plans) > 1 else None))
            if base is not None:
                self._refuse_other_data(name, plan, base)
                self.base_results[name] = base
        if self.confirm is not None:
            self.confirm_base = read_result(self.folder / CONFIRM_BASE_FILE)
            if self.confirm_base is not None:
                self._refuse_other_data(self.confirm.golden.name, self.confirm, self.confirm_base)
        self.watch.read_back()
        stored = [entry.step for entry in self.keeper.store.stored]
        self.journal.resume(step, stored)
        best = best_of(self.journal.lines)
        if best is not None and best.step not in stored:
            logger.warning(
                "the weights of step %d, which scored best (%.4f), are not in %s any more: the best is chosen among "
                "what is left and what comes",
                best.step,
                best.score,
                self.keeper.store.folder,
            )

    def _refuse_other_data(self, name: str, plan: EvaluationPlan, base: Result) -> None:
        """Raises where the data are others: scores of two sets cannot be ranked."""
        if base.provenance.get("data") != plan.golden.fingerprint():
            raise DataError(
                f"golden set {name!r} is not the one that this run began with; resume with the same data, or start "
                f"anew in another output_dir than that of {self.folder}"
            )

    def estimate(self, evaluations: int) -> Cost:
        """Returns what the evaluations will cost, from the time of a sample of the documents."""
        plan = next(iter(self.plans.values()))
        sizes = self._sizes()
        with undisturbed(self.model):
            for n in SAMPLE_SIZES:
                start = perf_counter()
                tokens = plan.sample(n, precision=self.precision)
                seconds = perf_counter() - start
                if n > SAMPLE_SIZES[0] and seconds >= SAMPLE_SECONDS:
                    break
        seconds *= sizes[-1] / max(1, tokens) / current_ranks().size  # the processes share an evaluation
        return Cost(*sizes, seconds, evaluations)

    def cost(self, evaluations: int) -> Cost | None:
        """Returns what the evaluations cost, from the time of the last that went well."""
        seconds = next((line.seconds for line in reversed(self.journal.lines) if line.status == "ok"), None)
        return None if seconds is None else Cost(*self._sizes(), seconds, evaluations)

    def _sizes(self) -> tuple[int, int, int, int]:
        """Returns documents, distinct texts, queries and tokens of all golden sets and guards together."""
        plans = [*self.plans.values(), *self.watch.plans.values()]
        documents, distinct, tokens = (sum(column) for column in zip(*(plan.size() for plan in plans), strict=True))
        return documents, distinct, sum(len(plan.golden.queries) for plan in plans), tokens

    def evaluate(self, step: int, epoch: float) -> Moment:
        """Scores the model as it stands, notes it, and keeps its weights if they are among the best.

        Raises:
            Exception: at step 0, whatever the evaluation or the storing raised, but for non-finite embeddings: nothing
                has been spent yet, and it would fail at every step.
        """
        self.step = step
        outcome = score_all(
            self.model, self.plans, self.objective, metrics=self.metrics, ties=self.ties, precision=self.precision
        )
        if outcome.error is not None:
            if step == 0 and not isinstance(outcome.error, NonFiniteError):
                raise outcome.error
            error = outcome.error
            self._note(outcome, step, epoch)
            logger.error(
                "evaluation at step %d failed and is not a candidate: %s: %s", step, type(error).__name__, error
            )
            return Moment(outcome)
        if step == 0:
            self.base_results = outcome.results
            self._confirm_base()
        wanted = of_the_writer(self.writes and self.keeper.store.wants(step, outcome.score or 0.0))
        start = perf_counter()
        look = self.watch.look(self.model, step, wanted=wanted)
        outcome = replace(outcome, seconds=outcome.seconds + perf_counter() - start)
        findings = (*self._collapse(step, outcome), *look.findings)
        self._note(outcome, step, epoch, findings, look)
        return Moment(outcome, look.eligible and self._keep(step, outcome), findings, look)

    def _collapse(self, step: int, outcome: Outcome) -> list[Finding]:
        found: list[Finding] = []
        for name, result in outcome.results.items():
            base = self.base_results.get(name) if step else None
            found += collapse_findings(result, base=base, thresholds=self.thresholds, name=name)
        return found

    def _keep(self, step: int, outcome: Outcome) -> bool:
        base = self.base_results if step else {}
        is_best = all_or_none(
            lambda: self.writes and self.keeper.keep(step, outcome.score or 0.0, outcome.results, base=base)
        )
        is_best, self.best = of_the_writer((is_best, self.keeper.store.best if self.writes else None))
        return is_best

    def _note(
        self, outcome: Outcome, step: int, epoch: float, findings: Sequence[Finding] = (), look: Look | None = None
    ) -> None:
        line = outcome.line(step, epoch)
        guarded = {
            f"guard/{name}/{metric}": value
            for name, result in ({} if look is None else look.results).items()
            for metric, value in result.metrics.items()
        }
        line = replace(
            line,
            metrics=line.metrics | guarded,
            note=NOT_ELIGIBLE if look is not None and not look.eligible else None,
            findings=[str(finding) for finding in findings],
        )
        try:
            self.journal.add(line, outcome.results)
        except (OSError, ValueError) as error:  # a full disk, or a number that JSON cannot hold
            logger.error("the evaluation of step %d could not be written to %s: %s", step, self.folder, error)

    def _confirm_base(self) -> None:
        """Scores the base model on the second set now: at the end its weights are gone where another step won."""
        self.confirm_base = self.score_confirm(CONFIRM_BASE_FILE)

    def score_confirm(self, file: str) -> Result | None:
        """Returns the result on the second golden set, and stores it in ``file``; None where it failed."""
        if self.confirm is None:
            return None
        name = self.confirm.golden.name
        outcome = score_all(
            self.model, {name: self.confirm}, None, metrics=self.metrics, ties=self.ties, precision=self.precision
        )
        if outcome.error is not None:
            logger.error("the golden set %r could not be scored to confirm the choice: %s", name, outcome.error)
            return None
        result = outcome.results[name]
        if self.writes:
            try:
                result.save(self.folder / file)
            except OSError as error:
                logger.error("%s could not be written to %s: %s", file, self.folder, error)
        return result

    def waited(self, *, min_delta: float) -> int:
        """Returns how many finished evaluations came since the last improvement."""
        return since_best(self.journal.current, min_delta=min_delta)
