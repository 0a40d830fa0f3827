"""Leaving no trace: an evaluation inside a training loop must not change the run.

Promise: after `undisturbed`, random states (python, numpy, torch, accelerators), the train/eval flag of every
submodule, and the gradient mode are as before, also when the evaluation raised.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["modules_within", "undisturbed"]

MAX_DEPTH, MAX_ITEMS = 3, 64
"""How deep an encoder of the user's own is searched for modules, and how long a list or dict may be to be searched."""


@contextmanager
def undisturbed(model: object) -> Iterator[None]:
    """Runs the body with ``model`` in eval mode and without gradients, then restores everything that it may touch.

    Args:
        model: a module, an object that holds some (see `modules_within`), or None.
    """
    flags = [(part, part.training) for module in modules_within(model) for part in module.modules()]
    states = _random_states()
    try:
        for part, _ in flags:
            part.training = False
        with torch.no_grad():
            yield
    finally:
        for part, training in flags:
            part.training = training
        _restore_random_states(states)


def modules_within(thing: object) -> list[nn.Module]:
    """Returns the outermost modules that an object is or holds, in attributes, lists and dicts a few levels deep."""
    found: dict[int, nn.Module] = {}
    level, seen = [thing], set[int]()
    for _ in range(MAX_DEPTH + 1):
        fresh = [item for item in level if id(item) not in seen]
        seen |= {id(item) for item in fresh}
        found |= {id(item): item for item in fresh if isinstance(item, nn.Module)}
        level = [part for item in fresh if not isinstance(item, nn.Module) for part in _parts(item)]
    return list(found.values())


def _parts(thing: object) -> Iterable[object]:
    if isinstance(thing, Mapping | list | tuple | set | frozenset):
        return () if len(thing) > MAX_ITEMS else list(thing.values() if isinstance(thing, Mapping) else thing)
    if isinstance(thing, MethodType):
        return (thing.__self__,)
    slots = (name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
    held = [getattr(thing, name, None) for name in slots if isinstance(name, str) and name != "__dict__"]
    return [*getattr(thing, "__dict__", {}).values(), *held]


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  # the training run may draw from the global state
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _restore_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
