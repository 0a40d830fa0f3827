"""What `eval` does with many sets: load, evaluate, store and print, one set after the other."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fullrank._errors import SettingError
from fullrank._files import refuse_unwritable, write_atomically
from fullrank.benchmarks import (
    MAX_DROP,
    Benchmark,
    Outcome,
    average,
    forgotten,
    load_benchmark,
    run_benchmarks,
    stored_results,
    wanted_metrics,
)
from fullrank.data import GoldenSet
from fullrank.doors import quiet_loading
from fullrank.gating import refuse_no_margin
from fullrank.metrics import Metric
from fullrank.mteb_io import MTEB_METRICS, to_mteb
from fullrank.progress import progress_bars
from fullrank.report import findings_text, say
from fullrank.result import Result
from fullrank.tables import benchmark_table, change_json, forgotten_text, latency_text

__all__ = ["How", "Scorer", "evaluate_sets", "save_mteb"]


@dataclass(frozen=True)
class How:
    """How `eval` evaluates: its options that do not depend on the data.

    Attributes:
        metrics: what is shown.
        ties: see `fullrank.evaluate`.
        precision: of encoding.
        latency: whether the time of one query is measured.
        mteb_json: folder for results in the form of mteb.
    """

    metrics: list[Metric]
    ties: str
    precision: str | None = None
    latency: bool = True
    mteb_json: Path | None = None

    @property
    def computed(self) -> list[Metric]:
        """What is shown, and what mteb reports where its form is asked for."""
        extra = map(Metric.parse, MTEB_METRICS) if self.mteb_json is not None else ()
        return list(dict.fromkeys([*self.metrics, *extra]))


class Scorer:
    """A loaded model that is evaluated on one set after the other."""

    def __init__(self, model: str, how: How) -> None:
        with quiet_loading():
            from fullrank.models import load_sentence_transformer

            self.network = load_sentence_transformer(model)
            if how.precision == "fp32":
                self.network.float()
        self.how = how

    def __call__(self, golden: GoldenSet, *, exclude_self: bool = False) -> Result:
        """Returns the result on ``golden``, with the latency of one query where that is wanted."""
        from fullrank.encode import as_encoder
        from fullrank.evaluate import evaluate
        from fullrank.latency import with_latency

        how = self.how
        with progress_bars() as progress:
            result = evaluate(
                self.network,
                golden,
                metrics=how.computed,
                ties=how.ties,  # type: ignore[arg-type]  # checked there
                precision=how.precision,  # type: ignore[arg-type]
                list_length=max(10, *(metric.k or 0 for metric in how.metrics)),
                exclude_self=exclude_self,
                progress=progress,
            )
        if not how.latency:
            return result
        return with_latency(result, as_encoder(self.network), precision=how.precision)  # type: ignore[arg-type]


def evaluate_sets(
    model: str,
    benchmarks: list[Benchmark],
    how: How,
    *,
    root: Path,
    split: str,
    out: Path,
    baseline: str | None = None,
    max_drop: float | None = None,
    as_json: bool = False,
) -> int:
    """Evaluates ``model`` on every set, stores and prints the results, and returns the exit code.

    Returns:
        1 where ``max_drop`` is given and a set lost more than that, else 2 where a set could not be evaluated, else 0.
    """
    if max_drop is not None:
        refuse_no_margin(max_drop)
        if baseline is None:
            raise SettingError("--max-drop needs a --baseline to fall behind")
    how = replace(how, metrics=wanted_metrics(how.metrics))
    for folder in (out, how.mteb_json):
        if folder is not None:
            refuse_unwritable(folder / "result.json")
    base = None if baseline is None else _baseline(baseline, benchmarks, how, out)
    scorer = Scorer(model, how)
    from fullrank.models import bare_backbone

    def score(benchmark: Benchmark, golden: GoldenSet) -> Result:
        result = scorer(golden, exclude_self=benchmark.exclude_self)
        result.save(out / f"{benchmark.name}.json")
        if how.mteb_json is not None:
            save_mteb(result, how.mteb_json, task=benchmark.task, split=split)
        return result

    outcomes = []
    for outcome in run_benchmarks(benchmarks, lambda b: load_benchmark(b, root, split), score, base):
        outcomes.append(outcome)
        if outcome.error:
            say(f"error: {outcome.benchmark.name}: {outcome.error}", file=sys.stderr)
    drop = MAX_DROP if max_drop is None else max_drop
    if as_json:
        say(json.dumps(_as_json(outcomes, how, out, drop)))
    elif any(outcome.result is not None for outcome in outcomes):
        _print(outcomes, how, out, drop)
        if bare := bare_backbone(model):
            say(findings_text(bare))
    if max_drop is not None and forgotten(outcomes, max_drop):
        return 1
    return 2 if any(outcome.error for outcome in outcomes) else 0


def save_mteb(result: Result, folder: Path, *, task: str | None = None, split: str = "test") -> Path:
    """Writes the result as mteb stores it, to ``FOLDER/TASK.json``, and returns the path."""
    body = to_mteb(result, task=task, split=split)
    name = body["task_name"].replace("/", "-")
    return write_atomically(folder / f"{name}.json", json.dumps(body, indent=2) + "\n")


def _baseline(
    source: str, benchmarks: list[Benchmark], how: How, out: Path
) -> Callable[[Benchmark, GoldenSet], Result]:
    """Returns what gives the baseline of a set: stored results, or another model that is evaluated beside this one."""
    folder = Path(source).expanduser()
    is_model = any((folder / name).is_file() for name in ("modules.json", "config.json", "adapter_config.json"))
    if folder.is_dir() and not is_model:
        if folder.resolve() == out.resolve():
            raise SettingError(f"--baseline and --out are both {source}: the new results would replace the baseline's")
        if stored_results(folder, benchmarks) is None:
            raise SettingError(
                f"--baseline {source} holds neither a model nor a result of these sets; expected "
                f"{', '.join(b.name + '.json' for b in benchmarks)} as an earlier `fullrank eval --out` wrote them"
            )
        return lambda benchmark, golden: Result.load(folder / f"{benchmark.name}.json")
    scorer = Scorer(source, replace(how, latency=False, mteb_json=None))

    def score(benchmark: Benchmark, golden: GoldenSet) -> Result:
        result = scorer(golden, exclude_self=benchmark.exclude_self)
        result.save(out / "baseline" / f"{benchmark.name}.json")
        return result

    return score


def _print(outcomes: list[Outcome], how: How, out: Path, max_drop: float) -> None:
    shown = [str(metric) for metric in how.metrics]
    say(benchmark_table(outcomes, shown))
    if any(outcome.change is not None for outcome in outcomes):
        say(forgotten_text(outcomes, max_drop))
    for outcome in outcomes:
        # The cut-offs that mteb's form needs were not asked for by anybody.
        unasked = "vacuous-k" if how.mteb_json is not None else None
        findings = [] if outcome.result is None else [f for f in outcome.result.findings if f.kind != unasked]
        if findings:
            say(f"{outcome.benchmark.name}: {findings_text(findings)}")
    if how.latency:
        say(
            "One query, p50 / p95: "
            + ", ".join(f"{o.benchmark.name} {latency_text(o.result.timing)}" for o in outcomes if o.result is not None)
        )
    say(f"Results in {out}")


def _as_json(outcomes: list[Outcome], how: How, out: Path, max_drop: float) -> dict[str, Any]:
    done = [outcome.result for outcome in outcomes if outcome.result is not None]
    return {
        "sets": {
            o.benchmark.name: {
                "metrics": o.result.metrics,
                "counts": o.result.counts,
                "timing": o.result.timing,
                "result": str(out / f"{o.benchmark.name}.json"),
                "change": None if o.change is None else change_json(o.change),
            }
            for o in outcomes
            if o.result is not None
        },
        "average": {str(metric): average(done, str(metric)) for metric in how.metrics} if done else {},
        "max_drop": max_drop,
        "forgotten": [o.benchmark.name for o in forgotten(outcomes, max_drop)],
        "errors": {o.benchmark.name: o.error for o in outcomes if o.error},
    }
