"""Retrieval metrics as functions of rank counts.

Promise: every metric is a function of (`better`, `tied`, `grade`) of the judged documents of a query, where `better`
is the number of documents of the whole corpus that score strictly higher and `tied` the size of the document's tie
group, itself included. Nothing else of the ranking is needed, so no run is kept and no cut-off is baked in. Ranks are
1-based. Sums run in the order of (`better`, `tied`, grade), so that shuffling the input changes no bit.

Tie rules (`ties=`):
    expected  the exact mean over all orders of tied documents, in closed form (McSherry & Najork, ECIR 2008)
    worst     the least favourable order of a tie group: irrelevant documents first, then relevant ones by rising grade
    trec      trec_eval's order: document id descending by bytes, from the count `ahead` of tied documents ahead
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fullrank._errors import DataError, SettingError

__all__ = [
    "Metric",
    "MetricName",
    "RankCounts",
    "TieRule",
    "mrr_at_k",
    "ndcg_at_k",
    "ranks_from_scores",
    "recall_at_k",
    "score_queries",
]

MetricName = Literal["recall", "hit", "recall_cap", "precision", "mrr", "map", "ndcg", "ndcg_exp"]
TieRule = Literal["expected", "worst", "trec"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TINY = float(np.nextafter(0.0, 1.0))
"""The smallest grade that can be relevant: grades of 0 and below never are, whatever `relevant_from` says."""
_NEEDS_K = frozenset({"precision", "recall", "hit", "recall_cap"})


@dataclass(frozen=True, order=True)
class Metric:
    """A retrieval metric and its cut-off, as a value: hashable, comparable, printed as ``ndcg@10``.

    Args:
        name: one of ``recall hit recall_cap precision mrr map ndcg ndcg_exp``.
        k: the cut-off; ``None`` means the full ranking (``precision recall hit recall_cap`` need one).

    Raises:
        SettingError: unknown name, missing or non-positive cut-off.

    >>> str(Metric.parse("eval_ndcg@10"))
    'ndcg@10'
    """

    name: str
    k: int | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(MetricName):
            raise SettingError(_unknown_metric(str(self)))
        if self.k is None and self.name in _NEEDS_K:
            raise SettingError(f"metric {self.name!r} needs a cut-off, for example '{self.name}@10'")
        if self.k is not None and (isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1):
            raise SettingError(f"metric {self.name!r} has the cut-off {self.k!r}; it must be a whole number from 1")

    def __str__(self) -> str:
        return self.name if self.k is None else f"{self.name}@{self.k}"

    @classmethod
    def parse(cls, text: "str | Metric") -> "Metric":
        """Returns the metric that ``text`` names; ``eval_recall@1`` and ``recall@1`` are the same.

        Raises:
            SettingError: not a metric; the message names the nearest valid one.
        """
        if isinstance(text, Metric):
            return text
        name, at, k = str(text).removeprefix("eval_").partition("@")
        if name not in get_args(MetricName):
            raise SettingError(_unknown_metric(text))
        if at and not re.fullmatch("[0-9]+", k):
            raise SettingError(f"metric {text!r} has the cut-off {k!r}; it must be a whole number from 1")
        return cls(name, int(k) if at else None)

    @property
    def greater_is_better(self) -> bool:
        """True: all these metrics grow as the ranking improves."""
        return True


@dataclass(frozen=True)
class RankCounts:
    """Where the judged documents of every query stand; a struct of equally long arrays, one entry a document.

    Attributes:
        n_queries: number of queries, with or without a relevant document.
        query: int64 [m], position of the query.
        better: float64 [m], documents that score strictly higher; infinity where the document was never retrieved.
        tied: float64 [m], size of the tie group in documents, itself included.
        ahead: float64 [m], tied documents that come first by trec_eval's rule (only ``ties="trec"`` reads it).
        grade: float64 [m], the judgement; documents with grade <= 0 neither count nor harm and may be left out.
        relevant_from: the smallest grade that counts as relevant; NDCG stays graded.
    """

    n_queries: int
    query: Ints
    better: Floats
    tied: Floats
    ahead: Floats
    grade: Floats
    relevant_from: float = 1

    def n_relevant(self) -> Ints:
        """Returns int64 [n_queries]: relevant documents of each query; 0 marks an unanswerable one."""
        return np.bincount(self.query[self.grade >= self._threshold], minlength=self.n_queries).astype(np.int64)

    @property
    def _threshold(self) -> float:
        return max(self.relevant_from, TINY)

    def placed(self, ties: TieRule) -> "RankCounts":
        """Returns the counts without documents of grade <= 0, in the fixed order, tie groups resolved by ``ties``.

        Under `worst` and `trec` every document has one rank, so `tied` is 1 and `better` is that rank less one.
        """
        if ties not in get_args(TieRule):
            raise SettingError(f"ties={ties!r} is unknown; choose one of {', '.join(get_args(TieRule))}")
        keep = self.grade > 0
        query, grade = self.query[keep], self.grade[keep]
        better, tied = self.better[keep], self.tied[keep]
        if ties == "trec":
            better, tied = better + self.ahead[keep], np.ones_like(tied)
        elif ties == "worst":
            order = np.lexsort((-grade, better, query))
            query, better, tied, grade = query[order], better[order], tied[order], grade[order]
            # Highest grade last: a document stands at the end of its group less those of higher grade.
            better, tied = better + tied - 1 - _position_in_group(query, better), np.ones_like(tied)
        order = np.lexsort((-grade, tied, better, query))
        return RankCounts(
            self.n_queries,
            query[order],
            better[order],
            tied[order],
            np.zeros(len(order)),
            grade[order],
            self._threshold,
        )


def score_queries(metrics: Sequence[Metric], counts: RankCounts, *, ties: TieRule = "expected") -> dict[str, Floats]:
    """Returns ``{str(metric): float64 [n_queries]}``; queries without a relevant document hold NaN.

    Values lie in [0, 1]. Definitions: `recall` is trec_eval's ``recall``, `precision` ``P``, `hit` ``success``, `mrr`
    ``recip_rank``, `map` ``map_cut``, `ndcg` ``ndcg_cut``; `recall_cap@k` divides by min(k, relevant), `ndcg_exp` uses
    the gain 2^grade - 1.
    """
    placed = counts.placed(ties)
    n_relevant = placed.n_relevant()
    relevant = placed.grade >= placed.relevant_from
    values: dict[str, Floats] = {}
    with np.errstate(invalid="ignore"):
        for metric in metrics:
            k = np.inf if metric.k is None else float(metric.k)
            if metric.name in {"ndcg", "ndcg_exp"}:
                value = _ndcg(placed, k, exponential=metric.name == "ndcg_exp")
            else:
                value = _binary(metric.name, k, placed, relevant, n_relevant)
            values[str(metric)] = np.where(n_relevant > 0, np.minimum(value, 1.0), np.nan)
    return values


def _binary(name: str, k: float, placed: RankCounts, relevant: NDArray[np.bool_], n_relevant: Ints) -> Floats:
    query, better, tied = placed.query[relevant], placed.better[relevant], placed.tied[relevant]
    if name in {"mrr", "hit"}:
        return _first_relevant(name, k, placed.n_queries, query, better, tied)
    if name == "map":
        return _sum_by_query(_precision_at_each(k, query, better, tied), query, placed.n_queries) / n_relevant
    inside = np.clip((k - better) / tied, 0.0, 1.0)  # probability of standing in the top k
    total = _sum_by_query(inside, query, placed.n_queries)
    if name == "recall":
        return total / n_relevant
    return total / (k if name == "precision" else np.minimum(k, n_relevant))


def _ndcg(placed: RankCounts, k: float, *, exponential: bool) -> Floats:
    gain = np.exp2(placed.grade) - 1 if exponential else placed.grade
    dcg = _sum_by_query(gain * _mean_discount(placed.better, placed.tied, k), placed.query, placed.n_queries)
    order = np.lexsort((-gain, placed.query))
    query = placed.query[order]
    position = _position_in_group(query)
    ideal = _sum_by_query(np.where(position < k, gain[order] / np.log2(position + 2.0), 0.0), query, placed.n_queries)
    return dcg / ideal


def _mean_discount(better: Floats, tied: Floats, k: float) -> Floats:
    """Returns the mean of 1 / log2(rank + 1) over the ranks of each tie group, 0 beyond k."""
    value = np.where(better < k, 1 / np.log2(better + 2), 0.0)
    for index, (b, t) in _distinct(tied > 1, better, tied):
        ranks = np.arange(b + 1, min(b + t, k) + 1)
        value[index] = np.sum(1 / np.log2(ranks + 1)) / t
    return value


def _first_relevant(name: str, k: float, n_queries: int, query: Ints, better: Floats, tied: Floats) -> Floats:
    """Reciprocal rank or hit of the first relevant document: only the first tie group with one can matter.

    With r relevant documents in a group of t, the first of them is the i-th with probability
    C(t - i, r - 1) / C(t, r).
    """
    value = np.zeros(n_queries)
    first = np.flatnonzero(np.diff(query, prepend=-1))
    b, t, owner = better[first], tied[first], query[first]
    r = np.bincount(query[better == b[np.searchsorted(owner, query)]], minlength=n_queries)[owner].astype(float)
    inside = b < k
    score = np.where(inside, 1 / (b + 1) if name == "mrr" else 1.0, 0.0)
    for index, (b_, t_, r_) in _distinct(inside & (t > 1), b, t, r):
        i = np.arange(1, min(t_ - r_ + 1, k - b_) + 1)
        probability = np.cumprod(np.append(r_ / t_, (t_ - i[:-1] - r_ + 1) / (t_ - i[:-1])))
        if name == "mrr":
            score[index] = np.sum(probability / (b_ + i))
        else:
            score[index] = 1.0 if b_ + t_ <= k else np.sum(probability)
    value[owner] = score
    return value


def _precision_at_each(k: float, query: Ints, better: Floats, tied: Floats) -> Floats:
    """Returns, for each relevant document, its expected share of average precision: precision at its rank, 0 beyond k.

    A document at rank b + j of its group has c relevant ones in better groups and, in expectation,
    (j - 1)(r - 1) / (t - 1) of its own group before it.
    """
    before = _position_in_group(query) - _position_in_group(query, better)
    group = np.flatnonzero((np.diff(query, prepend=-1) != 0) | (np.diff(better, prepend=-1) != 0))
    sizes = np.diff(np.append(group, len(query)))
    r = np.repeat(sizes, sizes).astype(float)
    value = np.where(better < k, (before + 1) / (better + 1), 0.0)
    for index, (b, t, c, r_) in _distinct((tied > 1) & (better < k), better, tied, before, r):
        j = np.arange(1, min(t, k - b) + 1)
        value[index] = np.sum((c + 1 + (j - 1) * ((r_ - 1) / (t - 1))) / (b + j)) / t
    return value


def _distinct(mask: NDArray[np.bool_], *columns: Floats) -> list[tuple[Ints, tuple[float, ...]]]:
    """Returns the distinct rows of ``columns`` under ``mask``, each with the positions that hold it.

    A collapsed model puts every query into the same tie group: the sum over it is then made once.
    """
    where = np.flatnonzero(mask & np.isfinite(columns[0]))
    if not len(where):
        return []
    rows, inverse = np.unique(np.stack([c[where] for c in columns], axis=1), axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    order = np.argsort(inverse, kind="stable")
    splits = np.split(where[order], np.cumsum(np.bincount(inverse))[:-1])
    return [(index, tuple(map(float, row))) for index, row in zip(splits, rows, strict=True)]


def _position_in_group(*keys: NDArray[Any]) -> Floats:
    """Returns the 0-based position of each entry among neighbours with equal keys; the keys are sorted."""
    n = len(keys[0])
    starts = np.zeros(n, dtype=bool)
    starts[:1] = True
    for key in keys:
        starts[1:] |= key[1:] != key[:-1]
    index = np.arange(n)
    return (index - np.maximum.accumulate(np.where(starts, index, 0))).astype(np.float64)


def _sum_by_query(values: Floats, query: Ints, n_queries: int) -> Floats:
    # bincount adds one by one in the order given; a pairwise sum would depend on what stands beside it.
    return np.bincount(query, weights=values, minlength=n_queries).astype(np.float64)


def _unknown_metric(text: object) -> str:
    known = get_args(MetricName)
    spelled = str(text).lower().removeprefix("eval_").replace("-", "_")
    spelled = re.sub(r"_?(?:at|@)_?(\d+)$", r"@\1", spelled)
    name, _, k = spelled.partition("@")
    name = {"accuracy": "hit", "success": "hit", "p": "precision", "recip_rank": "mrr", "acc": "hit"}.get(name, name)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}{'@' + (k or '10') if k or near[0] in _NEEDS_K else ''}'?" if near else "."
    return f"unknown metric {str(text)!r}{hint} Known: {', '.join(known)}, with '@k' for a cut-off"


# ------------------------------------------------------------------------------------------------ on a napkin


def ranks_from_scores(scores: ArrayLike, relevant: ArrayLike, *, ties: Literal["worst", "best"] = "worst") -> Ints:
    """Returns int64 [q]: the 1-based rank of each query's relevant document.

    Args:
        scores: [q, n], higher is better.
        relevant: [q], the column of the relevant document of each query.
        ties: where the relevant document stands among equals. `worst` (default) puts it last, so that a constant
            score matrix does not look perfect; `best` is 1 + strictly better.

    Raises:
        DataError: shapes do not fit, or a score is NaN or infinite.

    >>> ranks_from_scores([[0.9, 0.2, 0.4], [0.1, 0.7, 0.8]], [0, 1]).tolist()
    [1, 2]
    """
    table, column = np.asarray(scores), np.asarray(relevant)
    if table.ndim != 2 or column.shape != table.shape[:1]:
        raise DataError(
            f"scores must be [queries, documents] and relevant [queries]; got {table.shape} and {column.shape}"
        )
    if not np.isfinite(table).all():
        raise DataError(f"{int((~np.isfinite(table)).sum())} scores are NaN or infinite; they cannot be ranked")
    if ties not in ("worst", "best"):
        raise SettingError(f"ties={ties!r} is unknown; choose worst or best")
    if not ((column >= 0) & (column < table.shape[1])).all():
        raise DataError(f"relevant must hold columns from 0 to {table.shape[1] - 1}")
    target = np.take_along_axis(table, column[:, None], axis=1)
    ahead = table > target if ties == "best" else table >= target
    return np.asarray(ahead.sum(axis=1) + (1 if ties == "best" else 0), dtype=np.int64)


def recall_at_k(ranks: ArrayLike, k: int) -> float:
    """Returns the share of queries whose one relevant document stands in the top k. ``ranks``: [q], 1-based.

    A document that was not retrieved has the rank infinity.

    >>> recall_at_k([1, 3, 1, 7], 1)
    0.5
    """
    return float(np.mean(_checked_ranks(ranks) <= _cut("recall", k)))


def mrr_at_k(ranks: ArrayLike, k: int | None = None) -> float:
    """Returns the mean reciprocal rank of the one relevant document, 0 beyond k. ``ranks``: [q], 1-based.

    >>> mrr_at_k([1, 2, 4], 3)
    0.5
    """
    values = _checked_ranks(ranks)
    return float(np.mean(np.where(values <= _cut("mrr", k), 1 / values, 0.0)))


def ndcg_at_k(ranks: ArrayLike, k: int | None = None) -> float:
    """Returns the mean of 1 / log2(rank + 1), 0 beyond k: NDCG with one relevant document. ``ranks``: [q], 1-based.

    >>> ndcg_at_k([1, 3], 10)
    0.75
    """
    values = _checked_ranks(ranks)
    return float(np.mean(np.where(values <= _cut("ndcg", k), 1 / np.log2(values + 1), 0.0)))


def _cut(name: str, k: int | None) -> float:
    cut = Metric(name, k).k
    return np.inf if cut is None else cut


def _checked_ranks(ranks: ArrayLike) -> Floats:
    values = np.asarray(ranks, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not (values >= 1).all():
        raise DataError("ranks must be a non-empty list of numbers from 1 (infinity where nothing was retrieved)")
    return values
