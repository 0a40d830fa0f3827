"""Rows of golden data: lines of files, and data sets of the hubs that hold them.

Promise: rows are streamed, one in memory at a time. What comes from outside is data and nothing else: text and JSON,
nothing is unpickled or run. Bad rows do not stop the reading: all are counted and the first are named, in one error.
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from tqdm.auto import tqdm

from fullrank._errors import DataError, FullrankError, first_few
from fullrank._optional import require

__all__ = ["HUBS", "Problems", "Rows", "explained", "hub_rows", "read_lines", "read_objects"]

MAX_LINE_BYTES = 64 << 20
PROBLEMS_SHOWN = 5
PROGRESS_AFTER_SECONDS = 2

_QUERY_COLUMNS = ("query-id", "queryid", "qid", "topic-id", "topic", "query")
_DOC_COLUMNS = ("corpus-id", "corpusid", "doc-id", "docid", "document-id", "docno", "pid", "passage-id", "did", "doc")
_GRADE_COLUMNS = ("score", "grade", "relevance", "rel", "label")


@dataclass
class Problems:
    """What is wrong with the rows of one source; holds the first few and counts the rest.

    Attributes:
        where: the file or data set.
        expected: what a good row looks like and what to do, closing the message.
        unit: what a row is called.
    """

    where: object
    expected: str
    unit: str = "line"
    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, number: int, text: object) -> None:
        """Notes that row ``number`` is wrong."""
        self.count += 1
        if self.count <= PROBLEMS_SHOWN:
            self.shown.append(f"  {self.unit} {number}: {text}")

    def close(self, found: Collection[object]) -> None:
        """Raises `DataError` where a row was wrong, or where there was none: ``found`` is what the rows gave."""
        if self.count:
            rest = [f"  and {self.count - len(self.shown)} more"] if self.count > len(self.shown) else []
            head = f"{self.where}: {self.count} problem{'s' if self.count > 1 else ''}"
            raise DataError("\n".join([head, *self.shown, *rest, self.expected]))
        if not found:
            raise DataError(f"{self.where} is empty. {self.expected}")


# ------------------------------------------------------------------------------------------------ files


def read_lines(path: Path, problems: Problems, *, blank: bool = False) -> Iterator[tuple[int, str]]:
    """Yields (line number, text) of the lines of a UTF-8 file, plain or ``.gz``, that are not blank (``blank``: all).

    Line ends (LF or CRLF) and a byte order mark are taken off. Lines that are not UTF-8 go to ``problems``; so does a
    line over `MAX_LINE_BYTES`, where the reading stops.

    Raises:
        DataError: there is no such file, or it cannot be read.
    """
    number = offset = 0
    # disable=None: no bar where the output is neither a terminal nor a notebook. What a .gz holds is not known before.
    with (
        _opened(path) as file,
        tqdm(
            total=None if path.suffix == ".gz" else path.stat().st_size,
            desc=path.name,
            unit="B",
            unit_scale=True,
            delay=PROGRESS_AFTER_SECONDS,
            disable=None,
            leave=False,
        ) as bar,
    ):
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            bar.update(len(raw))
            if len(raw) > MAX_LINE_BYTES:
                problems.add(number, f"longer than {MAX_LINE_BYTES >> 20} MiB; the lines after it were not read")
                return
            if number == 1 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                problems.add(number, "the file is UTF-16; save it as UTF-8")
                return
            try:
                line = raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                place = offset + error.start
                problems.add(number, f"not UTF-8: byte {raw[error.start]:#04x} at offset {place} of the file")
            else:
                line = line.removeprefix("\ufeff") if number == 1 else line
                if blank or line.strip():
                    yield number, line
            offset += len(raw)


def read_objects(path: Path, problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, object) of a file with one JSON object a line; lines that hold none go to ``problems``."""
    for number, line in read_lines(path, problems):
        try:
            row = json.loads(line, object_pairs_hook=_object)
        except json.JSONDecodeError as error:
            problems.add(number, f"broken JSON at column {error.colno}: {error.msg}")
        except RecursionError:
            problems.add(number, "broken JSON: nested too deeply")
        except ValueError as error:
            problems.add(number, error)
        else:
            if isinstance(row, dict):
                yield number, row
            else:
                problems.add(number, f"a JSON object is expected, got {short(row)}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):  # the json module keeps the last one silently
        twice = [key for key, value in pairs if found[key] != value]
        if twice:
            raise ValueError(f"the key {short(twice[0])} stands there twice, with different values")
    return found


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield cast(BinaryIO, file)
    except EOFError as error:
        raise DataError(f"{path} ends in the middle: it is not a whole gzip file. Fetch it again") from error
    except (OSError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


# ------------------------------------------------------------------------------------------------ fields


def pick(row: Mapping[str, Any], *names: str) -> Any:
    """Returns the first of the fields ``names`` that ``row`` has; `ValueError` where it has none."""
    for name in names:
        if name in row:
            return row[name]
    raise ValueError(f"the field {' or '.join(map(repr, names))} is missing")


def as_id(value: object) -> str:
    """Returns an id as it is written; a number such as 12 becomes ``"12"``; `ValueError` where it is no id."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"an id must be a string, got {short(value)}")
    if not value.strip():
        raise ValueError("an id is empty")
    return as_text(value, "an id")


def as_text(value: object, what: str) -> str:
    """Returns ``value``; `ValueError` where it is not a string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a string, got {short(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:  # tokenizers refuse such a text in the middle of a run
            raise ValueError(
                f"{what} holds half of a surrogate pair ({value[error.start]!r}), which is no text"
            ) from error
    return value


def short(value: object) -> str:
    """Returns how ``value`` is written, cut where it is long: a message must stay one."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def judgement_columns(names: Sequence[str]) -> tuple[int, int, int] | None:
    """Returns the positions of query, document and grade among the column ``names``; None where one is not there.

    >>> judgement_columns(["score", "query-id", "corpus-id"])
    (1, 2, 0)
    """
    spelled = [name.strip().casefold().replace("_", "-") for name in names]
    found = [
        next((spelled.index(name) for name in known if name in spelled), None)
        for known in (_QUERY_COLUMNS, _DOC_COLUMNS, _GRADE_COLUMNS)
    ]
    query, doc, grade = found
    return None if query is None or doc is None or grade is None else (query, doc, grade)


# ------------------------------------------------------------------------------------------------ hubs


class Rows(NamedTuple):
    """The three tables of a golden set, not yet joined.

    Attributes:
        name: short name of the data set.
        documents: ``{"_id", "title", "text"}`` each.
        queries: ``{"_id", "text"}`` each.
        judgements: (query id, document id, grade) each.
    """

    name: str
    documents: Iterable[Mapping[str, Any]]
    queries: Iterable[Mapping[str, Any]]
    judgements: Iterable[tuple[object, object, object]]


def hub_rows(source: str, split: str) -> Rows:
    """Returns the rows of ``hf:REPO``, ``ir_datasets:ID`` or ``mteb:TASK``.

    Raises:
        MissingExtraError: the package for that hub is not installed.
        DataError: the data set, or the split, is not there, or lacks a part.
    """
    scheme, _, name = source.partition(":")
    if not name:
        raise DataError(f"{source!r} names no data set; write it as {scheme}:NAME")
    return HUBS[scheme](name, split)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns whatever a hub's package raises into a `DataError` that says what was being loaded."""
    try:
        yield
    except FullrankError:
        raise
    except Exception as error:  # they raise errors of many kinds: HTTP, cache, parsing, KeyError for a name
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise DataError(
            f"{what} could not be loaded: {type(error).__name__}: {error}{cause}. Check the name and that the hub can "
            "be reached, or load a BEIR folder from disk"
        ) from error


def _from_hf(repo: str, split: str) -> Rows:
    datasets = require("datasets", extra="hf")
    with explained(f"hf:{repo}"):
        configs = datasets.get_dataset_config_names(repo)
        if "corpus" not in configs or "queries" not in configs:
            raise DataError(
                f"hf:{repo} has the configs {first_few(configs)}; expected 'corpus', 'queries' and the judgements in "
                "'qrels', 'default' or a repository REPO-qrels"
            )
        config = next((name for name in ("qrels", "default") if name in configs), None)
        qrels = _hf_split(datasets, repo if config else f"{repo}-qrels", config, split)
        names = qrels.column_names
        if (columns := judgement_columns(names)) is None:
            raise DataError(
                f"hf:{repo}: the judgements have the columns {first_few(names)}; expected query-id, corpus-id and score"
            )
        return Rows(
            Path(repo).name,
            _hf_split(datasets, repo, "corpus", split, shared=True),
            _hf_split(datasets, repo, "queries", split, shared=True),
            (tuple(row[names[i]] for i in columns) for row in qrels),
        )


def _hf_split(datasets: Any, repo: str, config: str | None, split: str, *, shared: bool = False) -> Any:
    """Returns one split of a config; of texts that all splits share, the one there is, or the one of that name."""
    splits = datasets.get_dataset_split_names(repo, config)
    chosen = [name for name in splits if name == split or (shared and (name == config or len(splits) == 1))]
    if not chosen:
        named = f" in the config {config!r}" if config else ""
        raise DataError(f"hf:{repo} has no split {split!r}{named}; there are {first_few(splits)}")
    return datasets.load_dataset(repo, config, split=split if split in chosen else chosen[0])


def _from_ir_datasets(name: str, split: str) -> Rows:
    ir_datasets = require("ir_datasets", extra="ir-datasets")
    # An id names the split itself (beir/scifact/test), or a family that has the split as a member.
    own = [name] if split == "test" or name.endswith(f"/{split}") else []
    for candidate in (*own, f"{name}/{split}"):
        with explained(f"ir_datasets:{candidate}"):
            try:
                found = ir_datasets.load(candidate)
            except KeyError:
                continue
            if found.has_docs() and found.has_queries() and found.has_qrels():
                break
    else:
        raise DataError(
            f"ir_datasets has neither {name!r} nor {name + '/' + split!r} with documents, queries and judgements; ids "
            "there name the split, as in ir_datasets:beir/scifact/test"
        )

    def rows(kind: str) -> Iterator[Any]:
        with explained(f"ir_datasets:{candidate}, {kind},"):
            yield from getattr(found, f"{kind}_iter")()

    return Rows(
        candidate.removesuffix(f"/{split}").replace("/", "-"),
        ({"_id": row.doc_id, "text": _default_text(row)} for row in rows("docs")),
        ({"_id": row.query_id, "text": _default_text(row)} for row in rows("queries")),
        ((row.query_id, row.doc_id, row.relevance) for row in rows("qrels")),
    )


def _default_text(row: Any) -> object:
    text = row.default_text() if hasattr(row, "default_text") else row.text
    return text.strip() if isinstance(text, str) else text


def _from_mteb(name: str, split: str) -> Rows:
    mteb = require("mteb", extra="mteb")
    task_name, _, subset = name.partition("/")
    with explained(f"mteb:{name}"):
        task = mteb.get_task(task_name)
        if split not in task.eval_splits:
            raise DataError(f"mteb:{name} has no split {split!r}; there are {first_few(task.eval_splits)}")
        subsets = list(task.hf_subsets)
        if (subset or len(subsets) > 1) and subset not in subsets:
            raise DataError(f"mteb:{name}: name one of its subsets {first_few(subsets)}: mteb:{task_name}/{subsets[0]}")
        task = mteb.get_task(task_name, eval_splits=[split], hf_subsets=[subset or subsets[0]])
        task.load_data()
        if hasattr(task, "convert_v1_dataset_format_to_v2"):
            task.convert_v1_dataset_format_to_v2(num_proc=None)
        data = task.dataset[subset or subsets[0]][split]
        if lacking := [part for part in ("corpus", "queries", "relevant_docs") if part not in data]:
            raise DataError(f"mteb:{name} is no retrieval task: its data has no {first_few(lacking)}")
        return Rows(
            f"{task_name}-{subset}" if subset else task_name,
            data["corpus"],
            ({**row, "text": _with_instruction(row)} for row in data["queries"]),
            ((q, d, grade) for q, grades in data["relevant_docs"].items() for d, grade in grades.items()),
        )


def _with_instruction(row: Mapping[str, Any]) -> object:
    """Returns a query with its instruction behind it, where the task has one."""
    text, instruction = row.get("text"), row.get("instruction")
    return f"{text} {instruction}" if instruction and isinstance(text, str) else text


HUBS = {"hf": _from_hf, "ir_datasets": _from_ir_datasets, "mteb": _from_mteb}
"""What stands before the colon of a source, and who reads it."""
