"""The processes of a distributed run: one decision, one writer, and an error of one is an error of all.

Promise: with one process no collective call is made; every function here is called by all processes at the same moment.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from fullrank._errors import EvaluationError, NonFiniteError
from fullrank.ranks import current_ranks

__all__ = ["all_or_none", "copy_from_writer", "gathered", "of_the_writer"]

T = TypeVar("T")
WRITER = 0
"""The Trainer's world process zero, which writes."""


def gathered(value: T) -> list[T]:
    """Returns the value that each process gave, in their order; ``[value]`` in a run of one process."""
    size = current_ranks().size
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value)
    return values


def of_the_writer(value: T) -> T:
    """Returns what the writing process gave."""
    if current_ranks().size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=WRITER)
    return box[0]


def all_or_none(body: Callable[[], T]) -> T:
    """Runs ``body`` in each process and returns its value; where it raised in one of them, it raises in all.

    The error of the first process that has one decides for all, so that they go the same way from there.

    Raises:
        NonFiniteError: embeddings were not finite in another process.
        EvaluationError: another process raised anything else.
    """
    value, error = None, None
    try:
        value = body()
    except Exception as raised:
        error = raised
    told = gathered(None if error is None else (f"{type(error).__name__}: {error}", isinstance(error, NonFiniteError)))
    first = next(((i, entry) for i, entry in enumerate(told) if entry is not None), None)
    if first is None:
        return value  # type: ignore[return-value]  # no process raised
    i, (text, non_finite) = first
    if error is not None and (isinstance(error, NonFiniteError) == non_finite):
        raise error
    raise (NonFiniteError if non_finite else EvaluationError)(f"process {i}: {text}") from error


def copy_from_writer(tensors: Iterable[Tensor]) -> None:
    """Overwrites tensors, in place, by those of the writing process; each process gives them in the same order."""
    ranks = current_ranks()
    with torch.no_grad():
        for tensor in tensors if ranks.size > 1 else ():
            tensor.copy_(ranks.first(tensor))
