"""Golden sets from files and hubs; TREC judgements and runs.

Promise: what loads is what the files say. Ids stay as written, a split brings its own queries and no others, and a
file with bad rows does not load in part: one error names the first of them with their line numbers and counts all.
Files are read as streams; what stays in memory is the golden set.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fullrank._errors import DataError, first_few
from fullrank.data import GoldenSet, Missing, join_title
from fullrank.sources import (
    HUBS,
    Problems,
    Rows,
    as_id,
    as_text,
    hub_rows,
    judgement_columns,
    pick,
    read_lines,
    read_objects,
    short,
)

__all__ = ["load_golden", "read_corpus", "read_qrels", "read_run"]

T = TypeVar("T", int, float)
Triple = tuple[object, object, object]
"""Query id, document id, and the grade or score: as they stand in the source."""

LAYOUT = "corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv (each may end in .gz)"
SOURCES = (
    f"a folder with {LAYOUT}, a golden .jsonl beside a corpus.jsonl, a qrels file in such a folder, hf:REPO, "
    "ir_datasets:ID or mteb:TASK"
)
QRELS_SUFFIXES = (".tsv", ".txt", ".qrels")

_DOCUMENT_ROWS = 'Expected one JSON object a line: {"_id": "...", "title": "...", "text": "..."}; title may be missing.'
_QUERY_ROWS = 'Expected one JSON object a line: {"_id": "...", "text": "..."}.'
_GOLDEN_ROWS = (
    'Expected one JSON object a line: {"id": "...", "query": "...", "relevant": ["document id", ...] or '
    '{"document id": grade}, "type": "..."}; type may be missing, an empty "relevant" marks an unanswerable query.'
)
_QRELS_ROWS = (
    "Expected query id, document id and a whole grade, separated by tabs, below the header 'query-id corpus-id score' "
    "(.tsv), or the four TREC columns: query id, 0, document id, grade. Fractional grades go into a golden .jsonl."
)
_RUN_ROWS = "Expected the six TREC columns: query id, Q0, document id, rank, score, tag."
_HUB_ROWS = "Mend the data set, or load a corrected copy from disk."
_BLANKS = re.compile(r"[ \t]+")
_WHOLE = re.compile(r"[+-]?[0-9]+(\.0*)?")
_LARGEST_GRADE = 1 << 53  # beyond it floats are not exact


def load_golden(
    source: str | Path, split: str = "test", *, missing: Missing = "raise", relevant_from: float = 1
) -> GoldenSet:
    """Returns the golden set that ``source`` holds.

    Args:
        source: one of

            - a folder in BEIR layout: ``corpus.jsonl``, ``queries.jsonl``, ``qrels/SPLIT.tsv`` (or TREC judgements,
              ``qrels/SPLIT.txt`` or ``.qrels``), plain or ``.gz``. Queries that the split does not name are left out.
            - a golden ``.jsonl``, one query a line: ``{"id", "query", "relevant": [ids] or {id: grade}, "type"}``,
              beside a ``corpus.jsonl``. Ids in a list have grade 1; types become ``groups``; it has no splits.
            - a file of judgements in, or in ``qrels/`` of, a folder in BEIR layout.
            - ``hf:REPO`` (BEIR layout on the Hugging Face hub), ``ir_datasets:ID``, ``mteb:TASK`` or, where a task has
              several subsets, ``mteb:TASK/SUBSET``.
        split: whose judgements to take.
        missing: what to do with ids that do not match, see `GoldenSet`.
        relevant_from: the smallest grade that counts as relevant.

    The set is named after the folder, file or data set, with ``-SPLIT`` behind it where that is not ``test``.

    Raises:
        DataError: nothing there, no such split, or bad rows: all of one file in one error, the first with line numbers.
        MissingExtraError: a hub's package is not installed.

    >>> load_golden("data/scifact")  # doctest: +SKIP
    """
    build = partial(GoldenSet, missing=missing, relevant_from=relevant_from)
    if isinstance(source, str) and ":" in source and source.partition(":")[0] in HUBS:
        return _from_rows(source, hub_rows(source, split), split, build)
    path = Path(source)
    if path.is_dir():
        return _from_folder(path, split, _find_qrels(path, split), build)
    if not path.is_file():
        raise DataError(f"{str(source)!r} does not exist. Expected {SOURCES}")
    kind = path.name.removesuffix(".gz")
    if kind in ("corpus.jsonl", "queries.jsonl"):
        raise DataError(f"{path} is one part of a golden set; pass its folder, {str(path.parent)!r}")
    if kind.endswith(".jsonl"):
        return _from_golden(path, build)
    if kind.endswith(QRELS_SUFFIXES):
        folder = path.parent.parent if path.parent.name == "qrels" else path.parent
        return _from_folder(folder, _stem(path), path, build)
    raise DataError(f"{path} is not a kind of file that is known here. Expected {SOURCES}")


def read_qrels(path: str | Path) -> dict[str, dict[str, int]]:
    """Returns the judgements of a file as ``{query id: {document id: grade}}``, in the order of the file.

    ``.tsv`` is separated by tabs, anything else by blanks. A header names the columns, in any order; without one there
    are three (BEIR: query, document, grade) or four (TREC: query, iteration, document, grade). A pair that is listed
    twice with one grade counts once.

    Raises:
        DataError: bad lines, all in one error.
    """
    problems = Problems(path, _QRELS_ROWS)
    return _collect(_qrels_lines(Path(path), problems), problems, _whole)


def read_run(path: str | Path) -> dict[str, dict[str, float]]:
    """Returns a TREC run as ``{query id: {document id: score}}``, in the order of the file.

    Ranks and tags are not kept: the scores say the order.

    Raises:
        DataError: bad lines, all in one error.
    """
    problems = Problems(path, _RUN_ROWS)
    return _collect(_run_lines(Path(path), problems), problems, _score)


def read_corpus(path: str | Path) -> dict[str, str]:
    """Returns ``{document id: text}`` of a ``corpus.jsonl`` (or ``.gz``), or of the one in a folder; titles in front.

    Raises:
        DataError: no such file, or bad lines, all in one error.
    """
    found = _find(Path(path), "corpus.jsonl") if Path(path).is_dir() else Path(path)
    if found is None:
        raise DataError(f"{path} holds no corpus.jsonl (or .gz); it holds {_listing(Path(path))}")
    problems = Problems(found, _DOCUMENT_ROWS)
    return _by_id(read_objects(found, problems), problems, _document)


# ------------------------------------------------------------------------------------------------ lines


def _qrels_lines(path: Path, problems: Problems) -> Iterator[tuple[int, Triple]]:
    tabs = path.name.removesuffix(".gz").endswith(".tsv")
    columns, width = None, 0
    for number, line in read_lines(path, problems):
        cells = line.split("\t") if tabs else _BLANKS.split(line.strip(" \t"))
        if columns is None:
            if columns := judgement_columns(cells):
                width = len(cells)
                continue
            columns, width = ((0, 1, 2), 3) if tabs and len(cells) != 4 else ((0, 2, 3), 4)
        if len(cells) == width:
            yield number, (cells[columns[0]], cells[columns[1]], cells[columns[2]])
        else:
            hint = "; are the tabs missing?" if tabs and len(cells) == 1 else ""
            problems.add(number, f"expected {width} columns, found {len(cells)}{hint}")


def _run_lines(path: Path, problems: Problems) -> Iterator[tuple[int, Triple]]:
    for number, line in read_lines(path, problems):
        cells = _BLANKS.split(line.strip(" \t"), maxsplit=5)
        if len(cells) == 6:
            yield number, (cells[0], cells[2], cells[4])
        else:
            problems.add(number, f"expected 6 columns, found {len(cells)}")


def _collect(
    rows: Iterable[tuple[int, Triple]], problems: Problems, convert: Callable[[object], T]
) -> dict[str, dict[str, T]]:
    """Returns ``{query id: {document id: value}}``; an error where a row is bad or a pair has two values."""
    found: dict[str, dict[str, T]] = {}
    for number, (query, doc, raw) in rows:
        try:
            query_id, doc_id, value = as_id(query), as_id(doc), convert(raw)
        except ValueError as error:
            problems.add(number, error)
            continue
        earlier = found.setdefault(query_id, {}).setdefault(doc_id, value)
        if earlier != value:
            pair = f"query {short(query_id)} and document {short(doc_id)}"
            problems.add(number, f"{pair} stand here with {value}, further up with {earlier}")
    problems.close(found)
    return found


def _by_id(
    rows: Iterable[tuple[int, Mapping[str, Any]]],
    problems: Problems,
    parse: Callable[[Mapping[str, Any]], tuple[str, str]],
    *,
    keep: Collection[str] | None = None,
) -> dict[str, str]:
    """Returns ``{id: text}``, of ``keep`` alone where it is given; an error where a row is bad or an id comes twice."""
    found: dict[str, str] = {}
    for number, row in rows:
        try:
            key, text = parse(row)
        except ValueError as error:
            problems.add(number, error)
            continue
        if key in found:
            problems.add(number, f"the id {short(key)} stands here a second time")
        found[key] = text if keep is None or key in keep else ""
    problems.close(found)
    if keep is None:
        return found
    kept = {key: text for key, text in found.items() if key in keep}
    if not kept:
        raise DataError(
            f"{problems.where} holds none of the queries that the judgements name, such as {first_few(keep)}; it holds "
            f"{first_few(found)}. Do the two belong together?"
        )
    return kept


def _document(row: Mapping[str, Any]) -> tuple[str, str]:
    doc_id, title, text = as_id(pick(row, "_id", "id")), row.get("title"), as_text(pick(row, "text"), "'text'")
    return doc_id, join_title({"title": as_text("" if title is None else title, "'title'"), "text": text})


def _query(row: Mapping[str, Any]) -> tuple[str, str]:
    return as_id(pick(row, "_id", "id")), as_text(pick(row, "text"), "'text'")


def _whole(value: object) -> int:
    if not isinstance(value, str) or not _WHOLE.fullmatch(value.strip()):
        raise ValueError(f"the grade {short(value)} is not a whole number")
    return int(_grade(int(value.strip().partition(".")[0])))


def _grade(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"a grade must be a number, got {short(value)}")
    if not abs(value) <= _LARGEST_GRADE:  # NaN too
        raise ValueError(f"the grade {short(value)} is not a number that can be used")
    return int(value) if value == int(value) else value


def _score(value: object) -> float:
    try:
        score = float(str(value))
    except ValueError:
        raise ValueError(f"the score {short(value)} is not a number") from None
    if not math.isfinite(score):
        raise ValueError(f"the score {short(value)} cannot be ranked")
    return score


# ------------------------------------------------------------------------------------------------ sets


def _from_rows(source: str, rows: Rows, split: str, build: "partial[GoldenSet]") -> GoldenSet:
    def problems(part: str) -> Problems:
        return Problems(f"{source} {part}", _HUB_ROWS, unit="row")

    qrels = _collect(enumerate(rows.judgements, 1), problems("judgements"), _grade)
    queries = _by_id(enumerate(rows.queries, 1), problems("queries"), _query, keep=qrels)
    corpus = _by_id(enumerate(rows.documents, 1), problems("corpus"), _document)
    return build(queries, corpus, qrels, name=_named(rows.name, split), split=split)


def _from_folder(folder: Path, split: str, qrels_path: Path, build: "partial[GoldenSet]") -> GoldenSet:
    corpus_path, queries_path = _find(folder, "corpus.jsonl"), _find(folder, "queries.jsonl")
    if corpus_path is None or queries_path is None:
        raise _not_beir(folder)
    qrels = read_qrels(qrels_path)
    problems = Problems(queries_path, _QUERY_ROWS)
    queries = _by_id(read_objects(queries_path, problems), problems, _query, keep=qrels)
    return build(queries, read_corpus(corpus_path), qrels, name=_named(folder.resolve().name, split), split=split)


def _from_golden(path: Path, build: "partial[GoldenSet]") -> GoldenSet:
    corpus_path = _find(path.parent, "corpus.jsonl")
    if corpus_path is None:
        raise DataError(
            f"{path} needs its documents in a corpus.jsonl (or .gz) beside it; its folder holds {_listing(path.parent)}"
        )
    problems = Problems(path, _GOLDEN_ROWS)
    qrels: dict[str, dict[str, float]] = {}
    groups: dict[str, str] = {}

    def parse(row: Mapping[str, Any]) -> tuple[str, str]:
        query_id, text = as_id(pick(row, "id", "_id")), as_text(pick(row, "query"), "'query'")
        qrels[query_id] = _relevant(pick(row, "relevant"))
        if row.get("type") is not None:
            groups[query_id] = as_text(row["type"], "'type'")
        return query_id, text

    queries = _by_id(read_objects(path, problems), problems, parse)
    return build(queries, read_corpus(corpus_path), qrels, name=_stem(path), groups=groups or None)


def _relevant(value: object) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {as_id(key): _grade(grade) for key, grade in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {as_id(key): 1 for key in value}
    raise ValueError(f"'relevant' must be a list of document ids or an object with grades, got {short(value)}")


# ------------------------------------------------------------------------------------------------ folders


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _find_qrels(folder: Path, split: str) -> Path:
    """Returns the judgements of ``split``; a ``.tsv`` goes before TREC files, a plain file before a ``.gz``."""
    found = [path for path in (folder / "qrels").glob("*") if path.name.removesuffix(".gz").endswith(QRELS_SUFFIXES)]
    if not found:
        raise _not_beir(folder)
    order = {suffix: i for i, suffix in enumerate(QRELS_SUFFIXES)}
    found.sort(key=lambda path: (order[Path(path.name.removesuffix(".gz")).suffix], path.name))
    chosen = next((path for path in found if _stem(path) == split), None)
    if chosen is None:
        splits = sorted({_stem(path) for path in found})
        raise DataError(f"{folder} has no split {split!r}; there are {first_few(splits, n=20)}")
    return chosen


def _not_beir(folder: Path) -> DataError:
    return DataError(f"{str(folder)!r} is not a golden set: expected {LAYOUT}, found {_listing(folder)}")


def _listing(folder: Path) -> str:
    names = sorted(
        str(path.relative_to(folder))
        for inner in (folder, folder / "qrels")
        for path in inner.glob("*")
        if path.is_file()
    )
    return first_few(names, n=10) or "no files"


def _stem(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).stem


def _named(name: str, split: str) -> str:
    return name if split == "test" else f"{name}-{split}"
