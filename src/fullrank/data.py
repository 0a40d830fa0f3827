"""Golden sets: queries, a corpus and judgements, joined by id once, here.

Promise: a `GoldenSet` that exists is whole. Every judgement names a known query and, unless the caller asked to keep
it, a known document; positions are int64; nothing the caller gave is changed.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fullrank._errors import DataError, SettingError, first_few
from fullrank.checks import check_golden
from fullrank.metrics import TINY, Metric
from fullrank.result import Finding
from fullrank.settings import DEFAULT_METRICS

__all__ = ["GoldenSet", "Judgements", "Missing", "checked_grade", "join_title", "refuse_other_than_golden"]

Missing = Literal["raise", "keep", "drop"]
Document = str | Mapping[str, str]

MAX_GRADE = 1_000
"""A gain of 2^grade must stay a number."""
NOT_IN_CORPUS = -1
"""Position of a judged document that the corpus does not hold (``missing="keep"``): it can never be retrieved."""


@dataclass(frozen=True)
class Judgements:
    """The judgements as positions: equally long arrays, ordered by query.

    Attributes:
        query: int64 [m], position in `GoldenSet.query_ids`.
        doc: int64 [m], position in `GoldenSet.doc_ids`, or -1 for a document that the corpus does not hold.
        grade: float64 [m].
    """

    query: NDArray[np.int64]
    doc: NDArray[np.int64]
    grade: NDArray[np.float64]


@dataclass(frozen=True)
class GoldenSet:
    """Held-out queries, the full corpus and which documents answer which query.

    Args:
        queries: ``{query id: text}``.
        corpus: ``{document id: text}`` or ``{document id: {"title": ..., "text": ...}}``; title and text are joined by
            a blank, as BEIR does.
        qrels: ``{query id: {document id: grade}}``. A query whose grades all lie below ``relevant_from`` (or that has
            none) is unanswerable: counted apart, never in a mean.
        name: short name, used in logs and file names.
        groups: ``{query id: query type}``, for results by type.
        missing: what to do with a query that has no entry in ``qrels``, and with judgements of unknown queries or
            documents. ``raise``: an error that lists them. ``keep``: such a query is unanswerable, such a document is
            never retrieved but stays in the denominators. ``drop``: they go. Judgements of unknown queries go in both.
        relevant_from: the smallest grade that counts as relevant. Grades <= 0 are never relevant.
        split: which split of its source this is, as `load_golden` notes it: what a model card tells to measure again.

    Raises:
        DataError: empty corpus or queries, unknown ids, wrong types.

    >>> golden = GoldenSet({"q": "capital of France"}, {"d": "Paris", "e": "Rome"}, {"q": {"d": 1}})
    >>> golden.n_answerable
    1
    """

    queries: Mapping[str, str]
    corpus: Mapping[str, Document]
    qrels: Mapping[str, Mapping[str, float]]
    _: KW_ONLY
    name: str = "golden"
    groups: Mapping[str, str] | None = None
    missing: Missing = "raise"
    relevant_from: float = 1
    split: str | None = None
    _fingerprint: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.missing not in get_args(Missing):
            raise SettingError(f"missing={self.missing!r} is unknown; choose one of {', '.join(get_args(Missing))}")
        for part in ("queries", "corpus", "qrels"):
            if not isinstance(getattr(self, part), Mapping):
                raise DataError(f"{part} must be a dict by id, got {type(getattr(self, part)).__name__}")
        if self.groups is not None and not isinstance(self.groups, Mapping):
            raise DataError(f"groups must be a dict {{query id: type}}, got {type(self.groups).__name__}")
        if isinstance(self.relevant_from, bool) or not isinstance(self.relevant_from, int | float):
            raise DataError(f"relevant_from={self.relevant_from!r} must be a number")
        if not self.corpus:
            raise DataError(f"golden set {self.name!r} has an empty corpus: there is nothing to rank")
        if not self.queries:
            raise DataError(f"golden set {self.name!r} has no queries")
        if wrong := [qid for qid, grades in self.qrels.items() if not isinstance(grades, Mapping)]:
            raise DataError(
                f"qrels must be a dict of dicts {{query: {{document: grade}}}}; not so for {first_few(wrong)}"
            )
        queries = {
            _checked_id(qid, "query"): _checked_text(text, f"query {qid!r}") for qid, text in self.queries.items()
        }
        corpus = {_checked_id(did, "document"): join_title(doc, did) for did, doc in self.corpus.items()}
        queries, qrels = _resolve(queries, corpus, self.qrels, missing=self.missing, name=self.name)
        groups = None if self.groups is None else {str(q): str(g) for q, g in self.groups.items() if q in queries}
        for name, value in (("queries", queries), ("corpus", corpus), ("qrels", qrels), ("groups", groups)):
            object.__setattr__(self, name, value)

    @classmethod
    def from_pairs(
        cls,
        queries: Sequence[str],
        passages: Sequence[str],
        positives: Sequence[int | Iterable[int]],
        *,
        name: str = "golden",
    ) -> "GoldenSet":
        """Returns the golden set of lists: ``positives[i]`` is the position, or positions, of the answers of query i.

        Ids are ``q0, q1, ...`` and ``d0, d1, ...``.

        Raises:
            DataError: lengths differ, or a position lies outside ``passages``.

        >>> GoldenSet.from_pairs(["capital of France"], ["Rome", "Paris"], [1]).qrels
        {'q0': {'d1': 1}}
        """
        if len(queries) != len(positives):
            raise DataError(f"{len(queries)} queries and {len(positives)} positives; there must be one entry a query")
        answers = [[p] if isinstance(p, int | np.integer) else list(p or ()) for p in positives]
        if other := [p for ps in answers for p in ps if isinstance(p, bool) or not isinstance(p, int | np.integer)]:
            raise DataError(f"positives must be positions in passages, got {first_few(other)}")
        wrong = [(i, int(p)) for i, ps in enumerate(answers) for p in ps if not 0 <= p < len(passages)]
        if wrong:
            raise DataError(f"positions (query, passage) outside the {len(passages)} passages: {first_few(wrong)}")
        return cls(
            {f"q{i}": text for i, text in enumerate(queries)},
            {f"d{i}": text for i, text in enumerate(passages)},
            {f"q{i}": {f"d{int(p)}": 1 for p in ps} for i, ps in enumerate(answers)},
            name=name,
        )

    def __repr__(self) -> str:
        return f"GoldenSet({self.name!r}, {len(self.queries)} queries, {len(self.corpus)} documents)"

    @cached_property
    def query_ids(self) -> tuple[str, ...]:
        """Ids of all queries, answerable or not, in the order given."""
        return tuple(self.queries)

    @cached_property
    def doc_ids(self) -> tuple[str, ...]:
        """Ids of all documents, in the order given."""
        return tuple(self.corpus)

    @cached_property
    def query_texts(self) -> list[str]:
        """Texts in the order of `query_ids`."""
        return list(self.queries.values())

    @cached_property
    def doc_texts(self) -> list[str]:
        """Texts in the order of `doc_ids`, title and text joined."""
        return [join_title(doc, doc_id) for doc_id, doc in self.corpus.items()]

    @cached_property
    def n_equal_texts(self) -> int:
        """Documents whose text stands more than once, all copies counted."""
        return sum(n for n in Counter(self.doc_texts).values() if n > 1)

    @cached_property
    def judgements(self) -> Judgements:
        """All judgements as positions, whatever their grade."""
        place = {doc_id: i for i, doc_id in enumerate(self.doc_ids)}
        rows = [
            (i, place.get(doc_id, NOT_IN_CORPUS), grade)
            for i, qid in enumerate(self.query_ids)
            for doc_id, grade in self.qrels[qid].items()
        ]
        query, doc, grade = zip(*rows, strict=True) if rows else ((), (), ())
        return Judgements(np.array(query, np.int64), np.array(doc, np.int64), np.array(grade, np.float64))

    @cached_property
    def answerable(self) -> NDArray[np.bool_]:
        """Bool [queries]: whether a query has a relevant document."""
        threshold = max(self.relevant_from, TINY)
        relevant = self.judgements.query[self.judgements.grade >= threshold]
        return np.bincount(relevant, minlength=len(self.queries)) > 0

    @property
    def n_answerable(self) -> int:
        """Number of queries that have a relevant document."""
        return int(self.answerable.sum())

    def require_answerable(self) -> None:
        """Raises `DataError` where no query has a relevant document: no metric is defined then."""
        if not self.n_answerable:
            raise DataError(
                f"golden set {self.name!r}: none of the {len(self.queries)} queries is answerable (no judgement of "
                f"grade {self.relevant_from} or more), so no metric can be computed"
            )

    def check(
        self,
        *,
        metrics: Sequence[str | Metric] = DEFAULT_METRICS,
        train_pairs: Iterable[tuple[str, str]] | None = None,
    ) -> list[Finding]:
        """Returns what is wrong with the set, or worth knowing, errors first; see `fullrank.checks.check_golden`."""
        return check_golden(self, metrics=metrics, train_pairs=train_pairs)

    def fingerprint(self) -> str:
        """Returns a hash of ids, texts and judgements that does not depend on their order."""
        if not self._fingerprint:
            digest = hashlib.sha256()
            for part in (self.queries, dict(zip(self.doc_ids, self.doc_texts, strict=True))):
                for key in sorted(part):
                    digest.update(f"{len(key)}:{key}={len(part[key])}:{part[key]}\n".encode("utf-8", "surrogatepass"))
            for qid in sorted(self.qrels):
                digest.update(f"{qid!r}:{sorted(self.qrels[qid].items())!r}\n".encode("utf-8", "surrogatepass"))
            digest.update(repr(self.relevant_from).encode())
            object.__setattr__(self, "_fingerprint", digest.hexdigest()[:16])
        return self._fingerprint


def refuse_other_than_golden(golden: object) -> None:
    """Raises `DataError` for anything that is no `GoldenSet`."""
    if not isinstance(golden, GoldenSet):
        raise DataError(f"golden must be a GoldenSet, got {type(golden).__name__}; see fullrank.load_golden")


def join_title(document: object, doc_id: object = "?") -> str:
    """Returns a document's text with its title in front, as BEIR joins them.

    >>> join_title({"title": "Paris", "text": "is a city"})
    'Paris is a city'
    """
    if isinstance(document, str):
        return document
    if not isinstance(document, Mapping) or "text" not in document:
        raise DataError(
            f"document {doc_id!r} must be a text or a dict with 'text' (and 'title'), got {type(document).__name__}"
        )
    title, text = document.get("title") or "", document["text"]
    return f"{_checked_text(title, f'title of {doc_id!r}')} {_checked_text(text, f'document {doc_id!r}')}".strip()


def _checked_id(value: object, kind: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{kind} ids must be strings, got {value!r} ({type(value).__name__})")
    return value


def _checked_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where} must be a string, got {type(value).__name__}")
    return value


def checked_grade(value: object, qid: str, doc_id: str) -> float:
    """Returns a judgement as a plain number.

    Raises:
        DataError: not a number below 1,000 in size.
    """
    number = value.item() if isinstance(value, np.generic) else value
    if not isinstance(number, int | float) or not abs(number) < MAX_GRADE:
        raise DataError(
            f"grade of query {qid!r}, document {doc_id!r} must be a finite number below 1,000, got {value!r:.40}"
        )
    return int(number) if isinstance(number, bool) else number


def _resolve(
    queries: dict[str, str],
    corpus: Mapping[str, object],
    qrels: Mapping[str, Mapping[str, float]],
    *,
    missing: Missing,
    name: str,
) -> tuple[dict[str, str], dict[str, dict[str, float]]]:
    """Returns the queries and judgements that are left once unknown ids are dealt with as ``missing`` says."""
    no_entry = [qid for qid in queries if qid not in qrels]
    unknown_queries = [qid for qid in qrels if qid not in queries]
    unknown_docs = [d for q, grades in qrels.items() if q in queries for d in grades if d not in corpus]
    if missing == "raise" and (no_entry or unknown_queries or unknown_docs):
        problems = [
            f"{len(ids)} {what}: {first_few(ids)}"
            for ids, what in (
                (no_entry, "queries without an entry in qrels (an unanswerable query has an empty one)"),
                (unknown_queries, "judged queries that are not among the queries"),
                (unknown_docs, "judged documents that the corpus does not hold"),
            )
            if ids
        ]
        raise DataError(
            f"golden set {name!r}: {'; '.join(problems)}. Mend the data, or pass missing='keep' (they stay in the "
            "denominators) or missing='drop'"
        )
    if missing == "drop":
        queries = {qid: text for qid, text in queries.items() if qid in qrels}
        if not queries:
            raise DataError(f"golden set {name!r}: no query has an entry in qrels, so missing='drop' leaves none")
    judged = {
        qid: {
            _checked_id(doc_id, "document"): checked_grade(grade, qid, doc_id)
            for doc_id, grade in qrels.get(qid, {}).items()
            if missing != "drop" or doc_id in corpus
        }
        for qid in queries
    }
    return queries, judged
