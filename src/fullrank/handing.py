"""Handing a choice over: the chosen weights as an ordinary model folder, with a card that says by what it was chosen.

Promise: the folder loads by itself, without the state of the training; a copy that fails leaves nothing behind.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from fullrank._errors import DataError, EvaluationError
from fullrank._files import empty_folder
from fullrank.averaging import copy_model
from fullrank.candidates import Loader, backbone_folder, save_loaded
from fullrank.card import card_section, with_section
from fullrank.discover import inspect_folder
from fullrank.encode import as_encoder
from fullrank.modelfiles import ADAPTER_CONFIG, EXTRA
from fullrank.models import load_sentence_transformer
from fullrank.selection import BASE, SOUP, Row, Selection

__all__ = ["hand_over"]

PROBE = ["how are files opened", "a", "weights of a model, written and read back"]
PROBE_TOLERANCE = 1e-4
"""Merging an adapter rounds anew."""


def hand_over(selection: Selection, target: str | Path, *, base: str | None = None) -> Path:
    """Writes the chosen model to the new or empty folder ``target``, and returns its path.

    A SentenceTransformer's folder is copied; a copied adapter names the base that it was scored on. What lacks such
    files, an adapter beside which more was trained (which only fullrank reads), and a base that was scored in the shape
    of a checkpoint, is loaded and written whole. What was written is loaded and must embed as what was chosen.

    Raises:
        DataError: nothing was chosen, its folder has vanished, or what was written does not load.
        EvaluationError: what was written embeds otherwise than what was chosen.
        SettingError: the folder is not empty.
        OSError: it cannot be written.
    """
    winner = selection.winner
    if winner is None:
        raise DataError("nothing was chosen, so there is nothing to write")
    folder = empty_folder(target)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    # In the folder itself: it may be a mount, the working folder, or the end of a link, none of which can be replaced.
    partial = folder / f".{os.getpid()}.partial"
    try:
        expected = _written(selection, winner, partial, base)
        _refuse_other(expected, partial)
        card = partial / "README.md"
        text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
        card.write_text(with_section(text, _section(selection)), encoding="utf-8")
        _move_contents(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _move_contents(source: Path, target: Path) -> None:
    """Moves what is in a folder into another one of its file system: all of it, or nothing."""
    moved: list[Path] = []
    try:
        for path in sorted(source.iterdir()):
            moved.append(path.rename(target / path.name))
        source.rmdir()
    except BaseException:
        for path in moved:
            path.rename(source / path.name)
        raise


def _written(selection: Selection, winner: Row, folder: Path, base: str | None) -> Tensor:
    """Writes the model, and returns how the chosen one embeds the probe texts."""
    source = Path(winner.path).expanduser()
    if winner.origin == BASE:
        shape = selection.base_shape
        like = None if shape is None else inspect_folder(Path(shape), Path(shape).name)
        encoder = Loader(base).load_base(winner.path, like)[1]
        expected = encoder.encode_queries(PROBE)
        save_loaded(encoder, folder, adapters=False)
        return expected
    found = inspect_folder(source, winner.name, step=winner.step) if source.is_dir() else None
    if found is None or found.problem:
        raise DataError(f"{source} cannot be read any more: {'it has vanished' if found is None else found.problem}")
    encoder = Loader(base).load(found)[1]
    expected = encoder.encode_queries(PROBE)
    if found.bare or (found.kind == "adapter" and (source / EXTRA).is_file()):
        save_loaded(encoder, folder)
    else:
        copy_model(source, folder)
        if found.kind == "adapter":
            _name_base(folder / ADAPTER_CONFIG, base or found.base)
    return expected


def _name_base(config: Path, base: str | None) -> None:
    """Writes the base that an adapter was scored on into its configuration."""
    if base is None or not config.is_file():
        return
    local = Path(base).expanduser()
    body = json.loads(config.read_text(encoding="utf-8"))
    body["base_model_name_or_path"] = str(backbone_folder(local)) if local.is_dir() else base
    config.write_text(json.dumps(body, indent=2), encoding="utf-8")


def _refuse_other(expected: Tensor, folder: Path) -> None:
    model = load_sentence_transformer(str(folder)).float().eval()
    found = as_encoder(model).encode_queries(PROBE)
    if expected.shape != found.shape or not torch.allclose(expected.cpu(), found.cpu(), atol=PROBE_TOLERANCE):
        raise EvaluationError("what was written embeds otherwise than what was chosen; it was not kept")


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
    what = f"Step {step}" if winner.step is not None else mean if winner.origin == SOUP else "A model folder of the run"
    highest = (
        "had the highest" if selection.rule == "max" else "is the earliest within one standard error of the highest"
    )
    return section.replace(f"Step {step} had the highest", f"{what} {highest}", 1)
