"""The training-loop callback: evaluates on the full corpus, chooses by it, keeps the best, restores and verifies it.

Promise: the score that is reported and the weights that are kept belong together; the base model is a candidate; an
evaluation changes nothing in the run; a failed evaluation is failed, never 0 and never chosen.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import TrainerCallback

from fullrank._errors import SettingError
from fullrank.adapters import has_adapters, refuse_shadowed_adapter
from fullrank.adviser import Adviser
from fullrank.announce import Announcer
from fullrank.beginning import begin, look_before, names_to_log
from fullrank.checkpoints import Evaluation
from fullrank.comparison import Comparison
from fullrank.costing import cost_before, remedy_if_dear
from fullrank.data import GoldenSet
from fullrank.encode import Encoder, Precision
from fullrank.ending import Ending, conclude, last_logs, words, write_page
from fullrank.guards import CollapseThresholds, Guard
from fullrank.hooks import (
    TrainerLink,
    foreign_checkpoints,
    refuse_no_trainer,
    refuse_second,
    refuse_sharded,
    refuse_unfit_arguments,
    schedule_of,
    tag_of,
)
from fullrank.in_batch import InBatchMonitor
from fullrank.metrics import Metric, TieRule
from fullrank.objective import log_name, pool_name
from fullrank.options import Options
from fullrank.pooling import pooled_sets
from fullrank.prompting import prompts_text
from fullrank.ranks import current_ranks
from fullrank.result import Result
from fullrank.schedule import StepClock
from fullrank.session import Session
from fullrank.settings import DEFAULT_METRICS
from fullrank.store import Stored
from fullrank.weights import save_extra

__all__ = ["RetrievalCallback"]

logger = logging.getLogger(__name__)


class RetrievalCallback(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Ranks the full corpus every N steps and keeps the checkpoint that retrieves best.

    Use ``RetrievalCallback(golden).attach(trainer)`` after the trainer is made: the callback then stands first, reaches
    every tracker and reads the in-batch scores of the loss. Through ``callbacks=[...]`` it evaluates, chooses, keeps,
    restores, journals and writes TensorBoard events of its own.

    Args:
        golden: the held-out golden set, or several with different names.
        select: what chooses: ``"recall@1"``, ``"dev/recall@1"``, or weights ``{"dev/recall@1": 0.7, ...}``.
        every: optimizer steps between evaluations; ``"epoch"`` for each epoch; default the trainer's ``eval_steps``,
            else ten evaluations a run. Step 0 and the end are always evaluated.
        encoder: how to encode with the model in training, where it is no ``SentenceTransformer``: for example
            ``Backbone(model.backbone, tokenizer)``.
        confirm: a second golden set with other queries; the base model and the winner are scored on it once, and that
            number is the headline: the highest of several scores flatters.
        guards: general sets that must not get worse than the base model; a step below a floor is not eligible.
        metrics: what to compute and log.
        ties: see `fullrank.metrics`.
        keep_best: how many best steps stay on disk.
        patience: stop after so many finished evaluations without an improvement.
        min_delta: an improvement must be larger than this to reset ``patience``; the choice does not ask for it.
        precision: of encoding; ``"auto"`` follows the training run.
        batch_tokens: padded tokens of one batch of encoding.
        collapse: from where on embeddings count as collapsing.
        pool: documents that evaluations rank where the corpus is larger: the judged ones, hard competitors and a fixed
            sample. Values on it are upper bounds, logged as ``eval_<metric>_pool``; the base model and what is kept are
            scored on the whole corpus, and that decides at the end.
        train_texts: texts, or (query, positive) pairs, that must not hold texts of the golden sets; default: the
            trainer's dataset, where attached. ``()`` looks at nothing.
        strict: makes an error of what is found there.
        report: write ``fullrank/report.html`` at the end, or the file that is named.
        verbose: print a line for each evaluation; default: unless ``disable_tqdm`` is set.

    Attributes:
        history: the evaluations so far (`Evaluation`).
        best: the best stored step (`Stored`), or None.
        ending: what the run came to (`Ending`); its fields below are there as well.
        improved: whether a step beat the base model.
        base_result, best_result: results on the set that chooses, at step 0 and at the best step.
        comparison: paired comparison of the two, set at the end.

    Raises:
        SettingError: an option that cannot work.
        DataError: a golden set without an answerable query, or sets that do not go together.
    """

    def __init__(
        self,
        golden: GoldenSet | Sequence[GoldenSet],
        *,
        select: str | Mapping[str, float] = "recall@1",
        every: int | Literal["epoch"] | None = None,
        encoder: Encoder | None = None,
        confirm: GoldenSet | None = None,
        guards: Guard | Sequence[Guard] = (),
        metrics: Sequence[str | Metric] = DEFAULT_METRICS,
        ties: TieRule = "expected",
        keep_best: int = 1,
        patience: int | None = None,
        min_delta: float = 0.0,
        precision: Precision | Literal["auto"] | None = "auto",
        batch_tokens: int | None = None,
        collapse: CollapseThresholds | None = None,
        pool: int | None = None,
        train_texts: Iterable[Any] | None = None,
        strict: bool = False,
        report: bool | str | PathLike[str] = False,
        verbose: bool | None = None,
    ) -> None:
        self.options = Options.checked(
            golden,
            select,
            every=every,
            encoder=encoder,
            confirm=confirm,
            guards=guards,
            metrics=metrics,
            ties=ties,
            keep_best=keep_best,
            patience=patience,
            min_delta=min_delta,
            precision=precision,
            batch_tokens=batch_tokens,
            collapse=collapse,
            pool=pool,
            train_texts=train_texts,
            strict=strict,
            report=report,
            verbose=verbose,
        )
        self.monitor = InBatchMonitor()
        self.link = TrainerLink(None)
        self.ending = Ending()
        self._session: Session | None = None
        self._training = False

    def attach(self, trainer: Any) -> "RetrievalCallback":
        """Puts the callback first in ``trainer``, connects it to its trackers and its loss, and returns it."""
        refuse_no_trainer(trainer)
        refuse_shadowed_adapter(trainer.model)
        refuse_sharded(trainer.args, trainer)
        self.link.close()
        self.link = TrainerLink(trainer)
        self.link.register(self, self.monitor)
        return self

    @property
    def history(self) -> list[Evaluation]:
        """The evaluations so far."""
        return [] if self._session is None else list(self._session.journal.lines)

    @property
    def best(self) -> Stored | None:
        """The best step whose weights are stored."""
        return None if self._session is None else self._session.best

    @property
    def improved(self) -> bool:
        """Whether a step beat the base model; known at the end."""
        return self.ending.improved

    @property
    def base_result(self) -> Result | None:
        """The result of step 0 on the set that chooses."""
        return None if self._session is None else self._session.bases.get(self.options.objective.leading[0])

    @property
    def best_result(self) -> Result | None:
        """The result of the best step on the set that chooses; known at the end."""
        return self.ending.best_result

    @property
    def comparison(self) -> Comparison | None:
        """The best step against the base model, paired by query; known at the end."""
        return self.ending.comparison

    def record(self, scores: torch.Tensor, *, n_negs: int = 0, positives: torch.Tensor | None = None) -> None:
        """Adds in-batch scores from an own training step; arguments as in `in_batch_metrics`."""
        self.monitor.record(scores, n_negs=n_negs, positives=positives)

    # ------------------------------------------------------------------ events, in the order in which they come

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepares folders and encoders; trackers are not set up yet, so nothing is evaluated here."""
        model, options = kwargs["model"], self.options
        refuse_second(state, self)
        refuse_shadowed_adapter(model)
        refuse_sharded(args, self.link.trainer)
        pooled, (set_name, metric) = pooled_sets(options.golden, options.pool), options.objective.leading
        self._names, self._is_pooled = names_to_log(options, pooled), set_name in pooled
        several = len(options.golden) > 1
        self._shown = tag_of(log_name(set_name, pool_name(str(metric), self._is_pooled), several=several))
        refuse_unfit_arguments(args, self._names, self.link.trainer)
        if self.link.trainer is None:
            logger.warning(
                "RetrievalCallback was given through callbacks=[...]: it cannot reach the trackers, the loss or "
                "callbacks before it. Use RetrievalCallback(...).attach(trainer) for those"
            )
        self._schedule = schedule_of(args, state, options.every)
        # Under torchrun on CPUs without use_cpu=True every process takes itself for the main one.
        writes = bool(state.is_world_process_zero) and current_ranks().rank == 0
        speaks = writes and (not args.disable_tqdm if options.verbose is None else options.verbose)
        self._announcer = Announcer(
            options.golden[set_name],
            metric,
            several=several,
            speaks=speaks,
            writes=writes,
            writer=lambda: self.link.writer,
        )
        if state.global_step == 0 and (finding := foreign_checkpoints(args)):
            logger.warning("%s", finding)
        step = state.global_step
        self._session = begin(options, self.link, model, args, step=step, writes=writes, speaks=speaks)
        if (text := prompts_text(self._session.encoder)) is not None:
            self._announcer.tell("info", text)
        for finding in look_before(options, self.link, self._session):
            self._announcer.tell(finding.severity, str(finding))
        self._adviser = Adviser(metric, warmup_steps=args.get_warmup_steps(state.max_steps))
        self._clock, self._injected_at = StepClock(), -1
        self._values: dict[str, float] = {}
        self._eligible = True
        self.ending, self._training = Ending(), True

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Evaluates the base model before the first step, and says beforehand what evaluations cost."""
        if state.global_step == 0:
            tags, guards = [tag_of(name) for name in self._names], list(self._run.watch.tags.values())
            self._announcer.add_layout(tags, shown=self._shown, pooled=self._is_pooled, guards=guards)
            if self._announcer.speaks and (text := cost_before(self._run, self._schedule)):
                self._announcer.tell("info", text)
            return self._evaluate(args, state, control)
        return control

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints the line of an evaluation for which no loss line came."""
        self._announcer.release(state.max_steps)
        self._clock.start()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notes what begins to train, before its first update."""
        if self._run.writes:
            self._run.keeper.before_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Evaluates every N steps and at the last one."""
        seconds = self._clock.stop()
        if seconds is not None and (text := remedy_if_dear(self._run, self._schedule, seconds)):
            self._announcer.tell("warning", text)
        return self._evaluate(args, state, control) if self._schedule.due_after_step(state.global_step) else control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Evaluates where training stops early, and each epoch where that was asked for."""
        if self._schedule.due_after_epoch(state.global_step, stopping=control.should_training_stop):
            return self._evaluate(args, state, control)
        return control

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float] | None = None, **kwargs: Any
    ) -> Any:
        """Gives our value to ``metric_for_best_model`` where it names one of ours, in the first call of a step."""
        name = f"eval_{str(args.metric_for_best_model or '').removeprefix('eval_')}"
        if not self._training or metrics is None or name not in self._names:
            return control
        if name not in metrics and self._injected_at != state.global_step:
            control = self._evaluate(args, state, control)
            metrics[name] = self._values.get(name, float("-inf")) if self._eligible else float("-inf")
            self._injected_at = state.global_step
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds what trains beside an adapter to the trainer's own checkpoint, so that a resumed run has it."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._training and self._run.writes and has_adapters(self._run.model) and folder.is_dir():
            save_extra(self._run.model, folder, loss=self.link.loss)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Notes the loss line, and prints the evaluation of its step with it."""
        if logs and "loss" in logs and self._session is not None:
            self._announcer.loss_line(state.global_step, logs)
            self._adviser.loss_line(state.global_step, logs)
            self._announcer.release(state.max_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restores the best weights, verifies that they are those that were scored, and says how sure the choice is."""
        if state.global_step != self._run.step and not args.load_best_model_at_end:
            self._evaluate(args, state, control)  # an evaluation of the Trainer's own has ended the training
        self._announcer.release(state.max_steps)
        self._training = False
        self.link.close()
        ending = self.ending = conclude(self._run)
        best = ending.best
        state.best_metric = None if best is None else best.score
        state.best_global_step = None if best is None else best.step
        state.best_model_checkpoint = None if best is None else str(best.path)
        if values := last_logs(ending, self._run):
            self.link.log(values, state, control, folder=self._run.folder, writes=self._run.writes)
        self.link.flush()
        for level, text in words(ending, self._run):
            self._announcer.tell(level, text)
        if self.options.report and self._run.writes:
            write_page(self._run, self.options.report)
        self.link.close()

    # ------------------------------------------------------------------ what they share

    @property
    def _run(self) -> Session:
        if self._session is None:
            raise SettingError("RetrievalCallback got an event before on_train_begin; give it to a Trainer")
        return self._session

    def _evaluate(self, args: Any, state: Any, control: Any) -> Any:
        run, announcer = self._run, self._announcer
        if state.global_step == run.step:
            return control
        moment = run.evaluate(state.global_step, float(state.epoch or 0))
        self._eligible, self._values = moment.look.eligible, run.logs(moment)
        if moment.outcome.score is None:
            return control
        result = moment.outcome.results[self.options.objective.leading[0]]
        self.link.log(self._values, state, control, folder=run.folder, writes=run.writes)
        announcer.measured(state.global_step, result, tag=self._shown, floors=run.watch.tagged_floors)
        composite = moment.outcome.score if len(self.options.objective.terms) > 1 else None
        announcer.hold(state.global_step, result, is_best=moment.is_best, composite=composite)
        if state.global_step == 0:
            announcer.release(state.max_steps)
        for finding in (*moment.findings, *self._adviser.evaluation(state.global_step, result)):
            announcer.once(finding)
        waited = run.waited(min_delta=self.options.min_delta)
        if moment.look.stop or (self.options.patience and waited >= self.options.patience):
            control.should_training_stop = True
        return control
