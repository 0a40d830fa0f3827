"""From embeddings to a `Result`: join judgements and positions, rank, measure.

Promise: the numbers depend on the embeddings and the judgements alone, not on the order or size of the blocks.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fullrank._errors import DataError, NonFiniteError, first_few
from fullrank.data import NOT_IN_CORPUS, GoldenSet
from fullrank.metrics import Metric, RankCounts, TieRule, score_queries
from fullrank.result import Finding, Result, summarise, vacuous_cutoffs
from fullrank.search import Ranking, Similarity, TargetPairs, Vectors, prepare, rank
from fullrank.settings import refuse_no_count, refuse_unknown

__all__ = ["Clock", "Documents", "OnNonfinite", "Settings", "measure"]

BLOCK = 8_192
"""Documents that are encoded, ranked and forgotten at a time."""
MIN_LIST = 10
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


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()

    def __call__(self, phase: str) -> "_Phase":
        """Returns a context that adds the time of its body to ``phase``."""
        return _Phase(self, phase)

    def report(self, n_queries: int, n_documents: int) -> dict[str, float]:
        """Returns seconds by phase and in all, queries/s and documents/s of encoding."""
        rates = {
            f"{what}_per_second": n / self.seconds[phase]
            for what, phase, n in (("queries", "encode_queries", n_queries), ("documents", "encode", n_documents))
            if self.seconds.get(phase)
        }
        return {**self.seconds, "total": time.perf_counter() - self.started, **rates}


class _Phase:
    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = time.perf_counter() - self.start
        self.clock.seconds[self.name] = self.clock.seconds.get(self.name, 0.0) + spent


@dataclass(frozen=True)
class Documents:
    """Where the embeddings of documents come from.

    Attributes:
        rows: gives float [n, d] for document positions int64 [n], on the device of the queries.
        order: int64 [documents], the order in which to ask; judged documents are asked for first.
        same_text: int64 [documents], equal where texts are; ``order`` has them together. They are asked for together,
            so that they are encoded once and tie by construction.
    """

    rows: Callable[[NDArray[np.int64]], Tensor]
    order: NDArray[np.int64]
    same_text: NDArray[np.int64]

    def blocks(self, judged: NDArray[np.int64]) -> tuple[NDArray[np.int64], Iterator[NDArray[np.int64]]]:
        """Returns the first block, with the judged documents and all copies of them, and the others."""
        first = np.isin(self.same_text, self.same_text[judged])
        rest = self.order[~first[self.order]]
        return np.flatnonzero(first), self._cut(rest)

    def _cut(self, rest: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        text, start = self.same_text[rest], 0
        while start < len(rest):
            end = min(start + BLOCK, len(rest))
            while end < len(rest) and text[end] == text[end - 1]:
                end += 1
            yield rest[start:end]
            start = end


def measure(
    golden: GoldenSet,
    settings: Settings,
    query_rows: Tensor,
    documents: Documents,
    clock: Clock,
    provenance: dict[str, Any],
) -> Result:
    """Returns the result of ranking all documents for all queries.

    Args:
        golden: the golden set.
        settings: how to rank and what to compute.
        query_rows: float [queries, d].
        documents: where the embeddings of documents come from.
        clock: collects seconds by phase.
        provenance: what to record beside the settings.
    """
    golden.require_answerable()
    queries = prepare(query_rows, settings.similarity)
    _refuse_nonfinite(queries.bad, golden.query_ids, "query", settings)
    usable = torch.nonzero(~queries.bad).squeeze(1)
    tally = _Tally()
    ranked = None
    if len(usable):
        ranked = _rank(golden, settings, queries[usable], usable.cpu().numpy(), documents, clock, tally)
    with clock("metrics"):
        return _result(golden, settings, ranked, usable.cpu().numpy(), tally, clock, provenance)


@dataclass
class _Tally:
    """What the blocks showed on their way through."""

    n_bad: int = 0


def _rank(
    golden: GoldenSet,
    settings: Settings,
    queries: Vectors,
    usable: NDArray[np.int64],
    documents: Documents,
    clock: Clock,
    tally: _Tally,
) -> Ranking:
    device = queries.rows.device
    target_query, target_doc = _targets(golden, usable)
    first, others = documents.blocks(target_doc)
    rows = _checked_block(documents, first, golden, settings, tally)

    def blocks() -> Iterator[tuple[Tensor, Vectors]]:
        yield torch.from_numpy(first).to(device), rows
        for index in others:
            yield torch.from_numpy(index).to(device), _checked_block(documents, index, golden, settings, tally)

    encoding = clock.seconds.get("encode", 0.0)
    start = time.perf_counter()
    ranked = rank(
        queries,
        TargetPairs(torch.from_numpy(target_query).to(device), torch.from_numpy(target_doc).to(device)),
        rows[torch.from_numpy(np.searchsorted(first, target_doc)).to(device)],
        blocks(),
        similarity=settings.similarity,
        k=min(settings.k, len(golden.corpus)),
        id_order=_id_order(golden).to(device) if settings.ties == "trec" else None,
        exclude=_self_matches(golden, usable).to(device) if settings.exclude_self else None,
    )
    spent = time.perf_counter() - start - (clock.seconds.get("encode", 0.0) - encoding)
    clock.seconds["search"] = clock.seconds.get("search", 0.0) + spent
    return ranked


def _checked_block(
    documents: Documents,
    index: NDArray[np.int64],
    golden: GoldenSet,
    settings: Settings,
    tally: _Tally,
) -> Vectors:
    vectors = prepare(documents.rows(index), settings.similarity)
    n_bad = int(vectors.bad.sum())
    if n_bad:
        ids = [golden.doc_ids[i] for i in index]
        _refuse_nonfinite(vectors.bad, ids, "document", settings, of=len(golden.corpus))
        tally.n_bad += n_bad
    return vectors


def _refuse_nonfinite(bad: Tensor, ids: Sequence[str], kind: str, settings: Settings, *, of: int | None = None) -> None:
    where = torch.nonzero(bad).squeeze(1).tolist()
    if not where or settings.on_nonfinite == "worst":
        return
    zero = " (under cosine a zero vector is one)" if settings.similarity == "cosine" else ""
    raise NonFiniteError(
        f"{len(where)} of {of or len(ids)} {kind} embeddings are NaN or infinite{zero}: "
        f"{first_few(ids[i] for i in where)}. The model has diverged or the text cannot be encoded; pass "
        "on_nonfinite='worst' to rank them last"
    )


def _targets(golden: GoldenSet, usable: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns (query, document) of the judged documents that can be retrieved; queries as places in ``usable``."""
    keep = _retrievable(golden, usable)
    return np.searchsorted(usable, golden.judgements.query[keep]), golden.judgements.doc[keep]


def _retrievable(golden: GoldenSet, usable: NDArray[np.int64]) -> NDArray[np.bool_]:
    judgements = golden.judgements
    inside = np.logical_and(judgements.doc != NOT_IN_CORPUS, np.isin(judgements.query, usable))
    return np.asarray(inside & (judgements.grade > 0), dtype=np.bool_)


def _id_order(golden: GoldenSet) -> Tensor:
    """Returns the place of each document in the byte order of ids."""
    ids = [doc_id.encode("utf-8", "surrogatepass") for doc_id in golden.doc_ids]
    place = torch.empty(len(ids), dtype=torch.int64)
    place[torch.tensor(sorted(range(len(ids)), key=ids.__getitem__), dtype=torch.int64)] = torch.arange(len(ids))
    return place


def _self_matches(golden: GoldenSet, usable: NDArray[np.int64]) -> Tensor:
    """Returns, for each usable query, the position of the document with its id, or -1."""
    clash = [qid for qid in golden.query_ids if qid in golden.qrels[qid] and qid in golden.corpus]
    if clash:
        raise DataError(
            f"exclude_self would drop judged documents: {first_few(clash)} are queries whose own id is judged. Leave "
            "exclude_self off, or give queries and documents different ids"
        )
    place = {doc_id: i for i, doc_id in enumerate(golden.doc_ids)}
    return torch.tensor([place.get(golden.query_ids[i], -1) for i in usable], dtype=torch.int64)


def _result(
    golden: GoldenSet,
    settings: Settings,
    ranked: Ranking | None,
    usable: NDArray[np.int64],
    tally: _Tally,
    clock: Clock,
    provenance: dict[str, Any],
) -> Result:
    counts = _counts(golden, settings, ranked, usable)
    per_query = score_queries(settings.metrics, counts, ties=settings.ties)
    metrics, kept = summarise(per_query, golden.answerable)
    n, n_bad_queries = len(golden.corpus), len(golden.queries) - len(usable)
    tied = counts.tied[np.isfinite(counts.better)]
    tie_rate = float(np.mean((tied - 1) / max(1, n - 1))) if len(tied) else 0.0
    m = 0 if ranked is None else len(ranked.better)
    near = (ranked.n_near - m) / (m * max(1, n - 1)) if ranked is not None and m else 0.0
    collapsed = n > 1 and len(tied) > 0 and max(tie_rate, near) >= COLLAPSE
    findings = vacuous_cutoffs(settings.metrics, n)
    if collapsed:
        findings.append(_collapse_finding(tie_rate))
    return Result(
        metrics=metrics,
        per_query=kept,
        query_ids=tuple(q for q, a in zip(golden.query_ids, golden.answerable, strict=True) if a),
        counts={
            "n_scored": golden.n_answerable,
            "n_unanswerable": len(golden.queries) - golden.n_answerable,
            "n_documents": n,
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
        timing=clock.report(len(golden.queries), n),
        provenance={
            "data": golden.fingerprint(),
            "name": golden.name,
            "ties": settings.ties,
            "similarity": settings.similarity,
            "exclude_self": settings.exclude_self,
            "truncated_run": False,
            **provenance,
        },
        findings=tuple(findings),
        tie_rate=tie_rate,
        collapsed=collapsed,
        eligible=not (tally.n_bad or n_bad_queries),
    )


def _counts(golden: GoldenSet, settings: Settings, ranked: Ranking | None, usable: NDArray[np.int64]) -> RankCounts:
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


def _hits(golden: GoldenSet, ranked: Ranking, usable: NDArray[np.int64]) -> dict[str, list[tuple[str, float]]]:
    ids = golden.doc_ids
    return {
        golden.query_ids[q]: [(ids[d], s) for d, s in zip(docs, scores, strict=True) if d >= 0 and np.isfinite(s)]
        for q, docs, scores in zip(usable.tolist(), ranked.top_docs.tolist(), ranked.top_scores.tolist(), strict=True)
    }


def _collapse_finding(tie_rate: float) -> Finding:
    return Finding(
        "collapse",
        "error",
        f"the embeddings have collapsed: nearly all documents score alike (tie rate {tie_rate:.2f})",
        remedy="Scores are those of chance. Lower the learning rate or raise the temperature, and look at the loss",
    )
