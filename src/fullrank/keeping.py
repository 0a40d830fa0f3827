"""Which checkpoints of a run may go: a pure decision, and the one place that carries it out.

Promise: nothing outside the run's folder is deleted, and never the newest, the best eligible one, the one that the
trainer holds for best or would resume from, the base of another model, the target of a link, an unscored one, or one
that has changed since it was scored.
"""

import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullrank._errors import DataError, SettingError
from fullrank.discover import Candidate, checkpoint_folders, discover, fingerprint_of, inspect_folder
from fullrank.modelfiles import STATE, is_own_checkpoint, state_of
from fullrank.selection import BASE, SOUP, Row, Selection

__all__ = ["Keepsake", "decide", "delete", "keepsakes", "refuse_counts"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keepsake:
    """A checkpoint folder with what decides on it.

    Attributes:
        name, step: of the folder.
        rank: place among the eligible checkpoints from 0; None where it has none.
        refused: it was scored and a guard refused it: it is none of the best.
        protected: why it stays whatever its rank, or "".
    """

    name: str
    step: int
    rank: int | None
    refused: bool = False
    protected: str = ""


def decide(items: Iterable[Keepsake], *, keep_best: int, keep_last: int) -> dict[str, str]:
    """Returns, by name, why a checkpoint stays; "" for one that may go.

    >>> decide([Keepsake("checkpoint-2", 2, 1), Keepsake("checkpoint-4", 4, 0), Keepsake("checkpoint-6", 6, 2)],
    ...        keep_best=1, keep_last=1)
    {'checkpoint-2': '', 'checkpoint-4': 'among the 1 best', 'checkpoint-6': 'among the 1 newest'}

    Raises:
        SettingError: counts below 1: the best and the newest always stay.
    """
    refuse_counts(keep_best, keep_last)
    listed = sorted(items, key=lambda item: item.step)
    newest = {item.name for item in listed[-keep_last:]}
    has_best = any(item.rank is not None for item in listed)
    why: dict[str, str] = {}
    for item in listed:
        if item.protected:
            why[item.name] = item.protected
        elif item.rank is None and not (item.refused and has_best):
            why[item.name] = "no checkpoint is eligible" if item.refused else "not scored"
        elif item.rank is not None and item.rank < keep_best:
            why[item.name] = f"among the {keep_best} best"
        else:
            why[item.name] = f"among the {keep_last} newest" if item.name in newest else ""
    return why


def refuse_counts(keep_best: int | None, keep_last: int | None) -> None:
    """Raises `SettingError` for counts below 1; None is not asked for."""
    for name, count in (("keep_best", keep_best), ("keep_last", keep_last)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise SettingError(f"{name}={count!r} must be at least 1: the best and the newest are never deleted")


def keepsakes(run_dir: str | Path, selection: Selection, *, base: str | None = None) -> list[Keepsake]:
    """Returns the ``checkpoint-N`` folders of a run, joined with the leaderboard by folder.

    Folders that are links are left out, as are fullrank's own store and plain model folders: neither is ours to delete.

    Args:
        run_dir: the run's folder.
        selection: what was said of it.
        base: the base model that was given for it.
    """
    root = Path(run_dir).expanduser()
    folders = [(step, path) for step, path in checkpoint_folders(root) if is_own_checkpoint(path)]
    candidates = discover(root)
    rows = {name: row for name, row in _rows(root, selection).items() if row.status != "failed"}
    paths = {path.name for _, path in folders}
    scored = {name: row for name, row in rows.items() if name in paths and not row.is_that_of(selection.base)}
    rank = {name: place for place, name in enumerate(n for n, row in scored.items() if row.eligible is not False)}
    held = {path.name: _copy_of(path, step, candidates) for step, path in folders if path.name not in rows}
    held |= _held_by_trainer([path for _, path in folders]) | _needed(candidates, root, selection, base)
    held |= {name: "chosen" for name, row in rows.items() if row.is_that_of(selection.winner)}
    return [
        Keepsake(
            path.name, step, rank.get(path.name), path.name in scored and path.name not in rank, held.get(path.name, "")
        )
        for step, path in folders
    ]


def _rows(root: Path, selection: Selection) -> dict[str, Row]:
    """Returns the rows of the folders right below ``root``, by name, in the order of the leaderboard."""
    where = root.resolve()
    found = ((Path(row.path), row) for row in selection.rows if row.origin not in (BASE, SOUP))
    return {path.name: row for path, row in found if path.parent.resolve() == where}


def _copy_of(path: Path, step: int, candidates: Sequence[Candidate]) -> str:
    """Returns of which candidate a folder holds the weights, or "" where it is a candidate itself."""
    others = [candidate.name for candidate in candidates if candidate.step == step and not candidate.problem]
    if not others or any(candidate.path == path for candidate in candidates):
        return ""
    return f"a copy of {' or '.join(others)}"


def _needed(candidates: Iterable[Candidate], root: Path, selection: Selection, base: str | None) -> dict[str, str]:
    """Returns the folders right below ``root`` that something else needs, and why."""
    bases = {candidate.base for candidate in candidates if candidate.base} | {base}
    bases |= set() if selection.base is None else {selection.base.path}
    needed = {_below(root, Path(source).expanduser()): "a base model" for source in bases if source}
    needed |= {_below(root, link): f"the target of the link {link.relative_to(root)}" for link in _links(root)}
    return {name: why for name, why in needed.items() if name}


def _links(root: Path) -> Iterator[Path]:
    for above, folders, files in os.walk(root):
        yield from (path for name in (*folders, *files) if (path := Path(above) / name).is_symlink())


def _below(root: Path, path: Path) -> str:
    """Returns the name of the folder right below ``root`` in which a path ends, or ""."""
    try:
        return path.resolve().relative_to(root.resolve()).parts[0]
    except (ValueError, IndexError, OSError, RuntimeError):
        return ""


def _held_by_trainer(folders: Sequence[Path]) -> dict[str, str]:
    """Returns the folders that the trainer would go back to, and why."""
    held, states = {}, []
    for path in folders:
        if not (path / STATE).is_file():
            continue
        try:
            state = state_of(path)
            states.append((int(state.get("global_step") or 0), path.name, state.get("best_model_checkpoint")))
        except (DataError, OSError, TypeError, ValueError):
            held[path.name] = f"its {STATE} cannot be read"
    if states:
        _, newest, best = max(states, key=lambda entry: entry[0])
        if isinstance(best, str) and best:
            held.setdefault(Path(best).name, "best_model_checkpoint of the trainer")
        held[newest] = "the newest to resume from"
    return held


def delete(run_dir: str | Path, names: Sequence[str], selection: Selection, *, base: str | None = None) -> list[Path]:
    """Deletes checkpoint folders of a run, and returns the paths that are gone. The only place that deletes.

    What cannot be deleted (no permission) is an error line and stays, as far as it does.

    Raises:
        DataError: a name that is no plain folder right below ``run_dir``, that something else needs, or whose weights
            have changed since they were scored; nothing is deleted then.
    """
    root = Path(run_dir).expanduser().resolve()
    scored = {name: row.fingerprint for name, row in _rows(root, selection).items()}
    needed = _needed(discover(root), root, selection, base)
    paths = []
    for name in names:
        path = root / name
        if Path(name).name != name or path.is_symlink() or not path.is_dir() or path.resolve().parent != root:
            raise DataError(f"{path} is no folder right below {root}; nothing was deleted")
        if name in needed:
            raise DataError(f"{path} is {needed[name]}; nothing was deleted")
        found = inspect_folder(path, name)
        if found is None or scored.get(name) != fingerprint_of(found, base):
            raise DataError(f"{path} has changed since it was scored; nothing was deleted. Run the selection again")
        paths.append(path)
    gone = []
    for path in paths:
        try:
            shutil.rmtree(path)
        except OSError as error:
            logger.error("%s could not be deleted: %s", path, error)
            continue
        logger.info("deleted %s", path)
        gone.append(path)
    return gone
