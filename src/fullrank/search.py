"""Exact streaming ranks and top-k over blocks of document embeddings.

Promise: `better`, `tied` and `ahead` of every target are those of the whole corpus, whatever the block size, thread
count or processor. A matrix product cannot promise that: the same pair scores differently in blocks of another shape.
So the fp32 product only screens, and pairs within `MARGIN` of a target (or of the k-th best) are decided by the
canonical score, for target and competitor alike.

Shapes: q queries, n documents of a block, d dimensions, m targets (a target is a judged document of a query).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fullrank._errors import EvaluationError
from fullrank.scores import Similarity, Vectors, canonical_scores, chunks, exact_fp32, prepare
from fullrank.toplists import TopLists, by_row

__all__ = ["Ranking", "Similarity", "TargetPairs", "Vectors", "canonical_scores", "exact_fp32", "prepare", "rank"]

MARGIN = 1e-5
"""Pairs whose fp32 scores differ by less than this share of |q||d| are decided by the canonical score."""
QUERY_TILE = 256
DOCUMENT_TILE = 4_096
GROUP = 64
"""Documents whose highest score stands for them: where it passes no target and no list, none of them is looked at."""
TOP_SLACK = 16
DENSE_SHARE = 0.02
"""Share of undecided pairs in a tile above which a float64 product is cheaper than summing each pair in order."""
SPARSE_SHARE = 0.25
"""Share of groups that may pass before `torch.topk` over whole rows is cheaper than looking at the groups."""

MAX_WAITING = 1 << 20
"""Candidates that may wait: a collapsed model makes every document one."""


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
        for part in chunks(m, queries.rows.shape[1]):
            self.goal[part] = canonical_scores(queries.rows[targets.query[part]], target_vectors.rows[part], similarity)
        self.goal[target_vectors.bad] = -torch.inf
        self.better = torch.zeros(m, dtype=torch.int64, device=device)
        self.tied = torch.zeros_like(self.better)
        self.ahead = torch.zeros_like(self.better)
        self.lists = TopLists(q, k, device)
        # The k best screened scores so far: what a document must reach. Candidates wait for the end of their block, by
        # when most have been overtaken and need no canonical score.
        self.screen = torch.full((q, k), -torch.inf, dtype=torch.float32, device=device)
        self.longest = torch.zeros((), dtype=torch.float32, device=device)
        self.waiting: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
        self.n_documents = self.n_near = self.n_waiting = 0
        # Targets of a tile of queries are a slice, because the pairs are ordered by query.
        self.starts = torch.searchsorted(targets.query, torch.arange(q + 1, device=device)).tolist()

    def add(self, positions: Tensor, block: Vectors) -> None:
        _refuse_other_width(self.queries, block)
        self.n_documents += len(positions)
        for d0 in range(0, len(positions), DOCUMENT_TILE):
            docs = slice(d0, d0 + DOCUMENT_TILE)
            tile = block[docs]
            has_bad = bool(tile.bad.any())
            for q0 in range(0, len(self.queries.rows), QUERY_TILE):
                q1 = min(q0 + QUERY_TILE, len(self.queries.rows))
                self._tile(q0, q1, d0, positions[docs], tile, has_bad)
                if self.n_waiting > MAX_WAITING:
                    self._settle_all(positions, block)
        self._settle_all(positions, block)

    def _tile(self, q0: int, q1: int, d0: int, positions: Tensor, tile: Vectors, has_bad: bool) -> None:
        scores = self._screen(q0, q1, tile)
        if has_bad:
            scores[:, tile.bad] = -torch.inf
        if self.exclude is not None:
            scores[self.exclude[q0:q1, None] == positions[None, :]] = -torch.inf
        short = -scores.shape[1] % GROUP
        padded = functional.pad(scores, (0, short), value=-torch.inf) if short else scores
        groups = padded.view(q1 - q0, -1, GROUP)
        peaks = groups.amax(dim=2)
        first, last = self.starts[q0], self.starts[q1]
        if last > first:
            self._count(slice(first, last), q0, groups, peaks, positions, tile)
        self._find_candidates(q0, q1, d0, scores, groups, peaks, tile)

    def _screen(self, q0: int, q1: int, tile: Vectors) -> Tensor:
        """Returns fp32 [queries, documents] that order documents as their scores do, within `_slack`."""
        scores = self.queries.rows[q0:q1] @ tile.rows.T
        return scores - tile.scale**2 / 2 if self.similarity == "euclidean" else scores

    def _slack(self, query_scale: Tensor, longest: Tensor) -> Tensor:
        """Returns, for each query, how far screened scores of documents up to a length may lie from canonical ones."""
        if self.similarity == "euclidean":
            return MARGIN * (query_scale + longest) ** 2 / 2
        return MARGIN * query_scale * longest

    def _screened(self, scores: Tensor, query: Tensor) -> Tensor:
        """Returns canonical ``scores`` in the terms of `_screen`."""
        if self.similarity != "euclidean":
            return scores
        return ((self.queries.scale[query].double() ** 2 - scores.double() ** 2) / 2).to(torch.float32)

    def _count(self, part: slice, q0: int, groups: Tensor, peaks: Tensor, positions: Tensor, tile: Vectors) -> None:
        query, goal = self.targets.query[part], self.goal[part]
        slack = self._slack(self.queries.scale[query], tile.scale.max())
        screened = self._screened(goal, query)
        low, high = screened - slack, screened + slack
        unusable = goal == -torch.inf  # every document that can be ranked stands above it
        low, high = low.masked_fill(unusable, -torch.inf), high.masked_fill(unusable, -torch.inf)
        line, group = torch.nonzero(peaks[query - q0] >= low[:, None], as_tuple=True)
        for at in chunks(len(line), GROUP):
            t, g = line[at], group[at]
            scores = groups[query[t] - q0, g]
            above = scores > high[t, None]
            self.better.index_add_(0, part.start + t, above.sum(dim=1))
            pair, column = torch.nonzero(~above & (scores >= low[t, None]), as_tuple=True)
            docs = g[pair] * GROUP + column
            inside = docs < len(positions)  # unusable targets see the padding too
            self._decide(part.start + t[pair[inside]], docs[inside], positions, tile)

    def _decide(self, rows: Tensor, docs: Tensor, positions: Tensor, tile: Vectors) -> None:
        """Adds the near pairs (target, document of the tile) to the counts by canonical score."""
        self.n_near += len(rows)
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
        for part in chunks(len(unsure), tile.rows.shape[1]):
            pair = unsure[part]
            value[pair] = canonical_scores(self.queries.rows[query[pair]], tile.rows[docs[pair]], self.similarity)
        return value.masked_fill(tile.bad[docs], -torch.inf)

    def _find_candidates(
        self, q0: int, q1: int, d0: int, scores: Tensor, groups: Tensor, peaks: Tensor, tile: Vectors
    ) -> None:
        """Notes the documents of a tile that may enter a list; ``d0`` is the place of the tile in its block."""
        self.longest = torch.maximum(self.longest, tile.scale.max())
        slack = self._slack(self.queries.scale[q0:q1], self.longest)
        floor = self.screen[q0:q1, -1] - 2 * slack
        row, group = torch.nonzero(peaks >= floor[:, None], as_tuple=True)
        if len(row) <= SPARSE_SHARE * peaks.numel():
            for at in chunks(len(row), GROUP):
                r, g = row[at], group[at]
                values = groups[r, g]
                # Padding, unusable and excluded documents hold -inf: it reaches the floor of a list that is not full.
                pair, column = torch.nonzero((values >= floor[r, None]) & (values > -torch.inf), as_tuple=True)
                self._wait(q0, r[pair], values[pair, column], d0 + g[pair] * GROUP + column)
            return
        n = scores.shape[1]
        values, docs = torch.topk(scores, min(self.k + TOP_SLACK, n), dim=1)
        if self.k < n:  # documents this far below the k-th of the tile cannot enter the list
            floor = torch.maximum(floor, values[:, self.k - 1] - 2 * slack)
        open_rows = torch.nonzero((values[:, -1] >= floor) & (values.shape[1] < n)).squeeze(1)
        inside = values >= floor[:, None]
        inside[open_rows] = False
        row, column = torch.nonzero(inside, as_tuple=True)
        self._wait(q0, row, values[row, column], d0 + docs[row, column])
        if len(open_rows):  # more equals than the slack holds: look at the whole rows
            row, column = torch.nonzero(scores[open_rows] >= floor[open_rows, None], as_tuple=True)
            row = open_rows[row]
            self._wait(q0, row, scores[row, column], d0 + column)

    def _wait(self, q0: int, row: Tensor, value: Tensor, docs: Tensor) -> None:
        """Notes candidates (row of the query tile, screened score, document of the block) and raises the floor."""
        if not len(row):
            return
        order = row.argsort(stable=True)
        row, value, docs = row[order], value[order], docs[order]
        self.n_waiting += len(row)
        self.waiting.setdefault(q0, []).append((q0 + row, value, docs))
        rows, line, column, width = by_row(row)
        fresh = torch.full((len(rows), width), -torch.inf, device=value.device)
        fresh[line, column] = value
        best = torch.cat([self.screen[q0 + rows], fresh], dim=1)
        self.screen[q0 + rows] = torch.topk(best, self.k, dim=1).values

    def _settle_all(self, positions: Tensor, block: Vectors) -> None:
        for q0 in list(self.waiting):
            self._settle(q0, positions, block)
        self.n_waiting = 0

    def _settle(self, q0: int, positions: Tensor, block: Vectors) -> None:
        """Moves the candidates of a query tile that are still in reach into the lists, by canonical score."""
        query, value, docs = (torch.cat(column) for column in zip(*self.waiting.pop(q0), strict=True))
        slack = self._slack(self.queries.scale[query], self.longest)
        kept = torch.nonzero(value >= self.screen[query, -1] - 2 * slack).squeeze(1)
        kept = kept[query[kept].argsort(stable=True)]
        query, docs = query[kept], docs[kept]
        place = positions[docs]
        if self.exclude is not None:
            here = self.exclude[query] != place
            query, docs, place = query[here], docs[here], place[here]
        if len(query):
            self.lists.offer(query, self._pair_scores(query, docs, block), place)

    def result(self) -> Ranking:
        return Ranking(
            self.better, self.tied, self.ahead, self.lists.scores, self.lists.docs, self.n_documents, self.n_near
        )


def _refuse_other_width(queries: Vectors, documents: Vectors) -> None:
    if queries.rows.shape[1] != documents.rows.shape[1]:
        raise EvaluationError(
            f"queries have {queries.rows.shape[1]} dimensions and documents {documents.rows.shape[1]}; encode both "
            "with the same model"
        )
