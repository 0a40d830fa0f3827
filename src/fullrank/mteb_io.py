"""To and from mteb: results in its JSON form, golden sets as its tasks.

Promise: the JSON loads with mteb's own ``TaskResult``; mteb's evaluator on the task sees the texts, judgements and
queries that fullrank sees.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fullrank._errors import DataError, SettingError, first_few
from fullrank._optional import require
from fullrank.data import GoldenSet, refuse_other_than_golden
from fullrank.metrics import Metric
from fullrank.result import Result

__all__ = ["MTEB_METRICS", "mteb_task", "to_mteb"]

_NAMES = {"ndcg": "ndcg", "map": "map", "recall": "recall", "precision": "precision", "mrr": "mrr", "hit": "hit_rate"}
MAIN = "ndcg@10"
MTEB_METRICS = tuple(f"{name}@{k}" for name in _NAMES for k in (1, 3, 5, 10, 20, 100, 1000))
"""What mteb reports for a retrieval task."""


def to_mteb(
    result: Result,
    *,
    task: str | None = None,
    split: str = "test",
    subset: str = "default",
    languages: Sequence[str] = ("eng-Latn",),
    main: str | Metric = MAIN,
) -> dict[str, Any]:
    """Returns ``result`` as mteb stores the result of a retrieval task; ``json.dump`` it to a file.

    Metrics that mteb does not have are left out. ``dataset_revision`` is the fingerprint of the data, because that is
    what was evaluated. Numbers are not rounded.

    Args:
        result: of an evaluation.
        task: name of the task; default: that of the golden set.
        split, subset, languages: as mteb has them.
        main: the main score of the task; of nearly all retrieval tasks NDCG@10.

    Raises:
        DataError: the result is a bound.
        SettingError: ``main`` was not computed, or the result has no name and none was given.
    """
    if result.bound:
        raise DataError("a bound is no score: evaluate on the full corpus before exporting the result")
    name = task or result.provenance.get("name")
    if not name:
        raise SettingError("the result does not name its data; pass task='...'")
    result.name_of(main)
    scores: dict[str, Any] = {}
    for key, value in result.metrics.items():
        metric = Metric.parse(key)
        if metric.k is not None and metric.name in _NAMES:
            scores[f"{_NAMES[metric.name]}_at_{metric.k}"] = value
    if "recall@1" in result.metrics:
        scores["accuracy"] = result.metrics["recall@1"]
    form = _mteb_version()
    row = {**scores, "main_score": result[main], "hf_subset": subset, "languages": list(languages)}
    return {
        "dataset_revision": str(result.provenance.get("data", "unknown")),
        "task_name": str(name),
        "mteb_version": form,
        "scores": {split: [row | ({"mteb_version": form} if form else {})]},
        "evaluation_time": result.timing.get("total"),
        "kg_co2_emissions": None,
        "date": datetime.now(tz=UTC).timestamp(),
        "evaluation_phases": None,
    }


def mteb_task(
    golden: GoldenSet,
    *,
    name: str | None = None,
    split: str = "test",
    languages: Sequence[str] = ("eng-Latn",),
    exclude_self: bool = False,
    description: str = "A golden set of fullrank.",
) -> Any:
    """Returns ``golden`` as an mteb retrieval task: ``mteb.evaluate(model, tasks=[mteb_task(golden)], cache=None)``.

    Queries without an answer are left out: mteb would count them as 0. ``dataset_revision`` is the fingerprint of the
    data, so that mteb's cache does not answer for other data. It does answer for other models, where they were loaded
    from a folder: all of them have one name there. Hence ``cache=None``.

    Args:
        golden: the golden set.
        name: of the task; default: that of the golden set.
        split, languages, description: metadata of the task.
        exclude_self: a document with the id of the query does not count (``ignore_identical_ids``), see
            `fullrank.evaluate`.

    Raises:
        MissingExtraError: mteb is not installed.
        DataError: grades that are no whole numbers, or a threshold of relevance other than 1, which mteb cannot hold.

    >>> import mteb  # doctest: +SKIP
    >>> mteb.evaluate(model, tasks=[mteb_task(golden)], cache=None).task_results[0].main_score  # doctest: +SKIP
    """
    refuse_other_than_golden(golden)
    golden.require_answerable()
    qrels = _qrels(golden)
    mteb, tasks = require("mteb", extra="mteb"), require("mteb.abstasks", extra="mteb")
    datasets = require("datasets", extra="mteb")
    metadata = mteb.TaskMetadata(
        name=(name or golden.name).replace("/", "-"),
        description=description,
        dataset={"path": f"fullrank/{golden.name}", "revision": golden.fingerprint()},
        type="Retrieval",
        category="t2t",
        eval_splits=[split],
        eval_langs=list(languages),
        main_score="ndcg_at_10",
        is_public=False,
    )

    def load_data(self: Any, num_proc: int | None = None, **_: Any) -> None:
        """Puts the golden set where mteb looks for it; again after `unload_data`."""
        if self.data_loaded:
            return
        corpus = datasets.Dataset.from_dict({"id": list(golden.doc_ids), "text": golden.doc_texts})
        queries = datasets.Dataset.from_dict({"id": list(qrels), "text": [golden.queries[qid] for qid in qrels]})
        parts = {"corpus": corpus, "queries": queries, "relevant_docs": qrels, "top_ranked": None}
        self.dataset = {"default": {split: parts}}
        self.data_loaded = True

    body = {"metadata": metadata, "load_data": load_data, "ignore_identical_ids": exclude_self, "__doc__": description}
    return type("GoldenTask", (tasks.AbsTaskRetrieval,), body)()


def _qrels(golden: GoldenSet) -> dict[str, dict[str, int]]:
    """Returns the judgements of the answerable queries as mteb takes them; grades below 0 count as 0 there too."""
    if golden.relevant_from != 1:
        raise DataError(
            f"golden set {golden.name!r} has relevant_from={golden.relevant_from:g}; for mteb every grade above 0 is "
            "relevant. Set the grades below it to 0, and relevant_from to 1"
        )
    found: dict[str, dict[str, int]] = {}
    broken: list[tuple[str, str, float]] = []
    for qid, answerable in zip(golden.query_ids, golden.answerable, strict=True):
        if answerable:
            broken += [(qid, doc_id, g) for doc_id, g in golden.qrels[qid].items() if g != int(g)]
            found[qid] = {doc_id: max(0, int(grade)) for doc_id, grade in golden.qrels[qid].items()}
    if broken:
        raise DataError(
            f"mteb takes whole grades only; golden set {golden.name!r} has (query, document, grade) {first_few(broken)}"
        )
    return found


def _mteb_version() -> str | None:
    """Returns the version of mteb whose form this is, where it is installed."""
    try:
        return version("mteb")
    except PackageNotFoundError:
        return None
