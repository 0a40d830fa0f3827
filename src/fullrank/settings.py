"""Settings that several doors share: which metrics are computed where nobody says otherwise."""

from collections.abc import Sequence

from fullrank._errors import SettingError
from fullrank.metrics import Metric

__all__ = ["DEFAULT_METRICS", "parsed"]

DEFAULT_METRICS = ("recall@1", "recall@5", "recall@10", "ndcg@10", "mrr@10")


def parsed(metrics: Sequence[str | Metric]) -> list[Metric]:
    """Returns the metrics, in order, each once.

    Raises:
        SettingError: none given, or one that does not exist.
    """
    if isinstance(metrics, str | Metric) or not metrics:
        raise SettingError(f"metrics={metrics!r} must be a non-empty list, for example ['recall@1', 'ndcg@10']")
    return list(dict.fromkeys(Metric.parse(metric) for metric in metrics))
