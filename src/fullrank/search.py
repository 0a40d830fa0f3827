"""Exact streaming ranks and top-k over blocks of document embeddings.

Promise: `better`, `tied` and `ahead` of every target are those of the whole corpus, whatever the block size, thread
count or processor. A matrix product cannot promise that: the same pair scores differently in blocks of another shape.
So the fp32 product only screens, and pairs within `MARGIN` of a target (or of the k-th best) are decided by the
canonical score, for target and competitor alike: the products of the fp32 vectors in float64 (exact), summed in one
fixed order, rounded to float32.

Shapes: q queries, n documents of a block, d dimensions, m targets (a target is a judged document of a query).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fullrank._errors import EvaluationError, SettingError

__all__ = ["Ranking", "Similarity", "TargetPairs", "Vectors", "canonical_scores", "exact_fp32", "prepare", "rank"]

Similarity = Literal["cosine", "dot", "euclidean"]

MARGIN = 1e-5
"""Pairs whose fp32 scores differ by less than this share of |q||d| are decided by the canonical score."""
QUERY_TILE = 256
DOCUMENT_TILE = 4_096
TOP_SLACK = 16
PAIR_BYTES = 32 << 20
"""Memory that one batch of canonical scores may take."""
DENSE_SHARE = 0.02
"""Share of undecided pairs in a tile above which a float64 product is cheaper than summing each pair in order."""


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


@dataclass(frozen=True)
class TargetPairs:
    """The judged documents to be ranked, ordered by query: int64 [m] each, positions of queries and documents."""

    query: Tensor
    doc: Tensor


@dataclass(frozen=True)
class Ranking:
    """What one pass over the corpus gives.

    Attributes:
        better, tied, ahead: int64 [m], see `fullrank.metrics.RankCounts`.
        top_scores: float32 [q, k], canonical, best first; -inf where the corpus is shorter.
        top_docs: int64 [q, k], positions; equal scores by rising position; -1 where the corpus is shorter.
        n_documents: documents seen.
        n_near: pairs of a target and a document that only the canonical score could order, the target itself included.
    """

    better: Tensor
    tied: Tensor
    ahead: Tensor
    top_scores: Tensor
    top_docs: Tensor
    n_documents: int
    n_near: int


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

    Lengths are summed in the canonical order too, so that a row's unit vector does not depend on its neighbours.
    """
    if similarity not in get_args(Similarity):
        raise SettingError(f"similarity={similarity!r} is unknown; choose one of {', '.join(get_args(Similarity))}")
    if embeddings.ndim != 2:
        raise EvaluationError(f"embeddings must have the shape [n, d], got {tuple(embeddings.shape)}")
    rows = embeddings.detach().to(torch.float32)
    scale = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    for part in _chunks(len(rows), rows.shape[1]):
        wide = rows[part].to(torch.float64)
        length = _tree_sum(wide * wide).sqrt()
        if similarity == "cosine":
            out[part] = (wide / length[:, None]).to(torch.float32)
            scale[part] = torch.where(length == 0, torch.nan, length / length).to(torch.float32)
        else:
            out[part] = rows[part]
            scale[part] = length.to(torch.float32)
    bad = ~torch.isfinite(scale)
    out[bad] = 0.0
    scale[bad] = 0.0
    return Vectors(out, scale, bad)


def canonical_scores(queries: Tensor, documents: Tensor, similarity: Similarity) -> Tensor:
    """Returns float32 [m]: the score of each row of ``queries`` ([m, d] fp32) with the same row of ``documents``.

    Every step is elementwise IEEE arithmetic in a fixed order, so the result is the same on every processor.
    """
    q, d = queries.to(torch.float64), documents.to(torch.float64)
    if similarity == "euclidean":
        return -_tree_sum((q - d) ** 2).sqrt().to(torch.float32)
    return _tree_sum(q * d).to(torch.float32)


def rank(
    queries: Vectors,
    targets: TargetPairs,
    target_vectors: Vectors,
    blocks: Iterable[tuple[Tensor, Vectors]],
    *,
    similarity: Similarity,
    k: int,
    id_order: Tensor | None = None,
    exclude: Tensor | None = None,
) -> Ranking:
    """Returns exact counts for all targets and the top ``k`` documents of all queries, in one pass over ``blocks``.

    Args:
        queries: [q, d].
        targets: pairs of positions; every target document must be among the blocks once.
        target_vectors: [m, d], the embeddings of the target documents, one row a pair.
        blocks: (positions int64 [n], vectors [n, d]) in any order and size, on the device of the queries.
        similarity: the vectors were prepared for.
        k: length of the lists.
        id_order: int64 [documents], place of each document in the byte order of ids; needed for ``ahead``.
        exclude: int64 [q], a document position that does not exist for the query (its own text), or -1.

    Scores that leave the range of float32 (vectors below 1e-20 or above 1e17 in length) are not exact.

    Raises:
        EvaluationError: dimensions differ between queries and documents.
    """
    with exact_fp32(queries.rows.device.type):
        run = _Pass(queries, targets, target_vectors, similarity, k, id_order, exclude)
        for positions, block in blocks:
            run.add(positions, block)
        return run.result()


class _Pass:
    """The state of one pass: counts so far, lists so far."""

    def __init__(
        self,
        queries: Vectors,
        targets: TargetPairs,
        target_vectors: Vectors,
        similarity: Similarity,
        k: int,
        id_order: Tensor | None,
        exclude: Tensor | None,
    ) -> None:
        device, m, q = queries.rows.device, len(targets.query), len(queries.rows)
        _refuse_other_width(queries, target_vectors)
        self.queries, self.targets, self.similarity, self.k = queries, targets, similarity, k
        self.id_order, self.exclude = id_order, exclude
        self.goal = torch.empty(m, dtype=torch.float32, device=device)
        for part in _chunks(m, queries.rows.shape[1]):
            self.goal[part] = canonical_scores(queries.rows[targets.query[part]], target_vectors.rows[part], similarity)
        self.goal[target_vectors.bad] = -torch.inf
        self.better = torch.zeros(m, dtype=torch.int64, device=device)
        self.tied = torch.zeros_like(self.better)
        self.ahead = torch.zeros_like(self.better)
        self.top_scores = torch.full((q, k), -torch.inf, dtype=torch.float32, device=device)
        self.top_docs = torch.full((q, k), -1, dtype=torch.int64, device=device)
        self.n_documents = self.n_near = 0
        # Targets of a tile of queries are a slice, because the pairs are ordered by query.
        self.starts = torch.searchsorted(targets.query, torch.arange(q + 1, device=device)).tolist()

    def add(self, positions: Tensor, block: Vectors) -> None:
        _refuse_other_width(self.queries, block)
        self.n_documents += len(positions)
        for d0 in range(0, len(positions), DOCUMENT_TILE):
            docs = slice(d0, d0 + DOCUMENT_TILE)
            tile = Vectors(block.rows[docs], block.scale[docs], block.bad[docs])
            for q0 in range(0, len(self.queries.rows), QUERY_TILE):
                q1 = min(q0 + QUERY_TILE, len(self.queries.rows))
                self._tile(q0, q1, positions[docs], tile)

    def _tile(self, q0: int, q1: int, positions: Tensor, tile: Vectors) -> None:
        scores = self._screen(q0, q1, tile)
        scores[:, tile.bad] = -torch.inf
        if self.exclude is not None:
            scores[self.exclude[q0:q1, None] == positions[None, :]] = -torch.inf
        highest = scores.amax(dim=1)
        first, last = self.starts[q0], self.starts[q1]
        if last > first:
            self._count(slice(first, last), q0, scores, highest, positions, tile)
        self._extend_lists(q0, q1, scores, highest, positions, tile)

    def _screen(self, q0: int, q1: int, tile: Vectors) -> Tensor:
        """Returns fp32 [queries, documents] that order documents as their scores do, within `_slack`."""
        scores = self.queries.rows[q0:q1] @ tile.rows.T
        return scores - tile.scale**2 / 2 if self.similarity == "euclidean" else scores

    def _slack(self, query_scale: Tensor, tile: Vectors) -> Tensor:
        """Returns, for each query, how far two screened scores of the tile may lie from their canonical ones."""
        longest = tile.scale.max()
        if self.similarity == "euclidean":
            return MARGIN * (query_scale + longest) ** 2 / 2
        return MARGIN * query_scale * longest

    def _screened(self, scores: Tensor, query: Tensor) -> Tensor:
        """Returns canonical ``scores`` in the terms of `_screen`."""
        if self.similarity != "euclidean":
            return scores
        return ((self.queries.scale[query].double() ** 2 - scores.double() ** 2) / 2).to(torch.float32)

    def _count(self, part: slice, q0: int, scores: Tensor, highest: Tensor, positions: Tensor, tile: Vectors) -> None:
        query, goal = self.targets.query[part], self.goal[part]
        slack = self._slack(self.queries.scale[query], tile)
        screened = self._screened(goal, query)
        low, high = screened - slack, screened + slack
        unusable = goal == -torch.inf  # every document that can be ranked stands above it
        low, high = low.masked_fill(unusable, -torch.inf), high.masked_fill(unusable, -torch.inf)
        touched = torch.nonzero((highest[query - q0] >= low) | unusable).squeeze(1)
        rows_at_once = max(1, PAIR_BYTES // (4 * scores.shape[1]))
        for start in range(0, len(touched), rows_at_once):
            t = touched[start : start + rows_at_once]
            row_scores = scores[query[t] - q0]
            above = row_scores > high[t, None]
            self.better[part.start + t] += above.sum(dim=1)
            near = torch.nonzero(~above & (row_scores >= low[t, None]))
            self._decide(part.start + t, near, positions, tile)

    def _decide(self, target: Tensor, near: Tensor, positions: Tensor, tile: Vectors) -> None:
        """Adds the near pairs ((row of ``target``, document of the tile) [p, 2]) to the counts by canonical score."""
        self.n_near += len(near)
        rows, docs = target[near[:, 0]], near[:, 1]
        query, place = self.targets.query[rows], positions[docs]
        value = self._pair_scores(query, docs, tile)
        if self.exclude is not None:
            value = value.masked_fill(self.exclude[query] == place, torch.nan)
        goal = self.goal[rows]
        equal = value == goal
        self.better.index_add_(0, rows, (value > goal).long())
        self.tied.index_add_(0, rows, equal.long())
        if self.id_order is not None:
            greater = self.id_order[place] > self.id_order[self.targets.doc[rows]]
            self.ahead.index_add_(0, rows, (equal & greater).long())

    def _pair_scores(self, query: Tensor, docs: Tensor, tile: Vectors) -> Tensor:
        """Returns the canonical score of each pair (query, document of the tile): float32 [p].

        Many pairs of few queries, as a collapsed model makes them, go through a float64 product first: where its
        error cannot move the rounded value, that value is the canonical one; the others are summed in order.
        """
        value = torch.empty(len(query), dtype=torch.float32, device=query.device)
        unsure = torch.arange(len(query), device=query.device)
        rows, line = torch.unique_consecutive(query, return_inverse=True)
        if self.similarity != "euclidean" and len(query) > DENSE_SHARE * len(rows) * len(tile.rows):
            wide = (self.queries.rows[rows].double() @ tile.rows.double().T)[line, docs]
            error = 2**-52 * tile.rows.shape[1] * self.queries.scale[query].double() * tile.scale[docs].double()
            value = (wide - error).to(torch.float32)
            unsure = torch.nonzero(value != (wide + error).to(torch.float32)).squeeze(1)
        for part in _chunks(len(unsure), tile.rows.shape[1]):
            pair = unsure[part]
            value[pair] = canonical_scores(self.queries.rows[query[pair]], tile.rows[docs[pair]], self.similarity)
        return value.masked_fill(tile.bad[docs], -torch.inf)

    def _extend_lists(
        self, q0: int, q1: int, scores: Tensor, highest: Tensor, positions: Tensor, tile: Vectors
    ) -> None:
        query = torch.arange(q0, q1, device=scores.device)
        slack = self._slack(self.queries.scale[query], tile)
        floor = self._screened(self.top_scores[q0:q1, -1], query) - slack
        floor = floor.masked_fill(self.top_docs[q0:q1, -1] < 0, -torch.inf)
        touched = torch.nonzero(highest >= floor).squeeze(1)
        if not len(touched):
            return
        floor, slack, row_scores = floor[touched], slack[touched], scores[touched]
        n = scores.shape[1]
        values, docs = torch.topk(row_scores, min(self.k + TOP_SLACK, n), dim=1)
        if self.k < n:  # documents this far below the k-th of the tile cannot enter the list
            floor = torch.maximum(floor, values[:, self.k - 1] - 2 * slack)
        open_rows = torch.nonzero((values[:, -1] >= floor) & (values.shape[1] < n)).squeeze(1)
        inside = values >= floor[:, None]
        inside[open_rows] = False
        pairs = torch.nonzero(inside)
        self._merge(q0 + touched[pairs[:, 0]], docs[pairs[:, 0], pairs[:, 1]], positions, tile)
        if len(open_rows):  # more equals than the slack holds: look at the whole rows
            pairs = torch.nonzero(row_scores[open_rows] >= floor[open_rows, None])
            self._merge(q0 + touched[open_rows[pairs[:, 0]]], pairs[:, 1], positions, tile)

    def _merge(self, query: Tensor, docs: Tensor, positions: Tensor, tile: Vectors) -> None:
        """Merges candidates (queries ascending) into the lists: canonical score descending, position ascending."""
        if not len(query):
            return
        value, place = self._pair_scores(query, docs, tile), positions[docs]
        if self.exclude is not None:
            kept = self.exclude[query] != place
            query, value, place = query[kept], value[kept], place[kept]
        rows, counts = torch.unique_consecutive(query, return_counts=True)
        if not len(rows):
            return
        column = torch.arange(len(query), device=query.device) - torch.repeat_interleave(
            counts.cumsum(0) - counts, counts
        )
        line = torch.repeat_interleave(torch.arange(len(rows), device=query.device), counts)
        width = int(counts.max())
        new_scores = torch.full((len(rows), width), -torch.inf, device=query.device)
        new_docs = torch.full((len(rows), width), torch.iinfo(torch.int64).max, device=query.device)
        new_scores[line, column], new_docs[line, column] = value, place
        old_docs = self.top_docs[rows]
        all_docs = torch.cat([old_docs.masked_fill(old_docs < 0, torch.iinfo(torch.int64).max), new_docs], dim=1)
        all_scores = torch.cat([self.top_scores[rows], new_scores], dim=1)
        by_place = all_docs.argsort(dim=1, stable=True)
        all_docs, all_scores = all_docs.gather(1, by_place), all_scores.gather(1, by_place)
        by_score = all_scores.argsort(dim=1, descending=True, stable=True)[:, : self.k]
        docs_out = all_docs.gather(1, by_score)
        self.top_scores[rows] = all_scores.gather(1, by_score)
        self.top_docs[rows] = docs_out.masked_fill(docs_out == torch.iinfo(torch.int64).max, -1)

    def result(self) -> Ranking:
        return Ranking(
            self.better, self.tied, self.ahead, self.top_scores, self.top_docs, self.n_documents, self.n_near
        )


def _refuse_other_width(queries: Vectors, documents: Vectors) -> None:
    if queries.rows.shape[1] != documents.rows.shape[1]:
        raise EvaluationError(
            f"queries have {queries.rows.shape[1]} dimensions and documents {documents.rows.shape[1]}; encode both "
            "with the same model"
        )


def _tree_sum(x: Tensor) -> Tensor:
    """Returns the sum over the last dimension of ``x`` ([m, d] float64), halves added elementwise: one fixed order."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        folded = x[:, :half] + x[:, half : 2 * half]
        x = torch.cat([folded, x[:, -1:]], dim=1) if x.shape[1] % 2 else folded
    return x[:, 0] if x.shape[1] else x.new_zeros(len(x))


def _chunks(n: int, d: int) -> Iterator[slice]:
    step = max(1, PAIR_BYTES // (16 * max(1, d)))
    return (slice(start, min(start + step, n)) for start in range(0, n, step))
