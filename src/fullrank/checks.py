"""Checks of a golden set before anything is spent on it.

Promise: a check reads and never changes, and says what it found as a `Finding` with a count, examples and a remedy. No
finding means that none of these faults was found, not that the data is good.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from tqdm.auto import tqdm

from fullrank._errors import DataError
from fullrank.metrics import Metric
from fullrank.result import Finding, Severity, vacuous_cutoffs
from fullrank.settings import DEFAULT_METRICS, parsed
from fullrank.sources import PROGRESS_AFTER_SECONDS
from fullrank.training_data import POSITIVE_FIELDS, QUERY_FIELDS

if TYPE_CHECKING:  # a golden set offers these checks, so its module imports this one
    from fullrank.data import GoldenSet

__all__ = ["check_golden", "normalise"]

EXAMPLES = 5
WIDE_POINTS, VERY_WIDE_POINTS = 5.0, 10.0
"""Half-widths of the interval that earn an ``info`` and a ``warning``: 385 and 97 queries."""
SATURATED = 0.9
HIGH_CHANCE = 0.05
NEAR = 0.8
"""Jaccard similarity of word shingles from which two texts are near-duplicates."""
QUERY_SHINGLE, DOCUMENT_SHINGLE = 3, 5
"""Words in a shingle: one word changed in a query of seven would spoil every shingle of five."""

_CJK = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")  # Chinese and Japanese have no blanks: a character is a word
_SEVERITY = {"error": 0, "warning": 1, "info": 2}


def check_golden(
    golden: "GoldenSet",
    *,
    metrics: Sequence[str | Metric] = DEFAULT_METRICS,
    train_pairs: Iterable[tuple[str, str]] | None = None,
) -> list[Finding]:
    """Returns what is wrong with ``golden``, or worth knowing; errors first, then warnings.

    Kinds: ``dangling-ids equal-documents unjudged-duplicates equal-queries self-matches empty-documents empty-queries
    no-answerable few-queries vacuous-k no-unanswerable no-distractors high-chance``, and with training pairs
    ``train-queries train-queries-near train-documents train-documents-near``.

    Args:
        golden: the set.
        metrics: what it will be measured by.
        train_pairs: (anchor, positive) texts that a model is or was trained on; read once, not kept.

    >>> golden = GoldenSet({"q": "capital of France"}, {"d": "Paris", "e": "Rome"}, {"q": {"d": 1}})
    >>> [finding.kind for finding in check_golden(golden)]
    ['few-queries', 'vacuous-k', 'high-chance']
    """
    answers = _answers(golden)
    findings = [
        *_dangling(golden),
        *_equal_documents(golden, answers),
        *_equal_queries(golden, answers),
        *_self_matches(golden),
        *_empty(golden),
        *_size(golden),
        *vacuous_cutoffs(parsed(metrics), len(golden.corpus)),
        *_saturation(golden, answers),
        *([] if train_pairs is None else _leakage(golden, answers, train_pairs)),
    ]
    return sorted(findings, key=lambda finding: _SEVERITY[finding.severity])


def normalise(text: str) -> str:
    """Returns ``text`` as it is compared: case folded, composed (NFC), white space collapsed.

    >>> normalise("  Capital of\\nFRANCE ")
    'capital of france'
    """
    return " ".join(unicodedata.normalize("NFC", text.casefold()).split())


# ------------------------------------------------------------------------------------------------ ids and texts


def _answers(golden: "GoldenSet") -> dict[str, list[str]]:
    """Returns ``{query id: [relevant documents that the corpus holds]}`` of the queries that have one."""
    threshold = max(golden.relevant_from, np.nextafter(0.0, 1.0))
    found = {
        query: [doc for doc, grade in grades.items() if grade >= threshold and doc in golden.corpus]
        for query, grades in golden.qrels.items()
    }
    return {query: docs for query, docs in found.items() if docs}


def _dangling(golden: "GoldenSet") -> Iterator[Finding]:
    unknown = dict.fromkeys(doc for grades in golden.qrels.values() for doc in grades if doc not in golden.corpus)
    if unknown:
        message = f"{_n(unknown, 'judged document')} the corpus does not hold: never retrieved, yet in the denominators"
        remedy = "Add them to the corpus, or load with missing='drop'"
        yield _finding("dangling-ids", "warning", unknown, message, remedy)


def _equal_documents(golden: "GoldenSet", answers: Mapping[str, list[str]]) -> Iterator[Finding]:
    groups = _equal_groups(golden.doc_ids, golden.doc_texts)
    if spare := [doc for group in groups for doc in group[1:]]:
        message = f"{_n(spare, 'document')} with the text of another, but for case and white space"
        remedy = "Remove the copies from the corpus, or judge all of them alike"
        yield _finding("equal-documents", "info", spare, message, remedy)
    group_of = {doc: group for group in groups for doc in group}
    affected = [
        f"{query}: {other} = {doc}"
        for query, docs in answers.items()
        for doc in docs
        for other in group_of.get(doc, ())
        if other not in docs
    ]
    if affected:
        message = f"{_n(affected, 'copy')} of an answer not judged as one: a right hit counts as a miss"
        remedy = "Judge every copy of an answer as relevant, or remove the copies from the corpus"
        yield _finding("unjudged-duplicates", "warning", affected, message, remedy)


def _equal_queries(golden: "GoldenSet", answers: Mapping[str, list[str]]) -> Iterator[Finding]:
    groups = _equal_groups(golden.query_ids, golden.query_texts)
    unlike = any(len({frozenset(answers.get(query, ())) for query in group}) > 1 for group in groups)
    if spare := [query for group in groups for query in group[1:]]:
        message = f"{_n(spare, 'query')} with the text of another{' and other answers: not all can be met' * unlike}"
        remedy = "Merge them into one query with the answers of all"
        yield _finding("equal-queries", "warning" if unlike else "info", spare, message, remedy)


def _equal_groups(ids: Sequence[str], texts: Sequence[str]) -> list[list[str]]:
    """Returns the ids of equal texts, two or more a group; empty texts are no copies of one another.

    Hashes go first, so that a corpus is not held a second time in its normalised form.
    """
    hashes = np.fromiter((hash(normalise(text)) for text in texts), np.int64, len(texts))
    _, place, count = np.unique(hashes, return_inverse=True, return_counts=True)
    groups: dict[str, list[str]] = {}
    for i in np.flatnonzero(count[place.reshape(-1)] > 1).tolist():
        groups.setdefault(normalise(texts[i]), []).append(ids[i])
    return [group for text, group in groups.items() if text and len(group) > 1]


def _self_matches(golden: "GoldenSet") -> Iterator[Finding]:
    both = [query for query in golden.query_ids if query in golden.corpus]
    texts = dict(zip(golden.doc_ids, golden.doc_texts, strict=True)) if both else {}
    same = [query for query in both if normalise(golden.queries[query]) == normalise(texts[query])]
    if same:
        message = f"{_n(same, 'query')} with a document of the same id and text, which ranks first"
        yield _finding("self-matches", "warning", same, message, "Evaluate with exclude_self=True")
    elif both:
        message = f"{_n(both, 'query')} with a document of the same id, but another text"
        remedy = "If they are one item, evaluate with exclude_self=True; if the ids were numbered apart, all is well"
        yield _finding("self-matches", "info", both, message, remedy)


def _empty(golden: "GoldenSet") -> Iterator[Finding]:
    parts = (
        ("empty-documents", "document", golden.doc_ids, golden.doc_texts),
        ("empty-queries", "query", golden.query_ids, golden.query_texts),
    )
    for kind, noun, ids, texts in parts:
        if blank := [key for key, text in zip(ids, texts, strict=True) if not text.strip()]:
            message = f"{_n(blank, noun)} without text"
            yield _finding(kind, "warning", blank, message, "Fill in the text or leave them out")


# ------------------------------------------------------------------------------------------------ what it can show


def _size(golden: "GoldenSet") -> Iterator[Finding]:
    n = golden.n_answerable
    if not n:
        message = f"no query has a relevant document (grade {golden.relevant_from} or more)"
        remedy = "Check the judgements and relevant_from; no metric can be computed"
        yield _finding("no-answerable", "error", golden.query_ids, message, remedy)
        return
    points = 100 * 1.96 * math.sqrt(0.25 / n)
    if points > WIDE_POINTS:
        message = (
            f"{n} answerable {'query' if n == 1 else 'queries'}: the 95 % interval of a rate near one half is "
            f"± {points:.1f} points"
        )
        remedy = f"Smaller differences are noise; ± {WIDE_POINTS:.0f} points take 385 queries"
        yield Finding("few-queries", "warning" if points > VERY_WIDE_POINTS else "info", message, n, remedy=remedy)
    if golden.groups and n == len(golden.queries):
        message = "the queries have types, and every one is answerable: false answers cannot be measured"
        remedy = "Add queries that the corpus does not answer, with no relevant document"
        yield Finding("no-unanswerable", "info", message, n, remedy=remedy)


def _saturation(golden: "GoldenSet", answers: Mapping[str, list[str]]) -> Iterator[Finding]:
    n_documents = len(golden.corpus)
    relevant = {doc for docs in answers.values() for doc in docs}
    if len(relevant) >= SATURATED * n_documents:
        message = f"{len(relevant)} of the {n_documents} documents answer some query: hardly any is there to distract"
        remedy = "Add documents that the index will hold in use; scores on this set will look too good"
        yield Finding("no-distractors", "warning", message, len(relevant), remedy=remedy)
    chance = math.fsum(map(len, answers.values())) / (len(answers) * n_documents) if answers else 0.0
    if chance >= HIGH_CHANCE:
        message = f"a document drawn at random answers a query with probability {100 * chance:.1f} %"
        yield Finding("high-chance", "warning", message, n_documents, remedy="Evaluate on a larger corpus")


# ------------------------------------------------------------------------------------------------ leakage


def _checked_pair(pair: object) -> tuple[str, str]:
    anchor, positive = (None, None)
    if isinstance(pair, Mapping):  # a row of a data set
        anchor, positive = (
            next((pair[name] for name in names if name in pair), None) for names in (QUERY_FIELDS, POSITIVE_FIELDS)
        )
    elif isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2:
        anchor, positive = pair
    if not isinstance(anchor, str) or not isinstance(positive, str):
        raise DataError(
            f"train_pairs must hold (anchor, positive) texts, or rows with those fields; got {str(pair)[:60]!r}. Of a "
            "file: [e.pair for e in fullrank.read_training_data(path)]"
        )
    return anchor, positive


def _leakage(
    golden: "GoldenSet", answers: Mapping[str, list[str]], train_pairs: Iterable[tuple[str, str]]
) -> Iterator[Finding]:
    texts = dict(zip(golden.doc_ids, golden.doc_texts, strict=True))
    relevant = dict.fromkeys(doc for docs in answers.values() for doc in docs)
    queries = _Index(golden.queries, QUERY_SHINGLE)
    documents = _Index({doc: texts[doc] for doc in relevant}, DOCUMENT_SHINGLE)
    for pair in tqdm(train_pairs, "training pairs", delay=PROGRESS_AFTER_SECONDS, disable=None, leave=False):
        for whole in map(normalise, _checked_pair(pair)):
            queries.meet(whole)
            documents.meet(whole)
    again = "Remove them from the training pairs: this set is not held out"
    known = "Fine where training may know the index; elsewhere the numbers do not carry over to new documents"
    parts: tuple[tuple[str, str, _Index, Severity, str], ...] = (
        ("train-queries", "query", queries, "error", again),
        ("train-documents", "relevant document", documents, "warning", known),
    )
    for kind, noun, index, severity, remedy in parts:
        near = [key for key in index.near if key not in index.exact]
        if index.exact:
            message = f"{_n(index.exact, noun)} with a text that is in the training pairs"
            yield _finding(kind, severity, index.exact, message, remedy)
        if near:
            message = (
                f"{_n(near, noun)} with a text almost as in the training pairs ({100 * NEAR:.0f} % of the shingles)"
            )
            yield _finding(f"{kind}-near", "warning", near, message, remedy)


class _Index:
    """Texts by id, to be met with others one at a time; keeps which ids were met, exactly or nearly.

    Near: Jaccard similarity of word shingles >= `NEAR`. Two such sets of shingles share one among the
    ``n - ceil(NEAR n) + 1`` that stand first in any common order (prefix filter: Chaudhuri, Ganti & Kaushik, ICDE
    2006); with the rarest first, few texts are compared, and the result is that of comparing all.
    """

    def __init__(self, texts: Mapping[str, str], size: int) -> None:
        self.exact: dict[str, None] = {}
        self.near: dict[str, None] = {}
        self._size = size
        self._ids: dict[str, list[str]] = {}
        for key, text in texts.items():
            if whole := normalise(text):
                self._ids.setdefault(whole, []).append(key)
        self._shingles = [_shingles(whole, size) for whole in self._ids]
        self._owners = list(self._ids.values())
        self._count = Counter(shingle for shingles in self._shingles for shingle in shingles)
        self._holders: dict[int, list[int]] = {}
        for i, shingles in enumerate(self._shingles):
            for shingle in self._rarest(shingles):
                self._holders.setdefault(shingle, []).append(i)

    def meet(self, whole: str) -> None:
        """Notes the ids whose text equals ``whole``, a normalised text, or nearly."""
        self.exact.update(dict.fromkeys(self._ids.get(whole, ())))
        shingles = _shingles(whole, self._size)
        if sum(shingle in self._count for shingle in shingles) < NEAR * len(shingles):
            return  # most training texts end here
        for i in {i for shingle in self._rarest(shingles) for i in self._holders.get(shingle, ())}:
            common = len(shingles & self._shingles[i])
            if common / (len(shingles) + len(self._shingles[i]) - common) >= NEAR:
                self.near.update(dict.fromkeys(self._owners[i]))

    def _rarest(self, shingles: frozenset[int]) -> list[int]:
        order = sorted(shingles, key=lambda shingle: (self._count.get(shingle, 0), shingle))
        return order[: len(order) - math.ceil(NEAR * len(order)) + 1] if order else []


def _shingles(text: str, size: int) -> frozenset[int]:
    """Returns the hashes of every ``size`` words in a row; a shorter text is one shingle."""
    words = _WORD.findall(text)
    return frozenset(hash(" ".join(words[i : i + size])) for i in range(max(len(words) - size + 1, bool(words))))


def _finding(kind: str, severity: Severity, items: Collection[str], message: str, remedy: str) -> Finding:
    return Finding(kind, severity, message, len(items), tuple(items)[:EXAMPLES], remedy)


def _n(items: Collection[str], noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{len(items)} {noun if len(items) == 1 else plural}"
