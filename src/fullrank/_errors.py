"""The errors that fullrank raises: each is a ``FullrankError`` and the builtin that a caller would expect.

A message says what was found, what was expected and what to do.
"""

from collections.abc import Iterable, Sequence

__all__ = [
    "DataError",
    "EvaluationError",
    "FullrankError",
    "MissingExtraError",
    "NonFiniteError",
    "SettingError",
    "first_few",
]


class FullrankError(Exception):
    """Base of every error that fullrank raises on purpose."""


class DataError(FullrankError, ValueError):
    """A golden set, a run or a file of results is not what it should be."""


class SettingError(FullrankError, ValueError):
    """An option has a value that cannot work."""


class EvaluationError(FullrankError, RuntimeError):
    """A model gave embeddings that cannot be ranked, or stored weights are not those that were scored."""


class NonFiniteError(EvaluationError):
    """Embeddings are NaN or infinite: the model has diverged, or a text cannot be encoded."""


class MissingExtraError(FullrankError, ImportError):
    """An optional package is needed and not installed."""


def first_few(items: Iterable[object], *, n: int = 5) -> str:
    """Returns the first ``n`` items, comma-separated, and how many more there are.

    >>> first_few(["a", "b", "c"], n=2)
    "'a', 'b' and 1 more"
    """
    shown: Sequence[object] = list(items)
    text = ", ".join(repr(item) for item in shown[:n])
    return text if len(shown) <= n else f"{text} and {len(shown) - n} more"
