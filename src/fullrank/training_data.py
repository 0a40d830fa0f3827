"""Training data from files and hubs, in one plain form: query, positive, hard negatives.

Promise: what loads is what the rows say, in their order; a source with bad rows does not load in part: one error names
the first of them with their line numbers and counts all. Nothing is unpickled and no code that comes with data is run.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fullrank._errors import DataError, SettingError, first_few
from fullrank._files import write_atomically
from fullrank._optional import require
from fullrank.settings import refuse_no_count
from fullrank.sources import Problems, as_text, explained, pick, read_lines, read_objects, short

__all__ = [
    "POSITIVE_FIELDS",
    "QUERY_FIELDS",
    "TrainingExample",
    "read_training_data",
    "refuse_half_a_task",
    "refuse_less_than_a_batch",
    "training_columns",
    "write_training_data",
]

QUERY_FIELDS = ("anchor", "query", "question")
POSITIVE_FIELDS = ("positive", "positives", "pos", "document", "passage", "answer", "text")
NEGATIVE_FIELDS = ("negatives", "negative", "neg", "hard_negatives", "hard_negative")
_NUMBERED = re.compile(r"(?:hard_)?neg(?:ative)?s?_?([0-9]{1,4})")

MAX_TEXT = 1 << 20
"""Characters of one text: hundreds of times what a model reads; more is a file of another kind."""
MAX_LIST = 1_000
"""Texts in one list of positives or negatives."""

SOURCES = ".jsonl, .csv or .tsv (each may end in .gz), .parquet, a folder of Dataset.save_to_disk, hf:REPO[:CONFIG]"
_EXPECTED = (
    'Expected in each row a query ("anchor", "query", "question") and a positive ("positive", "pos", "document", '
    '"passage", "answer", "text"), and where there are hard negatives a list "negatives" or columns "negative_1", '
    '"negative_2" and so on'
)


@dataclass(frozen=True)
class TrainingExample:
    """One thing to learn: a query, a text that answers it, and texts that look as if they did.

    Attributes:
        query, positive: texts.
        negatives: hard negatives, hardest first where they were mined so; may be empty.
    """

    query: str
    positive: str
    negatives: tuple[str, ...] = ()

    @property
    def pair(self) -> tuple[str, str]:
        """The query and its positive."""
        return self.query, self.positive


def read_training_data(source: str | Path, split: str = "train", *, limit: int | None = None) -> list[TrainingExample]:
    """Returns the examples that ``source`` holds, in its order.

    The query is the first of the fields `QUERY_FIELDS` that a row has, the positive the first of `POSITIVE_FIELDS`; a
    list of positives gives one example each. Negatives are a text or a list in one of `NEGATIVE_FIELDS`, or numbered
    columns, in which empty cells are none. Other fields are not read.

    Args:
        source: ``.jsonl``, ``.csv``, ``.tsv`` (plain or ``.gz``), ``.parquet``, a folder that ``Dataset.save_to_disk``
            wrote, or ``hf:REPO`` or ``hf:REPO:CONFIG`` on the Hugging Face hub.
        split: of a data set that has splits; files have none.
        limit: read so many rows and no more.

    Raises:
        DataError: nothing there, or bad rows: all in one error, the first with line numbers.
        MissingExtraError: a parquet file or data set without the package ``datasets``.
    """
    refuse_no_count("limit", limit, "a whole number of rows from 1 or None")
    text = str(source)
    path = Path(source)
    kind = path.name.lower().removesuffix(".gz")
    if text.startswith("hf:"):
        return _collected(_hub_rows(text, split), Problems(text, f"{_EXPECTED}.", unit="row"), limit)
    if path.is_dir():
        return _collected(_saved_rows(path, split), Problems(path, f"{_EXPECTED}.", unit="row"), limit)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file. Expected {SOURCES}")
    problems = Problems(path, f"{_EXPECTED}.", unit="row" if kind.endswith(".parquet") else "line")
    if kind.endswith((".jsonl", ".ndjson")):
        return _collected(read_objects(path, problems), problems, limit)
    if kind.endswith((".csv", ".tsv")):
        with _long_cells():
            return _collected(_table_rows(path, problems, "\t" if kind.endswith(".tsv") else ","), problems, limit)
    if kind.endswith(".parquet"):
        return _collected(_parquet_rows(path), problems, limit)
    raise DataError(f"{path} is not a kind of file that is known here. Expected {SOURCES}")


def write_training_data(path: str | Path, examples: Iterable[TrainingExample]) -> Path:
    """Writes one JSON object a line (``query``, ``positive``, ``negatives``), atomically, and returns the path."""
    return write_atomically(path, "".join(json.dumps(asdict(e), ensure_ascii=False) + "\n" for e in examples))


def refuse_half_a_task(data: str | None, train: str | None, *, tiny: bool = False) -> None:
    """Raises `SettingError` where only one of what to measure by and what to train on is named.

    A ``tiny`` try-out may train on what was mined from the built-in task.
    """
    if data and not train:
        raise SettingError("--data says what to measure by; give --train as well")
    if train and not data and not tiny:
        raise SettingError(
            "--train says what to train on; give --data as well, a golden set of the same kind: the built-in task "
            "would measure something else"
        )


def refuse_less_than_a_batch(n: int, batch: int) -> None:
    """Raises `DataError` where ``n`` examples do not fill one batch, of which a training would never take a step."""
    if n < batch:
        raise DataError(f"{n} training examples do not fill one batch of {batch}; give more, or --batch {max(1, n)}")


def training_columns(
    examples: Sequence[TrainingExample], *, negatives: int = 0, batch: int = 1
) -> dict[str, list[str]]:
    """Returns the columns ``anchor``, ``positive``, ``negative_1`` ... that sentence-transformers' losses take.

    A row of fewer negatives than asked for repeats its own, in turn; one without any is left out, because a text made
    up for it could answer another query of the batch.

    Args:
        examples: what to train on.
        negatives: how many columns of hard negatives.
        batch: how many rows there have to be at least.

    Raises:
        DataError: no row is left, or fewer than ``batch``.

    >>> training_columns([TrainingExample("q", "p", ("n",))], negatives=2)
    {'anchor': ['q'], 'positive': ['p'], 'negative_1': ['n'], 'negative_2': ['n']}
    """
    if isinstance(negatives, bool) or not isinstance(negatives, int) or negatives < 0:
        raise SettingError(f"negatives={negatives!r} must be a whole number from 0")
    kept = [e for e in examples if e.negatives or not negatives]
    if not kept:
        raise DataError(
            f"none of the {len(examples)} examples has hard negatives, and {negatives} a row are asked for. Mine some "
            "with 'fullrank mine', or train with negatives=0"
        )
    refuse_less_than_a_batch(len(kept), batch)
    columns = {"anchor": [e.query for e in kept], "positive": [e.positive for e in kept]}
    for k in range(negatives):
        columns[f"negative_{k + 1}"] = [e.negatives[k % len(e.negatives)] for e in kept]
    return columns


# ------------------------------------------------------------------------------------------------ rows


def _collected(
    rows: Iterable[tuple[int, Mapping[str, Any]]], problems: Problems, limit: int | None
) -> list[TrainingExample]:
    found: list[TrainingExample] = []
    for n, (number, row) in enumerate(rows, 1):
        try:
            found += _examples(row)
        except ValueError as error:
            problems.add(number, error)
        if n == limit:
            break
    problems.close(found)
    return found


def _examples(row: Mapping[str, Any]) -> list[TrainingExample]:
    """Returns the examples of one row, one for each positive; `ValueError` where it is bad."""
    query = _text(pick(row, *QUERY_FIELDS), "the query")
    positives = _texts(pick(row, *POSITIVE_FIELDS), "the positive")
    if not positives:
        raise ValueError("there is no positive: the list is empty")
    negatives = _negatives(row)
    answers = {text.strip() for text in positives}
    if same := next((text for text in negatives if text.strip() in answers), None):
        raise ValueError(f"a negative is the positive itself: {short(same)}")
    return [TrainingExample(query, positive, negatives) for positive in positives]


def _negatives(row: Mapping[str, Any]) -> tuple[str, ...]:
    found: list[str] = []
    for name in NEGATIVE_FIELDS:
        if row.get(name) not in (None, ""):
            found += _texts(row[name], f"{name!r}")
    numbered = sorted((int(match[1]), name) for name in row if (match := _NUMBERED.fullmatch(name)))
    found += [_text(row[name], f"{name!r}") for _, name in numbered if row[name] not in (None, "")]
    return tuple(dict.fromkeys(found))


def _texts(value: object, what: str) -> list[str]:
    """Returns a text or a list of texts as a list, each text once."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [_text(value, what)]
    if len(value) > MAX_LIST:
        raise ValueError(f"{what} is a list of {len(value):,} texts; at most {MAX_LIST:,} are read")
    return list(dict.fromkeys(_text(item, what) for item in value))


def _text(value: object, what: str) -> str:
    text = as_text(value, what)
    if not text.strip():
        raise ValueError(f"{what} is empty")
    if len(text) > MAX_TEXT:
        raise ValueError(f"{what} has {len(text):,} characters; at most {MAX_TEXT:,} are read")
    return text


# ------------------------------------------------------------------------------------------------ tables and data sets


@contextmanager
def _long_cells() -> Iterator[None]:
    """Lets the csv module read cells of `MAX_TEXT`; its limit is one for the whole process, so it is put back."""
    before = csv.field_size_limit(4 * MAX_TEXT)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _table_rows(path: Path, problems: Problems, delimiter: str) -> Iterator[tuple[int, dict[str, str | list[str]]]]:
    at = 0

    def lines() -> Iterator[str]:
        nonlocal at
        for number, line in read_lines(path, problems, blank=True):
            at = number
            yield line + "\n"

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    start = 1
    try:
        for cells in reader:
            start, row_at = at + 1, start
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = [_header(cell) for cell in cells]
                _refuse_header(path, header)
            elif len(cells) == len(header):
                yield row_at, {name: _cell(name, cell) for name, cell in zip(header, cells, strict=True)}
            else:
                problems.add(row_at, f"expected {len(header)} cells, as in the header, found {len(cells)}")
    except csv.Error as error:
        problems.add(start, f"broken CSV: {error}; the lines after it were not read")


def _cell(name: str, cell: str) -> str | list[str]:
    """Returns what a cell holds: a text, or the list that is written there as JSON."""
    if cell.startswith("[") and name in (*POSITIVE_FIELDS, *NEGATIVE_FIELDS):
        try:
            inner = json.loads(cell)
        except (ValueError, RecursionError):
            return cell
        if isinstance(inner, list) and all(isinstance(item, str) for item in inner):
            return inner
    return cell


def _header(cell: str) -> str:
    return cell.strip().casefold().replace(" ", "_")


def _refuse_header(path: Path, header: list[str]) -> None:
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise DataError(f"{path}: the columns {first_few(twice)} stand twice in the header")
    if not set(header) & set(QUERY_FIELDS) or not set(header) & set(POSITIVE_FIELDS):
        hint = " Is the separator another one?" if len(header) == 1 else ""
        raise DataError(f"{path}: the first line must name the columns, found {first_few(header)}.{hint} {_EXPECTED}.")


def _parquet_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    parquet = require("pyarrow.parquet", extra="hf")
    with explained(str(path)):
        file = parquet.ParquetFile(path)
        wanted = [name for name in file.schema_arrow.names if _is_read(name)]
        batches = file.iter_batches(columns=wanted)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from enumerate(rows, 1)


def _is_read(name: str) -> bool:
    return name in (*QUERY_FIELDS, *POSITIVE_FIELDS, *NEGATIVE_FIELDS) or bool(_NUMBERED.fullmatch(name))


def _saved_rows(folder: Path, split: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    datasets = require("datasets", extra="hf")
    with explained(str(folder)):
        found = datasets.load_from_disk(str(folder))
        if isinstance(found, Mapping):
            if split not in found:
                raise DataError(f"{folder} has no split {split!r}; there are {first_few(found)}")
            found = found[split]
    yield from _numbered(found)


def _hub_rows(source: str, split: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    datasets = require("datasets", extra="hf")
    _, repo, config = (*source.split(":", 2), "")[:3]
    if not repo:
        raise DataError(f"{source!r} names no data set; write it as hf:REPO or hf:REPO:CONFIG")
    with explained(source):
        found = datasets.load_dataset(repo, config or None, split=split)
    yield from _numbered(found)


def _numbered(dataset: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    yield from enumerate(dataset.select_columns([name for name in dataset.column_names if _is_read(name)]), 1)
