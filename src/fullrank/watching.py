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

from fullrank._errors import SettingError
from fullrank.discover import Candidate

__all__ = ["Sightings", "held_lock"]

logger = logging.getLogger(__name__)

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
            before, since = self._since.get(candidate.name, (None, now))
            if mark != before or candidate.problem:
                self._since[candidate.name] = (mark, now)
            elif now - since >= self.quiet and now >= self._not_before.get(candidate.name, now):
                ready.append(candidate)
        return min(ready, key=lambda c: c.step or 0, default=None)

    def failed(self, candidate: Candidate, now: float) -> bool:
        """Notes a failure, and returns whether it was the last attempt; else the next one waits, longer each time."""
        n = self._failures[candidate.name] = self._failures.get(candidate.name, 0) + 1
        self._not_before[candidate.name] = now + min(LONGEST_WAIT, FIRST_WAIT * 2 ** (n - 1))
        return n >= self.attempts

    def forget(self, name: str) -> None:
        """Drops the failures of a checkpoint that is in the journal now."""
        self._failures.pop(name, None)

    @property
    def waiting(self) -> frozenset[str]:
        """Names of checkpoints that have failed and are tried again."""
        return frozenset(self._failures)

    @property
    def last_change(self) -> float | None:
        """When something was last seen to change, or None."""
        return max((since for _, since in self._since.values()), default=None)


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
