"""What an evaluation reveals besides its score: collapse, and a general set that got worse.

Promise: pure functions of results; a Finding says what was measured, what was allowed and what to try.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fullrank._errors import DataError, SettingError, first_few
from fullrank.checks import normalise
from fullrank.comparison import Comparison, compare
from fullrank.data import GoldenSet, refuse_other_than_golden
from fullrank.gating import TOLERANCE, fell_beyond, refuse_no_margin
from fullrank.metrics import Metric
from fullrank.result import Finding, Result
from fullrank.settings import refuse_no_count, refuse_unknown

__all__ = [
    "Breach",
    "CollapseThresholds",
    "Guard",
    "breach_of",
    "checked_confirm",
    "checked_guards",
    "collapse_findings",
    "guard_key",
    "guard_names",
    "passed_over",
]

SAME_SET = 0.5
"""A second set that shares more than this of its queries with the one that chooses confirms nothing; a guard that
shares more than this of its documents is no general set."""
OnBreach = Literal["warn", "stop"]
FORGETTING_REMEDY = "Try a lower learning rate, fewer epochs, or general pairs mixed in"


@dataclass(frozen=True)
class CollapseThresholds:
    """From where on embeddings count as collapsing.

    Attributes:
        mean_cosine: mean pairwise cosine of a fixed sample of documents. Trained models lie below .9, also those
            whose cosines are all high.
        rise: by how much it may rise above that of the base model.
        tie_rate: mean share of the other documents that tie with a judged one.
    """

    mean_cosine: float = 0.95
    rise: float = 0.3
    tie_rate: float = 0.05

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise SettingError(f"CollapseThresholds: {name}={value!r} must be a number from 0 to 1")


def collapse_findings(
    result: Result, *, base: Result | None = None, thresholds: CollapseThresholds | None = None, name: str = "golden"
) -> list[Finding]:
    """Returns what speaks for collapsing embeddings: ``collapse-cosine`` and ``collapse-ties``, at most one each.

    Args:
        result: of an evaluation.
        base: of the base model on the same set; without it the rise is not looked at.
        thresholds: default `CollapseThresholds()`.
        name: of the golden set, for the message.
    """
    limits = thresholds or CollapseThresholds()
    remedy = "Embeddings are growing alike: try a lower learning rate, a larger batch or another temperature"
    findings = []
    alike, before = result.mean_cosine, None if base is None else base.mean_cosine
    if alike is not None and math.isfinite(alike):
        rise = 0.0 if before is None or not math.isfinite(before) else alike - before
        # A base model that is above the limit itself collapses only where it rises further.
        high = alike >= limits.mean_cosine and (before is None or before < limits.mean_cosine)
        if high or rise > limits.rise + TOLERANCE:
            since = "" if before is None else f", {before:.3f} at step 0"
            message = f"documents of {name!r} have a mean pairwise cosine of {alike:.3f}{since}"
            findings.append(Finding("collapse-cosine", "warning", message, remedy=remedy))
    if result.collapsed or result.tie_rate >= limits.tie_rate:
        message = f"{100 * result.tie_rate:.0f} % of the documents of {name!r} score the same as an answer"
        findings.append(Finding("collapse-ties", "warning", message, remedy=remedy))
    return findings


def checked_confirm(confirm: GoldenSet, choosing: GoldenSet) -> Finding | None:
    """Returns a Finding where the set that confirms shares queries with the one that chooses.

    Raises:
        DataError: it is no golden set, has no answerable query, or shares more than half of its queries.
    """
    refuse_other_than_golden(confirm)
    confirm.require_answerable()
    known = set(map(normalise, choosing.query_texts))
    shared = [qid for qid, text in zip(confirm.query_ids, confirm.query_texts, strict=True) if normalise(text) in known]
    if not shared:
        return None
    n = len(confirm.queries)
    message = f"{len(shared)} of the {n} queries of confirm={confirm.name!r} also choose, in {choosing.name!r}"
    if len(shared) > SAME_SET * n:
        raise DataError(
            f"{message} ({first_few(shared)}): the confirmed score would flatter as the first one does. Give another "
            "split of held-out queries"
        )
    remedy = "Leave them out of one of the two sets"
    return Finding("confirm-shared", "warning", message, len(shared), tuple(shared[:5]), remedy)


@dataclass(frozen=True)
class Guard:
    """A general set that must not get worse than the base model: a checkpoint below its floor is not eligible.

    Attributes:
        golden: the set, of another domain than the training.
        metric: what is measured.
        max_drop: how far it may fall below the base model; a fall of exactly so much passes. 0.02 is the usual
            2-point rule.
        every_kth: measured at every k-th evaluation, and besides wherever a step would be kept.
        on_breach: ``"stop"`` ends the training at a breach.
        baseline: a saved `Result` of the base model on this set; default: the model as it stands at step 0.

    Raises:
        SettingError: an option that cannot work.
        DataError: no golden set, none of its queries answerable, or a baseline from other data or without the metric.
    """

    golden: GoldenSet
    metric: str = "ndcg@10"
    max_drop: float = 0.02
    every_kth: int = 1
    on_breach: OnBreach = "warn"
    baseline: Result | None = None

    def __post_init__(self) -> None:
        refuse_other_than_golden(self.golden)
        self.golden.require_answerable()
        object.__setattr__(self, "metric", str(Metric.parse(self.metric)))
        if isinstance(self.max_drop, bool) or not isinstance(self.max_drop, int | float):
            raise SettingError(f"max_drop={self.max_drop!r} must be a number: 0.02 allows a fall of 2 points")
        refuse_no_margin(self.max_drop)
        refuse_no_count("every_kth", self.every_kth or 0, "a whole number from 1")
        refuse_unknown("on_breach", self.on_breach, get_args(OnBreach))
        if self.baseline is None:
            return
        if not isinstance(self.baseline, Result):
            raise DataError("Guard: baseline must be a Result; read it back with fullrank.Result.load(path)")
        if self.metric not in self.baseline.metrics:
            raise DataError(
                f"Guard: the baseline does not hold {self.metric!r}, only {', '.join(self.baseline.metrics)}"
            )
        if self.baseline.provenance.get("data") != self.golden.fingerprint():
            raise DataError(
                f"Guard: the baseline was not made on the golden set {self.golden.name!r}; evaluate it again"
            )


@dataclass(frozen=True)
class Breach:
    """A step at which a guard fell below its floor.

    Attributes:
        step: of training.
        guard: that was breached.
        comparison: of the step with the base model, on the set of the guard.
    """

    step: int
    guard: Guard
    comparison: Comparison

    @property
    def finding(self) -> Finding:
        """The Finding: the drop with its interval, whether it is separable from none, and what to try."""
        found = self.comparison
        low, high = found.interval
        sure = "not separable from no change" if found.verdict == "not separable" else "separable from no change"
        allowed = f"a fall of {100 * self.guard.max_drop:g} points" if self.guard.max_drop else "no fall"
        return Finding(
            f"guard-{self.guard.golden.name}",
            "warning",
            f"step {self.step} changed {found.metric} on {self.guard.golden.name!r} by {100 * found.delta:+.2f} points "
            f"[{100 * low:+.2f}, {100 * high:+.2f}], {sure}; {allowed} is allowed, so it is not eligible",
            count=len(found.losses),
            examples=found.losses[:5],
            remedy=FORGETTING_REMEDY,
        )


def breach_of(guard: Guard, base: Result, now: Result, *, step: int) -> Breach | None:
    """Returns the breach where ``now`` lies more than ``max_drop`` below ``base``, else None."""
    fell = fell_beyond(now[guard.metric] - base[guard.metric], guard.max_drop)
    return Breach(step, guard, compare(base, now, guard.metric)) if fell else None


def passed_over(breach: Breach, *, score: float, metric: str, best: int | None) -> str:
    """Returns what the end of a run says about a step that scored higher and is not eligible.

    Args:
        breach: of that step.
        score, metric: of that step, by which it would have been chosen.
        best: the best eligible step, or None.
    """
    instead = "No step was eligible: nothing was chosen" if best is None else f"Step {best} is the best eligible one"
    why = breach.finding.message.removeprefix(f"step {breach.step} ")
    return f"Step {breach.step} scored higher, {metric} {score:.4f}, but {why}. {instead}. {FORGETTING_REMEDY}."


def guard_names(guard: Guard, base: Result, now: Result) -> dict[str, float]:
    """Returns what goes to the trackers: ``eval_guard_<set>_<metric>`` and its difference to the base model."""
    name = f"eval_guard_{guard.golden.name}_{guard.metric}"
    return {name: float(now[guard.metric]), f"{name}_delta": float(now[guard.metric] - base[guard.metric])}


def guard_key(guard: Guard) -> str:
    """Returns the name of a guard in the journal: ``guard/<set>/<metric>``."""
    return f"guard/{guard.golden.name}/{guard.metric}"


def checked_guards(guards: Guard | Sequence[Guard], choosing: Sequence[GoldenSet]) -> tuple[Guard, ...]:
    """Returns the guards.

    Raises:
        SettingError: what is no guard, or two of the same name.
        DataError: a guard on the documents that choose, which says nothing about another domain.
    """
    found = (guards,) if isinstance(guards, Guard) else guards
    if not isinstance(found, Sequence) or not all(isinstance(guard, Guard) for guard in found):
        given = {type(item).__name__: None for item in (found if isinstance(found, Sequence) else [found])}
        raise SettingError(f"guards must be Guard(golden, ...) or a list of them, got {', '.join(given)}")
    names = [guard.golden.name for guard in found] + [golden.name for golden in choosing]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise SettingError(f"guards and golden sets need different names, got {first_few(twice)} more than once")
    for guard in found:
        texts = set(map(normalise, guard.golden.doc_texts))
        for golden in choosing:
            shared = len(texts & set(map(normalise, golden.doc_texts)))
            if shared > SAME_SET * len(texts):
                raise DataError(
                    f"the guard {guard.golden.name!r} holds the documents of {golden.name!r} ({shared} of {len(texts)} "
                    "are the same): it cannot show what is forgotten elsewhere. Give a set of another domain"
                )
    return tuple(found)
