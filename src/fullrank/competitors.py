"""Which documents to look at first, so that a bound is tight early.

Promise: pure functions of finished results; the order changes how soon an evaluation can stop, never what it finds.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fullrank._errors import SettingError
from fullrank.data import GoldenSet
from fullrank.result import Result

__all__ = ["hard_first", "pool_positions"]


def hard_first(results: Sequence[Result], golden: GoldenSet) -> NDArray[np.int64]:
    """Returns the positions of the documents in the lists of ``results``, the most disturbing first.

    A document counts 1 / rank for each query that it is listed for, in each result: what stands at the top for many
    queries pushes most answers down.

    Raises:
        SettingError: something else than results.
    """
    if not isinstance(results, Sequence) or not all(isinstance(result, Result) for result in results):
        raise SettingError(f"competitors must be a list of results, got {type(results).__name__}")
    place = {doc_id: i for i, doc_id in enumerate(golden.doc_ids)}
    weight: dict[int, float] = {}
    for result in results:
        for hits in result.hits.values():
            for rank, (doc_id, _) in enumerate(hits, 1):
                if (position := place.get(doc_id)) is not None:
                    weight[position] = weight.get(position, 0.0) + 1 / rank
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
