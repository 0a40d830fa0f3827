"""Settings that several doors share: the metrics where nobody says otherwise, and checks of options."""

from collections.abc import Collection, Sequence

from fullrank._errors import SettingError
from fullrank.metrics import Metric

__all__ = ["DEFAULT_METRICS", "parsed", "refuse_no_count", "refuse_unknown"]

DEFAULT_METRICS = ("recall@1", "recall@5", "recall@10", "ndcg@10", "mrr@10")


def parsed(metrics: Sequence[str | Metric]) -> list[Metric]:
    """Returns the metrics, in order, each once.

    Raises:
        SettingError: none given, or one that does not exist.
    """
    if not isinstance(metrics, Sequence) or isinstance(metrics, str) or not metrics:
        raise SettingError(f"metrics={metrics!r} must be a non-empty list, for example ['recall@1', 'ndcg@10']")
    return list(dict.fromkeys(Metric.parse(metric) for metric in metrics))


def refuse_no_count(name: str, value: object, wanted: str) -> None:
    """Raises `SettingError` unless ``value`` is None or a whole number from 1."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise SettingError(f"{name}={value!r} must be {wanted}")


def refuse_unknown(name: str, value: object, known: Collection[object]) -> None:
    """Raises `SettingError` unless ``value`` is one of ``known``."""
    if value not in known:
        raise SettingError(f"{name}={value!r} is unknown; choose one of {', '.join(map(str, known))}")
