"""The store of best weights: saved because best, written beside and renamed, only its own folders deleted.

Promise: at every moment the folder of the best step is whole; a crash while writing leaves the previous best; nothing
that the store did not write is ever removed (a killed save leaves a ``.step-N.PID.partial`` behind, which may go).
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fullrank._errors import DataError, SettingError
from fullrank._files import weights_as_files, write_atomically
from fullrank.checkpoints import steps_to_keep
from fullrank.journal import move_aside

__all__ = ["BestStore", "Stored"]

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Stored:
    """A stored model folder: its training step, score and path, and the bytes of its files when they were written."""

    step: int
    score: float
    path: Path
    files: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def whole(self) -> bool:
        """Whether no file is gone or shorter than it was written; card and results may change."""
        return self.path.is_dir() and all(
            (self.path / name).is_file() and (self.path / name).stat().st_size >= size
            for name, size in self.files.items()
            if not name.endswith(".md") and not name.startswith("result.")
        )


class BestStore:
    """Keeps the weights of the best steps of a run.

    Args:
        folder: holds ``step-N`` folders and ``manifest.json``, which says which of them are kept; made on first use.
        keep_best: how many to keep.
        pinned: steps that are kept beside them, whatever they score.
        resume: what to do with steps that an earlier run left in ``folder``: True goes on with them, so that a score
            must beat theirs; False moves the folder aside, to ``NAME.1``, ``NAME.2``, ...; None goes on and says so.

    Where a file of a step is gone or cut short, that step is no candidate any more.

    In an own loop::

        store = BestStore("out/best", resume=False)
        if store.offer(step, result["recall@1"], lambda folder: model.save_pretrained(folder)):
            print("new best", store.best.path)

    Raises:
        SettingError: ``keep_best`` below 1.
        DataError: the manifest cannot be read.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_best: int = 1,
        pinned: Collection[int] = (),
        resume: bool | None = None,
    ) -> None:
        if keep_best < 1:
            raise SettingError(f"keep_best={keep_best} must be at least 1")
        self.folder, self.keep_best, self.pinned = Path(folder), keep_best, frozenset(pinned)
        if resume is False:
            move_aside(self.folder)
        self._entries = _read(self.folder)
        self._damaged = [entry for entry in self._entries.values() if entry.path.is_dir() and not entry.whole]
        for entry in self._damaged:
            logger.warning("%s has lost files since it was stored, and is no candidate any more", entry.path)
        self._unsaid = resume is None and bool(self.stored)

    @property
    def stored(self) -> list[Stored]:
        """What is kept, best first; of equal scores the earlier step first. What was lost is left out."""
        whole = {
            step: entry for step, entry in self._entries.items() if entry.path.is_dir() and entry not in self._damaged
        }
        return [whole[step] for step in steps_to_keep(_scores(whole), len(whole))]

    @property
    def damaged(self) -> list[Stored]:
        """Steps whose folder has lost files since they were stored: no candidates any more."""
        return list(self._damaged)

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
        if self._unsaid:
            self._unsaid = False
            logger.warning(
                "%s holds steps of an earlier run (%s): what is offered now must beat them. Pass resume=False to move "
                "them aside and begin anew, or resume=True if this run goes on from them",
                self.folder,
                ", ".join(f"step {entry.step}: {entry.score:.4f}" for entry in self.stored),
            )
        if not self.wants(step, score):
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".step-{step}.{os.getpid()}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            with weights_as_files():
                save(partial)
            added = Stored(step, score, self._free_path(step), _sizes(partial))
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
        self._entries, self._damaged = kept, []
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
        rows = [
            {"step": e.step, "score": e.score, "folder": e.path.name, "files": dict(e.files)} for e in entries.values()
        ]
        write_atomically(self.folder / MANIFEST, json.dumps({"kept": rows}, indent=2) + "\n")


def _scores(entries: dict[int, Stored]) -> dict[int, float]:
    return {step: entry.score for step, entry in entries.items()}


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


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
    files = row.get("files", {})
    if not isinstance(files, dict) or not all(type(size) is int for size in files.values()):
        raise ValueError(f"not an entry: {row}")
    return Stored(step, float(score), folder / name, files)
