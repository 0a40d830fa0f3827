"""In-batch accuracy and MRR: diagnostics of the loss, never used to choose.

Promise: what is measured is the score matrix that the loss has just used; no extra forward pass, no graph kept alive,
nothing synchronised with the device until the numbers are read.
"""

import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fullrank._errors import DataError, SettingError
from fullrank.taps import LossTaps

__all__ = ["InBatchMonitor", "in_batch_metrics"]

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
    scores = _as_scores(scores)
    acc, mrr = _acc_mrr(scores, _positive_mask(scores, n_negs, positives), ties)
    return {"acc": float(acc.mean()), "mrr": float(mrr.mean()), "candidates": scores.shape[1]}


class InBatchMonitor:
    """Collects in-batch metrics between two log lines.

    `watch_loss` taps the losses of sentence-transformers, `watch_model` a Hugging Face model that returns ``scores``,
    `record` takes scores from any loop. Only forwards with gradients count. Queries rank the documents of the batch
    by the similarity of the loss, before its scale and hardness penalties; the queries and further directions that a
    loss may contrast as well are no candidates, nor are documents that a guide has taken out as false negatives.
    """

    def __init__(self) -> None:
        self._taps = LossTaps(_sums, self._add)
        self._windows: dict[int, _Window] = {}
        self._hooks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

    def record(self, scores: Tensor, *, n_negs: int = 0, positives: Tensor | None = None) -> None:
        """Adds one batch; arguments as in `in_batch_metrics`."""
        scores = _as_scores(scores)
        with torch.no_grad():
            sums = _sums(scores.detach(), _positive_mask(scores, n_negs, positives))
        self._add(-1, sums, scores.shape[0], None)

    def flush(self) -> dict[str, float]:
        """Returns the means over all queries since the last call, and forgets them.

        Keys: ``in_batch_acc``, ``in_batch_mrr``, ``in_batch_candidates`` (documents that a query ranked), and with a
        MatryoshkaLoss ``in_batch_dim``, the dimension of the embeddings: where it draws dimensions, the numbers are of
        the batches at the largest one it drew since the last call. In a distributed run: of this process's queries.
        """
        windows, self._windows = list(self._windows.values()), {}
        if not windows:
            return {}
        n_queries = sum(window.n_queries for window in windows)
        totals = (window.sums.tolist() for window in windows)
        acc, mrr, candidates = (sum(column) / n_queries for column in zip(*totals, strict=True))
        out = {"in_batch_acc": acc, "in_batch_mrr": mrr, "in_batch_candidates": candidates}
        dims = [window.dim for window in windows if window.dim is not None]
        return {**out, "in_batch_dim": float(max(dims))} if dims else out

    def watch_loss(self, loss: nn.Module) -> bool:
        """Taps the loss and those inside it; returns whether one of them ranks candidates within the batch."""
        return self._taps.watch(loss)

    def watch_model(self, model: nn.Module) -> None:
        """Reads ``scores`` ([B, B * (1 + K)], positives at column i * (1 + K)) from what ``model`` returns."""

        def hook(_module: nn.Module, _args: object, output: Any) -> None:
            scores = output.get("scores") if isinstance(output, dict) else getattr(output, "scores", None)
            if not torch.is_grad_enabled() or not isinstance(scores, Tensor) or scores.ndim != 2:
                return
            rows, width = scores.shape
            if rows and width and width % rows == 0:
                self.record(scores, n_negs=width // rows - 1)

        if model not in self._hooks:
            self._hooks[model] = model.register_forward_hook(hook)

    def release(self) -> None:
        """Leaves losses and models as they were before they were watched, and forgets what was not flushed."""
        self._taps.release()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._windows = {}

    def _add(self, source: int, sums: Tensor, n_queries: int, dim: int | None) -> None:
        window = self._windows.get(source)
        if window is None or (dim or 0) > (window.dim or 0):
            self._windows[source] = _Window(sums, n_queries, dim)
        elif dim == window.dim:
            self._windows[source] = _Window(window.sums + sums, window.n_queries + n_queries, dim)


@dataclass(frozen=True)
class _Window:
    """Sums of one loss since the last log line; they stay on the device until they are read."""

    sums: Tensor
    n_queries: int
    dim: int | None


def _as_scores(scores: Any) -> Tensor:
    try:
        return torch.as_tensor(scores)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"scores must be a tensor [queries, candidates], got a {type(scores).__name__}: {error}"
        ) from error


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


def _sums(scores: Tensor, mask: Tensor) -> Tensor:
    """Returns float [3], summed over the queries: accuracy, MRR, and the candidates, which are those above -inf."""
    acc, mrr = _acc_mrr(scores, mask, "expected")
    return torch.stack([acc.sum(), mrr.sum(), (scores != -torch.inf).sum().to(acc.dtype)])


def _acc_mrr(scores: Tensor, mask: Tensor, ties: Ties) -> tuple[Tensor, Tensor]:
    """Returns accuracy and MRR [B] of the best-scored positive among the other documents."""
    if ties not in ("expected", "worst"):
        raise SettingError(f"ties={ties!r} is unknown; choose expected or worst")
    # Comparing needs no more digits than the scores have; Apple's devices have no float64 for the values.
    exact = torch.float32 if scores.device.type == "mps" else torch.float64
    rows = scores if scores.is_floating_point() else scores.to(exact)
    target = rows.masked_fill(~mask, -torch.inf).amax(dim=1, keepdim=True)
    # A NaN target ranks last and a NaN competitor first: a broken batch never looks good.
    others = rows.masked_fill(torch.isnan(rows), torch.inf).masked_fill(mask, -torch.inf)
    better = (others > target).sum(dim=1)
    tied = ((others == target) & ~mask).sum(dim=1) + 1
    better = torch.where(torch.isnan(target[:, 0]), (~mask).sum(dim=1), better)
    if ties == "worst":
        better, tied = better + tied - 1, torch.ones_like(tied)
    acc = torch.where(better == 0, 1 / tied.to(exact), 0.0)
    ranks = torch.arange(1, scores.shape[1] + 1, dtype=exact, device=scores.device)
    harmonic = torch.cat([ranks.new_zeros(1), (1 / ranks).cumsum(0)])
    mrr = torch.where(tied == 1, 1 / (better + 1).to(exact), (harmonic[better + tied] - harmonic[better]) / tied)
    return acc, mrr
