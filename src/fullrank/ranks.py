"""The processes that share an evaluation.

Promise: where there is one process, nothing collective is ever called; where one of several raises, all raise that
error instead of waiting for each other.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from fullrank._errors import EvaluationError

__all__ = ["ALONE", "Ranks", "current_ranks"]


@dataclass(frozen=True)
class Ranks:
    """This process among those that work together.

    Attributes:
        rank: of this process.
        size: how many there are.
    """

    rank: int
    size: int

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of ``values`` over all ranks, on the device of ``values``."""
        return self._reduced(values, distributed.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Returns the elementwise maximum of ``values`` over all ranks."""
        return self._reduced(values, distributed.ReduceOp.MAX)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Returns the ``values`` of each rank; they may differ in their first dimension."""
        if self.size == 1:
            return [values]
        lengths = [int(n) for n in self._gathered(torch.tensor([len(values)]))]
        padded = values.new_zeros((max(lengths), *values.shape[1:]))
        padded[: len(values)] = values
        return [part[:n].to(values.device) for part, n in zip(self._gathered(padded), lengths, strict=True)]

    def first(self, values: Tensor) -> Tensor:
        """Returns the ``values`` of rank 0, on the device of ``values``; they have the same shape on every rank."""
        if self.size == 1:
            return values
        wire = values.detach().to(_wire(), copy=True).contiguous()
        distributed.broadcast(wire, src=0)
        return wire.to(values.device)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs the body on every rank; where it raises on one, every rank raises that error when all have come here."""
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        if not int(self.max(torch.tensor([int(error is not None)]))):
            return
        errors: list[bytes | None] = [None] * self.size
        distributed.all_gather_object(errors, None if error is None else _packed(error, self.rank))
        if error is not None:
            raise error
        raise pickle.loads(next(body for body in errors if body is not None))  # of a rank of this very run

    def _reduced(self, values: Tensor, how: "distributed.ReduceOp.RedOpType") -> Tensor:
        if self.size == 1:
            return values
        wire = values.detach().to(_wire(), copy=True)
        distributed.all_reduce(wire, how)
        return wire.to(values.device)

    def _gathered(self, values: Tensor) -> list[Tensor]:
        wire = values.detach().to(_wire()).contiguous()
        out = [torch.empty_like(wire) for _ in range(self.size)]
        distributed.all_gather(out, wire)
        return out


ALONE = Ranks(0, 1)


def current_ranks() -> Ranks:
    """Returns the ranks of ``torch.distributed``, or `ALONE` where it was not initialised."""
    if not distributed.is_available() or not distributed.is_initialized():
        return ALONE
    return Ranks(distributed.get_rank(), distributed.get_world_size())


def _wire() -> torch.device:
    """Returns where tensors must lie to be sent."""
    nccl = "nccl" in str(distributed.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _packed(error: Exception, rank: int) -> bytes:
    """Returns the error as bytes; one that cannot travel becomes an `EvaluationError` with its text."""
    try:
        body = pickle.dumps(error)
        if type(pickle.loads(body)) is type(error):
            return body
    except Exception:  # an error of any kind may hold what cannot be pickled
        pass
    return pickle.dumps(EvaluationError(f"rank {rank} stopped with {type(error).__name__}: {error}"))
