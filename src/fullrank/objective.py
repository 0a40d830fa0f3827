"""The value that chooses: one metric of one golden set, or a weighted sum over several.

Promise: what is chosen by is named in logs, journal and files exactly as the user named it.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fullrank._errors import SettingError
from fullrank.data import GoldenSet
from fullrank.metrics import Metric
from fullrank.result import Result
from fullrank.settings import parsed

__all__ = [
    "POOL",
    "Objective",
    "collapse_names",
    "full_names",
    "log_name",
    "log_names",
    "metrics_needed",
    "named_sets",
    "pool_name",
]

POOL = "_pool"
"""Ends the name of a value over a part of the corpus: an upper bound of the score."""


@dataclass(frozen=True)
class Objective:
    """A weighted sum of metrics of golden sets.

    Attributes:
        terms: (golden set, metric, weight).
        label: the name of the objective: the metric where there is one term on the only set, else as the user wrote it.
    """

    terms: tuple[tuple[str, Metric, float], ...]
    label: str

    @classmethod
    def parse(cls, select: str | Mapping[str, float], set_names: Sequence[str]) -> "Objective":
        """Returns the objective that ``select`` names.

        Args:
            select: ``"recall@1"``, ``"dev/recall@1"``, or ``{"dev/recall@1": 0.7, "faq/recall@1": 0.3}``. A metric
                without a set is that of the first set.
            set_names: names of the golden sets.

        Raises:
            SettingError: unknown set or metric, a weight that is not positive.
        """
        if not isinstance(select, str | Metric | Mapping) or not select:
            raise SettingError(f"select={select!r} must name a metric, for example 'recall@1', or weights of several")
        weights = dict(select) if isinstance(select, Mapping) else {str(select): 1.0}
        terms = []
        for name, weight in weights.items():
            set_name, _, metric = name.rpartition("/")
            if set_name and set_name not in set_names:
                raise SettingError(f"select names the golden set {set_name!r}; there are {', '.join(set_names)}")
            if not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise SettingError(f"select gives {name!r} the weight {weight!r}; weights must be positive numbers")
            terms.append((set_name or set_names[0], Metric.parse(metric), float(weight)))
        if len(terms) > 1:
            return cls(tuple(terms), "objective")
        set_name, only, _ = terms[0]
        label = str(only) if len(set_names) == 1 else f"{set_name}/{only}"
        return cls(((set_name, only, 1.0),), label)  # a weight of its own would only change the number's name

    def rule(self) -> dict[str, float]:
        """Returns ``{"dev/recall@1": weight}``: what a run was begun with, in a form that can be compared."""
        return {f"{set_name}/{metric}": weight for set_name, metric, weight in self.terms}

    def value(self, results: Mapping[str, Result]) -> float:
        """Returns the weighted sum; ``results`` by golden set name."""
        return sum(weight * results[name].metrics[str(metric)] for name, metric, weight in self.terms)

    def name(self, pooled: Collection[str] = ()) -> str:
        """Returns the label, ending in ``_pool`` where one of its sets is ranked on a pool."""
        return pool_name(self.label, any(name in pooled for name, _, _ in self.terms))

    @property
    def leading(self) -> tuple[str, Metric]:
        """The (golden set, metric) of the largest weight: what intervals and comparisons are shown for."""
        name, metric, _ = max(self.terms, key=lambda term: term[2])
        return name, metric


def named_sets(golden: GoldenSet | Sequence[GoldenSet]) -> dict[str, GoldenSet]:
    """Returns the golden sets by name.

    Raises:
        SettingError: none, or two of the same name.
    """
    sets = [golden] if isinstance(golden, GoldenSet) else list(golden) if isinstance(golden, Sequence) else []
    if not sets or not all(isinstance(item, GoldenSet) for item in sets):
        raise SettingError("golden must be a GoldenSet or a list of them; load one with fullrank.load_golden(folder)")
    names = [item.name for item in sets]
    if len(set(names)) < len(names):
        raise SettingError(f"golden sets need different names, got {', '.join(names)}; pass name=... to GoldenSet")
    for item in sets:
        item.require_answerable()
    return dict(zip(names, sets, strict=True))


def metrics_needed(metrics: Sequence[str | Metric], objective: Objective) -> list[Metric]:
    """Returns the metrics to compute: those asked for and those of the objective, each once."""
    return list(dict.fromkeys([*parsed(metrics), *(metric for _, metric, _ in objective.terms)]))


def log_names(
    values: Mapping[str, Mapping[str, float]], objective: Objective, score: float, *, pooled: Collection[str] = ()
) -> dict[str, float]:
    """Returns what goes to the trackers, from ``{golden set: {metric: value}}``.

    ``eval_<metric>``; with several sets ``eval_<set>_<metric>`` and ``eval_<select>`` for the value that chooses. What
    was measured on a pool of the corpus (of the sets ``pooled``) ends in ``_pool``.
    """
    several = len(values) > 1
    logs = {
        log_name(set_name, pool_name(name, set_name in pooled), several=several): float(value)
        for set_name, metrics in values.items()
        for name, value in metrics.items()
    }
    if len(objective.terms) > 1:
        logs[f"eval_{objective.name(pooled)}"] = float(score)
    elif several:
        set_name, metric, _ = objective.terms[0]
        logs[f"eval_{pool_name(str(metric), set_name in pooled)}"] = float(score)
    return logs


def collapse_names(results: Mapping[str, Result]) -> dict[str, float]:
    """Returns the signs of collapse as they are logged: ``eval_mean_cosine`` (where known) and ``eval_tie_rate``."""
    several = len(results) > 1
    return {
        log_name(set_name, name, several=several): float(value)
        for set_name, result in results.items()
        for name, value in (("mean_cosine", result.mean_cosine), ("tie_rate", result.tie_rate))
        if value is not None
    }


def log_name(set_name: str, name: str, *, several: bool) -> str:
    """Returns the name of a value in the trackers; with several golden sets it carries the name of the set."""
    return f"eval_{set_name}_{name}" if several else f"eval_{name}"


def pool_name(name: str, pooled: bool) -> str:
    """Returns the name of a value, marked where it was measured on a pool."""
    return f"{name}{POOL}" if pooled else name


def full_names(logs: Mapping[str, float]) -> dict[str, float]:
    """Returns values on the whole corpus as a run on a pool logs them: ``eval_full_<metric>``."""
    return {f"eval_full_{name.removeprefix('eval_')}": value for name, value in logs.items()}
