"""Which checkpoints of a run may go: a pure decision, and the one place that carries it out.

Promise: nothing outside the run's folder is deleted, and never the newest, the best, the one that the trainer holds for
best or would resume from, an unscored one, or one that has changed since it was scored.
"""

import logging
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullrank._errors import DataError, SettingError
from fullrank.discover import STATE, Candidate, checkpoint_folders, fingerprint, state_of
from fullrank.selection import Selection

__all__ = ["Keepsake", "decide", "delete", "keepsakes"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keepsake:
    """A checkpoint folder with what decides on it.

    Attributes:
        name, step: of the folder.
        rank: place on the leaderboard from 0; None where it has no score and no bound that proves one.
        protected: why it stays whatever its rank, or "".
    """

    name: str
    step: int
    rank: int | None
    protected: str = ""


def decide(items: Iterable[Keepsake], *, keep_best: int, keep_last: int) -> dict[str, str]:
    """Returns, by name, why a checkpoint stays; "" for one that may go.

    >>> decide([Keepsake("checkpoint-2", 2, 1), Keepsake("checkpoint-4", 4, 0), Keepsake("checkpoint-6", 6, 2)],
    ...        keep_best=1, keep_last=1)
    {'checkpoint-2': '', 'checkpoint-4': 'among the 1 best', 'checkpoint-6': 'among the 1 newest'}

    Raises:
        SettingError: counts below 1: the best and the newest always stay.
    """
    for name, count in (("keep_best", keep_best), ("keep_last", keep_last)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise SettingError(f"{name}={count!r} must be at least 1: the best and the newest are never deleted")
    listed = sorted(items, key=lambda item: item.step)
    newest = {item.name for item in listed[-keep_last:]}
    why: dict[str, str] = {}
    for item in listed:
        if item.protected:
            why[item.name] = item.protected
        elif item.rank is None:
            why[item.name] = "not scored"
        elif item.rank < keep_best:
            why[item.name] = f"among the {keep_best} best"
        else:
            why[item.name] = f"among the {keep_last} newest" if item.name in newest else ""
    return why


def keepsakes(run_dir: str | Path, selection: Selection) -> list[Keepsake]:
    """Returns the ``checkpoint-N`` folders of a run, joined with the leaderboard by step.

    Folders that are links are left out, as are fullrank's own store and plain model folders: neither is ours to delete.
    """
    root = Path(run_dir).expanduser()
    # A candidate that a guard refused has its place by score, and may go; one that failed has none.
    steps = [row.step for row in selection.rows if row.status != "failed" and row.step is not None]
    rank = {step: place for place, step in enumerate(dict.fromkeys(steps))}
    folders = checkpoint_folders(root)
    held = _held_by_trainer([path for _, path in folders])
    known = {row.name for row in selection.rows if row.status != "failed"}
    chosen = None if selection.winner is None else selection.winner.step
    found = []
    for step, path in folders:
        if path.is_symlink():
            continue
        protected = "chosen" if step == chosen else held.get(path.name, "")
        twin = step in rank and path.name not in known  # its step was scored from the store
        found.append(Keepsake(path.name, step, rank.get(step), protected or ("not scored itself" if twin else "")))
    return found


def _held_by_trainer(folders: Sequence[Path]) -> dict[str, str]:
    """Returns the folders that the trainer would go back to, and why."""
    states = [(path, state_of(path)) for path in folders if (path / STATE).is_file()]
    if not states:
        return {}
    newest, state = max(states, key=lambda entry: int(entry[1].get("global_step") or 0))
    held = {newest.name: "the newest to resume from"}
    best = state.get("best_model_checkpoint")
    if isinstance(best, str) and best:
        held.setdefault(Path(best).name, "best_model_checkpoint of the trainer")
    return held


def delete(run_dir: str | Path, names: Sequence[str], selection: Selection) -> list[Path]:
    """Deletes checkpoint folders of a run, and returns the paths that are gone. The only place that deletes.

    Raises:
        DataError: a name that is no plain folder right below ``run_dir``, or whose weights have changed since they were
            scored; nothing is deleted then.
    """
    root = Path(run_dir).expanduser().resolve()
    scored = {row.name: row.fingerprint for row in selection.rows}
    paths = []
    for name in names:
        path = root / name
        if Path(name).name != name or path.is_symlink() or not path.is_dir() or path.resolve().parent != root:
            raise DataError(f"{path} is no folder right below {root}; nothing was deleted")
        now = fingerprint(Candidate(name, path, None, "model", True, "folder"))
        if scored.get(name) != now:
            raise DataError(f"{path} has changed since it was scored; nothing was deleted. Run the selection again")
        paths.append(path)
    for path in paths:
        shutil.rmtree(path)
        logger.info("deleted %s", path)
    return paths
