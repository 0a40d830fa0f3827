"""Which documents to look at first, so that a bound is tight early.

Promise: pure functions of finished results; the order changes how soon an evaluation can stop, never what it finds.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array, csr_array
from scipy.special import expit

from fullrank._errors import SettingError
from fullrank.data import GoldenSet
from fullrank.result import Result

__all__ = ["Rivals", "hard_first", "pool_positions"]

FAINT = 1e-3
"""What a document below the answer counts, at most: less than any that stands above one."""
FAINT_HARM = 1e-9
"""Below this nothing is expected of a document."""
STEEPNESS = 5.0
"""Of the chance over the lead, counted in spreads of the listed scores: a lead of a fifth of one stands at 73 %."""


class Rivals:
    """Which documents are likely to stand above the answers of which queries, going by finished models of the run.

    A document that stood above the first answer by a wide lead will do so again, one that stood close to it perhaps:
    the chance is the logistic function of its lead, averaged over the models.

    Args:
        results: of the finished models on one golden set.
        golden: that set.

    Raises:
        SettingError: something else than results.

    Attributes:
        docs: int64, positions of the documents that the lists hold, rising.
    """

    def __init__(self, results: Sequence[Result], golden: GoldenSet) -> None:
        _refuse_other_than_results(results)
        found = [_chances(result, golden) for result in results]
        self.docs = np.unique(np.concatenate([docs for _, _, docs in found] or [np.empty(0, dtype=np.int64)]))
        total = csr_array((len(golden.queries), len(self.docs)))
        for chances, queries, docs in found:
            total = total + csr_array((chances, (queries, np.searchsorted(self.docs, docs))), shape=total.shape)
        self._by_query = csr_array(total / max(1, len(results)))
        self._by_doc = csc_array(self._by_query)

    def most_harmful(self, stakes: NDArray[np.float64], seen: NDArray[np.bool_], n: int) -> NDArray[np.int64]:
        """Returns the positions of up to ``n`` documents that are expected to cost a model the most together.

        What a query can lose it loses once: each document that is taken leaves less of it for the next.

        Args:
            stakes: float64 [queries], what each query can lose.
            seen: bool [documents], those that were ranked already.
            n: how many at most; fewer where nothing that is known can cost more.
        """
        taken: list[int] = []
        stakes = stakes.copy()
        harm: NDArray[np.float64] = np.asarray(self._by_query.T @ stakes)
        harm[seen[self.docs]] = 0.0
        while len(taken) < min(n, len(harm)) and harm[worst := int(harm.argmax())] > FAINT_HARM:
            taken.append(worst)
            for query, chance in _entries(self._by_doc, worst):
                lost = stakes[query] * chance
                stakes[query] -= lost
                others = slice(*self._by_query.indptr[query : query + 2])
                harm[self._by_query.indices[others]] -= lost * self._by_query.data[others]
            harm[worst] = 0.0  # what others take from now on only lowers it
        return self.docs[taken]


def _entries(columns: csc_array, column: int) -> Iterator[tuple[int, float]]:
    start, end = columns.indptr[column : column + 2]
    yield from zip(columns.indices[start:end].tolist(), columns.data[start:end].tolist(), strict=True)


def _chances(result: Result, golden: GoldenSet) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns the chance of each listed document to stand above the first answer of its query, and both positions."""
    place = {doc_id: i for i, doc_id in enumerate(golden.doc_ids)}
    queries, docs, leads, spreads = [], [], [], []
    for query, qid in enumerate(golden.query_ids):
        listed = [(doc_id, score) for doc_id, score in result.hits.get(qid, []) if math.isfinite(score)]
        if not listed or not golden.answerable[query]:
            continue
        grades = result.qrels.get(qid, {})
        scores = np.array([score for _, score in listed], dtype=np.float64)
        answer = next((s for d, s in listed if grades.get(d, 0) >= result.relevant_from), scores[-1])
        others = [i for i, (d, _) in enumerate(listed) if d in place and grades.get(d, 0) < result.relevant_from]
        docs.append(np.array([place[listed[i][0]] for i in others], dtype=np.int64))
        queries.append(np.full(len(others), query))
        leads.append(scores[others] - answer)
        spreads.append(float(scores.std()))
    if not docs:
        nothing = np.empty(0, dtype=np.int64)
        return np.empty(0), nothing, nothing
    spread = float(np.median(spreads)) or 1.0
    return expit(np.concatenate(leads) / spread * STEEPNESS), np.concatenate(queries), np.concatenate(docs)


def _refuse_other_than_results(results: object) -> None:
    if not isinstance(results, Sequence) or not all(isinstance(result, Result) for result in results):
        what = [type(r).__name__ for r in results] if isinstance(results, list | tuple) else type(results).__name__
        raise SettingError(f"competitors must be a list of results, got {what}")


def hard_first(results: Sequence[Result], golden: GoldenSet) -> NDArray[np.int64]:
    """Returns the positions of the documents in the lists of ``results``, the most disturbing first: for a pool.

    A document that stands above the first answer of a query counts one over how many do: it is likely to stand there
    for the next model too, and where it is the only one nothing else lowers the bound. Ranks decide among what stands
    above no answer.

    Raises:
        SettingError: something else than results.
    """
    _refuse_other_than_results(results)
    place = {doc_id: i for i, doc_id in enumerate(golden.doc_ids)}
    weight: dict[int, float] = {}
    for result in results:
        for qid, listed in result.hits.items():
            grades = result.qrels.get(qid, {})
            relevant = (i for i, (doc_id, _) in enumerate(listed) if grades.get(doc_id, 0) >= result.relevant_from)
            n_above = next(relevant, len(listed))
            for i, (doc_id, _) in enumerate(listed):
                if (position := place.get(doc_id)) is not None:
                    share = 1 / n_above if i < n_above else FAINT / (i + 1) ** 3
                    weight[position] = weight.get(position, 0.0) + share
    return np.array(sorted(weight, key=lambda position: (-weight[position], position)), dtype=np.int64)


def pool_positions(golden: GoldenSet, n: int, competitors: NDArray[np.int64], *, seed: int = 0) -> NDArray[np.int64]:
    """Returns the positions of a pool of about ``n`` documents, rising.

    All judged documents, then competitors, filled up by a fixed random sample: the same at every evaluation that knows
    the same competitors, and a larger ``n`` only adds.
    """
    judged = np.unique(golden.judgements.doc[golden.judgements.doc >= 0])
    others = np.random.default_rng(seed).permutation(len(golden.corpus))
    order = np.concatenate([judged, competitors, others])
    _, first = np.unique(order, return_index=True)
    order = order[np.sort(first)]
    return np.sort(order[: max(n, len(judged))])
