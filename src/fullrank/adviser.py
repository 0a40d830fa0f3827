"""What the in-batch numbers of a run suggest, gathered as the run goes.

Promise: in-batch numbers explain, they never choose.
"""

from collections.abc import Mapping

from fullrank.advice import diverging, low_mrr
from fullrank.metrics import Metric
from fullrank.result import Finding, Result
from fullrank.stats import mean_interval

__all__ = ["Adviser"]


class Adviser:
    """Collects loss lines and scores, and says what they suggest.

    Args:
        metric: that scores are shown for.
        warmup_steps: of the learning rate.
    """

    def __init__(self, metric: Metric, *, warmup_steps: int) -> None:
        self.metric, self.warmup_steps = metric, warmup_steps
        self._lines: dict[float, list[tuple[int, float, float]]] = {}
        self._scores: list[tuple[int, float]] = []

    def loss_line(self, step: int, logs: Mapping[str, float]) -> None:
        """Takes the in-batch numbers of a loss line, apart by dimension where a loss draws dimensions."""
        if "in_batch_acc" in logs:
            line = (step, logs["in_batch_acc"], logs["in_batch_mrr"])
            self._lines.setdefault(logs.get("in_batch_dim", 0.0), []).append(line)

    def evaluation(self, step: int, result: Result) -> list[Finding]:
        """Takes a result on the set that chooses, and returns what there is to say; call it as results come."""
        self._scores.append((step, result[self.metric]))
        if not self._lines:
            return []
        lines = self._lines[max(self._lines)]
        # Of values on a pool too: how much the curve may move by chance, whatever it is a curve of.
        low, high = mean_interval(result.per_query[str(self.metric)])
        found = (
            low_mrr([(at, mrr) for at, _, mrr in lines], warmup_steps=self.warmup_steps),
            diverging(
                self._scores,
                [(at, acc) for at, acc, _ in lines],
                interval=(high - low) / 2,
                metric=str(self.metric),
            ),
        )
        return [finding for finding in found if finding is not None]
