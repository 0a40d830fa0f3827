"""A folder of text or Markdown files as chunks under their headings, split by document, and questions about them.

Promise: every chunk knows its document; the same files give the same chunks and the same split.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullrank._errors import DataError, SettingError
from fullrank._optional import require
from fullrank.checks import normalise
from fullrank.settings import refuse_no_count
from fullrank.sources import Problems, as_text, pick, read_objects

__all__ = ["Section", "held_out_documents", "read_documents", "read_questions", "sections_of"]

SUFFIXES = (".md", ".markdown", ".txt")
MAX_BYTES = 10 << 20
_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+(\S.*)")
_UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*")
_NO_TITLE = re.compile(r"[ \t]*([-+*>|]|\d+[.)])|    |\t|[ \t]*$")
"""Lines that an underline makes no heading of: of lists, quotes, tables and code, and empty ones."""
_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_QUESTIONS = (
    'Expected one JSON object a line: {"query": "...", "document": "file.md" or null, "contains": "..."}; contains may '
    "be missing, a null document says that none answers."
)


@dataclass(frozen=True)
class Section:
    """What stands below one heading of a document.

    Attributes:
        document: path below the folder, with ``/``.
        heading: with the first heading of the document in front; empty for what stands before it.
        chunks: ``{chunk id: text}``, the heading itself left out.
    """

    document: str
    heading: str
    chunks: Mapping[str, str] = field(default_factory=dict)


def sections_of(text: str) -> list[tuple[str, str]]:
    """Returns (heading, body) of a Markdown text, in order; a heading inside fenced code or front matter is none.

    Headings are lines that begin with ``#``, and lines of their own that are underlined with ``===`` or ``---``.

    >>> sections_of("# Cats\\nAn animal.\\n## Food\\nMice.")
    [('Cats', 'An animal.'), ('Cats: Food', 'Mice.')]
    """
    found: list[tuple[str, list[str]]] = [("", [])]
    title = fence = ""
    lines = text.splitlines()
    in_front = _front_matter(lines)
    found[-1][1].extend(lines[:in_front])
    for line in lines[in_front:]:
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence):
            fence = ""
        heading = "" if fence or mark else _heading(line)
        body = found[-1][1]
        if not heading and not fence and not mark and _underlines(line, body[in_front if len(found) == 1 else 0 :]):
            heading = body.pop().strip()
        if not heading:
            body.append(line)
        else:
            found.append((f"{title}: {heading}" if title else heading, []))
            title = title or heading
    whole = ((heading, "\n".join(body).strip()) for heading, body in found)
    return [(heading, body) for heading, body in whole if body]


def _front_matter(lines: Sequence[str]) -> int:
    """Returns how many lines stand between two lines of ``---`` at the very beginning, these counted in."""
    if not lines or lines[0].rstrip() != "---":
        return 0
    return next((n for n, line in enumerate(lines[1:], 2) if line.rstrip() == "---"), 0)


def _heading(line: str) -> str:
    """Returns the text of a line that begins with ``#``, without the ``#`` that may close it; else nothing."""
    found = _HEADING.fullmatch(line)
    text = found[1].rstrip() if found else ""
    bare = text.rstrip("#")
    return bare.rstrip() if not bare or bare[-1].isspace() else text


def _underlines(line: str, body: Sequence[str]) -> bool:
    """Returns whether a line makes the one before it, a paragraph of its own, a heading."""
    if not body or not _UNDERLINE.fullmatch(line):
        return False
    return _NO_TITLE.match(body[-1]) is None and (len(body) == 1 or not body[-2].strip())


def read_documents(folder: str | Path, *, size: int = 800) -> list[Section]:
    """Returns the sections of all ``.md``, ``.markdown`` and ``.txt`` files below ``folder``, in chunks.

    A ``.txt`` file has no headings.

    Args:
        folder: is searched with all folders in it, by name.
        size: characters of a chunk at most; it is cut at the largest unit (paragraph, sentence, word) that fits.

    Raises:
        DataError: no such files, a file that is not UTF-8 or larger than `MAX_BYTES`.
        MissingExtraError: the package ``semantic-text-splitter`` is not installed.
    """
    refuse_no_count("size", size, "a whole number of characters from 1")
    splitter = require("semantic_text_splitter", extra="recipes").MarkdownSplitter(size)
    root = Path(folder)
    found = [
        section
        for path in sorted(p for p in root.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        for section in _sections(path, path.relative_to(root).as_posix(), splitter)
    ]
    if not found:
        raise DataError(f"{folder} holds no {', '.join(SUFFIXES)} files with text")
    return found


def _sections(path: Path, name: str, splitter: Any) -> Iterator[Section]:
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path} is larger than {MAX_BYTES >> 20} MiB; split it or leave it out")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte at offset {error.start}); save it as UTF-8") from error
    n = 0
    name = name.encode("utf-8", "backslashreplace").decode()  # a file name may be no text
    for heading, body in [("", text.strip())] if path.suffix.lower() == ".txt" else sections_of(text):
        texts = splitter.chunks(body)
        yield Section(name, heading, {f"{name}#{n + i}": chunk for i, chunk in enumerate(texts)})
        n += len(texts)


def held_out_documents(documents: Iterable[str], share: float) -> set[str]:
    """Returns the documents to test on, about ``share`` of them: at least one, and not all where there are two.

    A hash of the name decides, so that a new document moves no other one to the other side.

    Raises:
        SettingError: a share that is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise SettingError(f"share={share!r} must lie between 0 and 1")
    place = {name: hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8] for name in documents}
    names = sorted(place, key=place.__getitem__)
    n = sum(int.from_bytes(place[name], "big") < share * 2**64 for name in names)
    return set(names[: min(max(n, 1), max(1, len(names) - 1))])


def read_questions(path: str | Path, sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Returns questions with the chunks that answer them, as rows of a golden ``.jsonl`` of the type ``real``.

    Args:
        path: JSONL, ``{"query", "document", "contains"}``: the answers are the chunks of the document that contain the
            text, or all of them; a null document says that the question has no answer.
        sections: of the documents.

    Raises:
        DataError: bad rows, unknown documents, texts that no chunk contains; all in one error.
    """
    problems = Problems(path, _QUESTIONS)
    chunks: dict[str, dict[str, str]] = {}
    for section in sections:
        chunks.setdefault(section.document, {}).update(section.chunks)
    rows = []
    for number, row in read_objects(Path(path), problems):
        try:
            query = as_text(pick(row, "query"), "the query")
            answers = _answers(pick(row, "document"), row.get("contains"), chunks)
        except ValueError as error:
            problems.add(number, error)
        else:
            rows.append({"id": f"real-{number}", "query": query, "relevant": answers, "type": "real"})
    problems.close(rows)
    return rows


def _answers(document: object, part: object, chunks: Mapping[str, Mapping[str, str]]) -> list[str]:
    if document is None:
        return []
    name = as_text(document, "'document'")
    if name not in chunks:
        raise ValueError(f"there is no document {name!r} with text")
    wanted = normalise(as_text("" if part is None else part, "'contains'"))
    found = [key for key, text in chunks[name].items() if wanted in normalise(text)]
    if not found:
        raise ValueError(f"no chunk of {name!r} contains {part!r}")
    return found
