"""Scores that every processor computes alike.

Promise: `canonical_scores` of a pair depends on the two vectors alone, not on what else is computed beside it: products
in float64 (exact for fp32 factors), summed in one fixed order by elementwise arithmetic, rounded to float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from fullrank._errors import EvaluationError, SettingError

__all__ = ["Rows", "Similarity", "Vectors", "canonical_scores", "chunks", "exact_fp32", "pair_scores", "prepare"]

Similarity = Literal["cosine", "dot", "euclidean"]

PAIR_BYTES = 4 << 20
"""Memory that one batch of canonical scores may take: it should stay in cache (32 MiB take twice as long)."""


DENSE_SHARE = 0.02
"""Share of wanted pairs in a block above which a float64 product is cheaper than summing each pair in order."""


@dataclass(frozen=True)
class Vectors:
    """Embeddings made ready for a similarity.

    Attributes:
        rows: float32 [n, d]; unit length under cosine; zero where the embedding was unusable.
        scale: float32 [n], length of each row.
        bad: bool [n], rows that hold NaN or infinity (or only zeros, under cosine) and never rank.
    """

    rows: Tensor
    scale: Tensor
    bad: Tensor

    def __getitem__(self, index: slice | Tensor) -> "Vectors":
        if isinstance(index, slice):
            return Vectors(self.rows[index], self.scale[index], self.bad[index])
        # Three times as fast as indexing, which looks at every element.
        return Vectors(*(column.index_select(0, index) for column in (self.rows, self.scale, self.bad)))


class Rows(Protocol):
    """Document embeddings that are made ready when they are asked for: `Vectors`, or a table prepared lazily."""

    def __getitem__(self, index: slice | Tensor, /) -> Vectors: ...


@contextmanager
def exact_fp32(device_type: str) -> Iterator[None]:
    """Runs matrix products in true fp32 (no TF32, no bf16 passes, no autocast), and puts the settings back."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    # A value that equals the general one may be inherited: "none" puts the inheritance back with it.
    general = torch.backends.fp32_precision  # type: ignore[attr-defined]
    before = ["none" if (own := backend.fp32_precision) == general else own for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device_type, enabled=False), torch.no_grad():
            yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


def prepare(embeddings: Tensor, similarity: Similarity) -> Vectors:
    """Returns ``embeddings`` ([n, d], any float dtype) ready for ranking.

    Under cosine the lengths are summed in the canonical order too, so that a row's unit vector does not depend on its
    neighbours. Elsewhere they only bound rounding errors. What the caller gave is never changed.
    """
    if similarity not in get_args(Similarity):
        raise SettingError(f"similarity={similarity!r} is unknown; choose one of {', '.join(get_args(Similarity))}")
    if embeddings.ndim != 2:
        raise EvaluationError(f"embeddings must have the shape [n, d], got {tuple(embeddings.shape)}")
    rows = embeddings.detach().to(torch.float32)
    if similarity == "cosine":
        rows, scale = _unit_rows(rows)
    else:
        scale = torch.linalg.vector_norm(rows, dim=1)
        if not bool(torch.isfinite(scale).all()):  # a square may overflow where the row does not
            scale = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).to(torch.float32)
    bad = ~torch.isfinite(scale)
    if bool(bad.any()):
        keep = ~bad[:, None]
        rows, scale = torch.where(keep, rows, 0.0), torch.where(bad, 0.0, scale)
    return Vectors(rows, scale, bad)


def _unit_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows at length 1 and a scale of 1, or NaN for a row without direction."""
    unit = torch.empty_like(rows, memory_format=torch.contiguous_format)
    scale = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    for part in chunks(*rows.shape):
        wide = rows[part].to(torch.float64)
        length = _tree_sum(wide * wide).sqrt()
        unit[part] = (wide / length[:, None]).to(torch.float32)
        scale[part] = torch.where(length == 0, torch.nan, length / length).to(torch.float32)
    return unit, scale


def canonical_scores(queries: Tensor, documents: Tensor, similarity: Similarity) -> Tensor:
    """Returns float32 [m]: the score of each row of ``queries`` ([m, d] fp32) with the same row of ``documents``.

    Every step is elementwise IEEE arithmetic in a fixed order, so the result is the same on every processor.
    """
    q, d = queries.to(torch.float64), documents.to(torch.float64)
    if similarity == "euclidean":
        return -_tree_sum((q - d) ** 2).sqrt().to(torch.float32)
    return _tree_sum(q * d).to(torch.float32)


def _tree_sum(x: Tensor) -> Tensor:
    """Returns the sum over the last dimension of ``x`` ([m, d] float64), halves added elementwise: one fixed order."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        folded = x[:, :half] + x[:, half : 2 * half]
        x = torch.cat([folded, x[:, -1:]], dim=1) if x.shape[1] % 2 else folded
    return x[:, 0] if x.shape[1] else x.new_zeros(len(x))


def chunks(n: int, d: int) -> Iterator[slice]:
    """Returns slices of n pairs of d dimensions whose float64 products fit into `PAIR_BYTES`."""
    step = max(1, PAIR_BYTES // (16 * max(1, d)))
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def pair_scores(queries: Vectors, query: Tensor, documents: Rows, doc: Tensor, similarity: Similarity) -> Tensor:
    """Returns the canonical score of each pair: float32 [p], -inf where the document is unusable.

    Many pairs of few texts, as a collapsed model makes them, go through a float64 product first: where its error cannot
    move the rounded value, that value is the canonical one; the others are summed in order.

    Args:
        queries, documents: what the pairs point into.
        query, doc: int64 [p], rows; equal queries together.
        similarity: the vectors were prepared for.
    """
    rows, line = torch.unique_consecutive(query, return_inverse=True)
    distinct, column = torch.unique(doc, return_inverse=True)
    unsure = torch.arange(len(query), device=query.device)
    value = torch.empty(len(query), dtype=torch.float32, device=query.device)
    if similarity != "euclidean" and len(query) > DENSE_SHARE * len(rows) * len(distinct):
        wanted = documents[distinct]
        wide = (queries.rows[rows].double() @ wanted.rows.double().T)[line, column]
        error = 2**-52 * wanted.rows.shape[1] * queries.scale[query].double() * wanted.scale[column].double()
        value = (wide - error).to(torch.float32)
        unsure = torch.nonzero(value != (wide + error).to(torch.float32)).squeeze(1)
        value = value.masked_fill(wanted.bad[column], -torch.inf)
    for part in chunks(len(unsure), queries.rows.shape[1]):
        pair = unsure[part]
        wanted = documents[doc[pair]]
        exact = canonical_scores(queries.rows.index_select(0, query[pair]), wanted.rows, similarity)
        value[pair] = exact.masked_fill(wanted.bad, -torch.inf)
    return value
