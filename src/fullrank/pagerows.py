"""Rows of a report: comparisons, query types, wins and losses, worst queries, unjudged documents.

Promise: plain dicts of what results hold, unrounded; texts are cut to one line and not escaped.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fullrank._errors import DataError
from fullrank.abstention import Abstention, Threshold, abstention, threshold_for, threshold_text
from fullrank.comparison import Comparison, compare, unlike
from fullrank.data import GoldenSet
from fullrank.metrics import Metric
from fullrank.result import Hit, Result
from fullrank.runfolder import Run
from fullrank.stats import holm, mean_interval

__all__ = [
    "Row",
    "abstention_row",
    "band",
    "candidate_rows",
    "change_row",
    "changes",
    "compared",
    "flat",
    "group_rows",
    "hole_row",
    "percent",
    "query_rows",
    "swept",
    "texts_of",
    "value_rows",
    "worst_rows",
]

WORST, RETRIEVED, GROUPS, QUERIES = 20, 3, 50, 2_000
TEXT_WIDTH, ROW_WIDTH = 320, 120
Row = dict[str, Any]


# ------------------------------------------------------------------------------------------------ comparisons


def compared(
    base: Result | None, best: Result | None, metric: str, notes: list[str]
) -> tuple[Comparison | None, list[Row]]:
    """Returns the comparison by ``metric`` and a row for every metric that both have."""
    if base is None or best is None:
        return None, []
    rows, chosen = [], None
    refused: dict[str, list[str]] = {}
    for name in (name for name in best.metrics if name in base.metrics):
        try:
            if not base.bound and not best.bound and (differing := unlike(base, best, Metric.parse(name))):
                # What `compare` says names options that a report does not have.
                raise DataError(f"the two results differ in {', '.join(differing)}; evaluate both on the same data")
            found = compare(base, best, name)
        except DataError as error:
            refused.setdefault(str(error), []).append(name)
            continue
        chosen = found if name == metric else chosen
        rows.append(
            {
                "metric": name,
                "base": base.metrics[name],
                "best": best.metrics[name],
                "delta": 100 * found.delta,
                "low": 100 * found.interval.low,
                "high": 100 * found.interval.high,
                "p": found.p_value,
                "won": len(found.wins),
                "lost": len(found.losses),
                "verdict": found.verdict,
            }
        )
    for why, names in refused.items():
        notes.append(f"{', '.join(names)} not compared: {why}" if rows else f"not compared: {why}")
    return chosen, rows


def value_rows(result: Result) -> list[Row]:
    """Returns a row for each metric of one result."""
    rows = []
    for name, value in result.metrics.items():
        low, high = band(result, name)
        rows.append({"metric": name, "value": value, "low": low, "high": high})
    return rows


def band(result: Result, metric: str) -> tuple[float, float] | tuple[None, None]:
    """Returns the interval of a metric; a bound has none."""
    return (None, None) if result.bound else tuple(result.ci(metric))


def candidate_rows(run: Run, notes: list[str]) -> list[Row]:
    """Returns a row for each of several plain results, compared with the first; p-values adjusted by Holm."""
    if len(run.candidates) < 2:
        return []
    base, rows = run.candidates[0][1], []
    for name, result in run.candidates:
        if run.metric not in result.metrics:
            continue
        low, high = band(result, run.metric)
        row: Row = {
            "name": name,
            "value": result.metrics[run.metric],
            "low": low,
            "high": high,
            "delta": None,
            "p": None,
        }
        if result is not base:
            found, _ = compared(
                base, replace(result, metrics={run.metric: result.metrics[run.metric]}), run.metric, notes
            )
            row |= {"delta": 100 * found.delta, "p": found.p_value} if found else {}
        rows.append(row)
    tested = [row for row in rows if row["p"] is not None]
    for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p"] = p
    return rows


def group_rows(base: Result | None, shown: Result | None, metric: str) -> list[Row]:
    """Returns a row for each query type, the one that fell most first."""
    if shown is None or not shown.groups:
        return []
    rows: list[Row] = []
    place = {} if base is None else {qid: i for i, qid in enumerate(base.query_ids)}
    for name, values in shown.by_group().items():
        row: Row = {"group": name or "no type", "n": int(values["n"]), "best": values[metric], "base": None}
        both = [(place[q], i) for i, q in enumerate(shown.query_ids) if q in place and shown.groups.get(q, "") == name]
        if base is not None and both:  # all three over the queries of both, by the types of the shown result
            before, after = base.per_query[metric][[j for j, _ in both]], shown.per_query[metric][[i for _, i in both]]
            low, high = mean_interval(after - before, bounds=(-1, 1))
            row |= {"n": len(both), "base": math.fsum(before) / len(both), "best": math.fsum(after) / len(both)}
            row |= {"delta": 100 * math.fsum(after - before) / len(both), "low": 100 * low, "high": 100 * high}
        rows.append(row)
    return sorted(rows, key=lambda row: float(row["delta"] if "delta" in row else row["best"]))[:GROUPS]


def changes(base: Result | None, best: Result | None, metric: str) -> list[tuple[float, str, float, float]]:
    """Returns (change, query id, before, after) of the queries of both, the largest loss first."""
    if base is None or best is None:
        return []
    before = dict(zip(base.query_ids, base.per_query[metric].tolist(), strict=True))
    after = dict(zip(best.query_ids, best.per_query[metric].tolist(), strict=True))
    return sorted((after[q] - before[q], q, before[q], after[q]) for q in after if q in before)


def percent(share: float) -> str:
    """Returns a share in per cent, with three digits, or more where it would read as none or all.

    >>> percent(0.025), percent(0.99996), percent(1.0)
    ('2.5', '99.996', '100')
    """
    texts = [f"{100 * share:.{digits}g}" for digits in (3, 6, 9, 17)]
    return next((text for text in texts if share in (0, 1) or float(text) not in (0, 100)), texts[-1])


# ------------------------------------------------------------------------------------------------ queries


def texts_of(golden: GoldenSet | None, shown: Result | None, notes: list[str]) -> Mapping[str, str]:
    """Returns the texts of the documents by id; adds a note where the data is not that of the results."""
    if golden is None:
        return {}
    if shown is not None and shown.provenance.get("data", golden.fingerprint()) != golden.fingerprint():
        notes.append(
            f"the data given ({golden.name}, {golden.fingerprint()}) is not that of the results "
            f"({shown.provenance['data']}): texts are shown by id, and may be those of another version"
        )
    return dict(zip(golden.doc_ids, golden.doc_texts, strict=True))


def flat(text: str, width: int = TEXT_WIDTH) -> str:
    """Returns a text on one line, cut at ``width``."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else f"{flat[: width - 1]}…"


def _document(result: Result, qid: str, hit: Hit, corpus: Mapping[str, str]) -> Row:
    grade = result.qrels.get(qid, {}).get(hit[0])
    relevant = grade is not None and grade > 0 and grade >= result.relevant_from
    mark = "not judged" if grade is None else "relevant" if relevant else "judged not relevant"
    return {"id": hit[0], "score": hit[1], "text": flat(corpus.get(hit[0], "")), "mark": mark, "right": relevant}


def _miss(result: Result, qid: str, value: float, corpus: Mapping[str, str]) -> Row:
    judged = result.qrels.get(qid, {})
    answers = [d for d, grade in judged.items() if grade > 0 and grade >= result.relevant_from]
    return {
        "id": qid,
        "query": flat(result.queries.get(qid, "")),
        "group": result.groups.get(qid, ""),
        "value": value,
        "expected": [{"id": d, "text": flat(corpus.get(d, ""))} for d in answers[:RETRIEVED]],
        "n_more": max(0, len(answers) - RETRIEVED),
        "retrieved": [_document(result, qid, hit, corpus) for hit in result.hits.get(qid, [])[:RETRIEVED]],
    }


def worst_rows(result: Result | None, metric: str, corpus: Mapping[str, str]) -> list[Row]:
    """Returns the queries with the lowest value that is below 1, with what was retrieved instead.

    Of equal values, which is what recall@1 gives, those come first that are worst by the other metrics.
    """
    if result is None:
        return []
    values, all_values = result.per_query[metric], np.sum(list(result.per_query.values()), axis=0)
    rows = [i for i in range(len(values)) if values[i] < 1]
    rows.sort(key=lambda i: (values[i], all_values[i], result.query_ids[i]))
    return [_miss(result, result.query_ids[i], float(values[i]), corpus) for i in rows[:WORST]]


def change_row(row: tuple[float, str, float, float], best: Result, corpus: Mapping[str, str]) -> Row:
    """Returns a query that rose or fell, with what the best result retrieves for it."""
    change, qid, before, after = row
    return {**_miss(best, qid, after, corpus), "before": before, "after": after, "change": change}


def hole_row(result: Result, hole: tuple[str, str, float], corpus: Mapping[str, str]) -> Row:
    """Returns an unjudged document that ranks above the answers."""
    qid, doc_id, score = hole
    text = flat(corpus.get(doc_id, ""), ROW_WIDTH)
    return {
        "query_id": qid,
        "query": flat(result.queries.get(qid, ""), ROW_WIDTH),
        "id": doc_id,
        "score": score,
        "text": text,
    }


def query_rows(base: Result | None, shown: Result | None, metric: str) -> list[Row]:
    """Returns a row for each query, in the order of the data."""
    if shown is None:
        return []
    before = {} if base is None else dict(zip(base.query_ids, base.per_query[metric].tolist(), strict=True))
    return [
        {
            "id": qid,
            "query": flat(shown.queries.get(qid, ""), ROW_WIDTH),
            "before": before.get(qid),
            "after": float(value),
        }
        for qid, value in zip(shown.query_ids[:QUERIES], shown.per_query[metric][:QUERIES], strict=True)
    ]


def swept(shown: Result | None, max_false_answer_rate: float) -> tuple[tuple[Abstention, Threshold] | None, str]:
    """Returns the sweep over thresholds with the suggested one, or None and why there is none."""
    if shown is None:
        return None, ""
    try:
        found = abstention(shown)
    except DataError as error:
        return None, str(error)
    return (found, threshold_for(found, max_false_answer_rate=max_false_answer_rate)), ""


def abstention_row(found: Abstention, threshold: Threshold) -> Row:
    """Returns the numbers of a sweep."""
    return {
        "auroc": found.auroc,
        "auroc_interval": found.auroc_interval,
        "n_answerable": len(found.answerable),
        "n_unanswerable": len(found.unanswerable),
        "threshold": threshold,
        "shown": threshold_text(found, threshold),
        "groups": [{"group": name, **vars(rates)} for name, rates in threshold.by_group.items()],
    }
