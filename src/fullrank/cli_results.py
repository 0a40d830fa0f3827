"""Doors to what reads results: `compare`, `gate`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fullrank.changes import changes, changes_by_group, flips
from fullrank.comparison import unlike
from fullrank.data import join_title
from fullrank.doors import Split, app
from fullrank.gating import gate as decide
from fullrank.loaders import load_golden
from fullrank.metrics import Metric
from fullrank.report import say
from fullrank.result import Result
from fullrank.tables import change_json, changes_table, flip_json, flips_text, gate_json, gate_text

__all__ = ["compare", "gate"]

MetricNames = Annotated[
    list[str] | None, typer.Option("--metric", help="Which metric; may be given several times. Default: all in both.")
]


@app.command()
def compare(
    base: Annotated[Path, typer.Argument(help="Result of the base model: a file that Result.save wrote.")],
    tuned: Annotated[Path, typer.Argument(help="Result of the model to compare with it.")],
    metric: MetricNames = None,
    n_flips: Annotated[int, typer.Option("--flips", min=0, help="How many wins and losses are shown.")] = 5,
    data: Annotated[str | None, typer.Option(help="The golden set, for the texts of documents in the flips.")] = None,
    split: Split = "test",
    allow_other_data: Annotated[
        bool, typer.Option("--allow-other-data", help="Compare the common queries of results on unlike data.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Compare two results query by query: points, intervals, p-values, query types, and the queries that flipped.

    Example: fullrank compare base.json tuned.json --metric recall@1 --metric ndcg@10
    """
    before, after = Result.load(base), Result.load(tuned)
    found = changes(before, after, metrics=metric or None, allow_other_data=allow_other_data)
    differing = unlike(before, after, Metric.parse(next(iter(found))))
    groups = {name: changes_by_group(before, after, name, allow_other_data=allow_other_data) for name in found}
    first = next(iter(found))
    wins, losses = flips(before, after, first, n=n_flips, allow_other_data=allow_other_data)
    if as_json:
        say(
            json.dumps(
                {
                    "base": str(base),
                    "tuned": str(tuned),
                    "differs_in": differing,
                    "metrics": {name: change_json(change) for name, change in found.items()},
                    "groups": {n: {g: change_json(c) for g, c in by.items()} for n, by in groups.items() if by},
                    "flips": {"metric": first, "wins": [*map(flip_json, wins)], "losses": [*map(flip_json, losses)]},
                }
            )
        )
        return
    corpus = None if data is None else {d: join_title(t, d) for d, t in load_golden(data, split).corpus.items()}
    say(changes_table(found, title=f"{base} -> {tuned}"))
    if differing:
        say(f"warning: the two differ in {', '.join(differing)}; only their common queries are compared")
    for name, by_group in groups.items():
        if by_group:
            say(changes_table(by_group, title=f"{name} by query type", what="type"))
    total = found[first].comparison
    for kind, shown, all_ids in (("Won", wins, total.wins), ("Lost", losses, total.losses)):
        if shown:
            say(flips_text(f"{kind} by {first}: {len(all_ids):,} queries, the largest changes", shown, corpus))


@app.command()
def gate(
    result: Annotated[Path, typer.Argument(help="Result of the candidate: a file that Result.save wrote.")],
    baseline: Annotated[Path, typer.Option(help="Result to hold it against.")],
    max_drop: Annotated[float, typer.Option(help="The fall that is allowed: 0.02 is 2 points.")] = 0.02,
    metric: MetricNames = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the decision as one JSON object.")] = False,
) -> None:
    """Fail where retrieval fell behind a baseline, for continuous integration: exit code 1.

    A metric fails where delta < -max_drop AND interval.high < 0: the mean of the paired differences fell by more than
    the margin, and their 95 % interval lies wholly below 0, so "no fall" is excluded. A fall that the queries cannot
    carry passes, and the output says so. Each metric is judged by itself; --json also has p after Holm's correction.
    Bounds, results that are not eligible, other data and other tie rules are refused: exit code 2.

    Example: fullrank gate tuned.json --baseline base.json --max-drop 0.02 --metric ndcg@10
    """
    found = decide(Result.load(baseline), Result.load(result), metrics=metric or None, max_drop=max_drop)
    say(json.dumps(gate_json(found)) if as_json else gate_text(found))
    raise typer.Exit(0 if found.passed else 1)
