"""In-batch accuracy and MRR: diagnostics of the loss, never used to choose.

Promise: what is measured is the score matrix that the loss has just used; no extra forward pass, no graph kept alive,
nothing synchronised with the device until the numbers are read.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fullrank._errors import DataError, SettingError

__all__ = ["InBatchMonitor", "equal_texts", "in_batch_metrics"]

Ties = Literal["expected", "worst"]


def in_batch_metrics(
    scores: Tensor, n_negs: int = 0, *, positives: Tensor | None = None, ties: Ties = "expected"
) -> dict[str, float]:
    """Returns ``{"acc", "mrr", "candidates"}`` of one batch: each query ranks the documents of the batch.

    Args:
        scores: [B, C], row i holds the scores of query i; usually C = B * (1 + n_negs).
        n_negs: hard negatives of each query, where they stand behind their positive: the positive of query i is column
            i * (1 + n_negs). With 0 it is column i, which also fits "all positives first, then negatives".
        positives: instead of `n_negs`: int64 [B], the column of each positive, or bool [B, C], True where the document
            equals the positive of the query (equal texts are not negatives of each other).
        ties: ``expected`` (mean over all orders) or ``worst``.

    Raises:
        DataError: shapes do not fit.

    >>> in_batch_metrics(torch.tensor([[0.9, 0.1], [0.8, 0.2]]))
    {'acc': 0.5, 'mrr': 0.75, 'candidates': 2}
    """
    scores = torch.as_tensor(scores)
    acc, mrr = _acc_mrr(scores, _positive_mask(scores, n_negs, positives), ties).tolist()
    return {"acc": acc, "mrr": mrr, "candidates": scores.shape[1]}


def equal_texts(columns: Sequence[dict[str, Any]]) -> Tensor | None:
    """Returns bool [B, B * columns]: which documents of a batch are the same text as the positive of each query.

    Args:
        columns: the features of the positives, then those of each column of negatives. A loss sees features and no
            texts: equal texts are equal ``input_ids`` under the mask.
    """
    rows = []
    for features in columns:
        ids, mask = features.get("input_ids"), features.get("attention_mask")
        if not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or ids.ndim != 2 or ids.shape != mask.shape:
            return None
        rows.append(ids.masked_fill(mask == 0, -1))  # -1 is no token id, so padding never equals a token
    width = max(ids.shape[1] for ids in rows)
    padded = torch.cat([functional.pad(ids, (0, width - ids.shape[1]), value=-1) for ids in rows])
    _, group = torch.unique(padded, dim=0, return_inverse=True)
    return torch.eq(group[: len(rows[0]), None], group[None, :])


# Where the losses of sentence-transformers have all embeddings of a batch in hand; other losses do not rank candidates.
_RANKING_LOSSES: dict[str, tuple[str, Callable[[Any], list[Tensor]]]] = {
    "MultipleNegativesRankingLoss": ("compute_loss_from_embeddings", list),
    "CachedMultipleNegativesRankingLoss": ("calculate_loss", lambda columns: [torch.cat(list(c)) for c in columns]),
}


class InBatchMonitor:
    """Collects in-batch metrics between two log lines.

    `watch_loss` taps the losses of sentence-transformers, `watch_model` a Hugging Face model that returns ``scores``,
    `record` takes scores from any loop. Only forwards with gradients count.
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._batches = self._candidates = 0
        self._equal: Tensor | None = None
        self._depth, self._widest = 0, -1
        self._pending: tuple[Tensor, int] | None = None

    def record(self, scores: Tensor, *, n_negs: int = 0, positives: Tensor | None = None) -> None:
        """Adds one batch; arguments as in `in_batch_metrics`."""
        with torch.no_grad():
            values = _acc_mrr(scores.detach(), _positive_mask(scores, n_negs, positives), "expected")
        self._add(values, scores.shape[1])

    def flush(self) -> dict[str, float]:
        """Returns the means since the last call, as ``in_batch_acc``, ``in_batch_mrr``, ``in_batch_candidates``."""
        if self._sums is None or not self._batches:
            return {}
        acc, mrr = (self._sums / self._batches).tolist()
        out = {"in_batch_acc": acc, "in_batch_mrr": mrr, "in_batch_candidates": self._candidates / self._batches}
        self._sums, self._batches, self._candidates = None, 0, 0
        return out

    def watch_loss(self, loss: nn.Module) -> bool:
        """Taps the loss and those inside it; returns whether one of them ranks candidates within the batch."""
        tapped = False
        for module in loss.modules():
            for name, (method, columns_of) in _RANKING_LOSSES.items():
                if any(base.__name__ == name for base in type(module).__mro__):
                    self._tap(module, method, columns_of)
                    tapped = True
                    break
        if tapped:
            self._scope(loss)
        return tapped

    def watch_model(self, model: nn.Module) -> None:
        """Reads ``scores`` ([B, B * (1 + K)], positives at column i * (1 + K)) from what ``model`` returns."""

        def hook(_module: nn.Module, _args: object, output: Any) -> None:
            scores = output.get("scores") if isinstance(output, dict) else getattr(output, "scores", None)
            if not torch.is_grad_enabled() or not isinstance(scores, Tensor) or scores.ndim != 2:
                return
            rows, width = scores.shape
            if rows and width and width % rows == 0:
                self.record(scores, n_negs=width // rows - 1)

        model.register_forward_hook(hook)

    def _tap(self, module: nn.Module, name: str, columns_of: Callable[[Any], list[Tensor]]) -> None:
        inner, similarity = getattr(module, name), module.similarity_fct

        def tapped(embeddings: Any, *args: Any, **options: Any) -> Any:
            if torch.is_grad_enabled():
                self._see(columns_of(embeddings), similarity)
            return inner(embeddings, *args, **options)

        setattr(module, name, tapped)

    def _see(self, columns: list[Tensor], similarity: Any) -> None:
        """Keeps the metrics of the widest embeddings of a batch: MatryoshkaLoss calls once for each dimension."""
        if len(columns) < 2 or columns[0].shape[1] <= self._widest:
            return
        with torch.no_grad():
            queries, documents = columns[0].detach(), torch.cat([c.detach() for c in columns[1:]])
            scores = similarity(queries, documents)
            mask = _positive_mask(scores, 0, None)
            if self._equal is not None and self._equal.shape == mask.shape:
                mask |= self._equal
            self._widest = columns[0].shape[1]
            self._pending = (_acc_mrr(scores, mask, "expected"), scores.shape[1])

    def _scope(self, loss: nn.Module) -> None:
        """Wraps ``loss.forward``, so that one batch counts once and equal positives are known."""
        inner = loss.forward

        def forward(features: Any, *args: Any, **options: Any) -> Any:
            features = list(features)
            self._widest, self._pending = -1, None
            self._equal = equal_texts(features[1:]) if torch.is_grad_enabled() and len(features) > 1 else None
            try:
                return inner(features, *args, **options)
            finally:
                if self._pending is not None:
                    self._add(*self._pending)
                self._widest, self._pending, self._equal = -1, None, None

        loss.forward = forward

    def _add(self, values: Tensor, candidates: int) -> None:
        self._sums = values if self._sums is None else self._sums + values
        self._batches += 1
        self._candidates += candidates


def _positive_mask(scores: Tensor, n_negs: int, positives: Tensor | None) -> Tensor:
    """Returns bool [B, C]: the columns that hold a query's positive."""
    if scores.ndim != 2 or not scores.numel():
        raise DataError(f"scores must be [queries, candidates] and not empty, got {tuple(scores.shape)}")
    n, width = scores.shape
    positives = None if positives is None else torch.as_tensor(positives)
    if positives is not None and positives.dtype == torch.bool:
        if positives.shape != scores.shape or not bool(positives.any(dim=1).all()):
            raise DataError(f"positives must be bool {tuple(scores.shape)} with a positive in every row")
        return positives.to(scores.device)
    if n_negs < 0:
        raise DataError(f"n_negs={n_negs} must be 0 or more")
    if positives is None:  # no look at the device: this runs in every training step
        columns, fits = torch.arange(n, device=scores.device) * (1 + n_negs), (n - 1) * (1 + n_negs) < width
    else:
        columns = positives.to(scores.device)
        fits = (
            not columns.is_floating_point()
            and columns.shape == (n,)
            and int(columns.min()) >= 0
            and int(columns.max()) < width
        )
    if not fits:
        raise DataError(
            f"scores {tuple(scores.shape)} do not hold the positives: with n_negs={n_negs} there must be at least "
            f"{(n - 1) * (1 + n_negs) + 1} columns, or pass positives=[{n} columns]"
        )
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask[torch.arange(n, device=scores.device), columns] = True
    return mask


def _acc_mrr(scores: Tensor, mask: Tensor, ties: Ties) -> Tensor:
    """Returns float64 [2]: accuracy and MRR of the best-scored positive among the other documents."""
    if ties not in ("expected", "worst"):
        raise SettingError(f"ties={ties!r} is unknown; choose expected or worst")
    rows = scores.to(torch.float64)
    target = rows.masked_fill(~mask, -torch.inf).amax(dim=1, keepdim=True)
    # A NaN target ranks last and a NaN competitor first: a broken batch never looks good.
    others = rows.masked_fill(torch.isnan(rows), torch.inf).masked_fill(mask, -torch.inf)
    better = (others > target).sum(dim=1)
    tied = ((others == target) & ~mask).sum(dim=1) + 1
    better = torch.where(torch.isnan(target[:, 0]), (~mask).sum(dim=1), better)
    if ties == "worst":
        better, tied = better + tied - 1, torch.ones_like(tied)
    acc = torch.where(better == 0, 1 / tied.double(), 0.0)
    ranks = torch.arange(1, scores.shape[1] + 1, dtype=torch.float64, device=scores.device)
    harmonic = torch.cat([ranks.new_zeros(1), (1 / ranks).cumsum(0)])
    mrr = torch.where(tied == 1, 1 / (better + 1).double(), (harmonic[better + tied] - harmonic[better]) / tied)
    return torch.stack([acc.mean(), mrr.mean()])
