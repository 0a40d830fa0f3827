"""Handing a choice over: the chosen weights as an ordinary model folder, with a card that says by what it was chosen.

Promise: the folder loads by itself, without the state of the training; a copy that fails leaves nothing behind.
"""

import shutil
from pathlib import Path

from fullrank._errors import DataError
from fullrank.averaging import copy_model
from fullrank.candidates import Loader, save_loaded
from fullrank.card import card_section, with_section
from fullrank.discover import inspect_folder
from fullrank.encode import Adapter
from fullrank.selection import BASE, SOUP, Selection
from fullrank.weights import EXTRA

__all__ = ["hand_over"]


def hand_over(selection: Selection, target: str | Path, *, base: str | None = None) -> Path:
    """Writes the chosen model to the new or empty folder ``target``, and returns its path.

    A SentenceTransformer's folder is copied. What lacks such files, and an adapter beside which more was trained (which
    only fullrank reads), is loaded and written whole.

    Raises:
        DataError: nothing was chosen, or its folder has vanished.
        OSError: it cannot be written.
    """
    winner, folder = selection.winner, Path(target).expanduser()
    if winner is None:
        raise DataError("nothing was chosen, so there is nothing to write")
    if folder.is_dir():
        folder.rmdir()  # empty: the caller has made sure, and this raises otherwise
    source = Path(winner.path).expanduser()
    found = inspect_folder(source, winner.name, step=winner.step) if source.is_dir() else None
    folder.parent.mkdir(parents=True, exist_ok=True)
    if found is None or found.problem:
        if winner.name != BASE:
            raise DataError(
                f"{source} cannot be read any more: {'it has vanished' if found is None else found.problem}"
            )
        _write(Loader().load_base(winner.path, None)[1], folder)
    elif found.bare or (found.kind == "adapter" and (source / EXTRA).is_file()):
        _write(Loader(base).load(found)[1], folder)
    else:
        copy_model(source, folder)
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    card.write_text(with_section(text, _section(selection)), encoding="utf-8")
    return folder


def _section(selection: Selection) -> str:
    winner, result = selection.winner, selection.result
    assert winner is not None
    assert result is not None  # a winner was evaluated in full
    confirmed = selection.confirmed
    step = winner.step or 0
    section = card_section(
        str(selection.leading),
        result,
        golden=str(result.provenance.get("name", "")),
        step=step,
        base=selection.base_result,
        chosen_by=selection.objective,
        confirmed=None
        if confirmed is None
        else (str(confirmed.provenance.get("name", "")), confirmed, selection.base_confirmed),
    )
    mean = "The mean of the steps that could not be told apart"
    what = f"Step {step}" if winner.step is not None else mean if winner.name == SOUP else "A model folder of the run"
    highest = (
        "had the highest" if selection.rule == "max" else "is the earliest within one standard error of the highest"
    )
    return section.replace(f"Step {step} had the highest", f"{what} {highest}", 1)


def _write(encoder: Adapter, folder: Path) -> None:
    try:
        save_loaded(encoder, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
