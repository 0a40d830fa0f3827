"""One run of training as fullrank sees it: scores each moment, notes it, keeps the best weights.

Promise: a line of the journal, a score and stored weights belong to the same moment; all processes of a distributed run
go through the same moments and hold the same journal, and one of them writes.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import nn

from fullrank._errors import DataError, NonFiniteError
from fullrank.checkpoints import NOT_ELIGIBLE, best_of, since_best
from fullrank.data import GoldenSet
from fullrank.encode import Adapter, Precision
from fullrank.guarding import Look, Watch
from fullrank.guards import CollapseThresholds, collapse_findings, guard_key
from fullrank.journal import Journal, read_result, result_name
from fullrank.keeper import Keeper
from fullrank.metrics import Metric, TieRule
from fullrank.objective import Objective, collapse_names, full_names, log_names
from fullrank.plan import EvaluationPlan, Progress
from fullrank.pooling import Pools, draw_pools, pooled_sets, read_pools, write_pools
from fullrank.result import Finding, Result
from fullrank.scoring import Outcome, journal_names, score_all
from fullrank.store import Stored
from fullrank.unison import all_or_none, copy_from_writer, of_the_writer
from fullrank.weights import changeable

__all__ = ["CONFIRM_BASE_FILE", "CONFIRM_FILE", "Moment", "Session"]

logger = logging.getLogger(__name__)

CONFIRM_FILE, CONFIRM_BASE_FILE = "confirm.json", "confirm-base.json"


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
        pool: documents that evaluations rank; None for the whole corpus. ``pools``: which ones, known from step 0 on.
        full_base: of step 0 on the whole corpus, where the others are on a pool.
        bars: gives a progress callback.
        seconds: of the last evaluation that went well, without what step 0 does besides.
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
    pool: int | None = None
    pools: Pools = field(default_factory=dict)
    full_base: dict[str, Result] = field(default_factory=dict)
    bars: Callable[[], AbstractContextManager[Progress]] | None = None
    seconds: float | None = None

    @property
    def golden(self) -> dict[str, GoldenSet]:
        """The golden sets that choose, by name."""
        return {name: plan.golden for name, plan in self.plans.items()}

    @property
    def bases(self) -> dict[str, Result]:
        """Results of step 0 on the whole corpus, by golden set."""
        return self.full_base if self.pooled else self.base_results

    @property
    def encoder(self) -> Adapter:
        """What encodes for the golden sets."""
        return next(iter(self.plans.values())).encoder

    @property
    def pooled(self) -> frozenset[str]:
        """The golden sets of which evaluations rank a pool only."""
        return pooled_sets(self.golden, self.pool)

    @property
    def folder(self) -> Path:
        """Where the run keeps its journal."""
        return self.journal.folder

    @property
    def rules(self) -> dict[str, Any]:
        """By what the run chooses."""
        return {"select": self.objective.rule(), "ties": self.ties, "precision": self.precision}

    def begin(self) -> None:
        """Notes by what a new run chooses."""
        all_or_none(lambda: self.journal.begin(self.rules))

    def resume(self, step: int) -> None:
        """Goes on where the journal ends, cut back to ``step``.

        Raises:
            DataError: a resumed run has other golden sets than it began with, or chooses by something else.
        """
        all_or_none(lambda: self._read_back(step) if self.writes else None)
        (self.journal.lines, self.best, self.base_results, self.confirm_base, self.watch.bases) = of_the_writer(
            (self.journal.lines, self.keeper.store.best, self.base_results, self.confirm_base, self.watch.bases)
        )
        self.pools, self.full_base = of_the_writer((self.pools, self.full_base))

    def _read_back(self, step: int) -> None:
        self.journal.refuse_other_rules(self.rules)
        for name, plan in self.plans.items():
            for stem, bases in (("step-0", self.base_results), ("full-step-0", self.full_base)):
                base = read_result(self.folder / result_name(stem, name if len(self.plans) > 1 else None))
                if base is not None:
                    self._refuse_other_data(name, plan, base)
                    bases[name] = base
        self.pools = read_pools(self.folder, self.golden, self.pool)
        if self.confirm is not None:
            self.confirm_base = read_result(self.folder / CONFIRM_BASE_FILE)
            if self.confirm_base is not None:
                self._refuse_other_data(self.confirm.golden.name, self.confirm, self.confirm_base)
        self.watch.read_back()
        stored = [entry.step for entry in self.keeper.store.stored]
        self.journal.resume(step, stored)
        if self.pools:  # a run that was complete has put full scores there
            scored = [(line.step, line.score) for line in self.journal.lines if line.score is not None]
            self.keeper.store.rescore({at: max(s for a, s in scored if a == at) for at, _ in scored})
        if not any(line.step == 0 for line in self.journal.lines):
            logger.warning(
                "no evaluation of the base model is on record in %s: whether a step improves on it will not be known",
                self.folder,
            )
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

    def evaluate(self, step: int, epoch: float) -> Moment:
        """Scores the model as it stands, notes it, and keeps its weights if they are among the best.

        Raises:
            Exception: at step 0, whatever the evaluation or the storing raised, but for non-finite embeddings: nothing
                has been spent yet, and it would fail at every step.
        """
        self.step = step
        outcome = self._scored(step)
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
        self.seconds = outcome.seconds + perf_counter() - start
        outcome = replace(outcome, seconds=self.seconds)
        findings = (*self._collapse(step, outcome), *look.findings)
        self._note(outcome, step, epoch, findings, look)
        return Moment(outcome, look.eligible and self._keep(step, outcome), findings, look)

    def _scored(self, step: int) -> Outcome:
        """Scores the golden sets; of the base model also the whole corpus, whose lists then are part of the pool."""
        if not self.pooled:
            return self.score(self.plans, self.objective)
        if step == 0:
            full = self.score(self.plans, self.objective)
            self._draw_pools(full.results)
            if full.error is not None:
                return full
            self.full_base = full.results
            self.store_full(0, full.results)
        return self.score(self.plans, self.objective, pools=self.pools)

    def score(
        self, plans: Mapping[str, EvaluationPlan], objective: Objective | None, *, pools: Pools | None = None
    ) -> Outcome:
        """Returns the outcome of scoring the model as it stands; every process calls it."""
        return score_all(
            self.model,
            plans,
            objective,
            pools=pools,
            bars=self.bars,
            metrics=self.metrics,
            ties=self.ties,
            precision=self.precision,
        )

    def _draw_pools(self, base: Mapping[str, Result]) -> None:
        self.pools = of_the_writer(draw_pools(self.golden, self.pool or 0, base))
        all_or_none(lambda: write_pools(self.folder, self.golden, self.pool or 0, self.pools) if self.writes else None)

    def store_full(self, step: int, results: Mapping[str, Result]) -> None:
        """Stores results on the whole corpus beside those on the pool."""
        for name, result in results.items():
            self._save(result, result_name(f"full-step-{step}", name if len(self.plans) > 1 else None))

    def restore(self, best: Stored) -> None:
        """Puts stored weights into the model, on every process.

        Raises:
            EvaluationError: they are not those that were scored.
        """
        all_or_none(lambda: self.keeper.restore(best) if self.writes else None)
        copy_from_writer(changeable(self.model, loss=self.keeper.link.loss))

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
        if step == 0:
            line = replace(line, metrics=line.metrics | journal_names(self.full_base))
        guarded = {
            guard_key(guard): look.results[guard.golden.name][guard.metric]
            for guard in self.watch.guards
            if look is not None and guard.golden.name in look.results
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
        self.confirm_base = self.score_confirm(CONFIRM_BASE_FILE, first=True)

    def score_confirm(self, file: str, *, first: bool = False) -> Result | None:
        """Returns the result on the second golden set, and stores it in ``file``; None where it failed.

        Raises:
            Exception: at the ``first`` time, as `evaluate` at step 0.
        """
        if self.confirm is None:
            return None
        name = self.confirm.golden.name
        outcome = self.score({name: self.confirm}, None)
        if first and outcome.error is not None and not isinstance(outcome.error, NonFiniteError):
            raise outcome.error
        if outcome.error is not None:
            logger.error("the golden set %r could not be scored to confirm the choice: %s", name, outcome.error)
            return None
        self._save(outcome.results[name], file)
        return outcome.results[name]

    def _save(self, result: Result, file: str) -> None:
        if self.writes:
            try:
                result.save(self.folder / file)
            except OSError as error:
                logger.error("%s could not be written to %s: %s", file, self.folder, error)

    def logs(self, moment: Moment) -> dict[str, float]:
        """Returns what goes to the trackers; of the base model also its scores on the whole corpus, ``eval_full_...``.

        Nothing where the evaluation failed.
        """
        results, score = moment.outcome.results, moment.outcome.score
        if score is None:
            return {}
        values = {name: result.metrics for name, result in results.items()}
        logs = log_names(values, self.objective, score, pooled=self.pooled) | collapse_names(results)
        if self.step == 0 and self.full_base:
            whole = {name: result.metrics for name, result in self.full_base.items()}
            logs |= full_names(log_names(whole, self.objective, self.objective.value(self.full_base)))
        return logs | moment.look.logs

    def waited(self, *, min_delta: float) -> int:
        """Returns how many finished evaluations came since the last improvement."""
        return since_best(self.journal.current, min_delta=min_delta)
