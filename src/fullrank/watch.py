"""Watching a training run from elsewhere: each new checkpoint is evaluated once, the best is kept up to date.

Promise: a half-written checkpoint is never evaluated; each is in the journal once, whatever is killed when; the choice
does not hang on the order in which checkpoints arrive; the best is a step whose weights are stored, and they are those
that were scored; nothing that the run wrote is changed.
"""

import logging
import math
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullrank._errors import DataError, FullrankError, SettingError
from fullrank.averaging import copy_model
from fullrank.candidates import Loader, save_loaded
from fullrank.checkpoints import NOT_ELIGIBLE, Evaluation
from fullrank.data import GoldenSet
from fullrank.discover import Candidate, checkpoint_folders, fingerprint_of, inspect_folder
from fullrank.encode import Adapter, Precision
from fullrank.journal import Journal
from fullrank.metrics import Metric, TieRule
from fullrank.modelfiles import state_of
from fullrank.objective import Objective, log_names, metrics_needed, named_sets
from fullrank.plan import EvaluationPlan
from fullrank.result import Result
from fullrank.selection import BASE
from fullrank.settings import DEFAULT_METRICS, refuse_no_count
from fullrank.store import BestStore, Stored
from fullrank.watching import Recognition, Sightings, base_fingerprint, held_lock, note_settings

__all__ = ["WATCH", "stored_best", "watch"]

logger = logging.getLogger(__name__)

WATCH = "fullrank-watch"


def watch(
    run_dir: str | Path,
    golden: GoldenSet | Sequence[GoldenSet],
    *,
    metric: str | dict[str, float] = "recall@1",
    base: str | None = None,
    until: int | None = None,
    idle_exit: float | None = None,
    quiet: float = 10.0,
    poll: float = 2.0,
    attempts: int = 3,
    keep_best: int = 1,
    metrics: Sequence[str | Metric] = DEFAULT_METRICS,
    ties: TieRule = "expected",
    precision: Precision | None = None,
    batch_tokens: int | None = None,
    on_line: Callable[[Evaluation, Evaluation | None], None] | None = None,
) -> list[Evaluation]:
    """Evaluates the checkpoints that a run writes, as they come, and returns their journal.

    Writes to ``RUN_DIR/fullrank-watch/``: ``history.jsonl``, ``step-N.json``, ``best/step-N``, TensorBoard scalars at
    the training step.

    Args:
        run_dir: where ``checkpoint-N`` folders appear.
        golden, metric, metrics, ties, batch_tokens: see `fullrank.select_checkpoint`.
        base: path or hub id of the base model, evaluated as step 0; default: the one that adapters name.
        until: end once this step, or a later one, is in the journal.
        idle_exit: end after so many minutes without news.
        quiet: seconds for which a folder must not have changed.
        poll: seconds between two looks.
        attempts: how often an evaluation is tried before it has failed.
        keep_best: how many best steps are kept.
        precision: of encoding; None is fp32.
        on_line: called with each new line of the journal and the best so far.

    Raises:
        SettingError: another watcher holds the folder, or an option that cannot work.
        DataError: no such folder, a journal that cannot be read or is of other settings, or checkpoints whose weights
            are others than those that it has scores of.
    """
    refuse_no_count("attempts", attempts, "a whole number from 1")
    for name, value in (("quiet", quiet), ("poll", poll), ("idle_exit", idle_exit or 0.0)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise SettingError(f"{name}={value!r} must be a number from 0")
    root = Path(run_dir).expanduser()
    if not root.is_dir():
        raise DataError(f"run folder {str(run_dir)!r} does not exist")
    sets = named_sets(golden)
    with held_lock(root / WATCH / "lock", f"{root} is watched"):
        scout = _Scout(root, sets, Objective.parse(metric, list(sets)), metrics, ties, precision, batch_tokens, base)
        scout.open(keep_best)
        try:
            sightings, started = Sightings(quiet, attempts), time.monotonic()
            while not scout.has_reached(until):
                line = scout.look(sightings)
                if line is not None:
                    started = time.monotonic()
                    if on_line is not None:
                        on_line(line, scout.best())
                    continue
                news = max(started, sightings.last_change or started)
                if idle_exit is not None and not sightings.waiting and time.monotonic() - news >= 60 * idle_exit:
                    break
                time.sleep(poll)
            return list(scout.journal.lines)
        finally:
            scout.close()


def stored_best(run_dir: str | Path) -> Stored | None:
    """Returns the best of the steps of a watched run whose weights are stored.

    Raises:
        DataError: the list of what is stored cannot be read.
    """
    return BestStore(Path(run_dir).expanduser() / WATCH / "best", resume=True).best


class _Scout:
    """The shell of `watch`: looks, evaluates, writes."""

    def __init__(
        self,
        root: Path,
        sets: dict[str, GoldenSet],
        objective: Objective,
        metrics: Sequence[str | Metric],
        ties: TieRule,
        precision: Precision | None,
        batch_tokens: int | None,
        base: str | None,
    ) -> None:
        self.root, self.sets, self.objective = root, sets, objective
        self.metrics, self.ties = metrics_needed(metrics, objective), ties
        self.precision, self.batch_tokens, self.base = precision or "fp32", batch_tokens, base
        self.loader = Loader(base)
        self._base_failed = self._base_given_up = False
        self.journal = Journal(root / WATCH)
        self.recognition = Recognition(root / WATCH, base)
        self._plans: dict[tuple[str, str], EvaluationPlan] = {}
        self._writer: Any = None

    def open(self, keep_best: int) -> None:
        """Reads the journal, and writes its scalars anew: a kill may have come between a line and its scalars."""
        self.journal.resume(1 << 62, [])
        self.store = BestStore(self.root / WATCH / "best", keep_best=keep_best, resume=True)
        self._note_settings()
        found = self._found()
        self.recognition.refuse_others(found, self.journal.lines)
        self.recognition.refuse_other_base(found, self.journal.lines)
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(self.root / WATCH / "tensorboard"), purge_step=0)
        for line in self.journal.lines:
            self._log(line)

    def has_reached(self, step: int | None) -> bool:
        """Returns whether ``step`` or a later one is in the journal, and nothing that is whole waits for its turn."""
        done = {line.step for line in self.journal.lines}
        if step is None or max(done, default=-1) < step or self._base_failed:
            return False
        return all(candidate.step in done for candidate in self._found() if not candidate.problem)

    def best(self) -> Evaluation | None:
        """Returns the line of the best step whose weights are stored."""
        lines = {line.step: line for line in self.journal.lines}
        return next((lines[entry.step] for entry in self.store.stored if entry.step in lines), None)

    def close(self) -> None:
        """Closes the events file."""
        if self._writer is not None:
            self._writer.close()

    def look(self, sightings: Sightings) -> Evaluation | None:
        """Evaluates the earliest checkpoint that is due; returns its line, or None where nothing was finished."""
        found = self._found()
        done = {line.step for line in self.journal.lines}
        known = sightings.settled((c for c in found if c.step in done), time.monotonic())
        self.recognition.refuse_others(known, self.journal.lines)
        for broken in sightings.stalled((c for c in found if c.step not in done), time.monotonic()):
            logger.warning("%s is not taken: %s", broken.name, broken.problem)
        gone = sightings.waiting - {c.name for c in found} - {BASE}
        for name in gone:
            sightings.forget(name)
            step = int(name.removeprefix("checkpoint-"))
            if step not in done:
                return self._note(Evaluation(step, 0.0, "skipped", note="it has vanished"), {})
        candidate = sightings.due(found, done, time.monotonic())
        waits = (c for c in found if self._base_failed and not c.problem)  # the base, when no checkpoint does
        like = candidate or next(waits, None)
        if like is not None and self._base_is_due(like, sightings):
            return self._evaluate_base(like, sightings)
        if candidate is None:
            return None
        return self._evaluate(candidate, sightings)

    def _evaluate(self, candidate: Candidate, sightings: Sightings) -> Evaluation | None:
        start = time.perf_counter()
        try:
            key, encoder, mark = self._loaded(candidate)
            results = self._results(key, encoder)
            score = self._score(results)
        except Exception as error:  # a model may raise anything, and the next checkpoint may be better
            logger.warning("%s could not be evaluated: %s", candidate.name, error)
            self._forget_models()
            if not sightings.failed(candidate, time.monotonic()):
                return None
            sightings.forget(candidate.name)
            seconds = time.perf_counter() - start
            line = Evaluation(candidate.step or 0, 0.0, "failed", seconds=seconds, error=traceback.format_exc())
            return self._note(line, {})
        line = self._line(candidate.step or 0, _epoch(candidate.path), score, results, time.perf_counter() - start)
        sightings.forget(candidate.name)
        line = replace(line, fingerprint=mark)
        return self._note(self._kept(line, lambda to: self._write(candidate, mark, encoder, to), results), results)

    def _loaded(self, candidate: Candidate) -> tuple[str, Adapter, str]:
        """Returns the name of the model in memory, what encodes with it, and the fingerprint of what was read."""
        mark = fingerprint_of(candidate, self.base)
        key, encoder = self.loader.load(candidate)
        if fingerprint_of(candidate, self.base) != mark:
            raise DataError(f"{candidate.path} was written to while it was read")
        return key, encoder, mark

    def _forget_models(self) -> None:
        """Has the next candidate read into a fresh model."""
        self.loader = Loader(self.base)
        self._plans.clear()

    def _write(self, candidate: Candidate, mark: str, encoder: Adapter, target: Path) -> None:
        """Copies a checkpoint; where its folder no longer holds what was scored, writes the model in memory."""
        try:
            copy_model(candidate.path, target)
            if fingerprint_of(replace(candidate, path=target), self.base) == mark:
                return
            why = "it was written to since it was scored"
        except OSError as error:
            why = str(error)
        logger.warning("%s cannot be copied, its weights are written from memory: %s", candidate.name, why)
        shutil.rmtree(target, ignore_errors=True)
        save_loaded(encoder, target)
        self._forget_models()  # adapters were merged

    def _found(self) -> list[Candidate]:
        try:
            folders = checkpoint_folders(self.root)
        except OSError:  # it vanishes, or the file system is away for a while
            return []
        inspected = (inspect_folder(path, path.name, step=step, origin="checkpoint") for step, path in folders)
        return [candidate for candidate in inspected if candidate is not None]

    def _base_is_due(self, candidate: Candidate, sightings: Sightings) -> bool:
        """Returns whether the base is to be evaluated now: also where it failed before the watch was started again."""
        known = any(line.step == 0 and line.status == "ok" for line in self.journal.lines)
        if known or self._base_given_up or not (self.base or candidate.base):
            return False
        return sightings.may_try(BASE, time.monotonic())

    def _evaluate_base(self, like: Candidate, sightings: Sightings) -> Evaluation | None:
        source, start = self.base or like.base or "", time.perf_counter()
        try:
            mark = base_fingerprint(source)
            key, encoder = self.loader.load_base(source, like)
            results = self._results(key, encoder)
            line = self._line(0, 0.0, self._score(results), results, time.perf_counter() - start)
        except Exception as error:
            logger.warning("the base model %s could not be evaluated: %s", source, error)
            self._forget_models()
            self._base_failed = not sightings.failed_again(BASE, time.monotonic())
            if self._base_failed:
                return None
            self._base_given_up = True
            sightings.forget(BASE)
            return self._note(Evaluation(0, 0.0, "failed", error=traceback.format_exc()), {})
        self._base_failed = False
        sightings.forget(BASE)

        def save(target: Path) -> None:
            # In the shape in which it was scored, whatever pooling its own folder names, and without adapters.
            save_loaded(encoder, target, adapters=False)
            self._forget_models()

        return self._note(self._kept(replace(line, fingerprint=mark), save, results), results)

    def _results(self, key: str, encoder: Adapter) -> dict[str, Result]:
        results = {}
        for name, golden in self.sets.items():
            plan = self._plans.setdefault((key, name), EvaluationPlan(encoder, golden, self.batch_tokens))
            results[name] = plan.run(metrics=self.metrics, ties=self.ties, precision=self.precision)
        return results

    def _score(self, results: dict[str, Result]) -> float:
        score = self.objective.value(results)
        if not math.isfinite(score):
            raise DataError(f"{self.objective.label} is {score}")
        return score

    def _line(self, step: int, epoch: float, score: float, results: dict[str, Result], seconds: float) -> Evaluation:
        values = {
            name if len(results) == 1 else f"{set_name}/{name}": value
            for set_name, result in results.items()
            for name, value in result.metrics.items()
        }
        return Evaluation(step, epoch, "ok", score, values, seconds)

    def _kept(self, line: Evaluation, write: Callable[[Path], object], results: dict[str, Result]) -> Evaluation:
        """Stores the weights if they are among the best, before the line is written; returns the line.

        Where they should be stored and could not, it is not eligible: a line whose weights are gone cannot be best.
        """

        def save(target: Path) -> None:
            target.rmdir()
            write(target)
            results[self.objective.leading[0]].save(target / "result.json")

        try:
            self.store.offer(line.step, line.score if line.score is not None else math.nan, save)
            return line
        except Exception as error:  # no space, and what a model raises when it is saved
            logger.error("the weights of step %d could not be stored (%s); the best so far stays", line.step, error)
            self._forget_models()
            return replace(line, note=NOT_ELIGIBLE, findings=[f"error: its weights could not be stored: {error}"])

    def _note(self, line: Evaluation, results: dict[str, Result]) -> Evaluation:
        self.journal.add(line, results)
        self._log(line)
        return line

    def _log(self, line: Evaluation) -> None:
        if line.status != "ok" or line.score is None:
            return
        values: dict[str, dict[str, float]] = {name: {} for name in self.sets}
        for name, value in line.metrics.items():
            set_name, _, metric = name.rpartition("/")
            values.setdefault(set_name or next(iter(self.sets)), {})[metric] = value
        for name, value in log_names(values, self.objective, line.score).items():
            self._writer.add_scalar(f"eval/{name.removeprefix('eval_')}", value, line.step)
        self._writer.flush()

    def _note_settings(self) -> None:
        settings = {
            "data": {name: golden.fingerprint() for name, golden in self.sets.items()},
            "objective": [[name, str(metric), weight] for name, metric, weight in self.objective.terms],
            "metrics": [str(metric) for metric in self.metrics],
            "ties": self.ties,
            "precision": self.precision,
            "base": self.base,
        }
        note_settings(self.root / WATCH, settings, begun=bool(self.journal.lines))


def _epoch(folder: Path) -> float:
    try:
        epoch = state_of(folder).get("epoch")
    except (FullrankError, OSError):
        return 0.0
    return float(epoch) if isinstance(epoch, int | float) and math.isfinite(epoch) else 0.0
