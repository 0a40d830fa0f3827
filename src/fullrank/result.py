"""What an evaluation gives: `Result` and `Finding`, and their JSON form.

Promise: a file written by `Result.save` reads back equal, carries the version of its schema, and says on what data and
with which settings it was made.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fullrank._errors import DataError, SettingError, first_few
from fullrank._files import write_atomically
from fullrank.metrics import Metric
from fullrank.resultfile import first_fault
from fullrank.stats import Interval, mean_interval

__all__ = ["Finding", "Hit", "Miss", "Result", "Severity", "summarise", "vacuous_cutoffs"]

SCHEMA, KIND = 1, "fullrank.Result"
MAX_RESULT_BYTES = 1 << 30
Severity = Literal["info", "warning", "error"]
Hit = tuple[str, float]
"""A retrieved document: its id and its score."""


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        kind: short name of the check, such as ``vacuous-k``.
        severity: ``info``, ``warning`` or ``error``.
        message: what was found.
        count: how many items it concerns.
        examples: the first of them.
        remedy: what to do.
    """

    kind: str
    severity: Severity
    message: str
    count: int = 1
    examples: tuple[str, ...] = ()
    remedy: str = ""

    def __str__(self) -> str:
        shown = f" ({first_few(self.examples)})" if self.examples else ""
        return f"{self.severity}: {self.message}{shown}{'. ' + self.remedy if self.remedy else ''}"


@dataclass(frozen=True)
class Miss:
    """A query with what was expected and what was retrieved; an entry of `Result.worst`.

    Attributes:
        query_id, query: the query and its text.
        value: its value of the metric.
        expected: ``{document id: grade}`` of its relevant documents.
        retrieved: the top of its ranking.
    """

    query_id: str
    query: str
    value: float
    expected: dict[str, float]
    retrieved: list[Hit]


@dataclass(frozen=True, eq=False)
class Result:
    """The outcome of one evaluation.

    Attributes:
        metrics: ``{"recall@1": mean over the answerable queries}``.
        per_query: ``{"recall@1": float64 [n]}``, in the order of `query_ids`.
        query_ids: the answerable queries.
        counts: ``n_scored``, ``n_unanswerable``, ``n_documents``, ``n_ranked`` (documents that a bound saw),
            ``n_equal_texts``, ``n_tied`` (judged documents that tie with another), ``n_nonfinite_documents``,
            ``n_nonfinite_queries``, ``n_truncated``.
        hits: ``{query id: [(document id, score), ...]}``, best first; unanswerable queries too.
        qrels: the judgements that were used.
        queries: ``{query id: text}``; empty where only embeddings or a run were given.
        groups: ``{query id: query type}``.
        relevant_from: the smallest grade that counts as relevant.
        timing: seconds by phase, documents/s, queries/s; of `fullrank eval` also p50 and p95 of one query in ms.
        provenance: fingerprint of the data, model, prompts, similarity, precision, versions.
        findings: what stood out.
        tie_rate: mean share of the other documents that tie with a judged one; 1.0 where all embeddings are equal.
        collapsed: nearly all documents score alike; the numbers are those of chance.
        eligible: whether the result may be used to choose (not with non-finite embeddings, not a bound).
        mean_cosine: mean pairwise cosine of a fixed sample of documents; near 1 where embeddings collapse. None where
            there were no embeddings.
        bound: the ranking saw only a part of the corpus, so the metrics are upper bounds, not scores. How much it saw
            is `coverage`.
    """

    metrics: dict[str, float]
    per_query: dict[str, NDArray[np.float64]]
    query_ids: tuple[str, ...]
    counts: dict[str, int]
    hits: Mapping[str, list[Hit]] = field(default_factory=dict)
    qrels: dict[str, dict[str, float]] = field(default_factory=dict)
    queries: dict[str, str] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    relevant_from: float = 1
    timing: dict[str, float] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    tie_rate: float = 0.0
    collapsed: bool = False
    eligible: bool = True
    mean_cosine: float | None = None
    bound: bool = False

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value:.4f}" for name, value in self.metrics.items())
        return f"Result({values}; {len(self.query_ids)} queries{'; bound' if self.bound else ''})"

    def __getitem__(self, metric: str | Metric) -> float:
        return self.metrics[self.name_of(metric)]

    def ci(self, metric: str | Metric, level: float = 0.95, *, seed: int = 0) -> Interval:
        """Returns the interval of the mean of ``metric``; unpacks as ``low, high``.

        Raises:
            DataError: the result is a bound: an interval of it would say nothing about the score.
        """
        if self.bound:
            raise DataError("a bound has no interval: it lies above the score. Evaluate on the full corpus")
        return mean_interval(self.per_query[self.name_of(metric)], level=level, seed=seed)

    def by_group(self) -> dict[str, dict[str, float]]:
        """Returns ``{query type: {metric: mean, "n": queries}}`` over the answerable queries."""
        where: dict[str, list[int]] = {}
        for i, qid in enumerate(self.query_ids):
            where.setdefault(self.groups.get(qid, ""), []).append(i)
        return {
            group: {"n": float(len(rows))}
            | {name: math.fsum(values[rows]) / len(rows) for name, values in self.per_query.items()}
            for group, rows in sorted(where.items())
        }

    def worst(self, n: int = 10, metric: str | Metric | None = None) -> list[Miss]:
        """Returns the ``n`` queries with the lowest value of ``metric`` (default: the first metric)."""
        values = self.per_query[self.name_of(metric if metric is not None else next(iter(self.metrics)))]
        rows = sorted(range(len(values)), key=lambda i: (values[i], self.query_ids[i]))[: max(0, n)]
        return [
            Miss(
                qid := self.query_ids[i],
                self.queries.get(qid, ""),
                float(values[i]),
                {d: g for d, g in self.qrels.get(qid, {}).items() if self._relevant(g)},
                self.hits.get(qid, []),
            )
            for i in rows
        ]

    @property
    def coverage(self) -> float:
        """Share of the corpus that was ranked; below 1 only for a bound."""
        n = self.counts.get("n_documents", 0)
        return self.counts.get("n_ranked", n) / n if n else 1.0

    @property
    def judged(self) -> float:
        """Share of the listed top documents of the answerable queries that carry a judgement."""
        listed = [(d in self.qrels.get(q, {})) for q in self.query_ids for d, _ in self.hits.get(q, [])]
        return sum(listed) / len(listed) if listed else 0.0

    def holes(self, n: int | None = None) -> list[tuple[str, str, float]]:
        """Returns (query id, document id, score) of unjudged documents above the first answer, to be labelled.

        Highest score first. Most regressions on small sets are missing labels, not worse models.
        """
        found = []
        for qid in self.query_ids:
            judged = self.qrels.get(qid, {})
            answers = [s for d, s in self.hits.get(qid, []) if self._relevant(judged.get(d, 0))]
            floor = answers[0] if answers else -math.inf
            found += [(qid, d, s) for d, s in self.hits.get(qid, []) if d not in judged and s > floor]
        found.sort(key=lambda hole: (-hole[2], hole[0], hole[1]))
        return found[:n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Result) and self._body() == other._body()

    __hash__ = None  # type: ignore[assignment]  # holds dicts and arrays

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the result as JSON, atomically, and returns the path."""
        body = {"schema": SCHEMA, "kind": KIND, **self._body()}
        return write_atomically(path, json.dumps(body, ensure_ascii=False, allow_nan=False) + "\n")

    def _body(self) -> dict[str, Any]:
        """Returns the fields as JSON holds them."""
        return {
            **vars(self),
            "per_query": {name: values.tolist() for name, values in self.per_query.items()},
            "query_ids": list(self.query_ids),
            "hits": {qid: [list(hit) for hit in hits] for qid, hits in self.hits.items()},
            "findings": [{**asdict(finding), "examples": list(finding.examples)} for finding in self.findings],
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Result":
        """Returns the result stored at ``path``.

        Raises:
            DataError: not a result file, another schema version, fields missing or of a wrong type.
        """
        source = Path(path)
        if source.is_dir():
            raise DataError(f"{source} is a folder; give a file that Result.save wrote")
        if not source.is_file():
            raise DataError(f"{source}: there is no such file")
        if source.stat().st_size > MAX_RESULT_BYTES:
            raise DataError(f"{source}: over {MAX_RESULT_BYTES >> 20} MiB, which no result file is")
        try:
            body = json.loads(source.read_text(encoding="utf-8", errors="surrogatepass"))  # as they are written
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{source} is not a result file: {error}") from error
        if not isinstance(body, dict) or body.pop("kind", None) != KIND:
            raise DataError(f"{source} is not a result file: it was not written by Result.save")
        if (schema := body.pop("schema", None)) != SCHEMA:
            raise DataError(f"{source} has the schema version {schema!r}; this fullrank reads version {SCHEMA}")
        if missing := [item.name for item in fields(cls) if item.name not in body]:
            raise DataError(f"{source} is not a whole result file: {first_few(missing)} missing")
        if fault := first_fault(body):
            raise DataError(f"{source} is not a whole result file: {fault}")
        try:
            body["per_query"] = {k: np.asarray(v, dtype=np.float64) for k, v in body["per_query"].items()}
            body["query_ids"] = tuple(body["query_ids"])
            body["hits"] = {q: [(str(d), float(s)) for d, s in rows] for q, rows in body["hits"].items()}
            body["findings"] = tuple(Finding(**{**f, "examples": tuple(f["examples"])}) for f in body["findings"])
            result = cls(**body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{source} is not a whole result file: {error}") from error
        if any(len(values) != len(result.query_ids) for values in result.per_query.values()):
            raise DataError(f"{source} is not a whole result file: values and query ids differ in number")
        return result

    def to_trec_run(self, path: str | os.PathLike[str], *, tag: str = "fullrank") -> Path:
        """Writes the listed documents as a TREC run (query, Q0, document, rank, score, tag) and returns the path.

        Raises:
            DataError: an id or the tag contains white space, which the format cannot hold.
        """
        ids = [tag] + [i for q, rows in self.hits.items() for i in (q, *(d for d, _ in rows))]
        if bad := [i for i in ids if not i or any(c.isspace() for c in i)]:
            raise DataError(
                f"a TREC run cannot hold ids or tags that are empty or contain white space: {first_few(bad)}"
            )
        lines = [
            f"{qid} Q0 {doc_id} {rank} {score!r} {tag}\n"
            for qid, rows in self.hits.items()
            for rank, (doc_id, score) in enumerate(rows, 1)
        ]
        return write_atomically(path, "".join(lines))

    def name_of(self, metric: str | Metric) -> str:
        """Returns the key of a metric; `SettingError` where it was not computed."""
        name = str(Metric.parse(metric))
        if name not in self.metrics:
            raise SettingError(f"metric {name!r} was not computed; there are {', '.join(self.metrics)}")
        return name

    def _relevant(self, grade: float) -> bool:
        return grade > 0 and grade >= self.relevant_from


def summarise(
    per_query: Mapping[str, NDArray[np.float64]], answerable: NDArray[np.bool_]
) -> tuple[dict[str, float], dict[str, NDArray[np.float64]]]:
    """Returns the means over the answerable queries, exactly rounded, and their values."""
    kept = {name: values[answerable] for name, values in per_query.items()}
    return {name: math.fsum(values) / len(values) for name, values in kept.items()}, kept


def vacuous_cutoffs(metrics: Sequence[Metric], n_documents: int) -> list[Finding]:
    """Returns a Finding for cut-offs that cover so much of the corpus that they say nothing (k >= 2 and k >= 5 %)."""
    vacuous = sorted({m.k for m in metrics if m.k is not None and m.k >= 2 and m.k >= 0.05 * n_documents})
    if not vacuous:
        return []
    return [
        Finding(
            "vacuous-k",
            "warning",
            f"cut-offs of 5 % of the {n_documents} documents or more say little",
            count=len(vacuous),
            examples=tuple(f"@{k}" for k in vacuous),
            remedy="Choose by a smaller cut-off, such as recall@1, or evaluate on a larger corpus",
        )
    ]
