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

from fullrank._errors import EvaluationError, SettingError
from fullrank.ranks import ALONE, Ranks
from fullrank.scores import (
    Rows,
    Similarity,
    Vectors,
    canonical_scores,
    chunks,
    exact_fp32,
    pair_scores,
    prepare,
)
from fullrank.shortlist import GROUP, Shortlist, group_peaks
from fullrank.toplists import TopLists

__all__ = [
    "Pass",
    "Ranking",
    "Similarity",
    "TargetPairs",
    "Vectors",
    "canonical_scores",
    "exact_fp32",
    "goals",
    "prepare",
    "rank",
    "refuse_other_width",
]

MARGIN = 1e-5
"""Pairs whose fp32 scores differ by less than this share of |q||d| are decided by the canonical score."""
QUERY_TILE, DOCUMENT_TILE = 512, 2_048
"""Scores at a time on a processor: 4 MiB, which stay in cache."""
DEVICE_SHARE, DEVICE_TILE = 8, 1 << 30
"""On an accelerator the scores at a time take an eighth of the free memory, and at most 1 GiB."""
MAX_WAITING = 1 << 20
"""Candidates and near pairs that may wait: a collapsed model makes every document one."""


@dataclass(frozen=True)
class TargetPairs:
    """The judged documents to be ranked, ordered by query: int64 [m] each, positions of queries and documents."""

    query: Tensor
    doc: Tensor


@dataclass(frozen=True)
class Ranking:
    """What one pass over documents gives.

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
    blocks: Iterable[tuple[Tensor, Rows]],
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
        SettingError: ``k`` is below 1.
    """
    goal = goals(queries, targets.query, target_vectors, similarity)
    run = Pass(queries, targets, goal, similarity=similarity, k=k, id_order=id_order, exclude=exclude)
    for positions, block in blocks:
        run.add(positions, block)
    return run.ranking()


def goals(queries: Vectors, query: Tensor, documents: Vectors, similarity: Similarity) -> Tensor:
    """Returns float32 [m], the canonical score of each target: ``query`` int64 [m] with ``documents`` [m, d]."""
    refuse_other_width(queries, documents)
    goal = torch.empty(len(query), dtype=torch.float32, device=query.device)
    for part in chunks(len(query), queries.rows.shape[1]):
        goal[part] = canonical_scores(queries.rows[query[part]], documents.rows[part], similarity)
    return goal.masked_fill(documents.bad, -torch.inf)


class Pass:
    """The state of one pass: counts and lists over the documents so far.

    Args:
        queries, targets, similarity, k, id_order, exclude: see `rank`.
        goal: from `goals`.
        ranks: the processes that share the documents; each adds its own, `ranking` brings them together.
    """

    def __init__(
        self,
        queries: Vectors,
        targets: TargetPairs,
        goal: Tensor,
        *,
        similarity: Similarity,
        k: int,
        id_order: Tensor | None = None,
        exclude: Tensor | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        if k < 1:
            raise SettingError(f"k={k} must be a whole number from 1")
        device, m, q = queries.rows.device, len(targets.query), len(queries.rows)
        self.queries, self.targets, self.goal, self.similarity, self.k = queries, targets, goal, similarity, k
        self.id_order, self.exclude, self.ranks = id_order, exclude, ranks
        self.better = torch.zeros(m, dtype=torch.int64, device=device)
        self.tied = torch.zeros_like(self.better)
        self.ahead = torch.zeros_like(self.better)
        self.lists = TopLists(q, k, device)
        self.longest = torch.zeros((), dtype=torch.float32, device=device)
        self.undecided: list[tuple[Tensor, Tensor]] = []
        self.n_documents = self.n_near = self.n_undecided = 0
        self.query_tile, self.document_tile = _tile_shape(device, q)
        # Candidates wait for the end of their block: by then most are overtaken and need no canonical score.
        tiles = [slice(q0, min(q0 + self.query_tile, q)) for q0 in range(0, q, self.query_tile)]
        self.shortlists = [(tile, Shortlist(tile.stop - tile.start, k, device)) for tile in tiles]
        # Targets of a tile of queries are a slice, because the pairs are ordered by query.
        self.starts = torch.searchsorted(targets.query, torch.arange(q + 1, device=device)).tolist()

    def add(self, positions: Tensor, block: Rows) -> None:
        """Ranks a block: ``positions`` int64 [n], and their embeddings."""
        with exact_fp32(self.queries.rows.device.type):
            for first in range(0, len(positions), self.document_tile):
                part = slice(first, min(first + self.document_tile, len(positions)))
                tile = block[part]
                refuse_other_width(self.queries, tile)
                self.longest = torch.maximum(self.longest, tile.scale.max())
                has_bad = bool(tile.bad.any())
                for queries, shortlist in self.shortlists:
                    self._tile(queries, shortlist, positions[part], tile, first, has_bad)
                    if shortlist.n > MAX_WAITING // len(self.shortlists):
                        self._settle(queries, shortlist, positions, block)
                    if self.n_undecided > MAX_WAITING:
                        self._decide(positions, block)
            self._decide(positions, block)
            for queries, shortlist in self.shortlists:
                self._settle(queries, shortlist, positions, block)
        self.n_documents += len(positions)

    def ranking(self, *, lists: bool = True) -> Ranking:
        """Returns what the documents so far give, those of all ranks together; may be asked at any time.

        Without ``lists`` the counts alone, and lists of length 0: what a look at a bound needs.
        """
        counts = self.ranks.sum(torch.stack([self.better, self.tied, self.ahead]))
        totals = self.ranks.sum(torch.tensor([self.n_documents, self.n_near], device=counts.device))
        n_documents, n_near = totals.tolist()
        better, tied, ahead = counts.clone()
        top = self.lists
        scores, docs = top.scores[:, :0], top.docs[:, :0]
        if lists:
            if self.ranks.size > 1:
                top = TopLists.merged(self.ranks.gather(top.scores), self.ranks.gather(top.docs))
            scores, docs = top.scores, top.docs
        return Ranking(better, tied, ahead, scores.clone(), docs.clone(), n_documents, n_near)

    def _tile(
        self, queries: slice, shortlist: Shortlist, positions: Tensor, tile: Vectors, first: int, has_bad: bool
    ) -> None:
        scores = self._screen(queries, tile)
        if has_bad:
            scores[:, tile.bad] = -torch.inf
        if self.exclude is not None:
            scores[self.exclude[queries, None] == positions[None, :]] = -torch.inf
        groups, peaks = group_peaks(scores)
        self._count(queries, groups, peaks, tile, first=first)
        slack = self._slack(self.queries.scale[queries], self.longest)
        shortlist.offer(scores, groups, peaks, slack, first=first)

    def _screen(self, queries: slice, tile: Vectors) -> Tensor:
        """Returns fp32 [queries, documents] that order documents as their scores do, within `_slack`."""
        scores = self.queries.rows[queries] @ tile.rows.T
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

    def _count(self, queries: slice, groups: Tensor, peaks: Tensor, tile: Vectors, *, first: int) -> None:
        """Counts what stands clearly above a target, and notes what stands too near to tell."""
        part = slice(self.starts[queries.start], self.starts[queries.stop])
        if part.stop == part.start:
            return
        n = len(tile.scale)
        query, goal = self.targets.query[part], self.goal[part]
        slack = self._slack(self.queries.scale[query], tile.scale.max())
        screened = self._screened(goal, query)
        low, high = screened - slack, screened + slack
        unusable = goal == -torch.inf  # every document that can be ranked stands above it
        low, high = low.masked_fill(unusable, -torch.inf), high.masked_fill(unusable, -torch.inf)
        line, group = torch.nonzero(peaks.index_select(0, query - queries.start) >= low[:, None], as_tuple=True)
        flat = groups.reshape(-1, GROUP)
        for at in chunks(len(line), GROUP):
            t, g = line[at], group[at]
            scores = flat.index_select(0, (query[t] - queries.start) * groups.shape[1] + g)
            above = scores > high[t, None]
            self.better.index_add_(0, part.start + t, above.sum(dim=1))
            pair, column = torch.nonzero(~above & (scores >= low[t, None]), as_tuple=True)
            docs = g[pair] * GROUP + column
            inside = docs < n  # unusable targets see the padding too
            self.undecided.append((part.start + t[pair[inside]], first + docs[inside]))
            self.n_undecided += int(inside.sum())

    def _decide(self, positions: Tensor, block: Rows) -> None:
        """Adds the near pairs (target, document of the block) to the counts by canonical score."""
        if not self.undecided:
            return
        rows, docs = (torch.cat(column) for column in zip(*self.undecided, strict=True))
        self.undecided, self.n_undecided = [], 0
        order = rows.argsort(stable=True)
        rows, docs = rows[order], docs[order]
        self.n_near += len(rows)
        query, place = self.targets.query[rows], positions[docs]
        value = pair_scores(self.queries, query, block, docs, self.similarity)
        if self.exclude is not None:
            value = value.masked_fill(self.exclude[query] == place, torch.nan)
        goal = self.goal[rows]
        equal = value == goal
        self.better.index_add_(0, rows, (value > goal).long())
        self.tied.index_add_(0, rows, equal.long())
        if self.id_order is not None:
            greater = self.id_order[place] > self.id_order[self.targets.doc[rows]]
            self.ahead.index_add_(0, rows, (equal & greater).long())

    def _settle(self, queries: slice, shortlist: Shortlist, positions: Tensor, block: Rows) -> None:
        """Moves the candidates that are still in reach into the lists, by canonical score."""
        row, docs = shortlist.take(self._slack(self.queries.scale[queries], self.longest))
        if not len(row):
            return
        query, place = queries.start + row, positions[docs]
        self.lists.offer(query, pair_scores(self.queries, query, block, docs, self.similarity), place)


def _tile_shape(device: torch.device, n_queries: int) -> tuple[int, int]:
    """Returns how many queries and documents are scored at a time."""
    if device.type != "cuda":
        return QUERY_TILE, DOCUMENT_TILE
    free, _ = torch.cuda.mem_get_info(device)
    queries = max(1, min(n_queries, 2_048))
    documents = min(free // DEVICE_SHARE, DEVICE_TILE) // (4 * queries)
    return queries, max(GROUP, documents // GROUP * GROUP)


def refuse_other_width(queries: Vectors, documents: Vectors) -> None:
    """Raises `EvaluationError` where two sides have other numbers of dimensions."""
    if queries.rows.shape[1] != documents.rows.shape[1]:
        raise EvaluationError(
            f"queries have {queries.rows.shape[1]} dimensions and documents {documents.rows.shape[1]}; encode both "
            "with the same model"
        )
