"""Doors to what measures: `demo`, `eval`, `check`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fullrank._errors import SettingError
from fullrank._files import refuse_unwritable
from fullrank.abstention import abstention, threshold_for
from fullrank.benchmarks import beir_sets, mteb_sets
from fullrank.cli_benchmarks import How, Scorer, evaluate_sets, save_mteb
from fullrank.data import GoldenSet
from fullrank.doors import (
    Data,
    Metrics,
    Split,
    app,
    metric_names,
    quiet_loading,
    short_name,
)
from fullrank.labelling import golden_gaps
from fullrank.loaders import load_golden
from fullrank.report import abstention_line, comparison_table, findings_text, result_table, say
from fullrank.settings import DEFAULT_METRICS, parsed
from fullrank.tables import latency_text
from fullrank.training_data import read_training_data

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
    say(f"Report:       fullrank report {out} --html report.html")
    say(f"Journal:      {out / 'fullrank' / 'history.jsonl'}")
    say(f"{run.seconds:.0f} s in all")
    raise typer.Exit(0 if found.improved else 1)


@app.command(name="eval")
def evaluate_model(
    model: Annotated[str, typer.Argument(help="Path or hub id of a SentenceTransformer.")],
    data: Annotated[
        str | None, typer.Option(help="BEIR folder, golden .jsonl, or hf:, ir_datasets:, mteb: source.")
    ] = None,
    beir: Annotated[str | None, typer.Option(help="BEIR sets by name: scifact,scidocs,fiqa.")] = None,
    mteb: Annotated[
        str | None,
        typer.Option(help="MTEB tasks by name: SciFact,NQ; or Retrieval-subset: SciFact, SCIDOCS, NQ, FiQA."),
    ] = None,
    split: Split = "test",
    metrics: Metrics = ",".join(DEFAULT_METRICS),
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; default: the model as it stands.")] = None,
    ties: Annotated[
        str | None,
        typer.Option(help="expected, worst or trec. Default: expected; of --beir and --mteb trec, as there."),
    ] = None,
    exclude_self: Annotated[
        bool, typer.Option("--exclude-self", help="With --data: a document with the id of the query is left out.")
    ] = False,
    beir_root: Annotated[
        Path, typer.Option(envvar="FULLRANK_BEIR", help="Folder of BEIR sets; what is not there comes from its hub.")
    ] = Path("beir"),
    baseline: Annotated[
        str | None, typer.Option(help="With --beir or --mteb: the base model, or a folder of its results.")
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(help="With --baseline: exit code 1 where a set lost more NDCG@10 than this; 0.02 is 2 points."),
    ] = None,
    latency: Annotated[bool, typer.Option("--latency/--no-latency", help="Time up to 64 queries one by one.")] = True,
    mteb_json: Annotated[Path | None, typer.Option(help="Folder for results in mteb's JSON form.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the result goes: MODEL-DATA.json; for many sets a folder, MODEL-sets.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON instead of a table.")] = False,
) -> None:
    """Evaluate a model on a golden set, or on BEIR and MTEB sets: every document, every query, exact ranks.

    With --baseline the rule of thumb is applied: who lost more than 2 points of NDCG@10 on a general set is
    over-specialised. Sets that cannot be loaded are named, the others go on, and the exit code is 2.

    Example: fullrank eval sentence-transformers/all-MiniLM-L6-v2 --data beir/scifact
    """
    if sum(source is not None for source in (data, beir, mteb)) != 1:
        raise typer.BadParameter("give one of --data, --beir and --mteb")
    many = data is None
    how = How(parsed(metric_names(metrics)), ties or ("trec" if many else "expected"), precision, latency, mteb_json)
    if data is not None:
        if baseline is not None or max_drop is not None:
            raise SettingError(
                "--baseline and --max-drop go with --beir or --mteb; compare two results with fullrank gate"
            )
        golden = load_golden(data, split)
        _evaluate_one(model, golden, how, split=split, exclude_self=exclude_self, out=out, as_json=as_json)
        return
    if exclude_self:
        raise SettingError("--exclude-self goes with --data; --beir and --mteb follow the rule of each set")
    code = evaluate_sets(
        model,
        beir_sets(metric_names(beir)) if beir is not None else mteb_sets(metric_names(mteb or "")),
        how,
        root=beir_root,
        split=split,
        out=out or Path(f"{short_name(model)}-sets"),
        baseline=baseline,
        max_drop=max_drop,
        as_json=as_json,
    )
    raise typer.Exit(code)


def _evaluate_one(
    model: str, golden: GoldenSet, how: How, *, split: str, exclude_self: bool, out: Path | None, as_json: bool
) -> None:
    """Evaluates a model on one golden set, stores the result and prints it."""
    out = out or Path(f"{short_name(model)}-{golden.name}.json")
    refuse_unwritable(out)
    if how.mteb_json is not None:
        refuse_unwritable(how.mteb_json / "result.json")
    result = Scorer(model, how)(golden, exclude_self=exclude_self)
    path = result.save(out)
    if how.mteb_json is not None:
        save_mteb(result, how.mteb_json, split=split)
    if as_json:
        body = {"metrics": result.metrics, "counts": result.counts, "timing": result.timing, "result": str(path)}
        say(json.dumps(body))
        return
    from fullrank.models import bare_backbone

    n = result.counts
    say(result_table(result, title=f"{golden.name}: {n['n_scored']:,} queries, {n['n_documents']:,} documents"))
    if n["n_unanswerable"] and result.hits:
        found = abstention(result)
        say(abstention_line(found, threshold_for(found)))
    findings = [*result.findings, *bare_backbone(model)]
    if findings:
        say(findings_text(findings))
    rate = result.timing.get("documents_per_second", 0.0)
    one = f"; one query {latency_text(result.timing)} (p50 / p95)" if how.latency else ""
    say(f"{result.timing['total']:.1f} s, {rate:,.0f} documents/s{one}; result in {path}")


@app.command()
def check(
    data: Data,
    split: Split = "test",
    train: Annotated[
        str | None, typer.Option(help="Training pairs (JSONL, CSV, parquet, hf:REPO): is the test in the training?")
    ] = None,
    metrics: Metrics = ",".join(DEFAULT_METRICS),
    missing: Annotated[str, typer.Option(help="Unknown ids: raise, keep or drop.")] = "raise",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look for faults in a golden set before anything is spent on it. Exit code 1 if there are errors.

    Example: fullrank check --data beir/scifact --train pairs.jsonl
    """
    golden = load_golden(data, split, missing=missing)  # type: ignore[arg-type]  # checked there
    pairs = None if train is None else [example.pair for example in read_training_data(train)]
    findings = golden.check(metrics=metric_names(metrics), train_pairs=pairs)
    if data.removesuffix(".gz").endswith(".jsonl"):
        findings += golden_gaps(golden)
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
