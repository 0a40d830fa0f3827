"""The report as one file that can be sent to a colleague: HTML that needs nothing beside it, or Markdown.

Promise: the page reads without network and without scripts; a text of the data is shown as it stands, whatever markup
it holds, and never run; the file is written whole or not at all.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import fullrank
from fullrank._errors import DataError, SettingError
from fullrank._files import write_atomically
from fullrank._optional import require
from fullrank.abstention import MAX_FALSE_ANSWER_RATE
from fullrank.data import GoldenSet
from fullrank.figures import printable
from fullrank.pagedata import PageData, page_data
from fullrank.pagerows import percent
from fullrank.report import literal
from fullrank.result import Result
from fullrank.runfolder import Run, read_run_folder, run_of_results

__all__ = ["html_page", "markdown_page", "read_source", "write_report"]

Source = str | os.PathLike[str] | Result | Sequence[str | os.PathLike[str] | Result]

_MARKDOWN = frozenset("\\`*_[]<>|#&~$!")
"""What means something inside a line of Markdown; sentences of ours keep the rest, so that the source can be read."""


def write_report(
    source: Source,
    path: str | os.PathLike[str],
    *,
    golden: GoldenSet | None = None,
    metric: str | None = None,
    guards: Mapping[str, float] | None = None,
    max_false_answer_rate: float = MAX_FALSE_ANSWER_RATE,
) -> Path:
    """Writes the report of a run or of results, and returns the path.

    Args:
        source: the output folder of a run (or the ``fullrank`` folder in it), or results and paths of results; of
            several the first is the base.
        path: ``.md`` writes Markdown for a pull request, anything else one HTML page.
        golden: gives the texts of the documents, and the findings of its checks.
        metric: what chose; default: what the journal says, or the first metric.
        guards: floors, by the names that the values have in the journal, ``{"guard/<set>/<metric>": floor}`` or
            ``{"<metric>": floor}``; default: those that the run has written.
        max_false_answer_rate: what the suggested threshold keeps to, see `fullrank.threshold_for`.

    Raises:
        DataError: nothing there to report on, or a file that cannot be read.
        SettingError: ``metric`` is not what chose, or was not computed.
        MissingExtraError: jinja2 or matplotlib is not installed.
    """
    run = read_source(source, metric=metric, guards=guards)
    content = page_data(run, golden=golden, max_false_answer_rate=max_false_answer_rate)
    text = markdown_page(content) if Path(path).suffix == ".md" else html_page(content)
    return write_atomically(path, text)


def read_source(source: Source, *, metric: str | None = None, guards: Mapping[str, float] | None = None) -> Run:
    """Returns the run that ``source`` is, see `write_report`."""
    if isinstance(source, str | os.PathLike | Result):
        source = [source]
    folders = [s for s in source if not isinstance(s, Result) and Path(s).is_dir()]
    if folders and len(source) > 1:
        raise SettingError(
            f"{os.fspath(folders[0])} is a folder; a report is of one run folder, or of result files: give the folder "
            "alone, or the .json files in it"
        )
    if folders:
        return read_run_folder(Path(folders[0]), metric=metric, guards=dict(guards or {}))
    notes: list[str] = []
    read = [found for i, s in enumerate(source) if (found := _read(s, i, notes)) is not None]
    if notes and not read:
        raise DataError(notes[0])
    names = _told_apart([path for path, _ in read])
    run = run_of_results([(name, result) for name, (_, result) in zip(names, read, strict=True)], metric=metric)
    return replace(run, notes=(*notes, *run.notes))


def html_page(content: PageData) -> str:
    """Returns the report as one HTML document."""
    template = _templates(autoescape=True).get_template("report.html.j2")
    style = _templates(autoescape=True).loader.get_source(None, "report.css")[0]
    return printable(template.render(page=content, style=style, version=fullrank.__version__))


def markdown_page(content: PageData) -> str:
    """Returns the report as Markdown for a pull request."""
    text = _templates(autoescape=False).get_template("report.md.j2").render(page=content)
    lines = printable(text).splitlines()
    return "\n".join(line for line, after in zip(lines, [*lines[1:], ""], strict=True) if line or after).strip() + "\n"


def _read(source: str | os.PathLike[str] | Result, place: int, notes: list[str]) -> tuple[Path | str, Result] | None:
    """Returns a result with its name or path; None, and a note, where its file cannot be read."""
    if isinstance(source, Result):
        return str(source.provenance.get("name") or f"result {place + 1}"), source
    try:
        return Path(source), Result.load(source)
    except (DataError, OSError) as error:
        notes.append(str(error) + (": the first of those that follow is the base" if place == 0 else ""))
        return None


def _told_apart(sources: Sequence[Path | str]) -> list[str]:
    """Returns a name for each: of a file its stem, with as many folders in front as tell it from the others."""
    names = []
    for source in sources:
        if isinstance(source, str):
            names.append(source)
            continue
        parts = (*source.absolute().parts[:-1], source.stem)
        others = [(*o.absolute().parts[:-1], o.stem) for o in sources if isinstance(o, Path) and o != source]
        n = next((n for n in range(1, len(parts)) if all(o[-n:] != parts[-n:] for o in others)), len(parts))
        names.append("/".join(parts[-n:]))
    return names


@cache
def _templates(*, autoescape: bool) -> Any:
    jinja2 = require("jinja2", extra="report")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fullrank", "templates"),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["literal"] = lambda text, width=None: f"<code>{literal(str(text), width)}</code>"
    environment.filters["percent"] = percent
    environment.filters["prose"] = lambda text: "".join(f"&#{ord(c)};" if c in _MARKDOWN else c for c in str(text))
    return environment
