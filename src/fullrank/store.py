"""The store of best weights: saved because best, written beside and renamed, only its own folders deleted.

Promise: at every moment the folder of the best step is whole; a crash while writing leaves the previous best; nothing
that the store did not write is ever removed (a killed save leaves a ``.step-N.PID.partial`` behind, which may go).
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fullrank._errors import DataError, SettingError
from fullrank._files import write_atomically
from fullrank.checkpoints import steps_to_keep

__all__ = ["BestStore", "Stored"]

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
        folder: holds ``step-N`` folders and ``manifest.json``, which says which of them are kept; made on first use.
        keep_best: how many to keep.
        pinned: steps that are kept beside them, whatever they score.

    In an own loop::

        store = BestStore("out/best")
        if store.offer(step, result["recall@1"], lambda folder: model.save_pretrained(folder)):
            print("new best", store.best.path)

    Raises:
        SettingError: ``keep_best`` below 1.
        DataError: the manifest cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep_best: int = 1, pinned: Collection[int] = ()) -> None:
        if keep_best < 1:
            raise SettingError(f"keep_best={keep_best} must be at least 1")
        self.folder, self.keep_best, self.pinned = Path(folder), keep_best, frozenset(pinned)
        self._entries = _read(self.folder)

    @property
    def stored(self) -> list[Stored]:
        """What is kept, best first; of equal scores the earlier step first. Folders that are gone are left out."""
        whole = {step: entry for step, entry in self._entries.items() if entry.path.is_dir()}
        return [whole[step] for step in steps_to_keep(_scores(whole), len(whole))]

    @property
    def best(self) -> Stored | None:
        """The best step, or None."""
        return next(iter(self.stored), None)

    def wants(self, step: int, score: float) -> bool:
        """Returns whether a score would be kept.

        NaN and infinity never are; nor is a score that an earlier step, or the same step before, has already reached.
        """
        kept = {entry.step: entry.score for entry in self.stored}
        if not math.isfinite(score) or kept.get(step, -math.inf) >= score:
            return False
        return step in self._to_keep({**kept, step: score})

    def offer(self, step: int, score: float, save: Callable[[Path], object]) -> bool:
        """Stores a step if it is among the best, and returns whether it is the new best.

        Args:
            step: training step.
            score: higher is better.
            save: writes a loadable model folder to the path it is given.

        Raises:
            OSError: the folder could not be written (no space, no permission); what was stored stays as it was.
        """
        step, score = int(step), float(score)  # numpy and torch scalars too: the manifest is JSON
        if not self.wants(step, score):
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".step-{step}.{os.getpid()}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            save(partial)
            added = Stored(step, score, self._free_path(step))
            partial.rename(added.path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        entries = {entry.step: entry for entry in self.stored} | {step: added}
        kept = {s: entries[s] for s in self._to_keep(_scores(entries))}
        try:
            self._write(kept)  # from here on the new folder counts; until here the old ones did
        except BaseException:
            shutil.rmtree(added.path, ignore_errors=True)
            raise
        dropped = [entry for entry in self._entries.values() if entry not in kept.values()]
        self._entries = kept
        for entry in dropped:
            shutil.rmtree(entry.path, ignore_errors=True)
        return next(iter(kept)) == step

    def rescore(self, scores: Mapping[int, float]) -> None:
        """Gives stored steps other scores, all on one scale; those without one are no longer listed, but stay on disk.

        Raises:
            OSError: the manifest could not be written.
        """
        entries = {e.step: replace(e, score=float(scores[e.step])) for e in self.stored if e.step in scores}
        self._write(entries)
        self._entries = entries

    def _to_keep(self, scores: dict[int, float]) -> list[int]:
        best = steps_to_keep(scores, self.keep_best)
        return [step for step in steps_to_keep(scores, len(scores)) if step in best or step in self.pinned]

    def _free_path(self, step: int) -> Path:
        """Returns ``step-N``, or ``step-N.1``, ... where that name is taken."""
        target, n = self.folder / f"step-{step}", 0
        while os.path.lexists(target):
            n += 1
            target = self.folder / f"step-{step}.{n}"
        return target

    def _write(self, entries: dict[int, Stored]) -> None:
        rows = [{"step": e.step, "score": e.score, "folder": e.path.name} for e in entries.values()]
        write_atomically(self.folder / MANIFEST, json.dumps({"kept": rows}, indent=2) + "\n")


def _scores(entries: dict[int, Stored]) -> dict[int, float]:
    return {step: entry.score for step, entry in entries.items()}


def _read(folder: Path) -> dict[int, Stored]:
    path = folder / MANIFEST
    if not path.exists():
        return {}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["kept"]
        return {entry.step: entry for entry in (_entry(row, folder) for row in rows)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}); it lists the stored steps. Move {folder} away") from error


def _entry(row: dict[str, Any], folder: Path) -> Stored:
    step, score, name = row["step"], row["score"], row["folder"]
    inside = isinstance(name, str) and name not in {"", ".", ".."} and Path(name).name == name
    if type(step) is not int or not isinstance(score, int | float) or not math.isfinite(score) or not inside:
        raise ValueError(f"not an entry: {row}")
    return Stored(step, float(score), folder / name)
