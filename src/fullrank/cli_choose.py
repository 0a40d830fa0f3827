"""Doors to what chooses among checkpoints: `select`, `watch`."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fullrank._errors import DataError, SettingError
from fullrank._files import empty_folder, refuse_unwritable
from fullrank.data import GoldenSet
from fullrank.doors import Data, Split, app, quiet_loading
from fullrank.guards import Guard
from fullrank.keeping import decide, delete, keepsakes, refuse_counts
from fullrank.leaderboard import choice_text, leaderboard_table, nothing_evaluated, watch_line
from fullrank.loaders import load_golden
from fullrank.progress import progress_bars
from fullrank.report import say
from fullrank.selection import Selection

__all__ = ["select", "watch"]

WatchedDir = Annotated[Path, typer.Argument(help="Folder of the run, where checkpoint-N folders appear.")]
RunDir = Annotated[
    Path, typer.Argument(help="Folder of the run: checkpoint-N, fullrank/best, model folders, adapters.")
]
MetricOption = Annotated[
    list[str] | None,
    typer.Option("--metric", help="What chooses, for example recall@1; several as recall@1=0.7 and ndcg@10=0.3."),
]
Base = Annotated[str | None, typer.Option(help="The base model, by path or hub id; default: what the adapters name.")]
Precision = Annotated[str | None, typer.Option(help="fp32 (default), bf16 or fp16.")]


@app.command()
def select(
    run_dir: RunDir,
    data: Data,
    split: Split = "test",
    metric: MetricOption = None,
    base: Base = None,
    rule: Annotated[str, typer.Option(help="max, or one-se: the earliest within one standard error.")] = "max",
    confirm: Annotated[str | None, typer.Option(help="Split whose queries take no part in the choice.")] = None,
    guard: Annotated[list[str] | None, typer.Option(help="Set that must not be lost: DATA:ndcg@10:0.02.")] = None,
    compare_base: Annotated[
        bool, typer.Option("--compare-base", help="Rank the base in full: interval of the difference to it.")
    ] = False,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Evaluate every candidate in full.")] = False,
    tied: Annotated[bool, typer.Option("--tied", help="Name what cannot be told apart from the best.")] = False,
    soup: Annotated[bool, typer.Option("--soup", help="Add the mean of what is tied as one more candidate.")] = False,
    copy_to: Annotated[Path | None, typer.Option(help="Write the choice there, ready to load.")] = None,
    keep_best: Annotated[int | None, typer.Option(help="Checkpoints to keep by score; prints which could go.")] = None,
    keep_last: Annotated[int | None, typer.Option(help="Checkpoints to keep by step; prints which could go.")] = None,
    delete_rest: Annotated[bool, typer.Option("--delete", help="Delete the others.")] = False,
    precision: Precision = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the selection as JSON.")] = False,
) -> None:
    """Rank the checkpoints that a run left behind. Exit code 1 if nothing beats the base model.

    Example: fullrank select runs/demo --data beir/scifact --split dev
    """
    keeps = keep_best is not None or keep_last is not None
    if delete_rest and not keeps:
        raise SettingError("--delete needs --keep-best or --keep-last, which say what stays")
    refuse_counts(keep_best, keep_last)
    chooses = _objective(metric or ["recall@1"])
    if copy_to is not None:
        _refuse_taken(copy_to)
    golden, guards = load_golden(data, split), [_guard(text) for text in guard or ()]
    with progress_bars() as progress, quiet_loading():
        from fullrank.select import select_checkpoint

        selection = select_checkpoint(
            run_dir,
            golden,
            metric=chooses,
            base=base,
            rule=rule,  # type: ignore[arg-type]  # checked there, as is the precision
            confirm=None if confirm is None else load_golden(data, confirm),
            guards=guards,
            compare_base=compare_base or copy_to is not None,  # its card says what was gained, with the interval
            exhaustive=exhaustive,
            tied=tied,
            soup=soup,
            keep_best=keep_best or 1 if keeps else None,
            precision=precision,  # type: ignore[arg-type]
            progress=progress,
        )
    if selection.winner is None and all(row.status == "failed" for row in selection.rows):
        raise DataError(nothing_evaluated(selection))
    if not as_json:  # before what may fail: the table is what all the work was for
        _say(selection, golden)
    stays = decide(keepsakes(run_dir, selection, base=base), keep_best=keep_best or 1, keep_last=keep_last or 1)
    may_go = [name for name, why in stays.items() if not why] if keeps else []
    gone: list[str] = []
    try:
        if copy_to is not None and selection.winner is not None:
            from fullrank.handing import hand_over

            with quiet_loading():
                hand_over(selection, copy_to, base=base)
            if not as_json:
                say(f"Model in {copy_to}")
        if delete_rest:
            gone = [path.name for path in delete(run_dir, may_go, selection, base=base)]
    finally:
        if as_json:
            say(json.dumps({**selection.as_dict(), "may_go": may_go, "deleted": gone}))
        elif keeps:
            _say_keeping(stays, gone, delete_rest)
    if delete_rest and (left := [name for name in may_go if name not in gone]):
        raise DataError(f"{', '.join(left)} could not be deleted, see above")
    raise typer.Exit(0 if selection.improved else 1)


@app.command()
def watch(
    run_dir: WatchedDir,
    data: Data,
    split: Split = "test",
    metric: MetricOption = None,
    base: Base = None,
    until: Annotated[int | None, typer.Option(help="End once this step is evaluated.")] = None,
    idle_exit: Annotated[float | None, typer.Option(help="End after so many minutes without news.")] = None,
    quiet: Annotated[float, typer.Option(help="Seconds for which a checkpoint must not have changed.")] = 10.0,
    poll: Annotated[float, typer.Option(help="Seconds between two looks.")] = 2.0,
    precision: Precision = None,
) -> None:
    """Evaluate the checkpoints of a training run elsewhere as it writes them, and keep the best up to date.

    Exit code 1 if nothing beat the base model. SIGTERM and Ctrl-C stop it at any time; started again it goes on.

    Example: fullrank watch runs/train --data beir/scifact --split dev --idle-exit 60
    """
    golden = load_golden(data, split)
    signal.signal(signal.SIGTERM, _interrupt)
    chooses = _objective(metric or ["recall@1"])
    label = chooses if isinstance(chooses, str) else "objective"
    with quiet_loading():
        from fullrank.watch import WATCH, stored_best
        from fullrank.watch import watch as watch_run

        try:
            lines = watch_run(
                run_dir,
                golden,
                metric=chooses,
                base=base,
                until=until,
                idle_exit=idle_exit,
                quiet=quiet,
                poll=poll,
                precision=precision,  # type: ignore[arg-type]  # checked there
                on_line=lambda line, best: say(watch_line(line, best, label)),
            )
        except KeyboardInterrupt:
            say(f"Stopped. What is finished is in {run_dir / WATCH}; start again to go on.")
            raise typer.Exit(0) from None
    best = stored_best(run_dir)
    if best is not None:
        say(f"Best: step {best.step} with {label} {best.score:.4f}; {best.path}")
    elif lines:
        say("Best: none; no step was evaluated whose weights are stored.")
    raise typer.Exit(0 if best is not None and best.step != 0 else 1)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _say(selection: Selection, golden: GoldenSet) -> None:
    n = golden.n_answerable
    say(leaderboard_table(selection, title=f"{golden.name}: {n:,} queries, {len(golden.corpus):,} documents"))
    say(choice_text(selection))
    if selection.journal is not None:
        say(f"Journal: {selection.journal}")


def _say_keeping(stays: dict[str, str], gone: Sequence[str], delete_rest: bool) -> None:
    for name, why in stays.items():
        if why:
            say(f"stays: {name} ({why})")
        elif not delete_rest:
            say(f"would be deleted: {name}")
        else:
            say(f"deleted: {name}" if name in gone else f"not deleted: {name}")
    if not delete_rest:
        say("Nothing was deleted; add --delete to do it.")


def _objective(texts: Sequence[str]) -> str | dict[str, float]:
    """Returns what --metric names: one metric, or weights of several."""
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    weights = {}
    for text in texts:
        name, _, weight = text.partition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            raise SettingError(
                f"--metric {text!r}: several metrics need weights, for example --metric recall@1=0.7 --metric "
                "ndcg@10=0.3"
            ) from None
    if len(weights) < len(texts):
        raise SettingError(f"--metric names one metric twice: {', '.join(texts)}")
    return weights


def _guard(text: str) -> Guard:
    """Returns the guard that DATA[:METRIC[:DROP]] names; DATA may hold colons itself."""
    parts = text.rsplit(":", 2)
    if len(parts) != 3 or not all(parts):
        raise SettingError(f"--guard {text!r} must be DATA:METRIC:MAX_DROP, for example beir/nq:ndcg@10:0.02")
    try:
        drop = float(parts[2])
    except ValueError:
        raise SettingError(f"--guard {text!r}: {parts[2]!r} is no number; 0.02 is two points") from None
    return Guard(load_golden(parts[0]), parts[1], drop)


def _refuse_taken(folder: Path) -> None:
    try:
        refuse_unwritable(empty_folder(folder) / "README.md")
    except SettingError as error:
        raise SettingError(f"--copy-to {error}") from None
