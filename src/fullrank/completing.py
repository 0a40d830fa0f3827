"""The end of a run on a pool: what was kept is scored on the whole corpus, and the winner is chosen by that.

Promise: no value on a pool is compared with a score; a step that cannot be completed is not chosen.
"""

import logging
from collections.abc import Mapping

from fullrank._errors import EvaluationError
from fullrank.journal import result_name
from fullrank.result import Result
from fullrank.scoring import journal_names
from fullrank.session import Session
from fullrank.store import Stored
from fullrank.unison import all_or_none, of_the_writer

__all__ = ["AMONG", "complete"]

logger = logging.getLogger(__name__)

AMONG = "the base model and the steps that were kept, by a pool of the corpus,"


def complete(session: Session) -> list[tuple[Stored, float]]:
    """Scores the kept steps and the base model on the whole corpus; every process calls it.

    The store then holds these scores, its folders the results, and the journal both values.

    Returns:
        What was completed, with its value on the pool; best first, none where nothing was kept.

    Raises:
        EvaluationError: nothing that was kept could be completed.
    """
    kept, scores, error = of_the_writer(session.keeper.store.stored), {}, None
    for entry in kept:
        results, score = session.full_base, None
        if entry.step == 0 and results:
            score = session.objective.value(results)
        else:
            session.restore(entry)
            outcome = session.score(session.plans, session.objective)
            results, score, error = outcome.results, outcome.score, outcome.error or error
        if score is None:
            logger.error("step %d could not be completed on the whole corpus and is not chosen: %s", entry.step, error)
            continue
        scores[entry.step] = score
        if entry.step == 0:
            session.full_base = results
        session.store_full(entry.step, results)
        session.journal.amend(entry.step, entry.score, journal_names(results))
        all_or_none(lambda entry=entry, results=results: _write(session, entry, results) if session.writes else None)  # type: ignore[misc]
    if kept and not scores:
        folder = session.keeper.store.folder
        raise EvaluationError(
            f"none of the kept steps could be evaluated on the whole corpus; they are in {folder}"
        ) from error
    if session.writes and scores:
        session.keeper.store.rescore(scores)
    on_pool = {entry.step: entry.score for entry in kept}
    return [(entry, on_pool[entry.step]) for entry in of_the_writer(session.keeper.store.stored)]


def _write(session: Session, entry: Stored, results: Mapping[str, Result]) -> None:
    try:
        for name, result in results.items():
            result.save(entry.path / result_name("result", name))
        base = session.full_base if entry.step else {}
        session.keeper.write_card(entry.path, entry.step, results, base, among=AMONG)
    except OSError as error:
        logger.error("the results of step %d could not be written to %s: %s", entry.step, entry.path, error)
