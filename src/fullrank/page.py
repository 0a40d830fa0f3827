"""The report as one file that can be sent to a colleague: HTML that needs nothing beside it, or Markdown.

Promise: the page reads without network and without scripts; a text of the data is shown as it stands, whatever markup
it holds, and never run; the file is written whole or not at all.
"""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import fullrank
from fullrank._errors import SettingError
from fullrank._files import write_atomically
from fullrank._optional import require
from fullrank.abstention import MAX_FALSE_ANSWER_RATE
from fullrank.data import GoldenSet
from fullrank.pagedata import PageData, page_data
from fullrank.report import literal
from fullrank.result import Result
from fullrank.runfolder import Run, read_run_folder, run_of_results

__all__ = ["html_page", "markdown_page", "read_source", "write_report"]

Source = str | os.PathLike[str] | Result | Sequence[str | os.PathLike[str] | Result]

# Neither HTML nor XML can hold these; half of a surrogate pair cannot be written as UTF-8 at all.
_UNPRINTABLE = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0xD800, 0xE000)], "\ufffd")

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
        guards: floors, ``{"guard/<set>/<metric>": floor}`` as the journal names them; default: those of the run.
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
    return run_of_results([_named(s, i) for i, s in enumerate(source)], metric=metric)


def html_page(content: PageData) -> str:
    """Returns the report as one HTML document."""
    template = _templates(autoescape=True).get_template("report.html.j2")
    style = _templates(autoescape=True).loader.get_source(None, "report.css")[0]
    return _clean(template.render(page=content, style=style, version=fullrank.__version__))


def markdown_page(content: PageData) -> str:
    """Returns the report as Markdown for a pull request."""
    text = _templates(autoescape=False).get_template("report.md.j2").render(page=content)
    lines = _clean(text).splitlines()
    return "\n".join(line for line, after in zip(lines, [*lines[1:], ""], strict=True) if line or after).strip() + "\n"


def _named(source: str | os.PathLike[str] | Result, place: int) -> tuple[str, Result]:
    if isinstance(source, Result):
        return str(source.provenance.get("name") or f"result {place + 1}"), source
    path = Path(source)
    return path.stem, Result.load(path)


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
    environment.filters["prose"] = lambda text: "".join(f"&#{ord(c)};" if c in _MARKDOWN else c for c in str(text))
    return environment


def _clean(text: str) -> str:
    return text.translate(_UNPRINTABLE)
