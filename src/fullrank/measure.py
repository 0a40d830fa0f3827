"""From embeddings to a `Result`: ranks what it is given, and can say at any time what that gives.

Promise: the numbers depend on the embeddings and the judgements alone, not on the order or size of the blocks. After a
part of the corpus every metric is an upper bound of its value: documents only ever push the judged ones down.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fullrank._errors import NonFiniteError, first_few
from fullrank.clock import Clock
from fullrank.data import GoldenSet
from fullrank.outcome import Settings, Tally, id_order, mean_metrics, outcome, self_matches, stakes, target_pairs
from fullrank.ranks import ALONE, Ranks
from fullrank.result import Result
from fullrank.scores import Rows, Vectors, prepare
from fullrank.search import Pass, Ranking, TargetPairs, goals, refuse_other_width

__all__ = ["Measurement"]

SAMPLE = 1_024
"""Documents, evenly spaced over the corpus, whose mean pairwise cosine tells whether embeddings collapse."""


class Measurement:
    """Ranks documents for the queries of a golden set, as they come.

    Args:
        golden: the golden set; its judged documents must be given to `aim` first.
        settings: how to rank and what to compute.
        query_rows: float [queries, d].
        clock: collects seconds by phase.
        ranks: the processes that share the documents: each gives its own ones to `aim` and `take`.

    Attributes:
        judged: int64, positions of the judged documents, rising.

    Raises:
        NonFiniteError: query embeddings that are not finite.
    """

    def __init__(
        self, golden: GoldenSet, settings: Settings, query_rows: Tensor, clock: Clock, ranks: Ranks = ALONE
    ) -> None:
        golden.require_answerable()
        queries = prepare(query_rows, settings.similarity)
        _refuse_nonfinite(queries.bad, golden.query_ids, "query", settings, of=len(golden.queries))
        usable = torch.nonzero(~queries.bad).squeeze(1)
        self.golden, self.settings, self.clock, self.ranks = golden, settings, clock, ranks
        self.usable = usable.cpu().numpy()
        self.queries = queries[usable]
        self.device = queries.rows.device
        pairs = target_pairs(golden, self.usable)
        self.targets = TargetPairs(pairs.query.to(self.device), pairs.doc.to(self.device))
        self.judged: NDArray[np.int64] = np.unique(pairs.doc.numpy())
        self._pass: Pass | None = None
        self._bad: set[int] = set()
        n = len(golden.corpus)
        self._sample = np.unique(np.linspace(0, n - 1, min(n, SAMPLE)).astype(np.int64))
        self._directions = torch.full((len(self._sample), query_rows.shape[1]), torch.nan, dtype=torch.float64)

    def aim(self, positions: NDArray[np.int64], rows: Rows) -> None:
        """Takes the scores of the judged documents, which the others are compared with.

        Args:
            positions: int64, rising; together with those of the other ranks it holds all of `judged`.
            rows: their embeddings.
        """
        if not len(self.queries.rows):
            return
        settings, golden = self.settings, self.golden
        place = torch.from_numpy(np.searchsorted(positions, self.targets.doc.cpu().numpy())).to(self.device)
        here = torch.from_numpy(np.isin(self.targets.doc.cpu().numpy(), positions)).to(self.device)
        goal = torch.full((len(here),), -torch.inf, device=self.device)
        if bool(here.any()):
            goal[here] = goals(self.queries, self.targets.query[here], rows[place[here]], settings.similarity)
        self._pass = Pass(
            self.queries,
            self.targets,
            self.ranks.max(goal),
            similarity=settings.similarity,
            k=min(settings.k, len(golden.corpus)),
            id_order=id_order(golden).to(self.device) if settings.ties == "trec" else None,
            exclude=self_matches(golden, self.usable).to(self.device) if settings.exclude_self else None,
            ranks=self.ranks,
        )

    def ready(self, positions: NDArray[np.int64], rows: Tensor) -> Vectors:
        """Returns embeddings of documents (float [n, d]) ready for ranking.

        Raises:
            EvaluationError: they have other dimensions than the queries.
            NonFiniteError: some are not finite, and ``on_nonfinite`` is ``raise``.
        """
        vectors = prepare(rows, self.settings.similarity)
        refuse_other_width(self.queries, vectors)
        if bool(vectors.bad.any()):
            ids = [self.golden.doc_ids[i] for i in positions]
            _refuse_nonfinite(vectors.bad, ids, "document", self.settings, of=len(self.golden.corpus))
            self._bad.update(positions[vectors.bad.cpu().numpy()].tolist())
        slot = np.searchsorted(self._sample, positions)
        slot[slot == len(self._sample)] = 0
        drawn = np.flatnonzero(self._sample[slot] == positions)
        if len(drawn):
            wide = vectors.rows[torch.from_numpy(drawn).to(vectors.rows.device)].cpu().double()
            self._directions[torch.from_numpy(slot[drawn])] = wide / wide.norm(dim=1, keepdim=True)
        return vectors

    def take(self, positions: NDArray[np.int64], rows: Rows) -> None:
        """Ranks documents: each once, in any order."""
        if self._pass is not None and len(positions):
            with self.clock("search"):
                self._pass.add(torch.from_numpy(positions).to(self.device), rows)

    def means(self) -> dict[str, float]:
        """Returns the metrics over the documents so far: upper bounds until all are in."""
        return mean_metrics(self.golden, self.settings, self._ranking(lists=False), self.usable)

    def stakes(self, weights: Mapping[str, float]) -> NDArray[np.float64]:
        """Returns what each query can lose by a document more above its answers: float64 [queries].

        Args:
            weights: of the metrics, as they make up what is lost.
        """
        return stakes(self.golden, self.settings, self._ranking(lists=False), self.usable, weights)

    def result(self, provenance: dict[str, Any]) -> Result:
        """Returns the result over the documents so far; `Result.bound` says whether some are missing."""
        with self.clock("search"):
            ranked, tally = self._ranking(), self._tally()
        with self.clock("metrics"):
            found = outcome(self.golden, self.settings, ranked, self.usable, tally, provenance)
        return replace(found, timing=self.clock.report())

    def _ranking(self, *, lists: bool = True) -> Ranking | None:
        return None if self._pass is None else self._pass.ranking(lists=lists)

    def _tally(self) -> Tally:
        known = self._directions[torch.isfinite(self._directions).all(dim=1)]
        total, count = self.ranks.sum(known.sum(dim=0)), int(self.ranks.sum(torch.tensor([len(known)])))
        cosine = (float(total @ total) - count) / (count * (count - 1)) if count > 1 else None
        return Tally(int(self.ranks.sum(torch.tensor([len(self._bad)]))), cosine)


def _refuse_nonfinite(bad: Tensor, ids: Sequence[str], kind: str, settings: Settings, *, of: int) -> None:
    where = torch.nonzero(bad).squeeze(1).tolist()
    if not where or settings.on_nonfinite == "worst":
        return
    zero = " (under cosine a zero vector is one)" if settings.similarity == "cosine" else ""
    raise NonFiniteError(
        f"{len(where)} of {of} {kind} embeddings are NaN or infinite{zero}: "
        f"{first_few(ids[i] for i in where)}. The model has diverged or the text cannot be encoded; pass "
        "on_nonfinite='worst' to rank them last"
    )
