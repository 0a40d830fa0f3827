"""Many sets in one go: BEIR and MTEB by name, base against tuned, and the rule for "it forgot".

Promise: a set on disk is read from there and no hub is asked; one that cannot be loaded is named and left out of the
average, and the average says of how many sets it is.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullrank._errors import DataError, FullrankError, MissingExtraError, SettingError, first_few
from fullrank._optional import require
from fullrank.changes import Change, changes
from fullrank.data import GoldenSet
from fullrank.gating import fell_beyond
from fullrank.loaders import load_golden
from fullrank.metrics import Metric
from fullrank.result import Result
from fullrank.settings import DEFAULT_METRICS, parsed

__all__ = [
    "MAX_DROP",
    "OBJECTIVE",
    "Benchmark",
    "Outcome",
    "average",
    "beir_sets",
    "forgotten",
    "load_benchmark",
    "mteb_sets",
    "run_benchmarks",
    "stored_results",
    "wanted_metrics",
]

OBJECTIVE = "ndcg@10"
"""What BEIR and MTEB report, and what the rule below looks at."""
MAX_DROP = 0.02
"""The rule of thumb: who lost more than 2 points of NDCG@10 on a general set is over-specialised."""
RETRIEVAL_SUBSET = "Retrieval-subset"
_SUBSET = ("SciFact", "SCIDOCS", "NQ", "FiQA2018")

_TASKS = {
    "arguana": "ArguAna",
    "climate-fever": "ClimateFEVER",
    "dbpedia-entity": "DBPedia",
    "fever": "FEVER",
    "fiqa": "FiQA2018",
    "hotpotqa": "HotpotQA",
    "msmarco": "MSMARCO",
    "nfcorpus": "NFCorpus",
    "nq": "NQ",
    "quora": "QuoraRetrieval",
    "scidocs": "SCIDOCS",
    "scifact": "SciFact",
    "trec-covid": "TRECCOVID",
    "webis-touche2020": "Touche2020",
}
"""Names of the same set: in BEIR, and in MTEB."""
_SELF_EXCLUDED = frozenset({"ArguAna", "FEVER", "FiQA2018", "MSMARCO", "QuoraRetrieval"})
"""Where mteb 2.26 takes a document with the id of the query out of its ranking (``ignore_identical_ids``)."""


@dataclass(frozen=True)
class Benchmark:
    """A set by name, and where it may be.

    Attributes:
        name: as it was asked for.
        folder: name of its BEIR folder.
        hub: source where there is no such folder.
        task: its name in MTEB.
    """

    name: str
    folder: str
    hub: str
    task: str

    @property
    def exclude_self(self) -> bool:
        """Whether a document with the id of the query is taken out of its ranking, as mteb does for this task."""
        if self.task in _TASKS.values() or not self.hub.startswith("mteb:"):
            return self.task in _SELF_EXCLUDED
        try:
            return bool(require("mteb", extra="mteb").get_task(self.task).ignore_identical_ids)
        except (MissingExtraError, KeyError, AttributeError):  # a folder of one's own that has a name like a task
            return False


@dataclass(frozen=True)
class Outcome:
    """What one set gave.

    Attributes:
        benchmark: the set.
        result: of the model; None where the set could not be evaluated.
        baseline: of the base model, where there is one.
        change: how NDCG@10 changed against it.
        error: why there is no result, or no change.
    """

    benchmark: Benchmark
    result: Result | None = None
    baseline: Result | None = None
    change: Change | None = None
    error: str = ""


def beir_sets(names: Sequence[str]) -> list[Benchmark]:
    """Returns the sets of BEIR names, each once.

    Raises:
        SettingError: no name, or one that is a path.

    >>> beir_sets(["scifact"])[0].hub
    'hf:BeIR/scifact'
    """
    return [
        Benchmark(name, name, f"hf:BeIR/{name}", _TASKS.get(name, name)) for name in _names(names, "--beir scifact")
    ]


def mteb_sets(names: Sequence[str]) -> list[Benchmark]:
    """Returns the sets of MTEB task names, each once; ``Retrieval-subset`` stands for SciFact, SCIDOCS, NQ, FiQA2018.

    Raises:
        SettingError: no name, or one that is a path.
    """
    folders = {task: folder for folder, task in _TASKS.items()}
    spelled = [n for name in names for n in (_SUBSET if name.casefold() == RETRIEVAL_SUBSET.casefold() else (name,))]
    return [
        Benchmark(name, folders.get(name, name), f"mteb:{name}", name) for name in _names(spelled, "--mteb SciFact")
    ]


def load_benchmark(benchmark: Benchmark, root: Path | None, split: str = "test") -> GoldenSet:
    """Returns the golden set: from the folder of its name under ``root`` where there is one, else from its hub.

    Raises:
        DataError: it is in neither place.
        MissingExtraError: the package for the hub is not installed.
    """
    folder = None if root is None else root / benchmark.folder
    if folder is not None and folder.is_dir():
        return load_golden(folder, split)
    try:
        return load_golden(benchmark.hub, split)
    except FullrankError as error:
        where = f"there is no folder {str(folder)!r}, and " if folder is not None else ""
        raise DataError(f"{where}{error}") from error


def wanted_metrics(metrics: Sequence[str | Metric] = DEFAULT_METRICS) -> list[Metric]:
    """Returns the metrics with NDCG@10 among them: the average and the rule need it."""
    return list(dict.fromkeys([Metric.parse(OBJECTIVE), *parsed(metrics)]))


def run_benchmarks(
    benchmarks: Sequence[Benchmark],
    load: Callable[[Benchmark], GoldenSet],
    score: Callable[[Benchmark, GoldenSet], Result],
    baseline: Callable[[Benchmark, GoldenSet], Result] | None = None,
) -> Iterator[Outcome]:
    """Yields what each set gave, one at a time, so that no two corpora are in memory at once.

    A set that cannot be loaded or ranked, or whose baseline does not fit, is an outcome with an error, and the others
    go on. An error of the model itself (embeddings that are not finite, say) stops.
    """
    for benchmark in benchmarks:
        try:
            golden = load(benchmark)
            result = score(benchmark, golden)
        except (DataError, MissingExtraError, OSError) as error:
            yield Outcome(benchmark, error=str(error))
            continue
        if baseline is None:
            yield Outcome(benchmark, result)
            continue
        try:
            base = baseline(benchmark, golden)
            change = changes(base, result, metrics=[OBJECTIVE])[OBJECTIVE]
        except (DataError, SettingError) as error:
            yield Outcome(benchmark, result, error=f"no baseline to compare with: {error}")
        else:
            yield Outcome(benchmark, result, base, change)


def stored_results(folder: Path, benchmarks: Sequence[Benchmark]) -> dict[str, Path] | None:
    """Returns ``{set: file}`` of the results that ``folder`` holds of the sets; None where it holds none of them."""
    found = {b.name: folder / f"{b.name}.json" for b in benchmarks if (folder / f"{b.name}.json").is_file()}
    return found or None


def average(results: Sequence[Result], metric: str = OBJECTIVE) -> float:
    """Returns the mean over sets, each counted alike, as BEIR averages; NaN of none."""
    return math.fsum(result.metrics[metric] for result in results) / len(results) if results else math.nan


def forgotten(outcomes: Sequence[Outcome], max_drop: float = MAX_DROP) -> list[Outcome]:
    """Returns the sets that lost more than ``max_drop`` of NDCG@10; exactly that much is not more."""
    return [o for o in outcomes if o.change is not None and fell_beyond(o.change.comparison.delta, max_drop)]


def _names(names: Sequence[str], example: str) -> list[str]:
    if not names:
        raise SettingError(f"no sets are named; write them comma-separated, for example {example}")
    if paths := [n for n in names if n in (".", "..") or any(s and s in n for s in (os.sep, os.altsep, "/", "\\"))]:
        raise SettingError(f"{first_few(paths)} are paths; sets are named, and their folders lie under --beir-root")
    return list(dict.fromkeys(names))
