"""The documents that may still enter the lists of a tile of queries, found by screened scores.

Promise: no document of the true list is ever missed. A document is let go only where k others stand more than the
screen's error above it.
"""

import torch
from torch import Tensor

from fullrank.toplists import by_row

__all__ = ["GROUP", "Shortlist", "group_peaks"]

GROUP = 32
"""Documents whose highest score stands for them: where it reaches no target and no list, none of them is looked at.
Measured on 256 x 4,096 scores, one thread, in shares of the product of 384 dimensions: the highest of every 32 costs
2 %, of every 16 costs 13 %."""
DENSE_SHARE = 0.4
"""Share of groups in reach above which comparing the whole tile is cheaper than looking at the groups."""
LOWEST = torch.finfo(torch.float32).min


def group_peaks(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``scores`` ([q, n]) cut into groups [q, g, GROUP], padded with -inf, and the highest of each [q, g]."""
    short = -scores.shape[1] % GROUP
    if short:
        scores = torch.nn.functional.pad(scores, (0, short), value=-torch.inf)
    groups = scores.view(len(scores), -1, GROUP)
    return groups, groups.amax(dim=2)


class Shortlist:
    """Candidates for the k best documents of q queries.

    Attributes:
        floor: float32 [q], screened score of the k-th best document so far; -inf before there are k.
        n: candidates that wait.
    """

    def __init__(self, q: int, k: int, device: torch.device) -> None:
        self.k, self.n = k, 0
        self.floor = torch.full((q,), -torch.inf, device=device)
        self._best = torch.full((q, k), -torch.inf, device=device)
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []
        self._fresh: list[tuple[Tensor, Tensor, Tensor]] = []
        self._n_fresh = 0

    def offer(self, scores: Tensor, groups: Tensor, peaks: Tensor, slack: Tensor, *, first: int) -> None:
        """Notes the documents of a tile that may enter a list.

        Args:
            scores: screened, float32 [q, n]; -inf for documents that do not count.
            groups, peaks: of ``scores``, from `group_peaks`.
            slack: float32 [q], how far a screened score may lie from the canonical one.
            first: place of the tile's first document in its block.
        """
        reach = self.floor
        if bool(torch.isneginf(reach).any()):
            reach = torch.maximum(reach, _cheap_floor(scores, self.k))
        reach = (reach - 2 * slack).clamp(min=LOWEST)
        row, group = torch.nonzero(peaks >= reach[:, None], as_tuple=True)
        if len(row) <= DENSE_SHARE * peaks.numel():
            values = groups.reshape(-1, GROUP).index_select(0, row * groups.shape[1] + group)
            pair, column = torch.nonzero(values >= reach[row, None], as_tuple=True)
            self._add(row[pair], values[pair, column], first + group[pair] * GROUP + column, slack)
        else:
            row, doc = torch.nonzero(scores >= reach[:, None], as_tuple=True)
            self._add(row, scores[row, doc], first + doc, slack)

    def take(self, slack: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the candidates that are still in reach, (row, place in the block), rows ascending; none wait then."""
        self._raise_floor(slack)
        row, doc = (torch.cat(column) for column in list(zip(*self._kept, strict=True))[::2]) if self._kept else _NONE
        self._kept, self.n = [], 0
        order = row.argsort(stable=True)
        return row[order], doc[order]

    def _add(self, row: Tensor, value: Tensor, doc: Tensor, slack: Tensor) -> None:
        self._fresh.append((row, value, doc))
        self._n_fresh += len(row)
        self.n += len(row)
        if self._n_fresh > self.k * len(self.floor):  # each time costs a `topk`: not at every tile
            self._raise_floor(slack)

    def _raise_floor(self, slack: Tensor) -> None:
        """Brings the floor up to the k-th best of all candidates, and drops those that fell out of reach."""
        if not self._n_fresh:
            return
        row, value, doc = (torch.cat(column) for column in zip(*self._fresh, strict=True))
        order = row.argsort(stable=True)
        row, value, doc = row[order], value[order], doc[order]
        rows, line, column, width = by_row(row)
        table = torch.full((len(rows), width), -torch.inf, device=value.device)
        table[line, column] = value
        best = torch.topk(torch.cat([self._best[rows], table], dim=1), self.k, dim=1, sorted=False).values
        self._best[rows], self.floor[rows] = best, best.amin(dim=1)
        self._kept.append((row, value, doc))
        row, value, doc = (torch.cat(column) for column in zip(*self._kept, strict=True))
        near = value >= (self.floor - 2 * slack)[row]
        self._kept = [(row[near], value[near], doc[near])]
        self._fresh, self._n_fresh = [], 0
        self.n = len(self._kept[0][0])


_NONE = (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


def _cheap_floor(scores: Tensor, k: int) -> Tensor:
    """Returns [q], a score that k documents of the tile reach, or -inf where it has fewer than k.

    The k-th highest of maxima over disjoint sets of documents: as good as the k-th highest score where the sets are
    many, and a tenth of its price (a `topk` over 256 columns, not over 4,096).
    """
    n = scores.shape[1]
    if n < k:
        return scores.new_full((len(scores),), -torch.inf)
    size = max(1, int(n // (2.5 * k)))
    width = n // size
    peaks = scores[:, : size * width].reshape(len(scores), size, width).amax(dim=1)
    return torch.topk(peaks, k, dim=1, sorted=False).values.amin(dim=1)
