"""When to answer at all: the top score of a query as the sign that the corpus holds an answer.

Promise: every rate is a count over a count at a threshold that was seen; ties count half in the AUROC; what few queries
cannot show gets an interval that says so. Only the order of the scores matters, so cosine and dot products do alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullrank._errors import DataError, SettingError
from fullrank.result import Result
from fullrank.stats import N_RESAMPLES, Interval, mean_interval

__all__ = [
    "MAX_FALSE_ANSWER_RATE",
    "Abstention",
    "GroupRates",
    "Threshold",
    "abstention",
    "threshold_for",
    "threshold_text",
]

Scores = NDArray[np.float64]

MAX_FALSE_ANSWER_RATE = 0.05


@dataclass(frozen=True, eq=False)
class Abstention:
    """What the top score tells about whether a query has an answer. A query is answered at scores >= threshold.

    Attributes:
        answerable, unanswerable: top scores ([a] and [u]); -inf for a query that retrieved nothing.
        correct: share of the documents tied on top that are relevant ([a]); 1 or 0 where nothing ties. Where more
            tie than are listed, it is what precision@1, hit@1 or recall@1 say; without any of them, of those listed.
        answerable_ids, unanswerable_ids: their queries.
        groups: ``{query id: query type}``.
        thresholds: every top score that occurs, rising, and one above all ([t]), at which nothing is answered.
        answer_rate: share of the answerable queries that are answered ([t]).
        correct_answer_rate: share of the answerable queries answered with a relevant document on top ([t]).
        false_answer_rate: share of the unanswerable queries that are answered ([t]).
        auroc: probability that an answerable query scores higher than an unanswerable one, ties counted half.
        auroc_interval: its interval, from resampling both sides.
    """

    answerable: Scores
    unanswerable: Scores
    correct: Scores
    answerable_ids: tuple[str, ...]
    unanswerable_ids: tuple[str, ...]
    groups: dict[str, str]
    thresholds: Scores
    answer_rate: Scores
    correct_answer_rate: Scores
    false_answer_rate: Scores
    auroc: float
    auroc_interval: Interval


@dataclass(frozen=True)
class GroupRates:
    """The rates of one query type at a threshold; None where it has no query of that side.

    Attributes:
        n_answerable, n_unanswerable: its queries.
        answer_rate, correct_answer_rate, false_answer_rate: as in `Abstention`.
        auroc: within the type.
    """

    n_answerable: int
    n_unanswerable: int
    answer_rate: float | None
    correct_answer_rate: float | None
    false_answer_rate: float | None
    auroc: float | None


@dataclass(frozen=True)
class Threshold:
    """The lowest threshold that keeps the false-answer rate at a target, and what it costs.

    Attributes:
        value: answer at top scores >= value.
        interval: where it falls when the unanswerable queries are resampled.
        target: the false-answer rate asked for.
        false_answer_rate, answer_rate, correct_answer_rate: at ``value``, on the queries it was chosen on.
        false_answer_interval, answer_interval, correct_answer_interval: their intervals.
        by_group: ``{query type: rates}``; empty where the queries have no types.
        resolution: the step between two false-answer rates, 1 / unanswerable queries. A target below it means none.
    """

    value: float
    interval: Interval
    target: float
    false_answer_rate: float
    false_answer_interval: Interval
    answer_rate: float
    answer_interval: Interval
    correct_answer_rate: float
    correct_answer_interval: Interval
    by_group: dict[str, GroupRates]
    resolution: float


def abstention(result: Result, *, level: float = 0.95, seed: int = 0, n_resamples: int = N_RESAMPLES) -> Abstention:
    """Returns the sweep over all thresholds, and the AUROC of answerable against unanswerable queries.

    The AUROC is the Mann-Whitney statistic (Hanley & McNeil, Radiology 1982).

    Args:
        result: of a golden set that holds unanswerable queries.
        level: confidence of the interval.
        seed: of the resampling.
        n_resamples: how often.

    Raises:
        DataError: no unanswerable query, or no ranked lists.
    """
    scored = set(result.query_ids)
    unanswerable_ids = tuple(qid for qid in result.qrels if qid not in scored)
    if not unanswerable_ids:
        raise DataError(
            f"all {len(scored)} queries have an answer: false answers cannot be measured. Add queries that the corpus "
            "does not answer, with no relevant document"
        )
    if not any(result.hits.values()):
        raise DataError("the result holds no ranked lists, so there is no top score; evaluate again and save all of it")
    answerable, unanswerable = _top(result, result.query_ids), _top(result, unanswerable_ids)
    correct = np.array([_correct(result, qid, i) for i, qid in enumerate(result.query_ids)])
    thresholds = _thresholds(answerable, unanswerable)
    answered = _rate(answerable, np.ones(len(answerable)), thresholds)
    return Abstention(
        answerable,
        unanswerable,
        correct,
        result.query_ids,
        unanswerable_ids,
        dict(result.groups),
        thresholds,
        answered,
        _rate(answerable, correct, thresholds),
        _rate(unanswerable, np.ones(len(unanswerable)), thresholds),
        _auroc(answerable, unanswerable),
        _auroc_interval(answerable, unanswerable, level, seed, n_resamples),
    )


def threshold_for(
    found: Abstention,
    *,
    max_false_answer_rate: float = MAX_FALSE_ANSWER_RATE,
    level: float = 0.95,
    seed: int = 0,
    n_resamples: int = N_RESAMPLES,
) -> Threshold:
    """Returns the lowest threshold at which at most ``max_false_answer_rate`` of the unanswerable queries are answered.

    It is chosen on the queries it is measured on, which flatters it a little; the intervals are those of the rates at
    that threshold.

    Raises:
        SettingError: a rate outside [0, 1].
    """
    if isinstance(max_false_answer_rate, bool) or not 0 <= max_false_answer_rate <= 1:
        raise SettingError(f"max_false_answer_rate={max_false_answer_rate!r} must lie between 0 and 1, such as 0.05")
    value = _lowest(found.unanswerable, found.thresholds, max_false_answer_rate)
    kept, wrong = found.answerable >= value, found.unanswerable >= value
    correct = found.correct * kept
    groups = sorted({found.groups[q] for q in (*found.answerable_ids, *found.unanswerable_ids) if q in found.groups})
    return Threshold(
        value,
        _threshold_interval(found, max_false_answer_rate, level, seed, n_resamples),
        max_false_answer_rate,
        float(wrong.mean()),
        mean_interval(wrong, level=level, seed=seed, n_resamples=n_resamples),
        float(kept.mean()),
        mean_interval(kept, level=level, seed=seed, n_resamples=n_resamples),
        float(correct.mean()),
        mean_interval(correct, level=level, seed=seed, n_resamples=n_resamples),
        {group: _group_rates(found, group, value) for group in groups},
        1 / len(found.unanswerable),
    )


def threshold_text(found: Abstention, threshold: Threshold) -> str:
    """Returns the threshold with as many digits, 4 at least, as answer the very queries that it answers itself."""
    scores = np.concatenate([found.answerable, found.unanswerable])
    answered = scores >= threshold.value
    texts = [f"{threshold.value:.{digits}g}" for digits in range(4, 18)]
    return next((text for text in texts if np.array_equal(scores >= float(text), answered)), texts[-1])


def _top(result: Result, query_ids: Sequence[str]) -> Scores:
    return np.array([hits[0][1] if (hits := result.hits.get(qid)) else -math.inf for qid in query_ids])


def _correct(result: Result, qid: str, place: int) -> float:
    hits, grades = result.hits.get(qid, []), result.qrels.get(qid, {})
    floor = max(result.relevant_from, np.nextafter(0.0, 1.0))
    tied = [grades.get(doc_id, 0) >= floor for doc_id, score in hits if score == hits[0][1]]
    if 1 < len(tied) == len(hits) < result.counts.get("n_documents", 0) and result.provenance.get("ties") == "expected":
        # The list ends within the tie; these count all of it.
        n_relevant = sum(grade >= floor for grade in grades.values())
        for name, factor in (("precision@1", 1), ("hit@1", 1), ("recall@1", n_relevant)):
            if name in result.per_query:
                return min(1.0, float(result.per_query[name][place]) * factor)
    return sum(tied) / len(tied) if tied else 0.0


def _thresholds(answerable: Scores, unanswerable: Scores) -> Scores:
    seen = np.unique(np.concatenate([answerable, unanswerable]))
    seen = seen[np.isfinite(seen)]  # at -inf a query that retrieved nothing would be answered
    return np.append(seen, np.nextafter(seen[-1], math.inf))


def _rate(scores: Scores, weights: Scores, thresholds: Scores) -> Scores:
    """Returns the share of ``weights`` ([n]) whose score reaches each threshold ([t])."""
    order = np.argsort(scores, kind="stable")
    below = np.concatenate([[0.0], np.cumsum(weights[order])])
    reached = below[-1] - below[np.searchsorted(scores[order], thresholds, side="left")]
    return np.asarray(reached / len(scores))


def _lowest(unanswerable: Scores, thresholds: Scores, target: float) -> float:
    rates = _rate(unanswerable, np.ones(len(unanswerable)), thresholds)
    return float(thresholds[int(np.argmax(rates <= target))])  # the last of them is always 0


def _auroc(answerable: Scores, unanswerable: Scores) -> float:
    ordered = np.sort(unanswerable)
    lower, upper = (np.searchsorted(ordered, answerable, side=side) for side in ("left", "right"))
    return float((lower + upper).sum() / (2 * len(answerable) * len(unanswerable)))


def _auroc_interval(answerable: Scores, unanswerable: Scores, level: float, seed: int, n_resamples: int) -> Interval:
    value, fewer = _auroc(answerable, unanswerable), min(len(answerable), len(unanswerable))
    if fewer > 1 and value in (0.0, 1.0):
        # Fully apart in every resample, which would be an interval without width; the smaller side limits the claim.
        low, high = mean_interval(np.full(fewer, value), level=level)
        return Interval(low, high, level, "wilson")
    if fewer == 1 or _alike(np.concatenate([answerable, unanswerable])):
        return Interval(0.0, 1.0, level, "degenerate")
    rng = np.random.default_rng(seed)
    values, place = np.unique(np.concatenate([answerable, unanswerable]), return_inverse=True)
    a, u = np.sort(place[: len(answerable)]), np.sort(place[len(answerable) :])  # sorted: order of queries is none
    found = [_resampled_auroc(rng, a, u, len(values)) for _ in range(n_resamples)]
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), level, "bootstrap")


def _resampled_auroc(rng: np.random.Generator, a: NDArray[np.int64], u: NDArray[np.int64], n_values: int) -> float:
    of_a = np.bincount(a[rng.integers(len(a), size=len(a))], minlength=n_values)
    of_u = np.bincount(u[rng.integers(len(u), size=len(u))], minlength=n_values)
    below = np.cumsum(of_u) - of_u
    return float(of_a @ (below + 0.5 * of_u) / (len(a) * len(u)))


def _threshold_interval(found: Abstention, target: float, level: float, seed: int, n_resamples: int) -> Interval:
    scores, grid = np.sort(found.unanswerable), found.thresholds
    if _alike(scores):
        return Interval(float(grid[0]), float(grid[-1]), level, "degenerate")
    rng = np.random.default_rng(seed)
    values = [_lowest(scores[rng.integers(len(scores), size=len(scores))], grid, target) for _ in range(n_resamples)]
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), level, "bootstrap")


def _alike(scores: Scores) -> bool:
    return bool((scores == scores[0]).all())


def _group_rates(found: Abstention, group: str, value: float) -> GroupRates:
    a = np.array([found.groups.get(qid) == group for qid in found.answerable_ids], dtype=bool)
    u = np.array([found.groups.get(qid) == group for qid in found.unanswerable_ids], dtype=bool)
    kept = found.answerable[a] >= value
    return GroupRates(
        int(a.sum()),
        int(u.sum()),
        float(kept.mean()) if a.any() else None,
        float((kept * found.correct[a]).mean()) if a.any() else None,
        float((found.unanswerable[u] >= value).mean()) if u.any() else None,
        _auroc(found.answerable[a], found.unanswerable[u]) if a.any() and u.any() else None,
    )
