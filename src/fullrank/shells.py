"""A model in memory that candidates share: their weights are put into it, and taken out before the next ones come.

Promise: what stood in the model before a candidate, or the base, is there again once it is restored, except for the
adapter's own tensors, which every candidate brings whole; the base is what its own files hold, whatever adapters did to
it when they were made or loaded.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullrank._errors import EvaluationError
from fullrank._optional import require
from fullrank.adapters import ADAPTER, adapter_tensors, load_adapters
from fullrank.encode import as_encoder
from fullrank.weights import stored_modules

__all__ = ["Shell", "adapter_layers", "names_below"]


class Shell:
    """A model into which weights are put, and what has to be put back before the next ones come."""

    def __init__(self, model: Any) -> None:
        self.model = model.float().eval()  # whatever precision is stored: a choice must not hang on rounding
        self.encoder = as_encoder(self.model)
        self.current: str | None = None
        self._added = self.switch_adapters(on=True)
        self._touched: dict[str, Tensor] = {}
        self._bases: dict[str, dict[str, Tensor]] = {}

    def switch_adapters(self, *, on: bool) -> set[str]:
        """Switches adapters on or off, lets them alone be trainable, and returns the names of their tensors.

        What is trainable is what `load_weights` looks for in a stored folder.
        """
        layers = [layer for _, layer in adapter_layers(self.model)]
        if not layers:
            return set()
        self.model.requires_grad_(False)
        for layer in layers:
            layer.enable_adapters(on)
        return {name for name, value in self.model.named_parameters() if value.requires_grad}

    def put_adapter(self, folder: Path, extra: dict[str, Tensor]) -> None:
        """Puts the adapter of a folder into the model, the modules stored beside it, and ``extra`` on top.

        Raises:
            EvaluationError: the files do not hold all of the adapter, or hold another one.
        """
        live = self.model.state_dict()
        self.overwrite({name: value for name, value in stored_modules(self.model, folder).items() if name in live})
        if not self._own() <= extra.keys():
            load_adapters(self.model, sorted(folder.rglob(ADAPTER)), folder)
        self.overwrite(extra)

    def put_base(self, source: str, load: Callable[[str], Any]) -> None:
        """Switches the adapters off and puts the base's own weights where something else stands.

        That is no trifle: adapters train biases in place, and some are made by changing the weights below them.

        Args:
            source: path or hub id of the base, whose weights are kept as far as they differ.
            load: loads it.

        Raises:
            EvaluationError: the base has another architecture than the model without its adapters.
        """
        self.switch_adapters(on=False)
        if source not in self._bases:
            self._bases[source] = self._differing(source, load(source).float().state_dict())
        self.overwrite(self._bases[source])

    def overwrite(self, state: dict[str, Tensor]) -> None:
        """Puts tensors into the model and remembers what stood there, except for the adapter's own."""
        live = self.model.state_dict()
        with torch.no_grad():
            for name, value in state.items():
                if name not in self._added and name not in self._touched:
                    self._touched[name] = live[name].detach().cpu().clone()
                live[name].copy_(value)

    def restore(self) -> None:
        """Puts back what candidates and the base have overwritten beside the adapters."""
        live = self.model.state_dict()
        with torch.no_grad():
            for name, value in self._touched.items():
                live[name].copy_(value)

    def _own(self) -> set[str]:
        """Returns the names of all that an adapter file holds: biases too, which are the base's while it is off."""
        places = adapter_tensors(self.model)
        return {name for name, value in self.model.state_dict().items() if value.data_ptr() in places}

    def _differing(self, source: str, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the base's tensors, by live name, that differ from the live ones or that an adapter may change."""
        live, own, names = self.model.state_dict(), self._own(), names_below(self.model)
        base = {_below(name): value for name, value in stored.items()}
        unlike = [n for n in base.keys() & names.keys() if base[n].shape != live[names[n]].shape]
        if misfit := sorted(base.keys() ^ names.keys()) or unlike:
            raise EvaluationError(f"the base {source!r} has another architecture than its adapters: {misfit[:3]}")
        return {
            names[n]: value.detach().cpu().clone()
            for n, value in base.items()
            if names[n] in own or not torch.equal(value, live[names[n]].to(value.device))
        }


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the layers that PEFT put into a model, by name."""
    if not any("lora_" in name or ".base_layer." in name or "modules_to_save" in name for name in model.state_dict()):
        return
    require("peft", extra="lora")
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = BaseTunerLayer | AuxiliaryTrainingWrapper
    yield from ((name, part) for name, part in model.named_modules() if isinstance(part, kinds))


def names_below(model: nn.Module) -> dict[str, str]:
    """Returns the names of a model's tensors by those that they have without adapters, whose own are left out."""
    layers = tuple(f"{name}." for name, _ in adapter_layers(model))
    names = {}
    for name in model.state_dict():
        adapters_own = name.startswith(layers) and not re.search(r"\.(base_layer|original_module)\.", name)
        if not adapters_own and "base_model." not in _below(name):  # a PeftModel holds what its layers share
            names[_below(name)] = name
    return names


def _below(name: str) -> str:
    """Returns the name that a tensor has in the model without adapters."""
    for part in ("base_model.model.", "base_layer.", "original_module.", "token_adapter."):
        name = name.replace(part, "")
    return name
