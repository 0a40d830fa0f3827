"""An evaluation of one model on one golden set that can be run again and again.

Promise: texts are tokenised once and equal texts encoded once; the model and the random states are left as they were;
under ``torch.distributed`` the ranks share the work, and no embedding of a document leaves its rank.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fullrank._errors import SettingError
from fullrank.anytime import Anytime, Documents, extend_until, values_to_beat
from fullrank.clock import Clock
from fullrank.competitors import Rivals, hard_first, pool_positions
from fullrank.data import GoldenSet, refuse_other_than_golden
from fullrank.encode import Adapter, Precision, at_precision
from fullrank.isolate import modules_within, undisturbed
from fullrank.measure import Measurement
from fullrank.metrics import Metric, TieRule
from fullrank.models import model_fingerprint
from fullrank.outcome import OnNonfinite, Settings
from fullrank.prompting import unused_prompts
from fullrank.ranks import ALONE, Ranks, current_ranks
from fullrank.result import Result
from fullrank.settings import DEFAULT_METRICS, parsed, refuse_no_count
from fullrank.texts import TextSide
from fullrank.tokens import OnBatch
from fullrank.wrappers import Side

__all__ = ["EvaluationPlan", "Progress"]

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, of all)."""


@dataclass
class EvaluationPlan:
    """An evaluation that can be run again and again: texts are tokenised once, equal texts are encoded once.

    Args:
        encoder: from `as_encoder`.
        golden: the golden set.
        batch_tokens, exclude_self, distributed: see `evaluate`.
    """

    encoder: Adapter
    golden: GoldenSet
    batch_tokens: int | None = None
    exclude_self: bool = False
    distributed: bool = True
    _sides: dict[Side, TextSide] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        refuse_other_than_golden(self.golden)
        self.golden.require_answerable()
        refuse_no_count("batch_tokens", self.batch_tokens, "a whole number from 1 or None")

    def run(
        self,
        *,
        metrics: Sequence[str | Metric] = DEFAULT_METRICS,
        ties: TieRule = "expected",
        precision: Precision | None = None,
        list_length: int | None = None,
        on_nonfinite: OnNonfinite = "raise",
        stop_below: Mapping[str, float] | None = None,
        pool: int | None = None,
        competitors: Sequence[Result] = (),
        within: NDArray[np.int64] | None = None,
        progress: Progress | None = None,
    ) -> Result:
        """Returns the result for the model as it stands now; see `evaluate`.

        ``within``: the positions of a pool that is known already, in the place of ``pool``.
        """
        refuse_no_count("pool", pool, "a whole number of documents from 1 or None")
        values = values_to_beat({} if stop_below is None else stop_below)
        rivals = Rivals(competitors, self.golden)
        if pool is not None:
            within = pool_positions(self.golden, pool, hard_first(competitors, self.golden))
        session = self.anytime(
            metrics=[*parsed(metrics), *values],
            ties=ties,
            precision=precision,
            list_length=list_length,
            on_nonfinite=on_nonfinite,
            progress=progress,
            within=within,
        )
        extend_until(session, rivals, values, within=within)
        return session.result()

    def run_dims(
        self,
        dims: Sequence[int],
        *,
        metrics: Sequence[str | Metric] = DEFAULT_METRICS,
        ties: TieRule = "expected",
        precision: Precision | None = None,
        progress: Progress | None = None,
    ) -> dict[int, Result]:
        """Returns the results at each of ``dims``; see `evaluate_dims`."""
        whole = isinstance(dims, Sequence) and all(isinstance(n, int) and not isinstance(n, bool) for n in dims)
        if not whole or not dims or min(dims) < 1:
            raise SettingError(f"dims={dims!r} must be whole numbers from 1, for example [384, 128, 64]")
        session = self.anytime(metrics=metrics, ties=ties, precision=precision, progress=progress, dims=dims)
        session.extend(session.remaining)
        results = {n: session.result(n) for n in dims}
        return {n: replace(r, provenance={**r.provenance, "dimensions": n}) for n, r in results.items()}

    def anytime(
        self,
        *,
        metrics: Sequence[str | Metric] = DEFAULT_METRICS,
        ties: TieRule = "expected",
        precision: Precision | None = None,
        list_length: int | None = None,
        on_nonfinite: OnNonfinite = "raise",
        progress: Progress | None = None,
        dims: Sequence[int | None] = (None,),
        within: NDArray[np.int64] | None = None,
    ) -> Anytime:
        """Returns an evaluation of the model as it stands now that has seen the judged documents only.

        It goes on with whatever weights the model holds when it is extended: they must be the same. ``within``: the
        positions that it will be extended to, for the progress bar.
        """
        settings = Settings(
            parsed(metrics), ties, self.encoder.similarity, list_length, self.exclude_self, on_nonfinite
        )
        provenance = self._provenance(precision)
        ranks = current_ranks() if self.distributed else ALONE
        clock = Clock()
        with ranks.together(), self._undisturbed():
            queries, documents = self._side("query", clock), self._side("document", clock)
            everything = np.arange(len(self.golden.queries))
            with at_precision(precision, queries.device), clock("encode_queries"):
                _, rows = queries.encode_share(everything, ranks, _reporter(progress, queries, clock, ranks))
        query_rows = _gathered(rows, queries.shares(everything, ranks.size), ranks, queries.device)
        if too_many := [n for n in dims if n is not None and n > query_rows.shape[1]]:
            raise SettingError(f"the model gives {query_rows.shape[1]} dimensions; {too_many[0]} cannot be kept")
        report = _reporter(progress, documents, clock, ranks, within)

        def encode_documents(block: NDArray[np.int64]) -> tuple[NDArray[np.int64], Tensor | None]:
            with self._undisturbed(), at_precision(precision, documents.device), clock("encode"):
                return documents.encode_share(block, ranks, report)

        return Anytime(
            {n: Measurement(self.golden, settings, query_rows[:, :n], clock, ranks) for n in dims},
            Documents(encode_documents, documents.by_length(), documents.inverse),
            lambda measurement: _with_text_facts(measurement.result(provenance), self, queries, documents),
            ranks,
        )

    def _undisturbed(self) -> AbstractContextManager[None]:
        return undisturbed(self.encoder.model)

    def probe(self, n: int = 8, *, precision: Precision | None = None) -> Tensor:
        """Returns float32 [2n, d] on the CPU: embeddings of the first ``n`` queries and documents, a fingerprint."""
        with self._undisturbed():
            sides = [self._side("query", Clock()), self._side("document", Clock())]
            with at_precision(precision, sides[0].device):
                rows = [side.encode(np.arange(min(n, len(side.inverse)))) for side in sides]
        return torch.cat([part.detach().float().cpu() for part in rows])

    def size(self, within: NDArray[np.int64] | None = None) -> tuple[int, int, int]:
        """Returns documents, distinct ones, and the tokens to encode (characters without a tokenizer), queries too.

        ``within``: positions of a pool; default: the corpus.
        """
        documents, queries = (self._side(side, Clock()) for side in ("document", "query"))
        places = documents.inverse if within is None else documents.inverse[within]
        texts = np.unique(places)
        return len(places), len(texts), int(documents.lengths()[texts].sum() + queries.lengths().sum())

    def sample(self, n: int, *, precision: Precision | None = None) -> int:
        """Encodes ``n`` documents evenly spaced by length, for timing, and returns how many tokens that were."""
        with self._undisturbed():
            side = self._side("document", Clock())
            order = side.by_length()
            index = order[np.unique(np.linspace(0, len(order) - 1, min(n, len(order))).astype(np.int64))]
            with at_precision(precision, side.device):
                side.encode(index)
        return int(side.lengths()[np.unique(side.inverse[index])].sum())

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
            "precision": _precision_used(precision, inner),
            "max_length": _max_length(self.encoder),
            "adapter": type(self.encoder).__name__,
            "versions": {name: version(name) for name in ("fullrank", "torch", "transformers")},
        }


def _precision_used(precision: Precision | None, model: object) -> str:
    """Returns the precision of encoding; raises `SettingError` for fp32 of weights that hold less."""
    parameters = [p for part in modules_within(model) for p in part.parameters()]
    half = sorted({str(p.dtype).removeprefix("torch.") for p in parameters if p.is_floating_point() and p.itemsize < 4})
    if precision == "fp32" and half:
        raise SettingError(
            f"precision='fp32', but the model's weights are {', '.join(half)}: call model.float() first, or pass "
            "precision=None to evaluate it as it stands"
        )
    return precision or " ".join(["as the model stands", *half])


def _reporter(
    progress: Progress | None, side: TextSide, clock: Clock, ranks: Ranks, within: NDArray[np.int64] | None = None
) -> OnBatch:
    n_texts = len(side.texts) if within is None else len(np.unique(side.inverse[within]))
    total, done = -(-n_texts // ranks.size), 0

    def report(texts: int, tokens: int, padded: int) -> None:
        nonlocal done
        done += texts
        clock.count("encode_queries" if side.side == "query" else "encode", texts, tokens, padded)
        if progress is not None:
            progress("queries" if side.side == "query" else "documents", min(done, total), total)

    return report


def _gathered(rows: Tensor | None, shares: list[NDArray[np.int64]], ranks: Ranks, device: torch.device) -> Tensor:
    """Returns the embeddings of all queries, in order, from the share that each rank encoded."""
    if ranks.size == 1 and rows is not None:
        return rows
    width = int(ranks.max(torch.tensor([0 if rows is None else rows.shape[1]])))
    mine = torch.empty((0, width), device=device) if rows is None else rows.float()
    parts = ranks.gather(mine)
    out = torch.empty((sum(map(len, shares)), width), device=device)
    for share, part in zip(shares, parts, strict=True):
        out[torch.from_numpy(share).to(device)] = part
    return out


def _with_text_facts(result: Result, plan: EvaluationPlan, queries: TextSide, documents: TextSide) -> Result:
    """Returns the result with what only the texts tell: truncated ones, prompts that were left out."""
    counts = dict(result.counts)
    if documents.n_truncated is not None and queries.n_truncated is not None:
        counts |= {"n_truncated": documents.n_truncated, "n_truncated_queries": queries.n_truncated}
    findings = (*result.findings, *unused_prompts(plan.encoder))
    return replace(result, counts=counts, findings=findings)


def _max_length(encoder: Adapter) -> int | None:
    found = getattr(getattr(encoder, "model", None), "max_seq_length", None) or getattr(encoder, "max_length", None)
    return found if isinstance(found, int) else None  # a static embedding has the length infinity


def _model_name(model: object) -> str:
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", "") or getattr(config, "name_or_path", "")
    return str(name or type(model).__name__)
