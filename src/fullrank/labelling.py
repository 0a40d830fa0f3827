"""Growing a golden set by hand: a template to begin with, what it still lacks, missing labels out and back in.

Promise: merging adds judgements and changes nothing else; a grade that cannot be read is an error with its line, never
a guess; no file is written over unless that was asked for.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fullrank._errors import DataError, SettingError
from fullrank._files import write_atomically
from fullrank.data import MAX_GRADE, GoldenSet
from fullrank.loaders import load_golden
from fullrank.result import Finding, Result
from fullrank.settings import refuse_no_count
from fullrank.sources import Problems, judgement_columns, pick, read_lines, read_objects, short

__all__ = ["Merged", "golden_gaps", "init_golden", "merge_labels", "write_holes"]

COLUMNS = ("query_id", "query", "document_id", "document", "score", "grade")
TEXT_WIDTH = 4_000
TEMPLATE = ("README.md", "corpus.jsonl", "golden.jsonl")
FEWEST, MOST = 50, 200
UNANSWERABLE = (0.10, 0.20)
FEWEST_OF_A_TYPE = 5

Labels = dict[tuple[str, str], int]
_LABEL_ROWS = (
    "Expected the file that `fullrank holes` wrote, with a whole number in every grade: 0 for not relevant, 1 for "
    "relevant, higher for better. Rows that are left empty on purpose are skipped with --skip-empty."
)
# A spreadsheet runs a cell that begins so; the quote in front makes it text, and is taken off when read back.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")


@dataclass(frozen=True)
class Merged:
    """What a merge did: the file, judgements added, those of them that are relevant, rows without a grade."""

    path: Path
    n_added: int
    n_relevant: int
    n_skipped: int


def init_golden(folder: str | Path) -> list[Path]:
    """Writes a small annotated golden set to begin with, and returns its files.

    Raises:
        SettingError: one of the files is there already.
    """
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise SettingError(f"{target} is a file; name a folder")
    if there := [name for name in TEMPLATE if (target / name).exists()]:
        raise SettingError(f"{target / there[0]} is there already and is not written over; name another folder")
    source = files("fullrank") / "templates" / "golden"
    return [write_atomically(target / name, (source / name).read_text(encoding="utf-8")) for name in TEMPLATE]


def golden_gaps(golden: GoldenSet) -> list[Finding]:
    """Returns what a set made by hand still lacks: questions, unanswerable ones, types.

    Kinds: ``golden-size unanswerable-share no-types few-of-a-type``.
    """
    n, found = len(golden.queries), []
    if n < FEWEST:
        message = f"{n} of the {FEWEST} to {MOST} questions that a golden set made by hand should have"
        found.append(Finding("golden-size", "info", message, n, remedy=f"Add {FEWEST - n} or more"))
    without = n - golden.n_answerable
    share = without / n
    low, high = UNANSWERABLE
    if not low <= share <= high:
        wanted = f"{low * n:.0f} to {high * n:.0f}"
        message = f"{without} of {n} questions have no answer ({100 * share:.0f} %)"
        remedy = f"Between {100 * low:.0f} and {100 * high:.0f} % show when a model answers falsely: {wanted} of {n}"
        found.append(Finding("unanswerable-share", "info", message, without, remedy=remedy))
    groups = golden.groups or {}
    if not groups:
        remedy = 'Give each a "type", such as "how-to" or "fact": the mean hides which kind a model fails on'
        found.append(Finding("no-types", "info", "the questions have no types", n, remedy=remedy))
    few = [f"{name}: {count}" for name, count in sorted(Counter(groups.values()).items()) if count < FEWEST_OF_A_TYPE]
    if few:
        message = f"{len(few)} types with fewer than {FEWEST_OF_A_TYPE} questions, whose means say little"
        found.append(
            Finding("few-of-a-type", "info", message, len(few), tuple(few[:5]), "Add questions, or merge types")
        )
    return found


# ------------------------------------------------------------------------------------------------ out


def write_holes(result: Result, path: str | Path, *, golden: GoldenSet | None = None, n: int | None = None) -> Path:
    """Writes the unjudged documents that rank above the answers, highest score first, with an empty grade.

    ``.csv`` opens in a spreadsheet, ``.jsonl`` has one object a line. Texts of documents come from ``golden``.

    Raises:
        SettingError: another ending, or ``n`` below 1.
    """
    refuse_no_count("n", n, "a whole number from 1 or None")
    target = Path(path)
    texts = {} if golden is None else dict(zip(golden.doc_ids, golden.doc_texts, strict=True))
    rows = [
        (qid, _cut(result.queries.get(qid, "")), doc_id, _cut(texts.get(doc_id, "")), score, None)
        for qid, doc_id, score in result.holes(n)
    ]
    if target.suffix == ".jsonl":
        lines = [json.dumps(dict(zip(COLUMNS, row, strict=True)), ensure_ascii=False) + "\n" for row in rows]
        return write_atomically(target, "".join(lines))
    if target.suffix != ".csv":
        raise SettingError(f"{target} must end in .csv or .jsonl")
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for *cells, score, _ in rows:
        writer.writerow([*map(_as_cell, cells), f"{score:.6g}", ""])
    return write_atomically(target, "\ufeff" + file.getvalue())  # a spreadsheet takes it for Latin-1 without the mark


def _cut(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= TEXT_WIDTH else f"{flat[: TEXT_WIDTH - 1]}…"


def _as_cell(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text


def _of_cell(text: str) -> str:
    return text[1:] if text.startswith("'") and text[1:].startswith(_FORMULA) else text


# ------------------------------------------------------------------------------------------------ back in


def merge_labels(
    golden: str | Path, labels: str | Path, *, out: str | Path, skip_empty: bool = False, overwrite: bool = False
) -> Merged:
    """Adds the grades of a labelled file to a golden set, writes it to ``out``, and returns what was done.

    Every line without a new judgement stays as it is, byte for byte; one with is written anew, as JSON.

    Args:
        golden: a golden ``.jsonl``, or the ``.tsv`` of judgements of a BEIR folder.
        labels: the file that `write_holes` wrote, with its grades filled in.
        out: the new file, of the same kind.
        skip_empty: leave rows without a grade out; otherwise they are an error.
        overwrite: write over ``out`` where it is there.

    Raises:
        DataError: bad rows, all in one error with line numbers: unknown ids, empty or odd grades, grades that
            contradict one another or the set.
        SettingError: ``out`` is there already, or of another kind.
    """
    source, target, kind = Path(golden), Path(out), Path(golden).suffix
    if kind not in (".jsonl", ".tsv") or not source.is_file():
        raise DataError(f"{source} is no golden .jsonl and no .tsv of judgements; only these can be merged into")
    if target.suffix != kind:
        raise SettingError(f"{target} must end in {kind}, as {source.name} does")
    if target.exists() and not overwrite:
        raise SettingError(f"{target} is there already; name another file, or pass --overwrite")
    known = load_golden(source)
    found, n_skipped = _read_labels(Path(labels), known, skip_empty=skip_empty)
    new = {pair: grade for pair, grade in found.items() if pair[1] not in known.qrels[pair[0]]}
    text = _merged_golden(source, new) if kind == ".jsonl" else _merged_tsv(source, new)
    n_relevant = sum(grade >= max(1, known.relevant_from) for grade in new.values())
    return Merged(write_atomically(target, text), len(new), n_relevant, n_skipped)


def _read_labels(path: Path, known: GoldenSet, *, skip_empty: bool) -> tuple[Labels, int]:
    problems = Problems(path, _LABEL_ROWS)
    found: Labels = {}
    n_rows = n_skipped = 0
    for number, row in _rows(path, problems):
        n_rows += 1
        try:
            pair = _known_pair(row, known)
            if _is_empty(grade := pick(row, "grade")) and skip_empty:
                n_skipped += 1
                continue
            value = _checked(grade)
        except ValueError as error:
            problems.add(number, error)
            continue
        before = found.setdefault(pair, value)
        judged = known.qrels[pair[0]].get(pair[1], value)
        if before != value:
            problems.add(number, f"{_named(pair)} have the grade {value} here, {before} further up")
        elif judged != value:
            problems.add(number, f"{_named(pair)} have the grade {value} here, {judged:g} in the golden set")
    problems.close(range(n_rows))
    return found, n_skipped


def _rows(path: Path, problems: Problems) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if path.suffix == ".jsonl":
        yield from read_objects(path, problems)
        return
    if path.suffix != ".csv":
        raise DataError(f"{path} must end in .csv or .jsonl. {_LABEL_ROWS}")
    numbers: list[int] = []

    def lines() -> Iterator[str]:
        for number, line in read_lines(path, problems):
            numbers.append(number)
            yield line + "\n"

    reader: Iterator[list[str]] | None = None
    names: list[str] = []
    source = lines()
    for header in source:
        # Spreadsheets of some countries write semicolons.
        mark = max(",;\t", key=header.count)
        names = [name.strip() for name in next(csv.reader([header], delimiter=mark))]
        reader = csv.reader(source, delimiter=mark)
        break
    if lacking := [name for name in ("query_id", "document_id", "grade") if name not in names]:
        raise DataError(f"{path}: the header has no column {lacking[0]!r}. {_LABEL_ROWS}")
    for cells in reader or ():
        if len(cells) == len(names):
            yield numbers[-1], {name: _of_cell(cell) for name, cell in zip(names, cells, strict=True)}
        else:
            problems.add(numbers[-1], f"expected {len(names)} columns, found {len(cells)}")


def _known_pair(row: Mapping[str, Any], known: GoldenSet) -> tuple[str, str]:
    qid, doc_id = str(pick(row, "query_id")), str(pick(row, "document_id"))
    if qid not in known.queries:
        raise ValueError(f"the golden set has no query {short(qid)}")
    if doc_id not in known.corpus:
        raise ValueError(f"the corpus has no document {short(doc_id)}")
    return qid, doc_id


def _is_empty(grade: object) -> bool:
    return grade is None or (isinstance(grade, str) and not grade.strip())


def _checked(grade: object) -> int:
    if _is_empty(grade):
        raise ValueError("the grade is empty")
    text = str(grade).strip().removesuffix(".0") if not isinstance(grade, bool) else "bool"
    if not (text.isascii() and text.isdigit() and int(text) < MAX_GRADE):
        raise ValueError(f"the grade {short(grade)} is not a whole number from 0")
    return int(text)


def _named(pair: tuple[str, str]) -> str:
    return f"query {short(pair[0])} and document {short(pair[1])}"


def _merged_golden(path: Path, new: Labels) -> str:
    by_query: dict[str, dict[str, int]] = {}
    for (qid, doc_id), grade in new.items():
        by_query.setdefault(qid, {})[doc_id] = grade

    def rewritten(line: str) -> str:
        row = json.loads(line.removeprefix("\ufeff"))
        added = by_query.get(str(row.get("id", row.get("_id"))))
        if not added:
            return line
        old = row["relevant"]
        if isinstance(old, list) and set(added.values()) == {1}:
            row["relevant"] = [*old, *added]
        else:  # a list has no room for other grades
            row["relevant"] = {**(old if isinstance(old, dict) else dict.fromkeys(map(str, old), 1)), **added}
        mark, end = line[: line.startswith("\ufeff")], line[len(line.rstrip("\r")) :]
        return f"{mark}{json.dumps(row, ensure_ascii=False)}{end}"

    return _each_line(path, rewritten)


def _merged_tsv(path: Path, new: Labels) -> str:
    text = _each_line(path, lambda line: line)
    head = text.split("\n", 1)[0]
    first, end = head.removeprefix("\ufeff").rstrip("\r").split("\t"), "\r\n" if head.endswith("\r") else "\n"
    columns = judgement_columns(first)
    if (columns or (0, 1, 2)) != (0, 1, 2) or len(first) != 3:
        raise DataError(f"{path}: expected the three columns query-id, corpus-id, score; found {len(first)}: {first}")
    rows = [f"{qid}\t{doc_id}\t{grade}{end}" for (qid, doc_id), grade in new.items()]
    return text + (end if rows and not text.endswith("\n") else "") + "".join(rows)


def _each_line(path: Path, change: Callable[[str], str]) -> str:
    text = path.read_bytes().decode("utf-8")  # with its mark of the byte order, where it has one
    return "\n".join(change(line) if line.strip("\ufeff \t\r") else line for line in text.split("\n"))
