"""Doors to what is read and sent on: `report`, `holes`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fullrank._errors import SettingError
from fullrank._files import refuse_unwritable, write_atomically
from fullrank.abstention import MAX_FALSE_ANSWER_RATE
from fullrank.doors import Split, app
from fullrank.figures import printable
from fullrank.labelling import write_holes
from fullrank.loaders import load_golden
from fullrank.report import say
from fullrank.result import Result

__all__ = ["holes", "report"]

DataTexts = Annotated[str | None, typer.Option("--data", help="The golden set, for the texts of documents.")]


@app.command()
def report(
    source: Annotated[list[str], typer.Argument(help="A run folder, or results: the first is the base.")],
    html: Annotated[Path | None, typer.Option(help="Where the page goes; default: report.html.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Where the Markdown for a pull request goes.")] = None,
    data: DataTexts = None,
    split: Split = "test",
    metric: Annotated[str | None, typer.Option(help="What chose; default: what the journal says.")] = None,
    holes: Annotated[Path | None, typer.Option(help="Where unjudged documents go, for labelling.")] = None,
    max_false_answers: Annotated[
        float, typer.Option(help="Share of the queries without an answer that may be answered.")
    ] = MAX_FALSE_ANSWER_RATE,
    as_json: Annotated[bool, typer.Option("--json", help="Print verdict, metrics and files as JSON.")] = False,
) -> None:
    """Write one page on a run or on results: verdict, curves, tables, worst queries. It needs nothing beside it.

    Example: fullrank report runs/demo --html demo.html
    """
    from fullrank.page import html_page, markdown_page, read_source
    from fullrank.pagedata import page_data

    nothing_named = html is None and markdown is None and holes is None
    wanted = ((Path("report.html") if nothing_named else html, html_page), (markdown, markdown_page))
    outputs = [path for path in (*(path for path, _ in wanted), holes) if path is not None]
    taken = {Path(name).resolve(): "is read" for name in (*source, *([] if data is None else [data]))}
    for path in outputs:
        refuse_unwritable(path)
        if (place := path.resolve()) in taken:
            raise SettingError(f"{path} {taken[place]} by this command and would be written over; name another file")
        taken[place] = "is written"
    golden = None if data is None else load_golden(data, split)
    run = read_source(source, metric=metric)
    content = page_data(run, golden=golden, max_false_answer_rate=max_false_answers)
    written = [write_atomically(path, build(content)) for path, build in wanted if path is not None]
    shown = run.best or run.base
    if holes is not None:
        if shown is None:
            raise SettingError(f"{source[0]}: no result could be read, so there are no unjudged documents to export")
        written.append(write_holes(shown, holes, golden=golden))
    if as_json:
        files = [str(path) for path in written]
        cut = content.abstention and content.abstention["threshold"]
        names = ("value", "target", "false_answer_rate", "answer_rate", "correct_answer_rate")
        threshold = cut and {name: getattr(cut, name) for name in names}
        body = {"verdict": content.verdict, "headline": content.headline, "metrics": content.metrics}
        say(json.dumps({**body, "threshold": threshold, "notes": content.notes, "written": files}))
        return
    for text in (content.headline, content.verdict, *(f"note: {note}" for note in content.notes)):
        if text:
            say(printable(text))
    for path in written:
        say(f"written: {path}")


@app.command()
def holes(
    result: Annotated[Path, typer.Argument(help="A result, as eval writes it.")],
    out: Annotated[Path, typer.Option(help="Where they go: .jsonl or .csv.")],
    data: DataTexts = None,
    split: Split = "test",
    limit: Annotated[int | None, typer.Option("-n", help="At most so many, the highest scores first.")] = None,
) -> None:
    """Export unjudged documents that rank above the answers, to be labelled and merged back.

    Example: fullrank holes base.json --data golden/golden.jsonl --out holes.csv
    """
    refuse_unwritable(out)
    golden = None if data is None else load_golden(data, split)
    found = Result.load(result)
    path = write_holes(found, out, golden=golden, n=limit)
    say(f"{min(len(found.holes()), limit or 1 << 60):,} unjudged documents in {path}. Fill in the grades, then:")
    say(f"  fullrank golden merge GOLDEN {path} --out NEW")
