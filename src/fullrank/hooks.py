"""The seams of a Hugging Face trainer: what a callback cannot reach by itself.

Promise: only the given trainer instance is touched, never a class; without a trainer the callback still works, with
less reach. Facts about transformers are those of release 5.18 and later.
"""

import inspect
import math
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

from torch import nn

from fullrank._errors import SettingError
from fullrank.adapters import has_adapters
from fullrank.encode import Precision
from fullrank.in_batch import InBatchMonitor
from fullrank.isolate import modules_within
from fullrank.metrics import Metric
from fullrank.result import Finding
from fullrank.schedule import Schedule
from fullrank.weights import load_weights

__all__ = [
    "TrainerLink",
    "foreign_checkpoints",
    "precision_of",
    "refuse_no_trainer",
    "refuse_other_model",
    "refuse_second",
    "refuse_sharded",
    "refuse_unfit_arguments",
    "schedule_of",
    "tag_of",
]


TWICE = (
    "the trainer has a RetrievalCallback already, and both would write to the same folder; give one callback a list of "
    "golden sets instead"
)


class TrainerLink:
    """A trainer as the callback sees it; with None it logs to the state and to TensorBoard events of its own."""

    def __init__(self, trainer: Any | None) -> None:
        self.trainer = trainer
        self._writer: Any = None
        self._monitor: InBatchMonitor | None = None
        self._replaced: dict[str, tuple[Any, Any]] = {}

    @property
    def loss(self) -> Any:
        """The loss modules of a sentence-transformers trainer, or None."""
        return getattr(self.trainer, "loss", None)

    @property
    def save_model(self) -> Callable[[Path], object] | None:
        """Writes the model as the trainer does, without a push to the hub; None without a trainer."""
        trainer = self.trainer
        return None if trainer is None else lambda folder: trainer.save_model(str(folder), _internal_call=True)

    def register(self, callback: Any, monitor: InBatchMonitor) -> None:
        """Puts ``callback`` first and connects it; see `connect`.

        Raises:
            SettingError: another callback of this kind is there, or the trainer cannot save without a push to the hub.
        """
        trainer: Any = self.trainer
        callbacks = trainer.callback_handler.callbacks
        if callback in callbacks:
            callbacks.remove(callback)
        if any(type(other) is type(callback) for other in callbacks):
            raise SettingError(TWICE)
        if "_internal_call" not in inspect.signature(trainer.save_model).parameters:
            raise SettingError(
                f"{type(trainer).__name__}.save_model must take _internal_call, as Trainer.save_model does: without it "
                "every best step would be pushed to the hub"
            )
        # First, so that an early stopping callback sees the metrics that we add in `on_evaluate`.
        callbacks.insert(0, callback)
        self._monitor = monitor
        self.connect()

    def connect(self) -> None:
        """Taps the loss and adds the in-batch metrics to the loss lines, where that has not been done; see `close`."""
        trainer, monitor = self.trainer, self._monitor
        if trainer is None or monitor is None:
            return
        losses = self.loss.values() if isinstance(self.loss, dict) else [self.loss]
        modules = [loss for loss in losses if isinstance(loss, nn.Module)]
        for loss in modules:
            monitor.watch_loss(loss)
        if not modules:
            monitor.watch_model(trainer.model)
        if self._replaced:
            return
        if hasattr(trainer, "loss") and has_adapters(trainer.model):
            # sentence-transformers rebuilds the model from the checkpoint and copies the state over, whose names are
            # not those of a model adapted by get_peft_model: resuming raises, load_best_model_at_end only logs.
            self._replace(
                "_load_from_checkpoint", lambda path: load_weights(trainer.model, Path(path), loss=trainer.loss)
            )
        inner = trainer.log

        def log(logs: dict[str, float], *args: Any, **options: Any) -> Any:
            # `Trainer.log` copies what it is given before `on_log`: keys for the loss line must come in here.
            return inner({**logs, **monitor.flush()} if "loss" in logs else logs, *args, **options)

        self._replace("log", log)

    def _replace(self, name: str, ours: Any) -> None:
        self._replaced[name] = (vars(self.trainer).get(name), ours)
        setattr(self.trainer, name, ours)

    def log(self, logs: dict[str, float], state: Any, control: Any, *, folder: Path, writes: bool) -> None:
        """Sends ``logs`` to the history and every tracker, without swallowing the loss line of the step."""
        if self.trainer is not None:
            # `Trainer.log` resets this flag, and the step's loss would then not be logged.
            should_log = control.should_log
            self.trainer.log(dict(logs))
            self.trainer.control.should_log = control.should_log = should_log
            return
        state.log_history.append({**logs, "epoch": state.epoch, "step": state.global_step})
        if writes:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(log_dir=str(folder / "tensorboard"))
            for name, value in logs.items():
                self._writer.add_scalar(tag_of(name), value, state.global_step)
            self._writer.flush()

    def flush(self) -> None:
        """Writes what TensorBoard holds back, for those who read its events."""
        if (writer := self.writer) is not None:
            writer.flush()

    def close(self) -> None:
        """Leaves trainer, loss and model as they were, and closes the writer of our own events; see `connect`."""
        for name, (before, ours) in self._replaced.items():
            if vars(self.trainer).get(name) is ours:  # else somebody has wrapped it since
                delattr(self.trainer, name)
                if before is not None:
                    setattr(self.trainer, name, before)
        self._replaced = {}
        if self._monitor is not None:
            self._monitor.release()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @property
    def writer(self) -> Any:
        """The TensorBoard writer in use, or None."""
        if self.trainer is None:
            return self._writer
        found = (getattr(callback, "tb_writer", None) for callback in self.trainer.callback_handler.callbacks)
        return next((writer for writer in found if writer is not None), None)


def tag_of(name: str) -> str:
    """Returns the tag that TensorBoard gets for a value logged under ``name``."""
    return f"eval/{name.removeprefix('eval_')}"


def schedule_of(args: Any, state: Any, every: int | Literal["epoch"] | None) -> Schedule:
    """Returns when a run evaluates; the trainer's own interval where ``every`` is None and it has one."""
    by_steps = str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "steps"
    return Schedule.of(
        every,
        eval_steps=int(state.eval_steps) if by_steps else None,
        max_steps=state.max_steps,
        epochs=max(1, math.ceil(state.num_train_epochs or 1)),
    )


def foreign_checkpoints(args: Any) -> Finding | None:
    """Returns a Finding where the Trainer would delete checkpoints that another run left in the output folder."""
    found = sorted(path.name for path in Path(args.output_dir).glob("checkpoint-*") if path.is_dir())
    if not found or args.save_total_limit is None:
        return None
    return Finding(
        "foreign-checkpoints",
        "warning",
        f"{len(found)} checkpoints of another run lie in {args.output_dir}, and save_total_limit="
        f"{args.save_total_limit} lets the Trainer delete them",
        count=len(found),
        examples=tuple(found[:5]),
        remedy="Move them away, or choose another output_dir",
    )


def precision_of(args: Any) -> Precision | None:
    """Returns the precision of the training run: that of its autocast, or None for the model as it stands."""
    if getattr(args, "bf16", False):
        return "bf16"
    return "fp16" if getattr(args, "fp16", False) else None


def refuse_no_trainer(trainer: object) -> None:
    """Raises `SettingError` for what has no callbacks and arguments to attach to."""
    if missing := [name for name in ("callback_handler", "args", "model", "save_model") if not hasattr(trainer, name)]:
        raise SettingError(
            f"attach needs a transformers Trainer or SentenceTransformerTrainer, got {type(trainer).__name__} (it has "
            f"no {missing[0]}): make the trainer first, then RetrievalCallback(...).attach(trainer)"
        )


def refuse_second(state: Any, callback: object) -> None:
    """Raises `SettingError` where another callback has begun the run that ``state`` belongs to."""
    # Every run has a state object of its own; what is no field of it is not saved.
    if vars(state).setdefault("_fullrank_callback", callback) is not callback:
        raise SettingError(TWICE)


def refuse_other_model(encoder: object, model: nn.Module) -> None:
    """Raises `SettingError` where the encoder holds modules, and none of their parameters is one of the model's.

    A ``Trainer(model_init=...)`` makes the model anew when training begins.
    """
    held = {id(parameter) for module in modules_within(encoder) for parameter in module.parameters()}
    if held and held.isdisjoint(map(id, model.parameters())):
        raise SettingError(
            f"the encoder does not share a single parameter with the {type(model).__name__} in training: it would be "
            "scored unchanged at every step. Make it of the trainer's own model, for example "
            "Backbone(trainer.model.backbone, tokenizer); with Trainer(model_init=...), which makes another model when "
            "training begins, pass the model itself instead: Trainer(model=...)"
        )


def refuse_sharded(args: Any, trainer: Any | None) -> None:
    """Raises `SettingError` where no process holds the whole model, as it takes to evaluate and store it."""
    accelerator = getattr(getattr(trainer, "accelerator", None), "state", None)
    if getattr(args, "fsdp", None) or getattr(accelerator, "fsdp_plugin", None) is not None:
        what = "FSDP"
    elif getattr(getattr(args, "hf_deepspeed_config", None), "is_zero3", lambda: False)():
        what = "DeepSpeed ZeRO stage 3"
    else:
        return
    raise SettingError(
        f"{what} spreads the weights over the processes, and an evaluation needs them whole. Train with DDP (adapters "
        "and embedding models fit), or without the callback, and evaluate the checkpoints afterwards"
    )


def refuse_unfit_arguments(args: Any, names: Collection[str], trainer: Any | None = None) -> None:
    """Raises `SettingError` for training arguments that name one of our values (``names``) wrong or upside down.

    Args:
        args: of the training run.
        names: as the values are logged, ``eval_...``.
        trainer: tells whether anything else of the run could give the metric.
    """
    wanted = str(args.metric_for_best_model or "").removeprefix("eval_")
    if f"eval_{wanted}" not in names and f"eval_{wanted}_pool" in names:
        raise SettingError(
            f"metric_for_best_model={wanted!r} is not known during a run with pool=...: it is an upper bound, logged "
            f"as {wanted + '_pool'!r}; name that, or leave metric_for_best_model out"
        )
    if f"eval_{wanted}" not in names:
        known = {_spelled(name.removeprefix("eval_")): name for name in names}
        metric = _spelled(wanted.rpartition("/")[2])
        meant = known.get(_spelled(wanted)) or (known.get(metric) if "/" in wanted else None)
        if meant is not None:
            raise SettingError(f"metric_for_best_model={wanted!r} is logged as {meant!r}; write it so")
        others = trainer is None or getattr(trainer, "compute_metrics", None) or getattr(trainer, "evaluator", None)
        if not others and _is_metric(metric):
            raise SettingError(
                f"metric_for_best_model={wanted!r} is not computed; pass metrics=[..., {metric!r}] to "
                f"RetrievalCallback, or choose one of {', '.join(names)}"
            )
        return
    if args.greater_is_better is False:
        raise SettingError(
            f"metric_for_best_model={wanted!r} with greater_is_better=False would keep the worst checkpoint; set "
            "greater_is_better=True"
        )
    scheduler = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    options = args.lr_scheduler_kwargs if isinstance(args.lr_scheduler_kwargs, dict) else {}
    if scheduler == "reduce_lr_on_plateau" and options.get("mode") != "max":
        raise SettingError(
            f"lr_scheduler_type='reduce_lr_on_plateau' waits for metric_for_best_model={wanted!r} to fall; pass "
            "lr_scheduler_kwargs={'mode': 'max'}"
        )


def _spelled(name: str) -> str:
    """Returns a metric's name in one spelling: ``Faq/recall_at_05`` is ``faq_recall@5``."""
    return re.sub(r"(?:_at_|@)0*(\d+)$", r"@\1", name.lower()).replace("/", "_")


def _is_metric(name: str) -> bool:
    try:
        Metric.parse(name)
    except SettingError:
        return False
    return True
