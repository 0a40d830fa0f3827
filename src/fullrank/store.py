"""The store of best weights: saved because best, written beside and renamed, only its own folders deleted.

Promise: at every moment the folder of the best step is whole; a crash while writing leaves the previous best; nothing
that the store did not write is ever removed.
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fullrank._errors import DataError, SettingError
from fullrank._files import write_atomically
from fullrank.checkpoints import steps_to_keep

__all__ = ["BestStore", "Stored"]

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Stored:
    """A stored model folder: its training step, score and path."""

    step: int
    score: float
    path: Path


class BestStore:
    """Keeps the weights of the best steps of a run.

    Args:
        folder: holds ``step-N`` folders and ``manifest.json``; made on first use.
        keep_best: how many to keep.

    In an own loop::

        store = BestStore("out/best")
        if store.offer(step, result["recall@1"], lambda folder: model.save_pretrained(folder)):
            print("new best", store.best.path)

    Raises:
        SettingError: ``keep_best`` below 1.
        DataError: the manifest cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep_best: int = 1) -> None:
        if keep_best < 1:
            raise SettingError(f"keep_best={keep_best} must be at least 1")
        self.folder, self.keep_best = Path(folder), keep_best
        self._scores = self._read()

    @property
    def stored(self) -> list[Stored]:
        """What is kept, best first; of equal scores the earlier step first. Folders that are gone are left out."""
        steps = steps_to_keep(self._scores, len(self._scores))
        return [Stored(s, self._scores[s], self.path(s)) for s in steps if self.path(s).is_dir()]

    @property
    def best(self) -> Stored | None:
        """The best step, or None."""
        return next(iter(self.stored), None)

    def path(self, step: int) -> Path:
        """Returns the folder of a step, whether it exists or not."""
        return self.folder / f"step-{step}"

    def wants(self, step: int, score: float) -> bool:
        """Returns whether a score would be kept; NaN and infinity never are, an equal score of a later step is not."""
        if not math.isfinite(score):
            return False
        return step in steps_to_keep({**self._scores, step: score}, self.keep_best)

    def offer(self, step: int, score: float, save: Callable[[Path], object]) -> bool:
        """Stores a step if it is among the best, and returns whether it is the new best.

        Args:
            step: training step.
            score: higher is better.
            save: writes a loadable model folder to the path it is given.

        Raises:
            OSError: the folder could not be written (no space, no permission); what was stored stays as it was.
        """
        if not self.wants(step, score):
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".step-{step}.{os.getpid()}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            save(partial)
            self._replace(partial, self.path(step))
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        kept = steps_to_keep({**self._scores, step: score}, self.keep_best)
        dropped = [old for old in self._scores if old not in kept]
        self._scores = {s: {**self._scores, step: score}[s] for s in kept}
        self._write()  # before deleting: a crash in between leaves a folder too many, never one too few
        for old in dropped:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return kept[0] == step

    def _replace(self, partial: Path, target: Path) -> None:
        aside = None
        if target.exists():
            if not self._is_ours(target):
                raise DataError(f"{target} exists and was not written by this store; move it away")
            aside = target.with_name(f".{target.name}.{os.getpid()}.old")
            target.rename(aside)
        partial.rename(target)
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)

    def _is_ours(self, target: Path) -> bool:
        return target in {self.path(step) for step in self._scores}

    def _read(self) -> dict[int, float]:
        path = self.folder / MANIFEST
        if not path.exists():
            return {}
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            return {int(step): float(score) for step, score in body["scores"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} cannot be read ({error}); it lists the stored steps. Move {self.folder} away"
            ) from error

    def _write(self) -> None:
        write_atomically(self.folder / MANIFEST, json.dumps({"scores": self._scores}) + "\n")
