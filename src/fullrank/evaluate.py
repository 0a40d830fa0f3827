"""Full-corpus evaluation: embed every document, embed every query, rank exactly, measure.

Promise: the same model and data give the same numbers whatever the block size; nothing is sampled or approximated; the
model and the random states are left as they were.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fullrank._errors import EvaluationError, SettingError
from fullrank.data import GoldenSet, refuse_other_than_golden
from fullrank.encode import Adapter, Precision, Side, as_encoder, at_precision, declared_prompt
from fullrank.isolate import undisturbed
from fullrank.measure import Clock, Documents, OnNonfinite, Settings, measure
from fullrank.metrics import Metric, TieRule
from fullrank.models import model_fingerprint
from fullrank.result import Finding, Result
from fullrank.search import Similarity
from fullrank.settings import DEFAULT_METRICS, parsed
from fullrank.texts import TextSide

__all__ = ["EvaluationPlan", "evaluate", "evaluate_embeddings"]

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, of all)."""


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
    )
    return plan.run(
        metrics=metrics,
        ties=ties,
        precision=precision,
        list_length=list_length,
        on_nonfinite=on_nonfinite,
        progress=progress,
    )


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
    device = query_embeddings.device if isinstance(query_embeddings, Tensor) else torch.device("cpu")

    def documents(index: NDArray[np.int64]) -> Tensor:
        if isinstance(document_embeddings, Tensor):
            return document_embeddings[torch.from_numpy(index).to(document_embeddings.device)].to(device)
        return torch.from_numpy(np.array(document_embeddings[index], dtype=np.float32)).to(device)

    queries = (
        query_embeddings
        if isinstance(query_embeddings, Tensor)
        else torch.from_numpy(np.array(query_embeddings, dtype=np.float32))
    )
    settings = Settings(parsed(metrics), ties, similarity, list_length, exclude_self, on_nonfinite)
    positions = np.arange(len(golden.corpus))
    return measure(golden, settings, queries, Documents(documents, positions, positions), Clock(), {})


@dataclass
class EvaluationPlan:
    """An evaluation that can be run again and again: texts are tokenised once, equal texts are encoded once.

    Args:
        encoder: from `as_encoder`.
        golden: the golden set.
        batch_tokens, exclude_self: see `evaluate`.
    """

    encoder: Adapter
    golden: GoldenSet
    batch_tokens: int | None = None
    exclude_self: bool = False
    _sides: dict[Side, TextSide] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        refuse_other_than_golden(self.golden)
        self.golden.require_answerable()
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise SettingError(f"batch_tokens={self.batch_tokens} must be at least 1")

    def run(
        self,
        *,
        metrics: Sequence[str | Metric] = DEFAULT_METRICS,
        ties: TieRule = "expected",
        precision: Precision | None = None,
        list_length: int | None = None,
        on_nonfinite: OnNonfinite = "raise",
        progress: Progress | None = None,
    ) -> Result:
        """Returns the result for the model as it stands now; see `evaluate`."""
        settings = Settings(
            parsed(metrics), ties, self.encoder.similarity, list_length, self.exclude_self, on_nonfinite
        )
        model = getattr(self.encoder, "model", None)
        clock = Clock()
        with undisturbed(model if isinstance(model, nn.Module) else None):
            queries, documents = self._side("query", clock), self._side("document", clock)
            device = queries.device
            with at_precision(precision, device), clock("encode_queries"):
                query_rows = queries.encode(np.arange(len(self.golden.queries)), _reporter(progress, queries))
            report = _reporter(progress, documents)

            def encode_documents(index: NDArray[np.int64]) -> Tensor:
                with at_precision(precision, device), clock("encode"):
                    return documents.encode(index, report)

            source = Documents(encode_documents, documents.by_length(), documents.inverse)
            result = measure(self.golden, settings, query_rows, source, clock, self._provenance(precision))
        return _with_text_facts(result, self, queries, documents)

    def probe(self, n: int = 8, *, precision: Precision | None = None) -> Tensor:
        """Returns float32 [2n, d] on the CPU: embeddings of the first ``n`` queries and documents, a fingerprint."""
        model = getattr(self.encoder, "model", None)
        with undisturbed(model if isinstance(model, nn.Module) else None):
            sides = [self._side("query", Clock()), self._side("document", Clock())]
            with at_precision(precision, sides[0].device):
                rows = [side.encode(np.arange(min(n, len(side.inverse)))) for side in sides]
        return torch.cat([part.detach().float().cpu() for part in rows])

    def _side(self, side: Side, clock: "Clock") -> "TextSide":
        if side not in self._sides:
            texts = self.golden.query_texts if side == "query" else self.golden.doc_texts
            with clock("tokenise"):
                self._sides[side] = TextSide(self.encoder, side, texts, self.batch_tokens)
        return self._sides[side]

    def _provenance(self, precision: Precision | None) -> dict[str, Any]:
        inner = getattr(self.encoder, "model", None)
        return {
            "model": _model_name(inner),
            "model_fingerprint": model_fingerprint(inner),
            "prompts": {side: self.encoder.prompt(side) for side in ("query", "document")},
            "precision": precision or "as the model stands",
            "max_length": _max_length(self.encoder),
            "adapter": type(self.encoder).__name__,
            "versions": {name: version(name) for name in ("fullrank", "torch", "transformers")},
        }


def _as_table(embeddings: Tensor | NDArray[Any]) -> Tensor | NDArray[Any]:
    if isinstance(embeddings, Tensor):
        return embeddings.to_dense() if embeddings.is_sparse else embeddings
    try:
        return embeddings if isinstance(embeddings, np.ndarray) else np.asarray(embeddings, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise EvaluationError(f"embeddings must be a tensor or an array [n, d]: {error}") from error


def _reporter(progress: Progress | None, side: TextSide) -> Callable[[int], None] | None:
    if progress is None:
        return None
    total, done = len(side.texts), 0

    def report(n: int) -> None:
        nonlocal done
        done += n
        progress("queries" if side.side == "query" else "documents", done, total)

    return report


def _with_text_facts(result: Result, plan: EvaluationPlan, queries: TextSide, documents: TextSide) -> Result:
    """Returns the result with what only the texts tell: truncated ones, prompts that were left out."""
    counts = dict(result.counts)
    if documents.n_truncated is not None and queries.n_truncated is not None:
        counts |= {"n_truncated": documents.n_truncated, "n_truncated_queries": queries.n_truncated}
    model = getattr(plan.encoder, "model", None)
    unused = [side for side in ("query", "document") if declared_prompt(model, side) and not plan.encoder.prompt(side)]
    findings = list(result.findings)
    if unused:
        findings.append(
            Finding(
                "prompt-unused",
                "warning",
                "the model declares a prompt that was not used",
                count=len(unused),
                examples=tuple(unused),
                remedy="Leave query_prompt and document_prompt at None to use the model's own",
            )
        )
    return replace(result, counts=counts, findings=tuple(findings))


def _max_length(encoder: Adapter) -> int | None:
    found = getattr(getattr(encoder, "model", None), "max_seq_length", None) or getattr(encoder, "max_length", None)
    return found if isinstance(found, int) else None  # a static embedding has the length infinity


def _model_name(model: object) -> str:
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", "") or getattr(config, "name_or_path", "")
    return str(name or type(model).__name__)
