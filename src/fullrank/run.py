"""Evaluation of a ranked list that somebody else made: a dict of scores or a TREC run file.

Promise: with ``ties="trec"`` the numbers are those of trec_eval. A judged document that is not listed is never
retrieved under any rule; it stays in the ideal and in the number of relevant documents.
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fullrank._errors import DataError, SettingError, first_few
from fullrank.data import checked_grade
from fullrank.loaders import read_qrels, read_run
from fullrank.metrics import Metric, RankCounts, TieRule, score_queries
from fullrank.result import Hit, Result, summarise
from fullrank.settings import DEFAULT_METRICS, parsed, refuse_no_count

__all__ = ["evaluate_run"]

Run = Mapping[str, Mapping[str, float]]
Qrels = Mapping[str, Mapping[str, float]]
Scores = NDArray[np.float64]


def evaluate_run(
    run: Run | str | Path,
    qrels: Qrels | str | Path,
    *,
    metrics: Sequence[str | Metric] = DEFAULT_METRICS,
    ties: TieRule = "expected",
    relevant_from: float = 1,
    list_length: int = 10,
) -> Result:
    """Returns the quality of ``run`` against ``qrels``.

    Args:
        run: ``{query id: {document id: score}}`` or the path of a TREC run file.
        qrels: ``{query id: {document id: grade}}`` or the path of a qrels file. All its queries count; one that the run
            does not list scores 0. Queries of the run that are not judged are left out.
        metrics: see `Metric`; without a cut-off they are those of the list given, not of a full ranking.
        ties: ``expected`` and ``worst`` take scores as they stand, ``trec`` rounds them to float32 first.
        relevant_from: the smallest grade that counts as relevant.
        list_length: documents kept for each query in `Result.hits`.

    Raises:
        DataError: a score is NaN or infinite (the message names query and document), or no query is answerable.

    >>> evaluate_run({"q": {"a": 0.9, "b": 0.4}}, {"q": {"b": 1}}, metrics=["mrr"]).metrics
    {'mrr': 0.5}
    """
    start = time.perf_counter()
    wanted = parsed(metrics)
    scores = read_run(run) if isinstance(run, str | Path) else run
    judged = read_qrels(qrels) if isinstance(qrels, str | Path) else qrels
    if not isinstance(scores, Mapping) or not isinstance(judged, Mapping):
        raise DataError("run and qrels must be dicts of dicts {query id: {document id: number}}, or paths")
    refuse_no_count("list_length", list_length or 0, "a whole number from 1")
    if isinstance(relevant_from, bool) or not isinstance(relevant_from, int | float) or math.isnan(relevant_from):
        raise SettingError(f"relevant_from={relevant_from!r} must be a number")
    judged = {qid: _checked_grades(qid, grades) for qid, grades in judged.items()}
    query_ids = list(judged)
    if not query_ids:
        raise DataError("qrels are empty: no query is judged, so no metric can be computed")
    counts, hits = _counts(scores, judged, query_ids, ties, relevant_from, list_length)
    answerable = counts.n_relevant() > 0
    if not answerable.any():
        raise DataError(
            f"none of the {len(query_ids)} judged queries is answerable (no grade of {relevant_from} or more), so no "
            "metric can be computed"
        )
    if strangers := [qid for qid in scores if not isinstance(qid, str)]:
        raise DataError(f"query ids of the run must be strings, as those of the qrels are: {first_few(strangers)}")
    values, kept = summarise(score_queries(wanted, counts, ties=ties), answerable)
    return Result(
        metrics=values,
        per_query=kept,
        query_ids=tuple(q for q, a in zip(query_ids, answerable, strict=True) if a),
        counts={
            "n_scored": int(answerable.sum()),
            "n_unanswerable": int((~answerable).sum()),
            "n_listed": sum(len(scores.get(qid, ())) for qid in query_ids),
            "n_tied": int((counts.tied > 1).sum()),
        },
        hits=hits,
        qrels={q: dict(grades) for q, grades in judged.items()},
        relevant_from=relevant_from,
        timing={"total": time.perf_counter() - start},
        provenance={"ties": ties, "truncated_run": True, "run": str(run) if not isinstance(run, Mapping) else "dict"},
    )


def _counts(
    run: Run, qrels: Qrels, query_ids: list[str], ties: TieRule, relevant_from: float, list_length: int
) -> tuple[RankCounts, dict[str, list[Hit]]]:
    parts: list[tuple[np.ndarray, ...]] = []
    hits: dict[str, list[Hit]] = {}
    for place, qid in enumerate(query_ids):
        docs, scores = _checked_list(qid, run.get(qid, {}))
        if not np.isfinite(scores).all():
            bad = [docs[i] for i in np.flatnonzero(~np.isfinite(scores))]
            raise DataError(f"the run has NaN or infinite scores for query {qid!r}: documents {first_few(bad)}")
        if ties == "trec":
            with np.errstate(over="ignore"):
                scores = scores.astype(np.float32).astype(np.float64)
        relevant = {doc_id: grade for doc_id, grade in qrels[qid].items() if grade > 0}
        better, tied, ahead = _stand(docs, scores, list(relevant), ties)
        grade = np.fromiter(relevant.values(), dtype=np.float64, count=len(relevant))
        parts.append((np.full(len(relevant), place), better, tied, ahead, grade))
        hits[qid] = _top(docs, scores, list_length, ties)
    query, better, tied, ahead, grade = (np.concatenate(column) for column in zip(*parts, strict=True))
    return RankCounts(len(query_ids), query.astype(np.int64), better, tied, ahead, grade, relevant_from), hits


def _checked_grades(qid: object, grades: object) -> dict[str, float]:
    if not isinstance(qid, str) or not isinstance(grades, Mapping) or not set(map(type, grades)) <= {str}:
        raise DataError(f"qrels of query {qid!r} must be {{document id: grade}} with ids that are strings")
    return {doc_id: checked_grade(grade, qid, doc_id) for doc_id, grade in grades.items()}


def _checked_list(qid: str, listed: Mapping[str, float]) -> tuple[list[str], Scores]:
    try:
        docs, scores = list(listed), np.fromiter(listed.values(), dtype=np.float64, count=len(listed))
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"the run of query {qid!r} must be {{document id: score}}: {error}") from error
    if not set(map(type, docs)) <= {str}:
        raise DataError(f"document ids in the run of query {qid!r} must be strings, as those of the qrels are")
    return docs, scores


def _stand(docs: list[str], scores: Scores, relevant: list[str], ties: TieRule) -> tuple[Scores, Scores, Scores]:
    """Returns `better`, `tied` and `ahead` of the relevant documents in one list."""
    column = {doc_id: i for i, doc_id in enumerate(docs)} if relevant else {}
    index = np.array([column.get(doc_id, -1) for doc_id in relevant], dtype=np.int64)
    found = index >= 0
    better, tied, ahead = np.full(len(index), np.inf), np.ones(len(index)), np.zeros(len(index))
    ordered, own = np.sort(scores), scores[index[found]]
    better[found] = len(scores) - np.searchsorted(ordered, own, side="right")
    tied[found] = len(scores) - better[found] - np.searchsorted(ordered, own, side="left")
    if ties == "trec":
        pairs = zip(index[found], tied[found], strict=True)
        ahead[found] = [_tied_ahead(docs, scores, int(i)) if t > 1 else 0 for i, t in pairs]
    return better, tied, ahead


def _tied_ahead(docs: list[str], scores: Scores, own: int) -> int:
    """Returns how many documents of the same score have a greater id by bytes."""
    return sum(_as_bytes(docs[i]) > _as_bytes(docs[own]) for i in np.flatnonzero(scores == scores[own]))


def _top(docs: list[str], scores: Scores, k: int, ties: TieRule) -> list[Hit]:
    k = min(k, len(docs))
    if not k:
        return []
    floor = np.partition(scores, len(scores) - k)[len(scores) - k]
    rows = [(docs[i], float(scores[i])) for i in np.flatnonzero(scores >= floor)]
    rows.sort(key=lambda row: _as_bytes(row[0]), reverse=ties == "trec")
    return sorted(rows, key=lambda row: -row[1])[:k]


def _as_bytes(doc_id: str) -> bytes:
    return doc_id.encode("utf-8", "surrogatepass")
