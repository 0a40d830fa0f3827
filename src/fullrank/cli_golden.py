"""Doors to golden sets made by hand: `golden init`, `golden merge`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fullrank._files import refuse_unwritable
from fullrank.doors import app
from fullrank.labelling import init_golden, merge_labels
from fullrank.report import say

__all__ = ["init", "merge"]

room = typer.Typer(help="Begin and grow a golden set made by hand.", no_args_is_help=True)
app.add_typer(room, name="golden")


@room.command()
def init(folder: Annotated[Path, typer.Argument(help="Where the template goes.")]) -> None:
    """Write a small annotated golden set to begin with.

    Example: fullrank golden init golden
    """
    for path in init_golden(folder):
        say(f"written: {path}")
    say(f"Replace its documents and questions by your own, then: fullrank check --data {folder / 'golden.jsonl'}")


@room.command()
def merge(
    golden: Annotated[Path, typer.Argument(help="A golden .jsonl, or the .tsv of judgements of a BEIR folder.")],
    labels: Annotated[Path, typer.Argument(help="The file that `fullrank holes` wrote, with grades.")],
    out: Annotated[Path, typer.Option(help="The new golden set.")],
    skip_empty: Annotated[bool, typer.Option("--skip-empty", help="Leave rows without a grade out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write over --out where it is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Merge labelled documents back into a golden set; everything else stays as it is.

    Example: fullrank golden merge golden/golden.jsonl holes.csv --out golden/golden2.jsonl
    """
    refuse_unwritable(out)
    done = merge_labels(golden, labels, out=out, skip_empty=skip_empty, overwrite=overwrite)
    if as_json:
        counts = {"added": done.n_added, "relevant": done.n_relevant, "skipped": done.n_skipped}
        say(json.dumps({"golden": str(done.path), **counts}))
        return
    say(f"{done.n_added:,} judgements added, {done.n_relevant:,} of them relevant, {done.n_skipped:,} rows skipped")
    say(f"written: {done.path}")
