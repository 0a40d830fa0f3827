"""The training-loop callback: evaluates on the full corpus, chooses by it, keeps the best, restores and verifies it.

Promise: the score that is reported and the weights that are kept belong together; the base model is a candidate; an
evaluation changes nothing in the run; a failed evaluation is failed, never 0 and never chosen.
"""

import logging
import math
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import TrainerCallback

from fullrank._errors import DataError, NonFiniteError, SettingError
from fullrank.checkpoints import Evaluation, since_best
from fullrank.comparison import Comparison, compare
from fullrank.data import GoldenSet
from fullrank.encode import Encoder, Precision, as_encoder
from fullrank.hooks import TrainerLink, foreign_checkpoints, precision_of, refuse_unfit_arguments
from fullrank.in_batch import InBatchMonitor
from fullrank.isolate import undisturbed
from fullrank.journal import Journal, move_aside, result_name
from fullrank.keeper import Keeper
from fullrank.metrics import Metric, TieRule
from fullrank.objective import Objective, log_names, metrics_needed, named_sets
from fullrank.plan import EvaluationPlan
from fullrank.report import evaluation_line, say, tensorboard_layout, verdict, worst_text
from fullrank.result import Result
from fullrank.settings import DEFAULT_METRICS, refuse_no_count, refuse_unknown
from fullrank.store import BestStore, Stored
from fullrank.weights import has_adapters, refuse_shadowed_adapter, save_extra

__all__ = ["RetrievalCallback"]

logger = logging.getLogger(__name__)

EVALUATIONS_A_RUN = 10


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
        metrics: what to compute and log.
        ties: see `fullrank.metrics`.
        keep_best: how many best steps stay on disk.
        patience: stop after so many finished evaluations without an improvement.
        min_delta: an improvement must be larger than this to reset ``patience``; the choice does not ask for it.
        precision: of encoding; ``"auto"`` follows the training run.
        batch_tokens: padded tokens of one batch of encoding.
        verbose: print a line for each evaluation; default: unless ``disable_tqdm`` is set.

    Attributes:
        history: the evaluations so far (`Evaluation`).
        best: the best stored step (`Stored`), or None.
        improved: whether a step beat the base model.
        base_result, best_result: results on the set that chooses, at step 0 and at the best step.
        comparison: paired comparison of the two, set at the end.

    Raises:
        SettingError: an option that cannot work.
        DataError: a golden set without an answerable query.
    """

    def __init__(
        self,
        golden: GoldenSet | Sequence[GoldenSet],
        *,
        select: str | Mapping[str, float] = "recall@1",
        every: int | Literal["epoch"] | None = None,
        encoder: Encoder | None = None,
        metrics: Sequence[str | Metric] = DEFAULT_METRICS,
        ties: TieRule = "expected",
        keep_best: int = 1,
        patience: int | None = None,
        min_delta: float = 0.0,
        precision: Precision | Literal["auto"] | None = "auto",
        batch_tokens: int | None = None,
        verbose: bool | None = None,
    ) -> None:
        if every != "epoch":
            refuse_no_count("every", every, "a whole number of steps from 1, 'epoch' or None")
        refuse_no_count("patience", patience, "a whole number from 1 or None")
        refuse_no_count("batch_tokens", batch_tokens, "a whole number from 1 or None")
        refuse_no_count("keep_best", keep_best or 0, "a whole number from 1")
        refuse_unknown("ties", ties, get_args(TieRule))
        refuse_unknown("precision", precision, ("auto", None, *get_args(Precision)))
        if not isinstance(min_delta, int | float) or not 0 <= min_delta < math.inf:
            raise SettingError(f"min_delta={min_delta!r} must be a number from 0")
        if encoder is not None:
            as_encoder(encoder)  # refuses what cannot encode
        self.golden = named_sets(golden)
        self.objective = Objective.parse(select, list(self.golden))
        self.metrics = metrics_needed(metrics, self.objective)
        self.every, self.encoder, self.ties, self.keep_best = every, encoder, ties, keep_best
        self.patience, self.min_delta = patience, min_delta
        self.precision, self.batch_tokens, self.verbose = precision, batch_tokens, verbose
        self.monitor = InBatchMonitor()
        self.link = TrainerLink(None)
        self.improved = False
        self.base_result: Result | None = None
        self.best_result: Result | None = None
        self.comparison: Comparison | None = None
        self._started = self._training = False
        self._injected_at = -1

    def attach(self, trainer: Any) -> "RetrievalCallback":
        """Puts the callback first in ``trainer``, connects it to its trackers and its loss, and returns it."""
        refuse_shadowed_adapter(trainer.model)
        self.link = TrainerLink(trainer)
        self.link.register(self, self.monitor)
        return self

    @property
    def history(self) -> list[Evaluation]:
        """The evaluations so far."""
        return list(self._journal.lines) if self._started else []

    @property
    def best(self) -> Stored | None:
        """The best step whose weights are stored."""
        return self._store.best if self._started else None

    def record(self, scores: torch.Tensor, *, n_negs: int = 0, positives: torch.Tensor | None = None) -> None:
        """Adds in-batch scores from an own training step; arguments as in `in_batch_metrics`."""
        self.monitor.record(scores, n_negs=n_negs, positives=positives)

    # ------------------------------------------------------------------ events, in the order in which they come

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepares folders and encoders; trackers are not set up yet, so nothing is evaluated here."""
        model = kwargs["model"]
        refuse_shadowed_adapter(model)
        nothing = {name: dict.fromkeys(map(str, self.metrics), 0.0) for name in self.golden}
        self._names = list(log_names(nothing, self.objective, 0.0))
        refuse_unfit_arguments(args, self._names)
        if self.link.trainer is None:
            logger.warning(
                "RetrievalCallback was given through callbacks=[...]: it cannot reach the trackers, the loss or "
                "callbacks before it. Use RetrievalCallback(...).attach(trainer) for those"
            )
        encoder = as_encoder(model if self.encoder is None else self.encoder)
        self._plans = {name: EvaluationPlan(encoder, g, self.batch_tokens) for name, g in self.golden.items()}
        self._precision = precision_of(args) if self.precision == "auto" else self.precision
        self._interval = self.every or (
            int(state.eval_steps)
            if str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "steps"
            else max(1, state.max_steps // EVALUATIONS_A_RUN)
        )
        self._writes = bool(state.is_world_process_zero)
        self._speaks = self._writes and (not args.disable_tqdm if self.verbose is None else self.verbose)
        if state.global_step == 0 and (finding := foreign_checkpoints(args)):
            logger.warning("%s", finding)
        self._model, self._last_step = model, -1
        self._open(Path(args.output_dir) / "fullrank", state.global_step)
        self._logs: dict[str, float] = {}
        self._values: dict[str, float] = {}
        self.base_result = self.best_result = self.comparison = None
        self.improved = False
        self._line: tuple[int, Result, bool] | None = None
        self._started = self._training = True

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Evaluates the base model before the first step."""
        if state.global_step == 0:
            self._add_layout()
            return self._evaluate(args, state, control)
        return control

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints the line of an evaluation for which no loss line came."""
        self._say_line(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Evaluates every N steps and at the last one."""
        due = self._interval != "epoch" and state.global_step % self._interval == 0
        if due or (self._interval != "epoch" and state.global_step >= state.max_steps):
            return self._evaluate(args, state, control)
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Evaluates where training stops early, and each epoch where that was asked for."""
        if control.should_training_stop or self._interval == "epoch" or state.global_step >= state.max_steps:
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
            metrics[name] = self._values.get(name, float("-inf"))
            self._injected_at = state.global_step
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds what trains beside an adapter to the trainer's own checkpoint, so that a resumed run has it."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._training and self._writes and has_adapters(self._model) and folder.is_dir():
            save_extra(self._model, folder, loss=self.link.loss)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Notes the loss line, and prints the evaluation of its step with it."""
        if logs and "loss" in logs and self._started:
            self._logs = dict(logs)
            self._say_line(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restores the best weights, verifies that they are those that were scored, and says how sure the choice is."""
        self._say_line(state)
        self._training = False
        self.link.close()
        self._read_store_of_the_writer()
        best = self._store.best
        if best is None:
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
            self._end("error", verdict(None, improved=False, step=None, metric=self.objective.label))
            return
        self._keeper.restore(best)
        state.best_metric, state.best_global_step = best.score, best.step
        state.best_model_checkpoint = str(best.path)
        base = next((line for line in self._journal.lines if line.step == 0 and line.status == "ok"), None)
        self.improved = best.step != 0 and (base is None or base.score is None or best.score > base.score)
        set_name, metric = self.objective.leading
        # From the folder of the weights: the step may have been evaluated on another branch as well.
        self.best_result = _read_result(best.path / result_name("result", set_name))
        if self.base_result is None:
            self.base_result = self._stored_result(0, set_name)
        if self.base_result is not None and self.best_result is not None:
            self.comparison = compare(self.base_result, self.best_result, metric)
        text = verdict(self.comparison, improved=self.improved, step=best.step, metric=self.objective.label)
        self._end("info" if self.improved else "warning", text)

    # ------------------------------------------------------------------ evaluating

    def _evaluate(self, args: Any, state: Any, control: Any) -> Any:
        step = state.global_step
        if step == self._last_step:
            return control
        self._last_step = step
        start = time.perf_counter()
        try:
            with undisturbed(self._model):  # an encoder of the user's own may not know that it runs in training
                results = {
                    name: plan.run(metrics=self.metrics, ties=self.ties, precision=self._precision)
                    for name, plan in self._plans.items()
                }
            score = self.objective.value(results)
            if not math.isfinite(score):
                raise NonFiniteError(f"{self.objective.label} is {score} at step {step}")
        except Exception as error:
            if step == 0 and not isinstance(error, NonFiniteError):
                raise  # nothing has been spent yet, and it would fail at every step
            self._failed(step, state, time.perf_counter() - start, error)
            return control
        self._note(_line(step, state, results, score, time.perf_counter() - start), results)
        self._values = log_names({n: r.metrics for n, r in results.items()}, self.objective, score)
        self.link.log(self._values, state, control, folder=self._folder, writes=self._writes)
        is_best = self._writes and self._keeper.keep(step, score, results)
        set_name, _ = self.objective.leading
        if step == 0:
            self.base_result = results[set_name]
        self._line = (step, results[set_name], is_best)
        if step == 0:
            self._say_line(state)
        if self.patience and since_best(self._journal.current, min_delta=self.min_delta) >= self.patience:
            control.should_training_stop = True
        return control

    def _failed(self, step: int, state: Any, seconds: float, error: Exception) -> None:
        line = Evaluation(step, float(state.epoch or 0), "failed", seconds=seconds, error=traceback.format_exc())
        self._values = {}
        self._note(line, {})
        logger.error("evaluation at step %d failed and is not a candidate: %s: %s", step, type(error).__name__, error)

    def _note(self, line: Evaluation, results: dict[str, Result]) -> None:
        try:
            self._journal.add(line, results)
        except (OSError, ValueError) as error:  # a full disk, or a number that JSON cannot hold
            logger.error("the evaluation of step %d could not be written to %s: %s", line.step, self._folder, error)

    # ------------------------------------------------------------------ folders and trackers

    def _open(self, folder: Path, step: int) -> None:
        if step == 0 and self._writes:
            move_aside(folder)
        self._journal = Journal(folder, write=self._writes)
        self._store = BestStore(folder / "best", keep_best=self.keep_best)
        self._folder = folder
        leading = self._plans[self.objective.leading[0]]
        self._keeper = Keeper(self._store, self._model, leading, self.link, self._precision)
        if step:
            self._refuse_other_data()
            self._journal.resume(step, [stored.step for stored in self._store.stored])

    def _read_store_of_the_writer(self) -> None:
        """Lets every rank of a distributed run see what the writing one has stored."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()
            self._store = BestStore(self._folder / "best", keep_best=self.keep_best)

    def _refuse_other_data(self) -> None:
        """Raises where a resumed run has other golden sets than it began with: scores of two sets cannot be ranked."""
        for name, golden in self.golden.items():
            base = self._stored_result(0, name)
            if base is not None and base.provenance.get("data") != golden.fingerprint():
                raise DataError(
                    f"golden set {name!r} is not the one that this run began with; resume with the same data, or start "
                    f"anew in another output_dir than that of {self._folder}"
                )

    def _stored_result(self, step: int, set_name: str) -> Result | None:
        suffix = set_name if len(self.golden) > 1 else None
        return _read_result(self._folder / result_name(f"step-{step}", suffix))

    def _add_layout(self) -> None:
        writer = self.link.writer
        if writer is not None:
            tags = [f"eval/{name.removeprefix('eval_')}" for name in self._names]
            writer.add_custom_scalars(tensorboard_layout(tags))

    def _say_line(self, state: Any) -> None:
        if not self._started or self._line is None:
            return
        (step, result, is_best), self._line = self._line, None
        _, metric = self.objective.leading
        if self._speaks:
            say(evaluation_line(step, state.max_steps, result, str(metric), logs=self._logs, is_best=is_best))
        writer = self.link.writer
        if writer is not None:
            golden = self.golden[self.objective.leading[0]]
            corpus = dict(zip(golden.doc_ids, golden.doc_texts, strict=True))
            writer.add_text("worst queries", worst_text(result.worst(10, metric), corpus), step)

    def _end(self, level: Literal["info", "warning", "error"], text: str) -> None:
        if self._speaks:
            say(text)
        elif level != "info":
            getattr(logger, level)(text)


def _read_result(path: Path) -> Result | None:
    return Result.load(path) if path.is_file() else None


def _line(step: int, state: Any, results: Mapping[str, Result], score: float, seconds: float) -> Evaluation:
    metrics = {
        name if len(results) == 1 else f"{set_name}/{name}": value
        for set_name, result in results.items()
        for name, value in result.metrics.items()
    }
    return Evaluation(step, float(state.epoch or 0), "ok", score, metrics, seconds)
