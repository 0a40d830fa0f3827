"""Decisions about checkpoints as pure functions of plain data: which is best, which stay.

Promise: a failed evaluation is failed, never 0; NaN never wins; of equal scores the earlier step wins.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["NOT_ELIGIBLE", "Evaluation", "Status", "best_of", "since_best", "steps_to_keep"]

Status = Literal["ok", "failed", "skipped"]
NOT_ELIGIBLE = "not eligible"
"""The note of an evaluation that went well and may not be chosen: by a guard, or as its weights are gone."""
_NONE: dict[str, object] = {"note": None, "findings": [], "fingerprint": ""}


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a run: a line of its journal.

    Attributes:
        step, epoch: where in training.
        status: ``ok``, ``failed`` (the evaluation raised or the embeddings were not finite) or ``skipped``.
        score: value of the objective; None unless ``ok``.
        metrics: ``{"recall@1": ...}``, with several golden sets ``{"<set>/recall@1": ...}``.
        seconds: how long it took.
        error: traceback of a failed one.
        note: remarks, such as ``abandoned branch`` or ``not eligible``.
        findings: what stood out, as text.
        fingerprint: of the weights, where they were read from a folder.
    """

    step: int
    epoch: float
    status: Status
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    note: str | None = None
    findings: list[str] = field(default_factory=list)
    fingerprint: str = ""

    @property
    def eligible(self) -> bool:
        """Whether it may be chosen: it went well, no guard was breached, and its weights are there."""
        return self.status == "ok" and self.note != NOT_ELIGIBLE

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON form; note, findings and fingerprint are left out where there are none."""
        return {name: value for name, value in vars(self).items() if name not in _NONE or value != _NONE[name]}


def best_of(history: Iterable[Evaluation]) -> Evaluation | None:
    """Returns the evaluation with the highest finite score, the earliest step among equals, or None."""
    scored = [(e.score, -e.step, e) for e in history if e.eligible and _finite(e.score)]
    return max(scored, key=lambda entry: entry[:2])[2] if scored else None


def since_best(history: Sequence[Evaluation], *, min_delta: float = 0.0) -> int:
    """Returns how many finished evaluations came after the last improvement of more than ``min_delta``.

    Failed evaluations do not count.
    """
    best, waited = -math.inf, 0
    for evaluation in history:
        if evaluation.status != "ok" or evaluation.score is None or not math.isfinite(evaluation.score):
            continue
        if evaluation.eligible and evaluation.score > best + (min_delta if math.isfinite(best) else 0.0):
            best, waited = evaluation.score, 0
        else:
            waited += 1
    return waited


def steps_to_keep(scores: dict[int, float], keep_best: int) -> list[int]:
    """Returns the ``keep_best`` steps of highest score, best first; equal scores by rising step.

    >>> steps_to_keep({0: 0.5, 2: 0.7, 4: 0.7}, 2)
    [2, 4]
    """
    return sorted(scores, key=lambda step: (-scores[step], step))[:keep_best]


def _finite(score: float | None) -> bool:
    return score is not None and math.isfinite(score)
