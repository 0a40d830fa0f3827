"""Watching a run's folder: which checkpoint is due, and the lock that one watcher at a time holds.

Promise: a checkpoint is due when its files are whole by their headers and nothing in it has changed for a while; what a
journal has is never due again; a lock of a dead process is free.
"""

import fcntl
import json
import logging
import os
import socket
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullrank._errors import SettingError
from fullrank.discover import Candidate

__all__ = ["SETTINGS", "Sightings", "held_lock", "read_settings"]

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
        ready = []
        for candidate in candidates:
            if candidate.step is None or candidate.step in done:
                continue
            mark = _mark(candidate.path)
            if mark != self._changed.get(candidate.name, (None, now))[0] or candidate.name not in self._changed:
                self._changed[candidate.name] = (mark, now)
            before, since = self._since.get(candidate.name, (None, now))
            if mark != before or candidate.problem:
                self._since[candidate.name] = (mark, now)
            elif now - since >= self.quiet and self.may_try(candidate.name, now):
                ready.append(candidate)
        return min(ready, key=lambda c: c.step or 0, default=None)

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


def read_settings(folder: Path) -> dict[str, Any]:
    """Returns what the scores in a watch's folder were made with; empty where it is new.

    Raises:
        ValueError: the file holds no JSON object.
    """
    file = folder / SETTINGS
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
