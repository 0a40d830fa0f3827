"""Weights of a stored step: what training can change, written to a loadable folder and put back from it.

Promise: after `load_weights(model, folder)` the model computes what it computed when `save_weights` wrote that folder;
weights are read from safetensors only.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fullrank._errors import EvaluationError, SettingError
from fullrank._optional import require
from fullrank.encode import unwrap

__all__ = ["load_probe", "load_weights", "refuse_shadowed_adapter", "save_probe", "save_weights"]

EXTRA = "extra.safetensors"
PROBE = "probe.safetensors"
ADAPTER = "adapter_model.safetensors"
_LOSS = "loss."


def save_weights(
    model: nn.Module, folder: Path, *, save_model: Callable[[Path], object] | None = None, loss: object = None
) -> None:
    """Writes a loadable model folder: all weights, or for PEFT the adapter and what else trains beside it.

    Args:
        model: the model in training.
        folder: exists and is empty.
        save_model: writes the model; default is the model's own ``save_pretrained``, else its state as safetensors.
        loss: a loss module (or dict of them) whose trainable parameters go along.
    """
    if save_model is not None:
        save_model(folder)
    elif hasattr(unwrap(model), "save_pretrained"):
        unwrap(model).save_pretrained(str(folder))
    else:
        save_file(_owned(unwrap(model).state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
    extra = {_LOSS + name: value for name, value in _loss_parameters(loss, model).items()}
    if _adapted(model):
        extra |= _beside_adapters(model)
    if extra:
        save_file(_owned(extra), folder / EXTRA)


def load_weights(model: nn.Module, folder: Path, *, loss: object = None) -> None:
    """Puts the weights stored in ``folder`` into ``model`` (and ``loss``), in place.

    Raises:
        EvaluationError: the folder does not hold all that the model needs.
    """
    inner = unwrap(model)
    # A wrapper around an adapted backbone is saved as a whole state, without adapter files.
    if adapters := sorted(folder.rglob(ADAPTER)):
        _load_adapters(_adapted(inner), adapters, folder)
    else:
        _load_whole(inner, folder)
    if (folder / EXTRA).is_file():
        state = load_file(folder / EXTRA)
        parameters = {_LOSS + name: value for name, value in _loss_parameters(loss, model).items()}
        _copy(state, {**parameters, **_tensors(inner)}, folder)


def refuse_shadowed_adapter(model: object) -> None:
    """Raises `SettingError` for the PEFT form that trains but cannot be saved and loaded.

    ``model[0].auto_model = get_peft_model(...)`` registers a second child beside ``model``: the checkpoint that is
    written then loads wrong.
    """
    for name, part in unwrap(model).named_modules() if isinstance(model, nn.Module) else ():
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


def _adapted(model: nn.Module) -> list[nn.Module]:
    """Returns the outermost modules that carry PEFT adapters."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for part in unwrap(model).modules():
        is_adapted = any(base.__name__ == "PeftModel" for base in type(part).__mro__) or (
            bool(getattr(part, "_hf_peft_config_loaded", False)) and hasattr(part, "peft_config")
        )
        if is_adapted and id(part) not in inside:
            found.append(part)
            inside |= {id(child) for child in part.modules()}
    # A SentenceTransformer forwards these attributes to its backbone: the innermost carrier is the one to load into.
    return [part for part in found if not any(other in list(part.modules())[1:] for other in found)]


def _load_adapters(adapted: list[nn.Module], paths: list[Path], folder: Path) -> None:
    peft = require("peft", extra="lora")
    if len(paths) != len(adapted):
        raise EvaluationError(f"{folder} holds {len(paths)} adapters for {len(adapted)} adapted modules")
    for part, path in zip(adapted, paths, strict=True):
        active: Any = part.active_adapters  # a property of PeftModel, a method of transformers models
        name = (active() if callable(active) else active)[0]
        outcome = peft.set_peft_model_state_dict(part, load_file(path), adapter_name=name)
        if unexpected := getattr(outcome, "unexpected_keys", None):
            raise EvaluationError(f"{path} does not fit the adapter {name!r}: unexpected {unexpected[:3]}")


def _load_whole(model: nn.Module, folder: Path) -> None:
    kind: Any = type(model)
    if hasattr(kind, "from_pretrained"):
        state = kind.from_pretrained(str(folder)).state_dict()
    elif (folder / "modules.json").is_file():
        state = kind(str(folder), device="cpu", local_files_only=True).state_dict()
    else:
        state = {}
        for path in sorted(folder.glob("model*.safetensors")):
            state |= load_file(path)
    _copy(state, _tensors(model), folder, complete=True)


def _copy(state: dict[str, Tensor], tensors: dict[str, Tensor], folder: Path, *, complete: bool = False) -> None:
    unknown = [name for name in state if name not in tensors]
    missing = [name for name in tensors if name not in state] if complete else []
    # Tied weights are stored once, under one of their names.
    stored = {tensors[name].data_ptr() for name in state if name in tensors}
    missing = [name for name in missing if tensors[name].data_ptr() not in stored and tensors[name].numel()]
    if unknown or missing:
        raise EvaluationError(f"{folder} does not fit the model: unknown {unknown[:3]}, missing {missing[:3]}")
    with torch.no_grad():
        for name, value in state.items():
            tensors[name].copy_(value)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the live parameters and stored buffers by name."""
    return model.state_dict(keep_vars=True)


def _beside_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Returns what training can change outside the adapters: trainable parameters and stored buffers."""
    names = {name for name, value in unwrap(model).named_parameters() if value.requires_grad}
    names |= {name for name, _ in unwrap(model).named_buffers()}
    return {
        name: value
        for name, value in _tensors(unwrap(model)).items()
        if name in names and not any(part.startswith(("lora_", "ia3_", "hada_")) for part in name.split("."))
    }


def _loss_parameters(loss: object, model: nn.Module) -> dict[str, Tensor]:
    known = {id(value) for value in unwrap(model).parameters()}
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
