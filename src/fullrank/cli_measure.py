"""Doors to what measures: `demo`, `eval`, `check`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fullrank._errors import SettingError
from fullrank.checks import read_train_pairs
from fullrank.doors import (
    Data,
    Metrics,
    Split,
    app,
    metric_names,
    progress_bars,
    quiet_loading,
    refuse_unwritable,
    short_name,
)
from fullrank.loaders import load_golden
from fullrank.report import comparison_table, findings_text, result_table, say
from fullrank.settings import DEFAULT_METRICS, parsed

__all__ = ["check", "demo", "evaluate_model"]


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
    with quiet_loading():
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
    data: Data,
    split: Split = "test",
    metrics: Metrics = ",".join(DEFAULT_METRICS),
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; default: the model as it stands.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the result goes; default: MODEL-DATA.json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON instead of a table.")] = False,
) -> None:
    """Evaluate a model on a golden set: every document, every query, exact ranks.

    Example: fullrank eval sentence-transformers/all-MiniLM-L6-v2 --data beir/scifact
    """
    wanted = parsed(metric_names(metrics))
    golden = load_golden(data, split)
    out = out or Path(f"{short_name(model)}-{golden.name}.json")
    refuse_unwritable(out)
    with quiet_loading():
        from fullrank.evaluate import evaluate
        from fullrank.models import bare_backbone, load_sentence_transformer

        network = load_sentence_transformer(model)
    with progress_bars() as progress:
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
    data: Data,
    split: Split = "test",
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
    findings = golden.check(metrics=metric_names(metrics), train_pairs=pairs)
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
