"""Weights of a stored step: what training can change, written to a loadable folder and put back from it.

Promise: after `load_weights(model, folder)` the model computes what it computed when `save_weights` wrote that folder;
weights are read from safetensors only.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fullrank._errors import EvaluationError, SettingError
from fullrank._optional import require

__all__ = [
    "changeable",
    "has_adapters",
    "load_probe",
    "load_weights",
    "refuse_shadowed_adapter",
    "save_extra",
    "save_probe",
    "save_weights",
]

EXTRA = "extra.safetensors"
PROBE = "probe.safetensors"
ADAPTER = "adapter_model.safetensors"
_LOSS = "loss."


def save_weights(
    model: nn.Module, folder: Path, *, save_model: Callable[[Path], object] | None = None, loss: object = None
) -> list[str]:
    """Writes a loadable model folder, and returns the names of tensors that other loaders will not find in it.

    All weights, or for PEFT the adapter; there ``extra.safetensors`` holds every tensor that training can change, by
    its live name, whatever the adapters are called and whatever trains beside them. Only `load_weights` reads it.

    Args:
        model: the model in training.
        folder: exists and is empty.
        save_model: writes the model; default is the model's own ``save_pretrained``, else its state as safetensors.
        loss: a loss module (or dict of them) whose trainable parameters go along.
    """
    if save_model is not None:
        save_model(folder)
    elif callable(save_pretrained := getattr(_outer(model), "save_pretrained", None)):
        save_pretrained(str(folder))
    else:
        save_file(_owned(_outer(model).state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
    save_extra(model, folder, loss=loss)
    if not any(folder.rglob(ADAPTER)):
        return []
    filed = _stored_modules(model, folder)
    return [name for name in _trained(model) if name not in filed and not _is_adapter(name)]


def save_extra(model: nn.Module, folder: Path, *, loss: object = None) -> None:
    """Writes ``extra.safetensors`` into a folder that holds a stored model, where there is something to add."""
    extra = {_LOSS + name: value for name, value in _loss_parameters(loss, model).items()}
    if any(folder.rglob(ADAPTER)):
        extra |= _trained(model) | dict(_buffers(model))
    if extra:
        save_file(_owned(extra), folder / EXTRA)


def load_weights(model: nn.Module, folder: Path, *, loss: object = None) -> None:
    """Puts the weights stored in ``folder`` into ``model`` (and ``loss``), in place.

    Raises:
        EvaluationError: the folder does not hold all that the model needs.
    """
    state = load_file(folder / EXTRA) if (folder / EXTRA).is_file() else {}
    live = {**{_LOSS + n: v for n, v in _loss_parameters(loss, model).items()}, **_tensors(_outer(model))}
    if unknown := [name for name in state if name not in live]:
        raise EvaluationError(f"{folder / EXTRA} does not fit the model: unknown {unknown[:3]}")
    # A wrapper around an adapted backbone is saved as a whole state, without adapter files.
    adapters = sorted(folder.rglob(ADAPTER))
    if not adapters:
        _load_whole(_outer(model), folder)
    elif missing := [name for name in _trained(model) if name not in state]:  # a checkpoint that we did not write
        filed = {name: value for name, value in _stored_modules(model, folder).items() if name in live}
        lost = [name for name in missing if name not in filed and not _is_adapter(name)]
        if lost:
            raise EvaluationError(f"{folder} does not hold what trains beside the adapter: {lost[:3]}")
        _load_adapters(_adapted(model), adapters, folder)
        state = {**filed, **state}
    _copy(state, live)


def refuse_shadowed_adapter(model: object) -> None:
    """Raises `SettingError` for the PEFT form that trains but cannot be saved and loaded.

    ``model[0].auto_model = get_peft_model(...)`` registers a second child beside ``model``: the checkpoint that is
    written then loads wrong.
    """
    for name, part in _outer(model).named_modules() if isinstance(model, nn.Module) else ():
        children = dict(part.named_children())
        if "model" in children and "auto_model" in children:
            where = f"model[{name}]" if name.isdigit() else name or "model"
            raise SettingError(
                f"{where} has two backbones, 'model' and 'auto_model': get_peft_model was assigned to .auto_model, "
                f"which trains but saves a checkpoint that loads wrong. Write {where}.model = "
                f"get_peft_model({where}.model, config) instead"
            )


def save_probe(probe: Tensor, folder: Path) -> None:
    """Writes embeddings of the probe texts beside the weights that gave them."""
    save_file({"embeddings": probe.contiguous()}, folder / PROBE)


def load_probe(folder: Path) -> Tensor | None:
    """Returns the stored probe embeddings, or None."""
    path = folder / PROBE
    return load_file(path)["embeddings"] if path.is_file() else None


def changeable(model: nn.Module, *, loss: object = None) -> list[Tensor]:
    """Returns what training can change: trained parameters, stored buffers, parameters of the loss."""
    return [*_trained(model).values(), *dict(_buffers(model)).values(), *_loss_parameters(loss, model).values()]


def has_adapters(model: nn.Module) -> bool:
    """Returns whether a module, or one inside it, carries PEFT adapters."""
    return bool(_adapted(model))


def _outer(model: nn.Module) -> nn.Module:
    """Returns the model inside DDP and ``torch.compile``, with a ``PeftModel`` around it left on."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _adapted(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that carry PEFT adapters, the innermost carrier of each."""
    found = [
        part
        for part in _outer(model).modules()
        if any(base.__name__ == "PeftModel" for base in type(part).__mro__)
        or (bool(getattr(part, "_hf_peft_config_loaded", False)) and hasattr(part, "peft_config"))
    ]
    # A SentenceTransformer forwards these attributes to its backbone, so that both look like carriers.
    return [part for part in found if not any(other in list(part.modules())[1:] for other in found)]


def _load_adapters(adapted: list[nn.Module], paths: list[Path], folder: Path) -> None:
    peft = require("peft", extra="lora")
    if len(adapted) != 1:
        raise EvaluationError(
            f"{folder} holds {len(paths)} adapters for {len(adapted)} adapted modules, without {EXTRA}"
        )
    (part,) = adapted
    for path in paths:
        known: Any = part.peft_config
        active: Any = part.active_adapters  # a property of PeftModel, a method of transformers models
        # A PeftModel writes the adapter "default" to the folder itself, others below it.
        at_root = "default" if "default" in known else (active() if callable(active) else active)[0]
        name = path.parent.name if path.parent.name in known else at_root
        outcome = peft.set_peft_model_state_dict(part, load_file(path), adapter_name=name)
        if unexpected := getattr(outcome, "unexpected_keys", None):
            raise EvaluationError(f"{path} does not fit the adapter {name!r}: unexpected {unexpected[:3]}")


def _load_whole(model: nn.Module, folder: Path) -> None:
    """Copies a stored state into the live model; rebuilding it is the last resort, as a class may need arguments."""
    live = _tensors(model)
    state = _stored_modules(model, folder) if (folder / "modules.json").is_file() else _read_tensors(folder)
    if _misfit(state, live) is not None:
        state = _rebuilt(model, folder)
    if (misfit := _misfit(state, live)) is not None:
        raise EvaluationError(f"{folder} does not fit the model: {misfit}")
    _copy(state, live)


def _stored_modules(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Returns the state of a SentenceTransformer: each module's file, under the live names of that module."""
    live = _tensors(model)
    state: dict[str, Tensor] = {}
    if not (folder / "modules.json").is_file():
        return state
    for entry in json.loads((folder / "modules.json").read_text(encoding="utf-8")):
        tensors = _read_tensors(folder / entry["path"])  # none where an adapter stands for the module
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
        if hasattr(kind, "from_pretrained"):
            fresh = kind.from_pretrained(str(folder))
        else:
            fresh = kind(str(folder), device="cpu", local_files_only=True)
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
    return {name: value for name, value in _tensors(_outer(model)).items() if value.requires_grad}


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    stored = _tensors(_outer(model))
    return ((name, value) for name, value in _outer(model).named_buffers() if name in stored)


def _is_adapter(name: str) -> bool:
    """Returns whether a tensor is part of what PEFT stores of an adapter."""
    parts = name.split(".")
    return "modules_to_save" in parts or any(part.startswith(("lora_", "ia3_", "hada_", "vera_")) for part in parts)


def _loss_parameters(loss: object, model: nn.Module) -> dict[str, Tensor]:
    known = {id(value) for value in _outer(model).parameters()}
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
