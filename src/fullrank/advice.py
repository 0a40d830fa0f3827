"""What the in-batch numbers of a run give away, as pure functions from points to a Finding.

Promise: in-batch numbers explain, they never choose; a Finding names the numbers it rests on. Nothing is remembered:
call again as points come in, and say the first Finding of each kind only.
"""

import itertools
import math
from collections.abc import Iterable, Sequence

from fullrank._errors import SettingError
from fullrank.result import Finding

__all__ = ["diverging", "low_mrr"]

Points = Iterable[tuple[int, float | None]]

LOW_MRR = 0.5
"""Below it, the positive is on average not among the first two documents of its own batch."""


def low_mrr(points: Points, *, warmup_steps: int, n_points: int = 3) -> Finding | None:
    """Returns advice where in-batch MRR stays below 0.5 after warm-up, else None.

    Args:
        points: (step, ``in_batch_mrr``) of the loss lines so far, of one ``in_batch_dim`` where dimensions are drawn.
            Points without a finite value are left out.
        warmup_steps: steps of the learning rate's warm-up; points up to that step do not count.
        n_points: points after warm-up that are needed; one at 0.5 or above among all of them, and nothing is said.

    Raises:
        SettingError: ``n_points`` below 1 or ``warmup_steps`` below 0.
    """
    if n_points < 1 or warmup_steps < 0:
        raise SettingError(f"n_points={n_points} must be at least 1, and warmup_steps={warmup_steps} 0 or more")
    after = [point for point in _finite(points) if point[0] > warmup_steps]
    if len(after) < n_points or any(value >= LOW_MRR for _, value in after):
        return None
    (first, _), (last, now) = after[0], after[-1]
    top = max(value for _, value in after)
    return Finding(
        "low-in-batch-mrr",
        "warning",
        f"in-batch MRR stays below {LOW_MRR} after warm-up: at most {top:.3f} between steps {first} and {last}, now "
        f"{now:.3f}",
        count=len(after),
        remedy=(
            "Look for answers among the hard negatives (filter them by a margin, or use a guided loss), or try another "
            "temperature (scale)"
        ),
    )


def diverging(
    scores: Points,
    accuracies: Points,
    *,
    n_evaluations: int = 4,
    interval: float | None = None,
    accuracy_rise: float = 0.02,
    metric: str = "the full-corpus score",
) -> Finding | None:
    """Returns a warning where in-batch accuracy rises while the score over the whole corpus falls, else None.

    Noise does both at times. So one of two things must hold at the latest evaluation:

    - over the last ``n_evaluations`` evaluations the score fell at each, and the accuracy before each rose (chance of
      both in noise, with 4 evaluations: 1 / 4!^2, one in 576);
    - with ``interval``: the score has been lower than its highest by more than ``interval`` at the latest two
      evaluations at least, and the accuracy higher than it was there by more than ``accuracy_rise``.

    Args:
        scores: (step, score) of the evaluations so far; higher is better. Failed ones (None, NaN) are left out.
        accuracies: (step, ``in_batch_acc``) of the loss lines. An evaluation has the mean of the points since the one
            before it; one without points is left out.
        n_evaluations: length of the falling run, at least 3.
        interval: a fall of the score that is more than noise, for example the half width of its confidence interval.
        accuracy_rise: the same for the accuracy.
        metric: name of the score, for the message.

    Raises:
        SettingError: ``n_evaluations`` below 3, ``interval`` or ``accuracy_rise`` negative.
    """
    if n_evaluations < 3:
        raise SettingError(f"n_evaluations={n_evaluations} must be at least 3: two points have a direction by chance")
    if accuracy_rise < 0 or (interval is not None and not interval >= 0):
        raise SettingError(f"interval={interval} and accuracy_rise={accuracy_rise} must be 0 or more")
    line = _joined(_finite(scores), _finite(accuracies))
    run = line[-n_evaluations:]
    if len(run) == n_evaluations and _falls([s for _, s, _ in run]) and _falls([-a for _, _, a in run]):
        return _diverged(run, metric)
    if interval is None or not line:
        return None
    peak = max(range(len(line)), key=lambda i: (line[i][1], -i))
    top, base = line[peak][1], line[peak][2]
    latest = line[peak + 1 :][-2:]
    if len(latest) == 2 and all(top - s > interval and a - base > accuracy_rise for _, s, a in latest):
        return _diverged(line[peak:], metric)
    return None


def _diverged(run: Sequence[tuple[int, float, float]], metric: str) -> Finding:
    (first, score_before, accuracy_before), (last, score, accuracy) = run[0], run[-1]
    return Finding(
        "in-batch-diverges",
        "warning",
        f"between steps {first} and {last} in-batch accuracy rose from {accuracy_before:.3f} to {accuracy:.3f}, while "
        f"{metric} fell from {score_before:.4f} to {score:.4f}",
        count=len(run),
        remedy=(
            "The batches no longer teach what the corpus asks: stop at the best step, or train on harder negatives, "
            "with a lower learning rate, or with general pairs mixed in"
        ),
    )


def _finite(points: Points) -> list[tuple[int, float]]:
    """Returns the finite points by step; of several at one step the last."""
    known = {step: value for step, value in points if value is not None and math.isfinite(value)}
    return sorted(known.items())


def _joined(
    scores: Sequence[tuple[int, float]], accuracies: Sequence[tuple[int, float]]
) -> list[tuple[int, float, float]]:
    """Returns (step, score, mean accuracy since the entry before) of the evaluations that have accuracies."""
    out: list[tuple[int, float, float]] = []
    since = -math.inf
    for step, score in scores:
        between = [value for at, value in accuracies if since < at <= step]
        if between:
            out.append((step, score, math.fsum(between) / len(between)))
            since = step
    return out


def _falls(values: Sequence[float]) -> bool:
    return all(later < earlier for earlier, later in itertools.pairwise(values))
