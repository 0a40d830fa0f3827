"""Leaving no trace: an evaluation inside a training loop must not change the run.

Promise: after `undisturbed`, random states (python, numpy, torch, accelerators), the train/eval flag of every
submodule, and the gradient mode are as before, also when the evaluation raised.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["undisturbed"]


@contextmanager
def undisturbed(module: nn.Module | None) -> Iterator[None]:
    """Runs the body with ``module`` in eval mode and without gradients, then restores everything that it may touch."""
    flags = [] if module is None else [(part, part.training) for part in module.modules()]
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
