"""Where a loss of sentence-transformers has the scores of a batch in hand.

Promise: a tapped loss returns what it returned before, bit for bit. A tap looks at matrices that the loss computes
anyway: it runs no model, draws no random number, and holds one block of scores, without its graph, until the next one
comes. Losses that rank no documents within the batch are left alone. Facts are those of sentence-transformers 6.2.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["LossTaps", "Measure", "Report", "text_keys"]

Measure = Callable[[Tensor, Tensor], Tensor]
"""Takes scores [n, C] and bool [n, C], True at the positives of a query; returns sums over the n queries."""

Report = Callable[[int, Tensor, int, int | None], None]
"""Takes which loss it was, the sums of a batch, its number of queries, and the dimension of a Matryoshka loss."""


@dataclass(frozen=True)
class _Seam:
    """Within ``method``, a loss calls ``similarity`` the same number of times for every chunk of queries.

    Attributes:
        calls: of a loss and its number of document columns: the calls for a chunk, and those of them that score the
            documents; the columns of their matrices, one after the other, are the candidates.
    """

    method: str
    similarity: str
    calls: Callable[[Any, int], tuple[int, Sequence[int]]]


def _directions(loss: Any, n_columns: int) -> tuple[int, Sequence[int]]:
    """One matrix for each direction, queries to all documents first; scale and hardness come after the similarity."""
    return len(set(loss.directions)), (0,)


def _guided(loss: Any, n_columns: int) -> tuple[int, Sequence[int]]:
    """Each matrix of the model, then that of the guide: positives, (anchors), (positives), each column of negatives."""
    beside = 1 + bool(loss.contrast_anchors) + bool(loss.contrast_positives)
    total = beside + n_columns - 1
    return 2 * total, (0, *range(2 * beside, 2 * total, 2))


_SEAMS = {
    "CachedMultipleNegativesRankingLoss": _Seam("calculate_loss", "similarity_fct", _directions),
    "MultipleNegativesRankingLoss": _Seam("compute_loss_from_embeddings", "similarity_fct", _directions),
    "CachedGISTEmbedLoss": _Seam("calculate_loss", "sim_matrix", _guided),
    "GISTEmbedLoss": _Seam("forward", "sim_matrix", _guided),
}


class LossTaps:
    """The taps of the losses of one training run; ``report`` is called once for each batch that gave numbers.

    Only forwards with gradients count. A batch is one call of the outermost loss: of the evaluations inside it, the
    first one at the widest embeddings counts (MatryoshkaLoss evaluates its loss once for each dimension), and of an
    AdaptiveLayerLoss those of the last layer, which is the model as it is used.
    """

    def __init__(self, measure: Measure, report: Report) -> None:
        self._measure, self._report = measure, report
        self._tapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._scoped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._n_scoped = 0
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._batch: _Batch | None = None
        self._muted = False

    def watch(self, loss: nn.Module) -> bool:
        """Taps ``loss`` and the losses inside it; returns whether one of them ranks documents within the batch."""
        found = False
        for module in reversed(list(loss.modules())):  # inner ones first: a tap wraps the taps inside it
            seam = _seam_of(module)
            if seam is not None:
                found = True
                if module not in self._tapped:
                    self._tapped.add(module)
                    self._tap(module, seam)
            elif _is_a(module, "AdaptiveLayerLoss") and module not in self._tapped:
                self._tapped.add(module)
                self._tap_layers(module)
        if found and loss not in self._scoped:
            self._scoped.add(loss)
            self._scope(loss)
        return found

    def release(self) -> None:
        """Takes every tap off: the losses are as they were. What somebody else has wrapped since stays, without use."""
        for place, name, before, tap in reversed(self._replaced):
            if vars(place).get(name) is tap:
                del vars(place)[name]
                if before is not None:
                    vars(place)[name] = before
        self._replaced.clear()
        self._tapped.clear()
        self._scoped.clear()

    def _replace(self, place: Any, name: str, tap: Any) -> None:
        self._replaced.append((place, name, vars(place).get(name), tap))
        setattr(place, name, tap)

    def _scope(self, loss: nn.Module) -> None:
        """Makes a batch of each call of ``loss.forward``, unless another loss around it has done so."""
        inner, number = loss.forward, self._n_scoped
        named = any(_is_a(module, "MatryoshkaLoss") for module in loss.modules())
        self._n_scoped += 1

        def forward(sentence_features: Any, *args: Any, **options: Any) -> Any:
            if self._batch is not None or not torch.is_grad_enabled():
                return inner(sentence_features, *args, **options)
            columns = list(sentence_features)
            batch = self._batch = _Batch(text_keys(columns[1:]))
            try:
                value = inner(columns, *args, **options)
            finally:
                self._batch, self._muted = None, False
            if batch.sums is not None:
                self._report(number, batch.sums, batch.n_queries, batch.width if named else None)
            return value

        self._replace(loss, "forward", forward)

    def _tap(self, module: nn.Module, seam: _Seam) -> None:
        # MatryoshkaLoss puts an object in the place of a cached loss's method, which calls ``fn`` for each dimension.
        place, name = module, seam.method
        while hasattr(getattr(place, name), "fn"):
            place, name = getattr(place, name), "fn"
        inner = getattr(place, name)

        def tapped(*args: Any, **options: Any) -> Any:
            batch = self._batch
            if batch is None or self._muted or not args or not torch.is_grad_enabled():
                return inner(*args, **options)
            columns = list(args[0])
            reading = _Reading(module, seam, len(columns) - 1, batch, self._measure)
            owner = _owner(module, seam.similarity)
            similarity = getattr(owner, seam.similarity)

            def looked(queries: Any, documents: Any, *rest: Any, **more: Any) -> Any:
                scores = similarity(queries, documents, *rest, **more)
                reading.see(queries, scores)
                return scores

            # In the instance's own dictionary, which wins over a method and over a registered submodule alike.
            before = owner.__dict__.get(seam.similarity)
            owner.__dict__[seam.similarity] = looked
            try:
                value = inner(columns, *args[1:], **options)
            finally:
                del owner.__dict__[seam.similarity]
                if before is not None:
                    owner.__dict__[seam.similarity] = before
            batch.take(reading)
            return value

        self._replace(place, name, tapped)

    def _tap_layers(self, adaptive: Any) -> None:
        """AdaptiveLayerLoss calls its loss for the last layer first, then for others: these are not recorded."""
        inner, each = adaptive.forward, adaptive.loss.forward
        calls: int | None = None  # None outside: the inner loss may serve by itself as well

        def forward(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls, before = 0, self._muted
            try:
                return inner(*args, **options)
            finally:
                calls, self._muted = None, before

        def layer(*args: Any, **options: Any) -> Any:
            nonlocal calls
            if calls is not None:
                calls += 1
                self._muted = self._muted or calls > 1
            return each(*args, **options)

        self._replace(adaptive, "forward", forward)
        self._replace(adaptive.loss, "forward", layer)


class _Batch:
    """What a batch has given so far."""

    def __init__(self, keys: Tensor | None) -> None:
        self._keys, self._all_keys = keys, None if keys is None else keys.flatten()
        self._world = 1
        self.sums: Tensor | None = None
        self.n_queries, self.width = 0, -1

    def keys_of_all(self, world: int) -> Tensor | None:
        """Returns the keys of the candidates [C] as the loss orders them: column by column, each over all processes."""
        if self._keys is not None and world != self._world:
            parts = [torch.empty_like(self._keys) for _ in range(world)]
            torch.distributed.all_gather(parts, self._keys)
            self._all_keys, self._world = torch.cat(parts, dim=1).flatten(), world
        return self._all_keys

    def take(self, reading: "_Reading") -> None:
        """Keeps the reading of the widest embeddings."""
        if reading.end() and reading.width > self.width:
            self.sums, self.n_queries, self.width = reading.sums, reading.n_queries, reading.width


class _Reading:
    """One evaluation of a loss, as its calls of the similarity tell it; a chunk of queries at a time."""

    def __init__(self, loss: Any, seam: _Seam, n_columns: int, batch: _Batch, measure: Measure) -> None:
        self._n_calls, self._wanted = seam.calls(loss, n_columns)
        self._n_columns, self._measure = n_columns, measure
        self._world, self._rank = _processes() if getattr(loss, "gather_across_devices", False) else (1, 0)
        self._keys = batch.keys_of_all(self._world)
        self._parts: list[Tensor] = []
        self._n_seen, self._whole = 0, True
        self.sums: Tensor | None = None
        self.n_queries, self.width = 0, -1

    def see(self, queries: Any, scores: Any) -> None:
        """Takes the next call; the block before is measured only now, since a loss may mask it after the call."""
        turn = self._n_seen % self._n_calls
        self._n_seen += 1
        if turn == 0:
            self._close()
            self.width = queries.shape[-1]
        if turn in self._wanted:
            self._parts.append(scores.detach())

    def end(self) -> bool:
        """Measures the last block; returns whether every call was understood."""
        self._close()
        return self._whole and self._n_seen % self._n_calls == 0

    def _close(self) -> None:
        parts, self._parts = self._parts, []
        if not parts or not self._whole:
            return
        n, width = len(parts[0]), sum(part.shape[-1] for part in parts)
        # A loss that gathers asks the queries of its own process for the documents of all.
        first = self._rank * (width // (self._world * self._n_columns)) + self.n_queries
        self._whole = first + n <= parts[0].shape[-1] and all(part.ndim == 2 and len(part) == n for part in parts)
        if not self._whole:
            return
        with torch.no_grad():
            scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            keys = self._keys
            if keys is None or len(keys) != width:
                keys = torch.arange(width, device=scores.device)
            sums = self._measure(scores, torch.eq(keys[first : first + n, None], keys[None, :]))
            self.sums = sums if self.sums is None else self.sums + sums
        self.n_queries += n


def text_keys(columns: Sequence[Any]) -> Tensor | None:
    """Returns int64 [columns, B]: equal keys where equal texts are, in any column and on any process.

    A loss sees features and no texts: equal texts are equal ``input_ids`` under the mask, wherever the padding stands.
    The key is their sum with fixed random weights modulo 2**64; unlike a sort of the rows it does not wait for the
    device. None where features hold more than text, or no ids.
    """
    keys = []
    for features in columns:
        if not isinstance(features, Mapping):
            return None
        ids, mask = features.get("input_ids"), features.get("attention_mask")
        if not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or ids.ndim != 2 or ids.shape != mask.shape:
            return None
        if any(_is_media(name, value) for name, value in features.items()):
            return None
        shown = mask != 0
        place = (shown.cumsum(dim=1) - 1).clamp(min=0)
        weights = _weights(1 << max(6, ids.shape[1].bit_length()), ids.device)
        keys.append(((ids.long() + 1) * weights[place] * shown).sum(dim=1))
    if not keys or len({len(column) for column in keys}) > 1:
        return None
    return torch.stack(keys)


@functools.lru_cache(maxsize=32)
def _weights(width: int, device: torch.device) -> Tensor:
    drawn = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size=width, dtype=np.int64)
    return torch.from_numpy(drawn | 1).to(device)  # odd: one differing token always shows


def _is_media(name: str, value: Any) -> bool:
    """Pixels and sound come as fractions; embeddings too, left in the features by the forward of an earlier call."""
    return isinstance(value, Tensor) and value.is_floating_point() and not name.endswith(("_embedding", "_embeddings"))


def _processes() -> tuple[int, int]:
    """Returns number of processes and rank of this one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1, 0
    return torch.distributed.get_world_size(), torch.distributed.get_rank()


def _is_a(module: nn.Module, name: str) -> bool:
    return any(base.__name__ == name for base in type(module).__mro__)


def _seam_of(module: nn.Module) -> _Seam | None:
    """Returns how to tap ``module``, or None. Losses of cross-encoders have the same names and no similarity."""
    found = next((seam for name, seam in _SEAMS.items() if _is_a(module, name)), None)
    fits = found is not None and hasattr(module, found.method) and hasattr(module, found.similarity)
    return found if fits else None


def _owner(module: Any, name: str) -> Any:
    """Returns the module that holds ``name``: a cached loss passes it on from the loss inside it."""
    return module.loss if isinstance(getattr(type(module), name, None), property) else module
