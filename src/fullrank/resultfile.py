"""What a file of a result must hold: the shape of each field, and finite numbers.

Promise: a fault is named by its field, and by metric and query where it is a value.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["first_fault"]


def first_fault(body: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with the fields of a result file, or None; all fields are there."""
    if fault := _faulty_value(body):
        return fault
    if wrong := [name for name, fits in _SHAPES.items() if not fits(body[name])]:
        return f"{wrong[0]} is {str(body[wrong[0]])[:60]!r}"
    if lacking := [name for name in body["metrics"] if name not in body["per_query"]]:
        return f"per_query has no {lacking[0]!r}"
    return None


def _faulty_value(body: Mapping[str, Any]) -> str | None:
    """Returns which value of a metric is no finite number, or None; other shapes are left to the reader."""
    metrics, per_query, ids = body["metrics"], body["per_query"], body["query_ids"]
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        if not _finite_number(value):
            return f"metric {name!r} is {value!r} and no finite number"
    for name, values in per_query.items() if isinstance(per_query, dict) else ():
        for i, value in enumerate(values if isinstance(values, list) else ()):
            if not _finite_number(value):
                query = ids[i] if isinstance(ids, list) and i < len(ids) else f"number {i}"
                return f"metric {name!r} of query {query!r} is {value!r} and no finite number"
    return None


def _finite_number(value: object) -> bool:
    return _is_number(value) and math.isfinite(value)  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_finding(value: object) -> bool:
    return (
        isinstance(value, dict)
        and all(_is_text(value.get(name)) for name in ("kind", "severity", "message", "remedy"))
        and _is_number(value.get("count"))
        and _list_of(_is_text)(value.get("examples"))
    )


def _is_hit(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_text(value[0]) and _is_number(value[1])


def _list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _dict_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


_SHAPES: dict[str, Callable[[object], bool]] = {
    "metrics": _dict_of(_is_number),
    "per_query": _dict_of(_list_of(_is_number)),
    "query_ids": _list_of(_is_text),
    "counts": _dict_of(_is_number),
    "hits": _dict_of(_list_of(_is_hit)),
    "qrels": _dict_of(_dict_of(_is_number)),
    "queries": _dict_of(_is_text),
    "groups": _dict_of(_is_text),
    "relevant_from": _is_number,
    "timing": _dict_of(_is_number),
    "provenance": lambda value: isinstance(value, dict),
    "findings": _list_of(_is_finding),
    "tie_rate": _is_number,
    "collapsed": lambda value: isinstance(value, bool),
    "eligible": lambda value: isinstance(value, bool),
    "mean_cosine": lambda value: value is None or _is_number(value),
    "bound": lambda value: isinstance(value, bool),
}
"""What the fields of a result file hold."""
