"""The command line: thin doors to the library.

Exit codes: 0 fine, 1 the answer is "no" (nothing beat the base model, a check found errors), 2 wrong input, 3 a fault
of fullrank itself.
"""

import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from fullrank._errors import FullrankError, SettingError
from fullrank.checks import read_train_pairs
from fullrank.loaders import load_golden
from fullrank.report import comparison_table, findings_text, result_table, say
from fullrank.settings import DEFAULT_METRICS, parsed

__all__ = ["main"]

app = typer.Typer(
    help="Rank the whole corpus, and keep the checkpoint that retrieves best.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Metrics = Annotated[str, typer.Option("--metrics", help="Comma-separated, for example recall@1,ndcg@10.")]


@app.callback()
def _common(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show log messages of the libraries below.")] = False,
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    if not verbose:
        warnings.simplefilter("ignore")  # of the libraries below; ours are Findings
        for noisy in ("transformers", "sentence_transformers", "datasets", "peft", "httpx"):
            logging.getLogger(noisy).setLevel(logging.ERROR)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/demo"),
    full: Annotated[
        bool, typer.Option("--full", help="The whole standard library: more functions, more steps.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="Path or hub id; default: the packaged all-MiniLM-L6-v2.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
) -> None:
    """Fine-tune a real model on code search and keep the checkpoint that retrieves best.

    Example: fullrank demo --out runs/demo
    """
    if out.exists() and not out.is_dir():
        raise SettingError(f"{out} is a file; --out names a folder")
    with _quiet_loading():
        from fullrank.demo import run_demo

        run = run_demo(out, full=full, model=model, steps=steps, say=say)
    found = run.callback
    if found.base_result is not None and found.best_result is not None:
        say(comparison_table(found.base_result, found.best_result, title="Held-out modules, full corpus"))
    if found.best is not None:
        say(f"Best weights: {found.best.path}")
    say(f"Curves:       tensorboard --logdir {out}")
    say(f"Journal:      {out / 'fullrank' / 'history.jsonl'}")
    say(f"{run.seconds:.0f} s in all")
    raise typer.Exit(0 if found.improved else 1)


@app.command(name="eval")
def evaluate_model(
    model: Annotated[str, typer.Argument(help="Path or hub id of a SentenceTransformer.")],
    data: Annotated[str, typer.Option(help="BEIR folder, golden .jsonl, or hf:, ir_datasets:, mteb: source.")],
    split: Annotated[str, typer.Option(help="Which judgements: qrels/SPLIT.tsv.")] = "test",
    metrics: Metrics = ",".join(DEFAULT_METRICS),
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; default: the model as it stands.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the result goes; default: MODEL-DATA.json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON instead of a table.")] = False,
) -> None:
    """Evaluate a model on a golden set: every document, every query, exact ranks.

    Example: fullrank eval sentence-transformers/all-MiniLM-L6-v2 --data beir/scifact
    """
    wanted = parsed(_names(metrics))
    golden = load_golden(data, split)
    out = out or Path(f"{_short_name(model)}-{golden.name}.json")
    _refuse_unwritable(out)
    with _quiet_loading():
        from fullrank.evaluate import evaluate
        from fullrank.models import bare_backbone, load_sentence_transformer

        network = load_sentence_transformer(model)
    with _bars() as progress:
        result = evaluate(network, golden, metrics=wanted, precision=precision, progress=progress)  # type: ignore[arg-type]
    path = result.save(out)
    if as_json:
        say(json.dumps({"metrics": result.metrics, "counts": result.counts, "result": str(path)}))
        return
    n = result.counts
    say(result_table(result, title=f"{golden.name}: {n['n_scored']:,} queries, {n['n_documents']:,} documents"))
    findings = [*result.findings, *bare_backbone(model)]
    if findings:
        say(findings_text(findings))
    rate = result.timing.get("documents_per_second", 0.0)
    say(f"{result.timing['total']:.1f} s, {rate:,.0f} documents/s; result in {path}")


@app.command()
def check(
    data: Annotated[str, typer.Option(help="BEIR folder, golden .jsonl, or hf:, ir_datasets:, mteb: source.")],
    split: Annotated[str, typer.Option(help="Which judgements: qrels/SPLIT.tsv.")] = "test",
    train: Annotated[Path | None, typer.Option(help="Training pairs as JSONL: is the test in the training?")] = None,
    metrics: Metrics = ",".join(DEFAULT_METRICS),
    missing: Annotated[str, typer.Option(help="Unknown ids: raise, keep or drop.")] = "raise",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look for faults in a golden set before anything is spent on it. Exit code 1 if there are errors.

    Example: fullrank check --data beir/scifact --train pairs.jsonl
    """
    golden = load_golden(data, split, missing=missing)  # type: ignore[arg-type]  # checked there
    pairs = None if train is None else read_train_pairs(train)
    findings = golden.check(metrics=_names(metrics), train_pairs=pairs)
    if as_json:
        say(json.dumps([asdict(finding) for finding in findings]))
    else:
        n_unanswerable = len(golden.queries) - golden.n_answerable
        say(
            f"{golden.name}: {len(golden.corpus):,} documents, {len(golden.queries):,} queries, of which "
            f"{n_unanswerable:,} have no answer"
        )
        say(findings_text(findings) or "no findings")
    raise typer.Exit(1 if any(finding.severity == "error" for finding in findings) else 0)


def _short_name(model: str) -> str:
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else path.name


def _refuse_unwritable(path: Path) -> None:
    """Raises `SettingError` where a file cannot be written, before anything is spent."""
    if path.is_dir():
        raise SettingError(f"{path} is a folder; give the name of a file")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        why = "is a file" if not above.is_dir() else "may not be written to"
        raise SettingError(f"{path} cannot be written: {above} {why}")


def _names(metrics: str) -> list[str]:
    return [name.strip() for name in metrics.split(",") if name.strip()]


@contextmanager
def _bars() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a progress callback that draws a bar a phase; silent where nobody watches."""
    bars: dict[str, Any] = {}

    def progress(phase: str, done: int, total: int) -> None:
        if phase not in bars:
            bars[phase] = tqdm(total=total, desc=f"encode {phase}", disable=None, leave=False, delay=1)
        bars[phase].update(done - bars[phase].n)

    try:
        yield progress
    finally:
        for bar in bars.values():
            bar.close()


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Keeps the weight-loading bars of transformers off the screen."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def main() -> None:
    """Runs the command line; an error of ours is one message and exit code 2."""
    try:
        app()
    except (FullrankError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except Exception:
        traceback.print_exc()
        sys.exit(3)  # a fault of ours is no "no"
