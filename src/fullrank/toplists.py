"""The best documents of each query so far, in a deterministic order.

Promise: score descending, position ascending, whatever the order in which documents were offered.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["TopLists", "by_row"]

NONE = torch.iinfo(torch.int64).max


class TopLists:
    """Lists of k documents for q queries.

    Attributes:
        scores: float32 [q, k], best first; -inf where a list is not full.
        docs: int64 [q, k], positions; -1 where a list is not full.
    """

    def __init__(self, q: int, k: int, device: torch.device) -> None:
        self.k = k
        self.scores = torch.full((q, k), -torch.inf, dtype=torch.float32, device=device)
        self.docs = torch.full((q, k), -1, dtype=torch.int64, device=device)

    @classmethod
    def merged(cls, scores: Sequence[Tensor], docs: Sequence[Tensor]) -> "TopLists":
        """Returns the lists of the documents of several lists [q, k] for the same queries."""
        q, k = scores[0].shape
        lists = cls(q, k, scores[0].device)
        for part_scores, part_docs in zip(scores, docs, strict=True):
            row, column = torch.nonzero(part_docs >= 0, as_tuple=True)
            if len(row):
                lists.offer(row, part_scores[row, column], part_docs[row, column])
        return lists

    def offer(self, query: Tensor, value: Tensor, place: Tensor) -> None:
        """Merges candidates into the lists: (query, score, position), [p] each, queries ascending."""
        rows, line, column, width = by_row(query)
        new_scores = torch.full((len(rows), width), -torch.inf, device=query.device)
        new_docs = torch.full((len(rows), width), NONE, device=query.device)
        new_scores[line, column], new_docs[line, column] = value, place
        old_docs = self.docs[rows]
        docs = torch.cat([old_docs.masked_fill(old_docs < 0, NONE), new_docs], dim=1)
        scores = torch.cat([self.scores[rows], new_scores], dim=1)
        by_place = docs.argsort(dim=1, stable=True)
        docs, scores = docs.gather(1, by_place), scores.gather(1, by_place)
        by_score = scores.argsort(dim=1, descending=True, stable=True)[:, : self.k]
        docs = docs.gather(1, by_score)
        self.scores[rows] = scores.gather(1, by_score)
        self.docs[rows] = docs.masked_fill(docs == NONE, -1)


def by_row(row: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Returns how to lay out a flat list by its ``row`` ([p], ascending, not empty) as a table.

    The distinct rows, and for each entry the line and column of the table, and the table's width.
    """
    rows, counts = torch.unique_consecutive(row, return_counts=True)
    line = torch.repeat_interleave(torch.arange(len(rows), device=row.device), counts)
    column = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[line]
    return rows, line, column, int(counts.max())
