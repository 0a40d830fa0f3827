"""From counts to a `Result`: join judgements and positions by id, apply the metrics, say what stood out.

Promise: the numbers depend on the counts and the judgements alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fullrank._errors import DataError, first_few
from fullrank.data import NOT_IN_CORPUS, GoldenSet
from fullrank.metrics import Metric, RankCounts, TieRule, score_queries
from fullrank.result import Finding, Hit, Result, summarise, vacuous_cutoffs
from fullrank.search import Ranking, Similarity, TargetPairs
from fullrank.settings import refuse_no_count, refuse_unknown

__all__ = [
    "OnNonfinite",
    "Settings",
    "Tally",
    "id_order",
    "mean_metrics",
    "outcome",
    "self_matches",
    "stakes",
    "target_pairs",
]

MIN_LIST = 10
MORE = (1, 2, 4, 8, 16, 32, 64)
"""Documents more above an answer whose effect is looked at."""
COLLAPSE = 0.5
"""Tie rate, or share of pairs that only the canonical score can order, above which a model counts as collapsed."""

OnNonfinite = Literal["raise", "worst"]


@dataclass(frozen=True)
class Settings:
    """How to rank and what to compute; see `fullrank.evaluate`."""

    metrics: list[Metric]
    ties: TieRule
    similarity: Similarity
    list_length: int | None
    exclude_self: bool
    on_nonfinite: OnNonfinite

    def __post_init__(self) -> None:
        refuse_unknown("on_nonfinite", self.on_nonfinite, get_args(OnNonfinite))
        refuse_no_count("list_length", self.list_length, "a whole number from 1 or None")

    @property
    def k(self) -> int:
        """Length of the lists of retrieved documents."""
        if self.list_length is not None:
            return self.list_length
        return max([MIN_LIST, *(m.k for m in self.metrics if m.k is not None)])


@dataclass(frozen=True)
class Tally:
    """What the embeddings showed on their way through.

    Attributes:
        n_bad: documents that hold NaN or infinity.
        mean_cosine: mean pairwise cosine of a sample of documents, or None.
    """

    n_bad: int = 0
    mean_cosine: float | None = None


def target_pairs(golden: GoldenSet, usable: NDArray[np.int64]) -> TargetPairs:
    """Returns the judged documents that can be retrieved, for queries as places in ``usable``."""
    keep = _retrievable(golden, usable)
    query = np.searchsorted(usable, golden.judgements.query[keep])
    return TargetPairs(torch.from_numpy(query), torch.from_numpy(golden.judgements.doc[keep]))


def id_order(golden: GoldenSet) -> Tensor:
    """Returns the place of each document in the byte order of ids: int64 [documents]."""
    ids = [doc_id.encode("utf-8", "surrogatepass") for doc_id in golden.doc_ids]
    place = torch.empty(len(ids), dtype=torch.int64)
    place[torch.tensor(sorted(range(len(ids)), key=ids.__getitem__), dtype=torch.int64)] = torch.arange(len(ids))
    return place


def self_matches(golden: GoldenSet, usable: NDArray[np.int64]) -> Tensor:
    """Returns, for each usable query, the position of the document with its id, or -1.

    Raises:
        DataError: such a document is judged.
    """
    clash = [qid for qid in golden.query_ids if qid in golden.qrels[qid] and qid in golden.corpus]
    if clash:
        raise DataError(
            f"exclude_self would drop judged documents: {first_few(clash)} are queries whose own id is judged. Leave "
            "exclude_self off, or give queries and documents different ids"
        )
    place = {doc_id: i for i, doc_id in enumerate(golden.doc_ids)}
    return torch.tensor([place.get(golden.query_ids[i], -1) for i in usable], dtype=torch.int64)


def mean_metrics(
    golden: GoldenSet, settings: Settings, ranked: Ranking | None, usable: NDArray[np.int64]
) -> dict[str, float]:
    """Returns the means alone: what decides whether an evaluation may stop."""
    per_query = score_queries(settings.metrics, _counts(golden, ranked, usable), ties=settings.ties)
    return summarise(per_query, golden.answerable)[0]


def stakes(
    golden: GoldenSet,
    settings: Settings,
    ranked: Ranking | None,
    usable: NDArray[np.int64],
    weights: Mapping[str, float],
) -> NDArray[np.float64]:
    """Returns what each query can lose by a document more above its answers: float64 [queries].

    Recall@10 loses nothing by the first of three that push an answer out, so what several would take is shared among
    them, as many as make the share largest.

    Args:
        golden, settings, ranked, usable: see `outcome`.
        weights: of the metrics, as they make up what is lost.
    """
    counts = _counts(golden, ranked, usable)
    metrics = [metric for metric in settings.metrics if str(metric) in weights]

    def value(more: int) -> NDArray[np.float64]:
        scores = score_queries(metrics, replace(counts, better=counts.better + more), ties=settings.ties)
        return sum((weights[str(m)] * np.nan_to_num(scores[str(m)]) for m in metrics), np.zeros(len(golden.queries)))

    now = value(0)
    shares: NDArray[np.float64] = np.max([(now - value(more)) / more for more in MORE], axis=0)
    return shares


def outcome(
    golden: GoldenSet,
    settings: Settings,
    ranked: Ranking | None,
    usable: NDArray[np.int64],
    tally: Tally,
    provenance: dict[str, Any],
) -> Result:
    """Returns the result of a pass over documents; its timing is empty.

    Args:
        golden, settings: what was evaluated, and how.
        ranked: counts and lists of the usable queries, or None where no query is.
        usable: int64, positions of the queries with finite embeddings.
        tally: what the embeddings showed.
        provenance: what to record beside the settings.
    """
    counts = _counts(golden, ranked, usable)
    metrics, kept = summarise(score_queries(settings.metrics, counts, ties=settings.ties), golden.answerable)
    n, n_bad_queries = len(golden.corpus), len(golden.queries) - len(usable)
    n_ranked = n if ranked is None else ranked.n_documents
    tied = counts.tied[np.isfinite(counts.better)]
    tie_rate = float(np.mean((tied - 1) / max(1, n_ranked - 1))) if len(tied) else 0.0
    m = 0 if ranked is None else len(ranked.better)
    near = (ranked.n_near - m) / (m * max(1, n_ranked - 1)) if ranked is not None and m else 0.0
    collapsed = n_ranked > 1 and len(tied) > 0 and max(tie_rate, near) >= COLLAPSE
    findings = vacuous_cutoffs(settings.metrics, n)
    if collapsed:
        findings.append(_collapse_finding(tie_rate))
    bound = n_ranked < n
    return Result(
        metrics=metrics,
        per_query=kept,
        query_ids=tuple(q for q, a in zip(golden.query_ids, golden.answerable, strict=True) if a),
        counts={
            "n_scored": golden.n_answerable,
            "n_unanswerable": len(golden.queries) - golden.n_answerable,
            "n_documents": n,
            **({"n_ranked": n_ranked} if bound else {}),
            "n_equal_texts": golden.n_equal_texts,
            "n_tied": int((tied > 1).sum()),
            "n_nonfinite_documents": tally.n_bad,
            "n_nonfinite_queries": n_bad_queries,
        },
        hits={} if ranked is None else _hits(golden, ranked, usable),
        qrels={q: dict(grades) for q, grades in golden.qrels.items()},
        queries=dict(golden.queries),
        groups=dict(golden.groups or {}),
        relevant_from=golden.relevant_from,
        provenance={
            "data": golden.fingerprint(),
            "name": golden.name,
            **({} if golden.split is None else {"split": golden.split}),
            "ties": settings.ties,
            "similarity": settings.similarity,
            "exclude_self": settings.exclude_self,
            "truncated_run": False,
            **provenance,
        },
        findings=tuple(findings),
        tie_rate=tie_rate,
        collapsed=collapsed,
        eligible=not (tally.n_bad or n_bad_queries or bound),
        mean_cosine=tally.mean_cosine,
        bound=bound,
    )


def _retrievable(golden: GoldenSet, usable: NDArray[np.int64]) -> NDArray[np.bool_]:
    judgements = golden.judgements
    inside = np.logical_and(judgements.doc != NOT_IN_CORPUS, np.isin(judgements.query, usable))
    return np.asarray(inside & (judgements.grade > 0), dtype=np.bool_)


def _counts(golden: GoldenSet, ranked: Ranking | None, usable: NDArray[np.int64]) -> RankCounts:
    judgements = golden.judgements
    m = len(judgements.query)
    better, tied, ahead = np.full(m, np.inf), np.ones(m), np.zeros(m)
    if ranked is not None:
        keep = _retrievable(golden, usable)
        better[keep], tied[keep] = ranked.better.cpu().numpy(), ranked.tied.cpu().numpy()
        ahead[keep] = ranked.ahead.cpu().numpy()
    return RankCounts(
        len(golden.queries), judgements.query, better, tied, ahead, judgements.grade, golden.relevant_from
    )


class _Lists(Mapping[str, list[Hit]]):
    """The ranked lists by query, each made when it is asked for.

    As tuples all at once, 1,000 lists of 100 keep the garbage collector busy for a tenth of the time of their search.
    """

    def __init__(self, query_ids: Sequence[str], docs: NDArray[np.object_], scores: Tensor, lengths: list[int]) -> None:
        self._row = {qid: i for i, qid in enumerate(query_ids)}
        self._docs, self._scores, self._lengths = docs, scores.numpy(), lengths

    def __getitem__(self, query_id: str) -> list[Hit]:
        i = self._row[query_id]
        n = self._lengths[i]
        return list(zip(self._docs[i, :n].tolist(), self._scores[i, :n].tolist(), strict=True))

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


def _hits(golden: GoldenSet, ranked: Ranking, usable: NDArray[np.int64]) -> Mapping[str, list[Hit]]:
    docs = np.array(golden.doc_ids, dtype=np.object_)[ranked.top_docs.cpu().numpy()]
    lengths = torch.isfinite(ranked.top_scores).logical_and(ranked.top_docs >= 0).sum(dim=1).tolist()
    return _Lists([golden.query_ids[q] for q in usable.tolist()], docs, ranked.top_scores.cpu(), lengths)


def _collapse_finding(tie_rate: float) -> Finding:
    return Finding(
        "collapse",
        "error",
        f"the embeddings have collapsed: nearly all documents score alike (tie rate {tie_rate:.2f})",
        remedy="Scores are those of chance. Lower the learning rate or raise the temperature, and look at the loss",
    )
