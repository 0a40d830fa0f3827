"""An evaluation that can be extended document by document, and asked at any time.

Promise: after the judged documents are in, every metric is an upper bound of its value on the full corpus; it never
rises as documents are added, and equals the value when all are in.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fullrank._errors import SettingError
from fullrank.competitors import Rivals
from fullrank.measure import Measurement
from fullrank.metrics import Metric
from fullrank.ranks import ALONE, Ranks
from fullrank.result import Result

__all__ = ["BLOCK", "Anytime", "Documents", "extend_until", "next_harmful", "values_to_beat"]

BLOCK = 8_192
"""Documents that are encoded, ranked and forgotten at a time."""
FIRST_BLOCK = 64
"""Documents between two looks at a bound, at first; twice as many each time."""
SHARE = 0.01
"""Of the corpus that is looked at at a time while likely competitors are known: they cost less together than each."""
SLACK = 1e-12
"""A bound is below a value where it is lower by more than this: rounding must not reject."""


@dataclass(frozen=True)
class Documents:
    """Where the embeddings of documents come from.

    Attributes:
        rows: gives this rank's share of document positions int64 [n], and for it float [m, d] on the device of the
            queries, or None where the share is empty.
        order: int64 [documents], the order in which encoding is cheapest.
        same_text: int64 [documents], equal where texts are. Those are asked for together, so that they are encoded once
            and tie by construction.
    """

    rows: Callable[[NDArray[np.int64]], tuple[NDArray[np.int64], Tensor | None]]
    order: NDArray[np.int64]
    same_text: NDArray[np.int64]


class Anytime:
    """One evaluation of one model, or of several truncations of its embeddings.

    The judged documents are encoded and ranked at once. Under ``torch.distributed`` all ranks make the same calls.

    Args:
        measurements: by dimensions that are kept; None for all.
        documents: where their embeddings come from.
        finish: adds what only the caller knows to a result.
        ranks: the processes that share the documents.

    Attributes:
        seen: bool [documents], what has been ranked.
    """

    def __init__(
        self,
        measurements: Mapping[int | None, Measurement],
        documents: Documents,
        finish: Callable[[Measurement], Result],
        ranks: Ranks = ALONE,
    ) -> None:
        self.measurements, self.documents, self.finish, self.ranks = dict(measurements), documents, finish, ranks
        self.seen = np.zeros(len(documents.order), dtype=np.bool_)
        judged = np.unique(np.concatenate([m.judged for m in self.measurements.values()]))
        self._add(np.flatnonzero(np.isin(documents.same_text, documents.same_text[judged])), aim=True)

    @property
    def n_seen(self) -> int:
        """Documents ranked so far."""
        return int(self.seen.sum())

    @property
    def remaining(self) -> NDArray[np.int64]:
        """Positions of the documents not ranked yet, in the order in which encoding is cheapest."""
        order = self.documents.order
        return order[~self.seen[order]]

    def extend(self, positions: NDArray[np.int64]) -> None:
        """Encodes and ranks the documents at ``positions``; those already seen are skipped.

        Documents with the text of one of them come along: they cost nothing and must tie with it.
        """
        same_text = self.documents.same_text
        wanted = np.zeros(len(self.seen), dtype=np.bool_)
        wanted[positions] = True
        wanted &= ~self.seen
        if not wanted.all():
            wanted = np.isin(same_text, same_text[wanted]) & ~self.seen
        order = self.documents.order
        for block in _blocks(order[wanted[order]], same_text):
            self._add(block)

    def means(self, dimensions: int | None = None) -> dict[str, float]:
        """Returns the metrics over the documents so far: upper bounds until all are in."""
        return self.measurements[dimensions].means()

    def stakes(self, weights: Mapping[str, float], dimensions: int | None = None) -> NDArray[np.float64]:
        """Returns what each query can lose by a document more above its answers; ``weights`` by metric."""
        return self.measurements[dimensions].stakes(weights)

    def result(self, dimensions: int | None = None) -> Result:
        """Returns the result over the documents so far; `Result.bound` says whether some are missing."""
        return self.finish(self.measurements[dimensions])

    def _add(self, block: NDArray[np.int64], *, aim: bool = False) -> None:
        with self.ranks.together():
            mine, rows = self.documents.rows(block)
            ready = {
                dimensions: None if rows is None else measurement.ready(mine, rows[:, :dimensions])
                for dimensions, measurement in self.measurements.items()
            }
        if aim:
            for dimensions, measurement in self.measurements.items():  # also on a rank without a judged document
                vectors = ready[dimensions]
                measurement.aim(mine, measurement.queries[:0] if vectors is None else vectors)
        with self.ranks.together():  # memory may run out here too
            for dimensions, measurement in self.measurements.items():
                if (found := ready[dimensions]) is not None:
                    measurement.take(mine, found)
        self.seen[block] = True


def next_harmful(
    session: Anytime, rivals: Rivals, weights: Mapping[str, float], n: int, left: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns up to ``n`` positions out of ``left``: the documents by which an evaluation is likely to lose the most.

    Args:
        session: the evaluation.
        rivals: what is known of the documents.
        weights: of the metrics whose bounds are to fall.
        n: how many at most; fewer, or none, where nothing is known of the others.
        left: positions to choose from.
    """
    if not len(rivals.docs):
        return rivals.docs
    closed = np.ones(len(session.seen), dtype=np.bool_)
    closed[left] = False
    return rivals.most_harmful(session.stakes(weights), closed, n)


def extend_until(
    session: Anytime,
    rivals: Rivals,
    stop_below: Mapping[Metric, float],
    *,
    within: NDArray[np.int64] | None = None,
) -> None:
    """Extends an evaluation to all documents, or until every metric is proved to lie below a value.

    Args:
        session: the evaluation.
        rivals: what is known of the documents: the likely competitors are looked at first.
        stop_below: the values; without any, nothing stops early.
        within: positions to stay within; default: the corpus.
    """
    weights, size = {str(metric): 1.0 for metric in stop_below}, FIRST_BLOCK
    while True:
        left = session.remaining
        left = left if within is None else left[np.isin(left, within)]
        if not len(left) or (stop_below and _proved_below(session.means(), stop_below)):
            return
        if not stop_below:
            session.extend(left)
            continue
        harmful = next_harmful(session, rivals, weights, max(FIRST_BLOCK, round(len(session.seen) * SHARE)), left)
        if len(harmful):
            session.extend(harmful)
        else:
            session.extend(left[:size])
            size = min(2 * size, BLOCK)


def values_to_beat(stop_below: Mapping[str, float]) -> dict[Metric, float]:
    """Returns ``stop_below`` by metric; raises `SettingError` where a value is no number."""
    if not isinstance(stop_below, Mapping):
        raise SettingError(f"stop_below={stop_below!r} must map metrics to values, for example {{'recall@1': 0.61}}")
    for name, value in stop_below.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise SettingError(f"stop_below[{name!r}]={value!r} must be a number, such as the score to beat")
    return {Metric.parse(name): float(value) for name, value in stop_below.items()}


def _proved_below(means: Mapping[str, float], values: Mapping[Metric, float]) -> bool:
    return all(means[str(metric)] < value - SLACK for metric, value in values.items())


def _blocks(order: NDArray[np.int64], same_text: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yields ``order`` in blocks; documents of one text, which it has together, stay together."""
    start = 0
    while start < len(order):
        end = min(start + BLOCK, len(order))
        while end < len(order) and same_text[order[end]] == same_text[order[end - 1]]:
            end += 1
        yield order[start:end]
        start = end
