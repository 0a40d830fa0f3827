"""Full-corpus evaluation: embed every document, embed every query, rank exactly, measure.

Promise: the same model and data give the same numbers whatever the block size; nothing is sampled or approximated; the
model and the random states are left as they were.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fullrank._errors import EvaluationError
from fullrank.clock import Clock
from fullrank.data import GoldenSet, refuse_other_than_golden
from fullrank.encode import Precision, as_encoder
from fullrank.measure import Measurement
from fullrank.metrics import Metric, TieRule
from fullrank.outcome import OnNonfinite, Settings
from fullrank.plan import EvaluationPlan, Progress
from fullrank.result import Result
from fullrank.scores import Similarity, Vectors, prepare
from fullrank.settings import DEFAULT_METRICS, parsed

__all__ = ["evaluate", "evaluate_dims", "evaluate_embeddings"]


def evaluate(
    model: object,
    golden: GoldenSet,
    *,
    metrics: Sequence[str | Metric] = DEFAULT_METRICS,
    ties: TieRule = "expected",
    similarity: Similarity | None = None,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
    precision: Precision | None = None,
    batch_tokens: int | None = None,
    list_length: int | None = None,
    exclude_self: bool = False,
    on_nonfinite: OnNonfinite = "raise",
    stop_below: Mapping[str, float] | None = None,
    pool: int | None = None,
    competitors: Sequence[Result] = (),
    distributed: bool = True,
    progress: Progress | None = None,
) -> Result:
    """Returns the exact retrieval quality of ``model`` on ``golden``.

    Args:
        model: a ``SentenceTransformer`` (PEFT-wrapped or not), a `Backbone`, an `Encoder`, or anything with
            ``encode(list[str])``.
        golden: held-out queries and the full corpus.
        metrics: what to compute, see `Metric`.
        ties: see `fullrank.metrics`.
        similarity: instead of the model's own: ``cosine``, ``dot`` or ``euclidean``.
        query_prompt, document_prompt: instead of those that the model declares; "" for none.
        precision: of encoding: ``fp32``, ``bf16``, ``fp16`` (autocast), or None for the model as it stands. Scores are
            computed in fp32 whatever this says.
        batch_tokens: padded tokens of one batch; chosen by device if None.
        list_length: documents kept for each query in `Result.hits` (default: the largest cut-off, at least 10).
        exclude_self: a document with the id of the query does not exist for that query.
        on_nonfinite: ``raise`` an error that names the first ids, or rank such embeddings ``worst`` (the result is then
            not eligible for selection).
        stop_below: ``{"recall@1": 0.61}`` stops as soon as every named metric is proved to lie below its value. The
            result then is a bound (`Result.bound`), not a score.
        pool: rank about so many documents instead of all: the judged ones, ``competitors`` and a fixed random sample.
            The result is a bound as well.
        competitors: earlier results on this golden set, whose lists are looked at first.
        distributed: under ``torch.distributed`` the ranks share the documents, and every rank must make this call;
            False evaluates on this rank alone.
        progress: called with (phase, done, all).

    Raises:
        DataError: no answerable query.
        SettingError: unknown metric, similarity, precision, or no way to encode with ``model``.
        EvaluationError: non-finite embeddings, or embeddings of a wrong shape.
    """
    plan = EvaluationPlan(
        as_encoder(model, query_prompt=query_prompt, document_prompt=document_prompt, similarity=similarity),
        golden,
        batch_tokens=batch_tokens,
        exclude_self=exclude_self,
        distributed=distributed,
    )
    return plan.run(
        metrics=metrics,
        ties=ties,
        precision=precision,
        list_length=list_length,
        on_nonfinite=on_nonfinite,
        stop_below=stop_below,
        pool=pool,
        competitors=competitors,
        progress=progress,
    )


def evaluate_dims(
    model: object,
    golden: GoldenSet,
    dims: Sequence[int],
    *,
    metrics: Sequence[str | Metric] = DEFAULT_METRICS,
    ties: TieRule = "expected",
    precision: Precision | None = None,
    progress: Progress | None = None,
) -> dict[int, Result]:
    """Returns the quality of a Matryoshka model at each of ``dims``, from one pass over the texts.

    Args:
        model, golden, metrics, ties, precision, progress: see `evaluate`.
        dims: how many of the first dimensions to keep.

    Raises:
        SettingError: no dimensions, or more than the model has.
    """
    plan = EvaluationPlan(as_encoder(model), golden)
    return plan.run_dims(dims, metrics=metrics, ties=ties, precision=precision, progress=progress)


def evaluate_embeddings(
    query_embeddings: Tensor | NDArray[Any],
    document_embeddings: Tensor | NDArray[Any],
    golden: GoldenSet,
    *,
    similarity: Similarity = "cosine",
    metrics: Sequence[str | Metric] = DEFAULT_METRICS,
    ties: TieRule = "expected",
    list_length: int | None = None,
    exclude_self: bool = False,
    on_nonfinite: OnNonfinite = "raise",
) -> Result:
    """Returns the quality of embeddings, in the order of ``golden.query_ids`` and ``golden.doc_ids``.

    Args:
        query_embeddings: float [queries, d], tensor or array (a memory-mapped one is read block by block).
        document_embeddings: float [documents, d].
        golden, similarity, metrics, ties, list_length, exclude_self, on_nonfinite: see `evaluate`.

    Raises:
        EvaluationError: shapes do not fit the golden set, or non-finite rows.
    """
    refuse_other_than_golden(golden)
    query_embeddings, document_embeddings = _as_table(query_embeddings), _as_table(document_embeddings)
    for name, table, n in (
        ("query_embeddings", query_embeddings, len(golden.queries)),
        ("document_embeddings", document_embeddings, len(golden.corpus)),
    ):
        if table.ndim != 2 or len(table) != n:
            raise EvaluationError(
                f"{name} has the shape {tuple(table.shape)}; golden set {golden.name!r} needs [{n}, d]"
            )
    if query_embeddings.shape[1] != document_embeddings.shape[1]:
        raise EvaluationError(
            f"queries have {query_embeddings.shape[1]} dimensions and documents {document_embeddings.shape[1]}; encode "
            "both with the same model"
        )
    queries = _as_tensor(query_embeddings)
    settings = Settings(parsed(metrics), ties, similarity, list_length, exclude_self, on_nonfinite)
    measurement = Measurement(golden, settings, queries, Clock())
    corpus = _Table(document_embeddings, measurement, queries.device)
    measurement.aim(measurement.judged, corpus[torch.from_numpy(measurement.judged)])
    measurement.take(np.arange(len(golden.corpus)), corpus)
    return measurement.result({})


@dataclass(frozen=True)
class _Table:
    """Embeddings that lie somewhere already, made ready a tile at a time; a memory-mapped array stays on disk."""

    embeddings: Tensor | NDArray[Any]
    measurement: Measurement
    device: torch.device

    def __getitem__(self, index: slice | Tensor) -> Vectors:
        if isinstance(index, slice):  # the one pass over all rows, which checks them
            return self.measurement.ready(np.arange(index.start, index.stop), self._rows(index))
        return prepare(self._rows(index.cpu()), self.measurement.settings.similarity)

    def _rows(self, index: slice | Tensor) -> Tensor:
        if not isinstance(self.embeddings, Tensor):
            rows = _as_tensor(self.embeddings[index if isinstance(index, slice) else index.numpy()])
        elif isinstance(index, slice):
            rows = self.embeddings[index]
        else:
            rows = self.embeddings.index_select(0, index.to(self.embeddings.device))
        return rows.to(self.device)


def _as_table(embeddings: Tensor | NDArray[Any]) -> Tensor | NDArray[Any]:
    if isinstance(embeddings, Tensor):
        table: Tensor | NDArray[Any] = embeddings.to_dense() if embeddings.is_sparse else embeddings
    else:
        try:
            table = embeddings if isinstance(embeddings, np.ndarray) else np.asarray(embeddings, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise EvaluationError(f"embeddings must be a tensor or an array [n, d]: {error}") from error
    if table.is_complex() if isinstance(table, Tensor) else np.iscomplexobj(table):
        raise EvaluationError(f"embeddings are {table.dtype}; expected real numbers")
    return table


def _as_tensor(embeddings: Tensor | NDArray[Any]) -> Tensor:
    # A copy of an array, because torch cannot share one that is read-only.
    return embeddings if isinstance(embeddings, Tensor) else torch.from_numpy(np.array(embeddings, dtype=np.float32))
