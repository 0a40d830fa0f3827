"""The end of a run: the best weights are put back, verified, and judged.

Promise: what is in the model at the end is what was scored; the numbers of the verdict are those of these weights.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullrank.announce import Level
from fullrank.checkpoints import NOT_ELIGIBLE
from fullrank.comparison import Comparison, compare
from fullrank.completing import AMONG, complete
from fullrank.guards import Breach, passed_over
from fullrank.journal import read_result, result_name
from fullrank.objective import full_names, log_name
from fullrank.page import write_report
from fullrank.report import completion, confirmation, verdict
from fullrank.result import Result
from fullrank.session import CONFIRM_FILE, Session
from fullrank.store import Stored
from fullrank.unison import of_the_writer

__all__ = ["Ending", "conclude", "last_logs", "words", "write_page"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        best: the step that won; None where every evaluation failed.
        improved: whether it beat the base model.
        base_score: value of the base model by what chooses; None where it failed or was never scored.
        base_known: whether it was scored, even without success.
        base_result, best_result: on the golden set that chooses.
        comparison: of the two, paired by query.
        confirm_base, confirmed: on the second golden set.
        confirmation: of these two.
        completed: of a run on a pool, what was scored on the whole corpus, best first, and its value on the pool.
        passed_over: the breach of the step that scored highest and higher than ``best``, and its score.
    """

    best: Stored | None = None
    improved: bool = False
    base_result: Result | None = None
    best_result: Result | None = None
    comparison: Comparison | None = None
    confirm_base: Result | None = None
    confirmed: Result | None = None
    confirmation: Comparison | None = None
    passed_over: tuple[Breach, float] | None = None
    completed: tuple[tuple[Stored, float], ...] = ()
    base_score: float | None = None
    base_known: bool = True


def conclude(session: Session) -> Ending:
    """Restores the best weights on every rank, verifies them, scores them on the second golden set, and compares.

    Raises:
        EvaluationError: the stored weights are not those that were scored.
    """
    completed = complete(session) if session.pools else []
    if completed:
        session.best = completed[0][0]
    best = session.best
    set_name, metric = session.objective.leading
    base_result = session.bases.get(set_name)
    if best is None:
        return Ending(
            base_result=base_result,
            confirm_base=session.confirm_base,
            passed_over=of_the_writer(_passed_over(session, [])),
        )
    session.restore(best)
    # From the folder of the weights: the step may have been evaluated on another branch as well.
    best_result = of_the_writer(read_result(best.path / result_name("result", set_name)))
    at_base = [line for line in session.journal.lines if line.step == 0]
    base_score = next((line.score for line in at_base if line.status == "ok"), None)
    if completed:
        base_score = next((entry.score for entry, _ in completed if entry.step == 0), None)
    confirmed = session.score_confirm(CONFIRM_FILE)
    if base_result is None:
        logger.warning("the result of step 0 is not in %s any more: nothing to compare with", session.folder)
    ending = Ending(
        best,
        best.step != 0 and bool(at_base) and (base_score is None or best.score > base_score),
        base_result,
        best_result,
        _compared(base_result, best_result, str(metric)),
        session.confirm_base,
        confirmed,
        _compared(session.confirm_base, confirmed, str(metric)),
        of_the_writer(_passed_over(session, completed)),
        tuple(completed),
        base_score,
        bool(at_base),
    )
    if session.writes:
        stored = {name: read_result(best.path / result_name("result", name)) for name in session.plans}
        session.keeper.describe(best.step, {name: result for name, result in stored.items() if result is not None})
        _finish_card(session, ending)
    return ending


def _passed_over(session: Session, completed: Sequence[tuple[Stored, float]]) -> tuple[Breach, float] | None:
    """Returns what scored higher and was not eligible; of a run on a pool by the values on it."""
    floor = completed[0][1] if completed else -math.inf if session.best is None else session.best.score
    higher = [(line.score, line.step) for line in session.journal.lines if line.note == NOT_ELIGIBLE]
    above = [(-score, step) for score, step in higher if score is not None and score > floor]
    for below, step in sorted(above):  # of equal scores the earlier step
        if breaches := session.watch.breaches(step) if session.writes else []:
            return breaches[0], -below
    return None


def _compared(before: Result | None, after: Result | None, metric: str) -> Comparison | None:
    return None if before is None or after is None else compare(before, after, metric)


def _finish_card(session: Session, ending: Ending) -> None:
    """Adds the confirmed number and the guards to the card beside the stored weights."""
    guards = [(guard.golden.name, str(guard.metric), guard.max_drop) for guard in session.watch.guards]
    if ending.best is None or ending.best_result is None or not (ending.confirmed or guards):
        return
    best, set_name = ending.best, session.objective.leading[0]
    base = {set_name: ending.base_result} if best.step and ending.base_result is not None else {}
    more: dict[str, Any] = {"among": AMONG} if ending.completed else {}
    if session.confirm is not None and ending.confirmed is not None:
        more["confirmed"] = (session.confirm.golden.name, ending.confirmed, ending.confirm_base if best.step else None)
    try:
        session.keeper.write_card(best.path, best.step, {set_name: ending.best_result}, base, guards=guards, **more)
    except OSError as error:
        logger.error("the model card in %s could not be completed: %s", best.path, error)


def words(ending: Ending, session: Session) -> list[tuple[Level, str]]:
    """Returns what a run says at its end, and how urgent that is: the verdict first, the headline last."""
    label, metric = session.objective.label, str(session.objective.leading[1])
    step = None if ending.best is None else ending.best.step
    said: list[tuple[Level, str]] = []
    if step is not None or ending.passed_over is None:
        text = verdict(
            ending.comparison,
            improved=ending.improved,
            step=step,
            metric=label,
            base_known=ending.base_known,
            composite=None
            if len(session.objective.terms) == 1 or ending.best is None
            else (ending.base_score, ending.best.score, "/".join(map(str, session.objective.leading))),
        )
        said.append(("error" if step is None else "info" if ending.improved else "warning", text))
    if ending.completed:
        values = [(entry.step, entry.score, on_pool) for entry, on_pool in ending.completed]
        sizes = {name: (len(pool), len(session.golden[name].corpus)) for name, pool in session.pools.items()}
        said.append(("info", completion(values, metric=label, sizes=list(sizes.values()))))
    if ending.passed_over is not None:
        breach, score = ending.passed_over
        name = session.objective.name(session.pooled)
        said.append(("warning", passed_over(breach, score=score, metric=name, best=step)))
    if session.confirm is not None and ending.confirmed is not None:
        name = session.confirm.golden.name
        said.append(("info", confirmation(name, metric, ending.confirmed, ending.confirmation)))
    return said


def last_logs(ending: Ending, session: Session) -> dict[str, float]:
    """Returns what goes to the trackers at the end: scores on the second set, and on the whole corpus after a pool."""
    confirmed = {} if ending.confirmed is None else ending.confirmed.metrics
    logs = {f"eval_confirm_{name}": float(value) for name, value in confirmed.items()}
    if ending.completed and ending.best_result is not None:
        set_name, several = session.objective.leading[0], len(session.plans) > 1
        values = ending.best_result.metrics
        logs |= full_names({log_name(set_name, name, several=several): float(v) for name, v in values.items()})
    return logs


def write_page(session: Session, report: Path | bool) -> None:
    """Writes the report; what goes wrong there ends no training."""
    path = report if isinstance(report, Path) else session.folder / "report.html"
    golden = session.golden[session.objective.leading[0]]
    try:
        logger.info("report: %s", write_report(session.folder, path, golden=golden, metric=session.objective.label))
    except Exception as error:
        logger.error("the report could not be written to %s: %s: %s", path, type(error).__name__, error)
