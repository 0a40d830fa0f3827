"""The end of a run: the best weights are put back, verified, and judged.

Promise: what is in the model at the end is what was scored; the numbers of the verdict are those of these weights.
"""

import logging
import math
from dataclasses import dataclass

from fullrank.card import card_section, with_section
from fullrank.checkpoints import NOT_ELIGIBLE
from fullrank.comparison import Comparison, compare
from fullrank.guards import Breach
from fullrank.journal import read_result, result_name
from fullrank.result import Result
from fullrank.session import CONFIRM_FILE, Session
from fullrank.store import Stored
from fullrank.unison import all_or_none, copy_from_writer, of_the_writer
from fullrank.weights import changeable

__all__ = ["Ending", "conclude"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        best: the step that won; None where every evaluation failed.
        improved: whether it beat the base model.
        base_result, best_result: on the golden set that chooses.
        comparison: of the two, paired by query.
        confirm_base, confirmed: on the second golden set.
        confirmation: of these two.
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


def conclude(session: Session) -> Ending:
    """Restores the best weights on every rank, verifies them, scores them on the second golden set, and compares.

    Raises:
        EvaluationError: the stored weights are not those that were scored.
    """
    best = session.best
    set_name, metric = session.objective.leading
    base_result = session.base_results.get(set_name)
    if best is None:
        return Ending(
            base_result=base_result, confirm_base=session.confirm_base, passed_over=of_the_writer(_passed_over(session))
        )
    all_or_none(lambda: session.keeper.restore(best) if session.writes else None)
    copy_from_writer(changeable(session.model, loss=session.keeper.link.loss))
    # From the folder of the weights: the step may have been evaluated on another branch as well.
    best_result = of_the_writer(read_result(best.path / result_name("result", set_name)))
    base_score = next((line.score for line in session.journal.lines if line.step == 0 and line.status == "ok"), None)
    confirmed = session.score_confirm(CONFIRM_FILE)
    if base_result is None:
        logger.warning("the result of step 0 is not in %s any more: nothing to compare with", session.folder)
    ending = Ending(
        best,
        best.step != 0 and (base_score is None or best.score > base_score),
        base_result,
        best_result,
        _compared(base_result, best_result, str(metric)),
        session.confirm_base,
        confirmed,
        _compared(session.confirm_base, confirmed, str(metric)),
        of_the_writer(_passed_over(session)),
    )
    if session.writes:
        stored = {name: read_result(best.path / result_name("result", name)) for name in session.plans}
        session.keeper.describe(best.step, {name: result for name, result in stored.items() if result is not None})
        _finish_card(session, ending)
    return ending


def _passed_over(session: Session) -> tuple[Breach, float] | None:
    floor = -math.inf if session.best is None else session.best.score
    higher = [(line.score, line.step) for line in session.journal.lines if line.note == NOT_ELIGIBLE]
    for score, step in sorted(((s, step) for s, step in higher if s is not None and s > floor), reverse=True):
        if breaches := session.watch.breaches(step) if session.writes else []:
            return breaches[0], score
    return None


def _compared(before: Result | None, after: Result | None, metric: str) -> Comparison | None:
    return None if before is None or after is None else compare(before, after, metric)


def _finish_card(session: Session, ending: Ending) -> None:
    """Adds the confirmed number to the card beside the stored weights."""
    if ending.best is None or ending.best_result is None or ending.confirmed is None or session.confirm is None:
        return
    path = ending.best.path / "README.md"
    set_name, metric = session.objective.leading
    section = card_section(
        str(metric),
        ending.best_result,
        golden=set_name,
        step=ending.best.step,
        base=ending.base_result if ending.best.step else None,
        chosen_by=session.objective.label,
        confirmed=(session.confirm.golden.name, ending.confirmed, ending.confirm_base if ending.best.step else None),
    )
    try:
        path.write_text(with_section(path.read_text("utf-8") if path.is_file() else "", section), "utf-8")
    except OSError as error:
        logger.error("the model card %s could not be completed: %s", path, error)
