"""Weights of a stored step: what training can change, written to a loadable folder and put back from it.

Promise: after `load_weights(model, folder)` the model computes what it computed when `save_weights` wrote that folder;
weights are read from safetensors only.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fullrank._errors import DataError, EvaluationError, first_few
from fullrank.adapters import (
    ADAPTER,
    adapter_tensors,
    carriers,
    check_adapters,
    load_adapters,
    lost_elsewhere,
    move_active_up,
)
from fullrank.modelfiles import EXTRA
from fullrank.models import refusing_made_up
from fullrank.wrappers import outermost

__all__ = [
    "changeable",
    "check_folder",
    "complete_extra",
    "load_probe",
    "load_weights",
    "save_extra",
    "save_probe",
    "save_weights",
    "stored_modules",
]

PROBE = "probe.safetensors"
_LOSS = "loss."


def save_weights(
    model: nn.Module, folder: Path, *, save_model: Callable[[Path], object] | None = None, loss: object = None
) -> list[str]:
    """Writes a loadable model folder, and returns why other loaders would make another model of it, if they would.

    All weights, or for PEFT the adapter; there ``extra.safetensors`` holds every tensor that training can change, by
    its live name, whatever the adapters are called and whatever trains beside them. Only `load_weights` reads it.

    Args:
        model: the model in training.
        folder: exists and is empty.
        save_model: writes the model; default is the model's own ``save_pretrained``, else its state as safetensors.
        loss: a loss module (or dict of them) whose trainable parameters go along.
    """
    save_pretrained = getattr(outermost(model), "save_pretrained", None)
    if save_model is not None:
        try:
            save_model(folder)
        except RuntimeError:  # safetensors refuses tied weights, which a trainer writes as they stand
            if callable(save_pretrained) or not _shares_memory(model):
                raise
            _save_state(model, folder)
    elif callable(save_pretrained):
        save_pretrained(str(folder))
    else:
        _save_state(model, folder)
    move_active_up(model, folder)
    save_extra(model, folder, loss=loss)
    if not any(folder.rglob(ADAPTER)):
        return []
    beside = _beside(model, stored_modules(model, folder))
    noted = [f"{len(beside)} tensors train beside the adapter ({beside[0]}, ...)"] if beside else []
    return noted + lost_elsewhere(model)


def save_extra(model: nn.Module, folder: Path, *, loss: object = None) -> None:
    """Writes ``extra.safetensors`` into a folder that holds a stored model, where there is something to add."""
    extra = {_LOSS + name: value for name, value in _loss_parameters(loss, model).items()}
    if any(folder.rglob(ADAPTER)):
        extra |= _trained(model) | dict(_buffers(model))
    if extra:
        save_file(_owned(extra), folder / EXTRA)


def complete_extra(model: nn.Module, folder: Path) -> None:
    """Adds the tensors that have begun to train since ``folder`` was stored: as they stand, before their first step."""
    if not (folder / EXTRA).is_file() or not any(folder.rglob(ADAPTER)):
        return
    state = load_file(folder / EXTRA)
    if fresh := {name: value for name, value in _trained(model).items() if name not in state}:
        partial = folder / f".{EXTRA}.partial"
        save_file({**state, **_owned(fresh)}, partial)
        partial.replace(folder / EXTRA)


def load_weights(model: nn.Module, folder: str | os.PathLike[str], *, loss: object = None) -> None:
    """Puts the weights stored in ``folder`` into ``model`` (and ``loss``), in place.

    Args:
        model: of the same kind as the one that was stored.
        folder: a stored step, or a checkpoint of the trainer.
        loss: the loss of the training run, to go on training; None leaves out its parameters.

    Raises:
        EvaluationError: the folder does not hold all that the model needs.
    """
    folder = Path(folder)
    state = load_file(folder / EXTRA) if (folder / EXTRA).is_file() else {}
    if loss is None:
        state = {name: value for name, value in state.items() if not name.startswith(_LOSS)}
    live = {**{_LOSS + n: v for n, v in _loss_parameters(loss, model).items()}, **_tensors(outermost(model))}
    if unknown := [name for name in state if name not in live]:
        raise EvaluationError(f"{folder / EXTRA} does not fit the model: unknown {unknown[:3]}")
    # A wrapper around an adapted backbone is saved as a whole state, without adapter files.
    adapters = sorted(folder.rglob(ADAPTER))
    if not adapters:
        _load_whole(outermost(model), folder)
    elif missing := _not_in(state, model):  # a checkpoint that we did not write, or an adapter that did not train
        filed = {name: value for name, value in stored_modules(model, folder).items() if name in live}
        if lost := [name for name in _beside(model, filed) if name in missing]:
            raise EvaluationError(f"{folder} does not hold what trains beside the adapter: {lost[:3]}")
        load_adapters(model, adapters, folder)
        state = {**filed, **state}
    _copy(state, live)


def save_probe(probe: Tensor, folder: Path) -> None:
    """Writes embeddings of the probe texts beside the weights that gave them, and what the other files hold."""
    save_file({"embeddings": probe.contiguous()}, folder / PROBE, metadata={"files": json.dumps(_digests(folder))})


def load_probe(folder: Path) -> Tensor | None:
    """Returns the stored probe embeddings, or None."""
    path = folder / PROBE
    return load_file(path)["embeddings"] if path.is_file() else None


def check_folder(model: nn.Module, folder: Path) -> None:
    """Proves that other loaders find what was stored: the files beside the weights, and the adapters of ``model``.

    Raises:
        EvaluationError: a file is gone or another one than was written.
    """
    with safe_open(folder / PROBE, "pt") as file:
        written: dict[str, str] = json.loads((file.metadata() or {}).get("files", "{}"))
    found = _digests(folder)
    if changed := [name for name, digest in written.items() if found.get(name) != digest]:
        raise EvaluationError(
            f"{folder} is not as it was stored: {first_few(changed)} changed or gone. Do not use this folder"
        )
    if (folder / EXTRA).is_file() or any(folder.rglob(ADAPTER)):
        check_adapters(model, folder)


def changeable(model: nn.Module, *, loss: object = None) -> list[Tensor]:
    """Returns what training can change: trained parameters, stored buffers, parameters of the loss."""
    return [*_trained(model).values(), *dict(_buffers(model)).values(), *_loss_parameters(loss, model).values()]


def _save_state(model: nn.Module, folder: Path) -> None:
    save_file(_owned(outermost(model).state_dict()), folder / "model.safetensors", metadata={"format": "pt"})


def _shares_memory(model: nn.Module) -> bool:
    places = [value.data_ptr() for value in _tensors(outermost(model)).values() if value.numel()]
    return len(set(places)) < len(places)


def _load_whole(model: nn.Module, folder: Path) -> None:
    """Copies a stored state into the live model; rebuilding it is the last resort, as a class may need arguments."""
    live = _tensors(model)
    state = stored_modules(model, folder) if (folder / "modules.json").is_file() else _read_tensors(folder)
    if _misfit(state, live) is not None:
        state = _rebuilt(model, folder)
    if (misfit := _misfit(state, live)) is not None:
        raise EvaluationError(f"{folder} does not fit the model: {misfit}")
    _copy(state, live)


def stored_modules(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Returns the state of a SentenceTransformer: each module's file, under the live names of that module.

    Where an adapter stands for a module, nothing of it is there.
    """
    live = _tensors(model)
    state: dict[str, Tensor] = {}
    if not (folder / "modules.json").is_file():
        return state
    for entry in json.loads((folder / "modules.json").read_text(encoding="utf-8")):
        tensors = _read_tensors(folder / entry["path"])
        prefixes = (f"{entry['name']}.", f"{entry['name']}.model.", f"{entry['name']}.auto_model.")
        prefix = next((p for p in prefixes if all(p + name in live for name in tensors)), prefixes[0])
        state |= {prefix + name: value for name, value in tensors.items()}
    return state


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        state |= load_file(path)
    return state


def _rebuilt(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    kind: Any = type(model)
    try:
        with refusing_made_up(str(folder)):
            if hasattr(kind, "from_pretrained"):
                fresh = kind.from_pretrained(str(folder))
            else:
                fresh = kind(str(folder), device="cpu", local_files_only=True)
    except DataError as error:
        raise EvaluationError(str(error)) from error
    except Exception as error:  # whatever a foreign constructor raises
        raise EvaluationError(f"{folder} cannot be loaded as a {kind.__name__}: {error}") from error
    return dict(fresh.state_dict())


def _misfit(state: dict[str, Tensor], live: dict[str, Tensor]) -> str | None:
    """Returns what of a stored state does not fit the live tensors, or None. Tied weights are stored once."""
    unknown = [name for name in state if name not in live]
    stored = {live[name].data_ptr() for name in state if name in live}
    missing = [n for n, value in live.items() if n not in state and value.numel() and value.data_ptr() not in stored]
    return f"unknown {unknown[:3]}, missing {missing[:3]}" if unknown or missing else None


def _copy(state: dict[str, Tensor], live: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in state.items():
            live[name].copy_(value)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the live parameters and stored buffers by name."""
    return model.state_dict(keep_vars=True)


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters that training changes, by live name."""
    return {name: value for name, value in _tensors(outermost(model)).items() if value.requires_grad}


def _not_in(state: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Returns what trains, and what an adapter consists of although it does not, that ``state`` does not hold."""
    # Of several adapted modules no file tells which it belongs to: what does not train there stays as it is.
    own = adapter_tensors(model) if len(carriers(model)) == 1 else set()
    names = (n for n, value in _tensors(outermost(model)).items() if value.requires_grad or value.data_ptr() in own)
    return [name for name in names if name not in state]


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    stored = _tensors(outermost(model))
    return ((name, value) for name, value in outermost(model).named_buffers() if name in stored)


def _beside(model: nn.Module, filed: dict[str, Tensor]) -> list[str]:
    """Returns the trained parameters that neither an adapter file nor ``filed`` holds."""
    held = adapter_tensors(model)
    return [name for name, value in _trained(model).items() if name not in filed and value.data_ptr() not in held]


def _digests(folder: Path) -> dict[str, str]:
    """Returns a hash of each file but the weights, which are compared as tensors, and the card, which goes on."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in {".safetensors", ".md"}
    }


def _loss_parameters(loss: object, model: nn.Module) -> dict[str, Tensor]:
    known = {id(value) for value in outermost(model).parameters()}
    return {
        name: value
        for prefix, module in _losses(loss)
        for name, value in ((prefix + n, v) for n, v in module.named_parameters())
        if value.requires_grad and id(value) not in known
    }


def _losses(loss: object) -> Iterator[tuple[str, nn.Module]]:
    items: dict[str, Any] = loss if isinstance(loss, dict) else {"": loss}
    return ((f"{name}." if name else "", part) for name, part in items.items() if isinstance(part, nn.Module))


def _owned(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors contiguous, on the CPU, and each with memory of its own, as safetensors wants them."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
