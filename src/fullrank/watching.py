"""Watching a run's folder: which checkpoint is due, what does not belong to its journal, and the lock that one watcher
at a time holds.

Promise: a checkpoint is due when its files are whole by their headers and nothing in it has changed for a while; what a
journal has is never due again, and other weights in its place are refused; a lock of a dead process is free.
"""

import fcntl
import json
import logging
import os
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullrank._errors import DataError, SettingError, first_few
from fullrank._files import write_atomically
from fullrank.checkpoints import Evaluation
from fullrank.discover import Candidate, fingerprint_of
from fullrank.modelfiles import fingerprint

__all__ = ["Recognition", "Sightings", "base_fingerprint", "held_lock", "note_settings"]

logger = logging.getLogger(__name__)

SETTINGS = "settings.json"
"""What the scores of a watch were made with, beside its journal."""
FIRST_WAIT, LONGEST_WAIT = 5.0, 600.0
"""Seconds before a failed evaluation is tried again: at first, doubled each time, and at most."""


@dataclass
class Sightings:
    """What was seen of each checkpoint, and when.

    Attributes:
        quiet: seconds for which nothing in a folder may change before it is taken.
        attempts: how often an evaluation is tried before it has failed.
    """

    quiet: float
    attempts: int
    _since: dict[str, tuple[object, float]] = field(default_factory=dict)
    _changed: dict[str, tuple[object, float]] = field(default_factory=dict)
    _named: set[str] = field(default_factory=set)
    _failures: dict[str, int] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)

    def due(self, candidates: Iterable[Candidate], done: Collection[int], now: float) -> Candidate | None:
        """Returns the earliest checkpoint to evaluate now, or None.

        Args:
            candidates: what lies there.
            done: steps that the journal has.
            now: seconds, of a clock that only moves on.
        """
        new = (c for c in candidates if c.step is not None and c.step not in done)
        ready = (c for c in self.settled(new, now) if self.may_try(c.name, now))
        return min(ready, key=lambda c: c.step or 0, default=None)

    def settled(self, candidates: Iterable[Candidate], now: float) -> list[Candidate]:
        """Returns the checkpoints that are whole and in which nothing has changed for a while."""
        quiet = []
        for candidate in candidates:
            mark = _mark(candidate.path)
            if mark != self._changed.get(candidate.name, (None, now))[0] or candidate.name not in self._changed:
                self._changed[candidate.name] = (mark, now)
            before, since = self._since.get(candidate.name, (None, now))
            if mark != before or candidate.problem:
                self._since[candidate.name] = (mark, now)
            elif now - since >= self.quiet:
                quiet.append(candidate)
        return quiet

    def failed(self, candidate: Candidate, now: float) -> bool:
        """Notes a failure, and returns whether it was the last attempt; else the next one waits, longer each time."""
        return self.failed_again(candidate.name, now)

    def failed_again(self, name: str, now: float) -> bool:
        """The same of what is no folder of the run: the base model."""
        n = self._failures[name] = self._failures.get(name, 0) + 1
        self._not_before[name] = now + min(LONGEST_WAIT, FIRST_WAIT * 2 ** (n - 1))
        return n >= self.attempts

    def may_try(self, name: str, now: float) -> bool:
        """Returns whether the wait after a failure is over."""
        return now >= self._not_before.get(name, now)

    def stalled(self, candidates: Iterable[Candidate], now: float) -> list[Candidate]:
        """Returns the checkpoints that are not whole and have been quiet for a while; each once."""
        found = [
            c
            for c in candidates
            if c.problem and c.name in self._changed and now - self._changed[c.name][1] >= self.quiet
        ]
        fresh = [c for c in found if c.name not in self._named]
        self._named |= {c.name for c in fresh}
        return fresh

    def forget(self, name: str) -> None:
        """Drops the failures of a checkpoint that is in the journal now."""
        self._failures.pop(name, None)

    @property
    def waiting(self) -> frozenset[str]:
        """Names of checkpoints that have failed and are tried again."""
        return frozenset(self._failures)

    @property
    def last_change(self) -> float | None:
        """When a file was last seen to change, or None: a folder that stays half-written is no news."""
        return max((when for _, when in self._changed.values()), default=None)


class Recognition:
    """Knows the weights that a journal has scores of.

    Args:
        folder: of the journal, for messages.
        base: path or hub id of the base model that was given.
    """

    def __init__(self, folder: Path, base: str | None) -> None:
        self.folder, self.base = folder, base
        self._compared: dict[str, object] = {}

    def refuse_others(self, candidates: Iterable[Candidate], lines: Iterable[Evaluation]) -> None:
        """Raises `DataError` where a checkpoint is not the one that its line is of: another training has begun."""
        scored, others = {line.step: line.fingerprint for line in lines if line.fingerprint}, []
        for candidate in candidates:
            if candidate.problem or candidate.step not in scored:
                continue
            if candidate.step == 0 and (self.base or candidate.base):
                continue  # that line is of the base
            mark = _mark(candidate.path)
            if mark == self._compared.get(candidate.name):
                continue
            differs = self._fingerprint(candidate) not in ("", scored[candidate.step])
            if mark != _mark(candidate.path):  # it is being written, or deleted
                continue
            self._compared[candidate.name] = mark
            others += [candidate.name] if differs else []
        self._refuse(others)

    def refuse_other_base(self, candidates: Iterable[Candidate], lines: Iterable[Evaluation]) -> None:
        """The same of the base model: the one given, else the first that an adapter names."""
        known = next((line.fingerprint for line in lines if line.step == 0), "")
        source = self.base or next((c.base for c in candidates if c.base), None)
        if source and known and base_fingerprint(source) not in ("", known):
            self._refuse([f"the base model {source}"])

    def _fingerprint(self, candidate: Candidate) -> str:
        try:
            return fingerprint_of(candidate, self.base)
        except OSError:  # it vanishes
            return ""

    def _refuse(self, others: list[str]) -> None:
        if others:
            raise DataError(
                f"{self.folder} has scores of other weights than lie there now ({first_few(others)}): another training "
                "or base has taken their place, and old and new scores cannot be compared; move it away to begin anew"
            )


def base_fingerprint(source: str) -> str:
    """Returns the fingerprint of a base model in a folder; "" for one of a hub, or one that cannot be read."""
    folder = Path(source).expanduser()
    try:
        return fingerprint(folder) if folder.is_dir() else ""
    except OSError:
        return ""


def note_settings(folder: Path, settings: Mapping[str, Any], *, begun: bool) -> None:
    """Notes in a watch's folder what its scores are made with.

    Args:
        folder: of the journal.
        settings: JSON values by name.
        begun: whether there are scores already.

    Raises:
        DataError: they were made with others.
    """
    try:
        before = _read_settings(folder / SETTINGS)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / SETTINGS} cannot be read ({error}); move {folder} away to begin anew") from error
    if begun and before != settings:
        differing = [name for name in settings if before.get(name) != settings[name]]
        raise DataError(
            f"{folder} was begun with other settings ({', '.join(differing)}), and its scores cannot be compared "
            "with new ones; move it away to begin anew, or start with those of before"
        )
    write_atomically(folder / SETTINGS, json.dumps(settings, indent=1) + "\n")


def _read_settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    body = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(body, dict):
        raise ValueError("no JSON object")
    return body


def _mark(path: Path) -> object:
    """Returns what changes whenever a file below ``path`` is written; None where it has vanished meanwhile."""
    try:
        files = sorted(p for p in path.rglob("*") if p.is_file())
        return tuple((str(p), stat.st_size, stat.st_mtime_ns) for p in files for stat in [p.stat()])
    except OSError:
        return None


@contextmanager
def held_lock(path: Path, taken: str, *, needed: bool = True) -> Iterator[None]:
    """Holds the lock file ``path`` for the time of the body; the system frees it when the process dies, however.

    On a file system that several machines share, this needs one that carries locks between them (NFS does).

    Args:
        path: of the lock file.
        taken: begins the message where another process holds it.
        needed: False goes on with a warning where the file system carries no locks, or the file cannot be written.

    Raises:
        SettingError: another process holds it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if needed:
            raise
        logger.warning("%s cannot be locked (%s): see that nothing else writes there", path, error)
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingError(f"{taken} already by {_holder(path)}; stop that one first") from None
        except OSError as error:
            if not needed:
                logger.warning("%s cannot be locked (%s): see that nothing else writes there", path, error)
                yield
                return
            raise SettingError(
                f"{path} cannot be locked ({error}): its file system carries no locks; watch from elsewhere"
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        yield
    finally:
        os.close(descriptor)


def _holder(path: Path) -> str:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        return f"process {int(body['pid'])} on {body['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
