"""PEFT adapters: who carries them, how a folder holds them, and whether it holds those of the live model.

Promise: an adapter file is compared with what PEFT itself would write of the live model; what another loader would not
make of a stored folder is known when it is written.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fullrank._errors import EvaluationError, SettingError, first_few
from fullrank._optional import require
from fullrank.wrappers import outermost

__all__ = [
    "ADAPTER",
    "adapter_tensors",
    "carriers",
    "check_adapters",
    "has_adapters",
    "load_adapters",
    "lost_elsewhere",
    "move_active_up",
    "refuse_shadowed_adapter",
]

ADAPTER = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


def refuse_shadowed_adapter(model: object) -> None:
    """Raises `SettingError` for the PEFT form that trains but cannot be saved and loaded.

    ``model[0].auto_model = get_peft_model(...)`` registers a second child beside ``model``: the checkpoint that is
    written then loads wrong.
    """
    for name, part in outermost(model).named_modules() if isinstance(model, nn.Module) else ():
        children = dict(part.named_children())
        if "model" in children and "auto_model" in children:
            where = f"model[{name}]" if name.isdigit() else name or "model"
            raise SettingError(
                f"{where} has two backbones, 'model' and 'auto_model': get_peft_model was assigned to .auto_model, "
                f"which trains but saves a checkpoint that loads wrong. Write {where}.model = "
                f"get_peft_model({where}.model, config) instead"
            )


def has_adapters(model: nn.Module) -> bool:
    """Returns whether a module, or one inside it, carries PEFT adapters."""
    return bool(carriers(model))


def carriers(model: nn.Module) -> list[Any]:
    """Returns the modules that carry PEFT adapters, the innermost carrier of each."""
    found = [
        part
        for part in outermost(model).modules()
        if any(base.__name__ == "PeftModel" for base in type(part).__mro__)
        or (bool(getattr(part, "_hf_peft_config_loaded", False)) and hasattr(part, "peft_config"))
    ]
    # A SentenceTransformer forwards these attributes to its backbone, so that both look like carriers.
    return [part for part in found if not any(other in list(part.modules())[1:] for other in found)]


def adapter_tensors(model: nn.Module) -> set[int]:
    """Returns the addresses of the tensors that PEFT stores of the adapters: biases and whole modules too."""
    return {value.data_ptr() for _, _, state in _states(model) for value in state.values()}


def load_adapters(model: nn.Module, paths: list[Path], folder: Path) -> None:
    """Puts the adapters of ``folder`` into the one module that carries them.

    Raises:
        EvaluationError: several such modules, a file of another adapter, or one that does not hold all of it.
    """
    peft, adapted = require("peft", extra="lora"), carriers(model)
    if len(adapted) != 1:
        raise EvaluationError(
            f"{folder} holds {len(paths)} adapters for {len(adapted)} adapted modules, without extra.safetensors"
        )
    (part,) = adapted
    wanted = {name: state.keys() for _, name, state in _states(model)}
    prefix = _PEFT_PREFIX if isinstance(part, peft.PeftModel) else ""  # which transformers models do not have
    named = [(path, path.parent.name if path.parent.name in part.peft_config else _at_root(part)) for path in paths]
    if len({name for _, name in named}) < len(named):
        raise EvaluationError(f"{folder} holds {len(paths)} adapters, and the model has {first_few(part.peft_config)}")
    for path, name in named:
        stored = {key.removeprefix(_PEFT_PREFIX): value for key, value in load_file(path).items()}
        if missing := sorted(wanted[name] - stored.keys()):
            raise EvaluationError(f"{path} does not hold all of the adapter {name!r}: missing {missing[:3]}")
        state = {prefix + key: value for key, value in stored.items()}
        outcome = peft.set_peft_model_state_dict(part, state, adapter_name=name)
        if unexpected := getattr(outcome, "unexpected_keys", None):
            raise EvaluationError(f"{path} does not fit the adapter {name!r}: unexpected {unexpected[:3]}")


def check_adapters(model: nn.Module, folder: Path) -> None:
    """Compares every adapter file of ``folder`` with what PEFT would write of the model as it stands.

    Raises:
        EvaluationError: a file holds other tensors than any adapter of the model, or an active adapter has no file.
    """
    states = list(_states(model))
    held: list[tuple[int, str]] = []
    for path in sorted(folder.rglob(ADAPTER)):
        stored = {name.removeprefix(_PEFT_PREFIX): value for name, value in load_file(path).items()}
        same = [(id(part), name) for part, name, state in states if _equals(state, stored)]
        if not same:
            raise EvaluationError(
                f"{path} does not hold the adapter that was scored: it was changed after it was written, or written "
                "wrong. Do not use this folder"
            )
        held += same
    if missing := [name for part, name, _ in states if name in _active(part) and (id(part), name) not in held]:
        raise EvaluationError(
            f"{folder} lacks the {ADAPTER} of the adapter {first_few(missing)}. Do not use this folder"
        )


def move_active_up(model: nn.Module, folder: Path) -> None:
    """Moves an active adapter that PEFT wrote to a folder of its name to where loaders look, if nothing lies there."""
    for part in carriers(model):
        name = _at_root(part)
        for path in sorted(folder.rglob(f"{name}/{ADAPTER}")):
            if not (path.parents[1] / ADAPTER).exists():
                for file in sorted(path.parent.iterdir()):
                    if not (target := path.parents[1] / file.name).exists():
                        file.rename(target)
                if not any(path.parent.iterdir()):
                    path.parent.rmdir()


def lost_elsewhere(model: nn.Module) -> list[str]:
    """Returns why another loader would make something else of the adapter files of ``model``."""
    reasons = []
    for part in carriers(model):
        active = _active(part)
        if any(getattr(config, "use_dora", False) for config in part.peft_config.values()):
            reasons.append("transformers loses the magnitudes of DoRA adapters when it loads them")
        if active != [_at_root(part)]:
            reasons.append(
                f"the active adapters are {first_few(active)}, and loaders take {_at_root(part)!r} alone, which lies "
                "in the folder itself"
            )
    return list(dict.fromkeys(reasons))


def _states(model: nn.Module) -> Iterator[tuple[Any, str, dict[str, Tensor]]]:
    """Yields (carrier, adapter, what PEFT stores of it, by the name in the file without prefix)."""
    for part in carriers(model):
        peft, state = require("peft", extra="lora"), part.state_dict()
        for name in part.peft_config:
            # Base embeddings that PEFT may add to a file are no part of the adapter, and asking may ask the hub.
            found = peft.get_peft_model_state_dict(part, state, adapter_name=name, save_embedding_layers=False)
            yield part, name, {key.removeprefix(_PEFT_PREFIX): value for key, value in found.items()}


def _equals(state: dict[str, Tensor], stored: dict[str, Tensor]) -> bool:
    return all(name in stored and torch.equal(value.cpu(), stored[name]) for name, value in state.items())


def _active(part: Any) -> list[str]:
    found = part.active_adapters  # a property of PeftModel, a method of transformers models
    return list(found() if callable(found) else found)


def _at_root(part: Any) -> str:
    """Returns the adapter that lies in the folder itself: PeftModel writes all but "default" below it."""
    return "default" if "default" in part.peft_config else _active(part)[0]
