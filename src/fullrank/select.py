"""Choosing among the checkpoints that a run left behind, by real retrieval.

Promise: the winner is that of evaluating every checkpoint in full; what failed is failed, never 0; a killed selection
goes on where it was.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from fullrank._errors import DataError, SettingError, first_few
from fullrank.averaging import write_soup
from fullrank.candidates import Loader, refuse_gone
from fullrank.contest import Contestant
from fullrank.data import GoldenSet
from fullrank.discover import Candidate, discover, inspect_folder, refuse_mixed
from fullrank.encode import Precision
from fullrank.guards import Guard
from fullrank.metrics import Metric, TieRule
from fullrank.modelfiles import fingerprint
from fullrank.objective import Objective, metrics_needed, named_sets
from fullrank.ring import Ring
from fullrank.selecting import TOLERANCE, Rule, in_question, race, ruled, settle
from fullrank.selection import BASE, SOUP, Selection, SelectionJournal
from fullrank.settings import DEFAULT_METRICS, refuse_no_count, refuse_unknown
from fullrank.standings import standings, tied_group
from fullrank.watching import held_lock

__all__ = ["JOURNAL", "select_checkpoint"]

logger = logging.getLogger(__name__)

JOURNAL = "selection.json"
LIKES = 3
"""Candidates in whose shape the base is tried, where the first does not load."""
Progress = Callable[[str, int, int], None]


def select_checkpoint(
    run_dir: str | Path,
    golden: GoldenSet | Sequence[GoldenSet],
    *,
    metric: str | Mapping[str, float] = "recall@1",
    base: str | None = None,
    rule: Rule = "max",
    confirm: GoldenSet | None = None,
    guards: Sequence[Guard] = (),
    compare_base: bool = False,
    exhaustive: bool = False,
    tied: bool = False,
    soup: bool = False,
    keep_best: int | None = None,
    metrics: Sequence[str | Metric] = DEFAULT_METRICS,
    ties: TieRule = "expected",
    precision: Precision | None = None,
    batch_tokens: int | None = None,
    journal: str | Path | None = None,
    progress: Progress | None = None,
) -> Selection:
    """Returns which checkpoint of a run retrieves best on the full corpus, and how sure that is.

    Bounds come first (the relevant documents alone), then the most promising candidate is finished, then the others are
    ranked on, hardest competitors first, until their bounds fall below the best. Those are 'proved lower on these
    queries', and most documents are never encoded for them.

    Args:
        run_dir: holds ``checkpoint-N`` folders, fullrank's best store, model folders, LoRA adapters.
        golden: the golden set, or several with different names.
        metric: what chooses: ``"recall@1"``, ``"dev/recall@1"``, or weights ``{"dev/recall@1": 0.7, ...}``.
        base: path or hub id of the base model, which is a candidate; default: the one that the adapters name.
        rule: ``max``, or ``one-se``: the earliest checkpoint whose paired difference to the best is at most its
            standard error.
        confirm: a golden set whose queries take no part in the choice; the winner is scored on it again.
        guards: sets on which a candidate may lose at most ``max_drop`` of the base's score, see `Guard`.
        compare_base: rank the base in full, for the paired interval of the difference to it. Otherwise it is ranked on
            until the choice is proved better or nothing is left, and the difference is 'at least'.
        exhaustive: evaluate every candidate in full.
        tied: find as well which candidates cannot be told apart from the best.
        soup: add the uniform mean of those as one more candidate.
        keep_best: how many of the best checkpoints (``checkpoint-N``, eligible) have to be known in their order.
        metrics, ties, batch_tokens: see `evaluate`.
        precision: of encoding; None is fp32.
        journal: where the selection is noted; default ``RUN_DIR/selection.json``.
        progress: called with (phase, done, all).

    Raises:
        DataError: nothing to choose from, confirming queries that took part in the choice, or a ``base`` that cannot
            be evaluated.
        SettingError: an option that cannot work, or another selection that uses the same journal now.
    """
    refuse_unknown("rule", rule, get_args(Rule))
    refuse_unknown("ties", ties, get_args(TieRule))
    refuse_unknown("precision", precision, (None, *get_args(Precision)))
    refuse_no_count("keep_best", keep_best, "a whole number from 1")
    sets = named_sets(golden)
    objective = Objective.parse(metric, list(sets))
    used = {name: sets[name] for name in dict.fromkeys(name for name, _, _ in objective.terms)}
    if confirm is not None:
        _refuse_overlap(confirm, used)
    refuse_gone(base)
    folder = Path(run_dir).expanduser()
    found = refuse_mixed(discover(folder))
    if guards and _start(found) is None and _source(found, base) is None:
        raise SettingError("guards compare with the base model, and none is known; pass base=... (--base MODEL)")
    wanted = metrics_needed(metrics, objective)
    where = Path(journal) if journal is not None else folder / JOURNAL
    taken = f"{where} is being written"
    with held_lock(where.with_suffix(".lock"), taken, needed=False):
        ring = Ring(
            loader=Loader(base),
            golden=used,
            objective=objective,
            metrics=wanted,
            ties=ties,
            precision=precision or "fp32",
            batch_tokens=batch_tokens,
            guards=guards,
            journal=SelectionJournal(
                where, _settings(used, objective, wanted, ties, precision or "fp32", guards, found, base=base)
            ),
            remember_bounds=rule == "max" and not tied and not soup,
            progress=lambda: None,
        )
        contestants = _contestants(found, ring, base, folder)
        _report_progress(ring, contestants, progress)
        known_base = next((c for c in contestants if c.is_base), None)
        try:
            if base is not None and known_base is not None:
                known_base.open()
                if known_base.failed:
                    raise DataError(f"the base model {base!r} cannot be evaluated: {known_base.error}")
            if guards and known_base is not None:
                ring.guarded = known_base.measure_guards()
            question = in_question(rule, ties=tied or soup, keep=keep_best or 0, contenders=contestants)
            best = race(contestants, question, first=known_base if compare_base else None, exhaustive=exhaustive)
            if best is not None and soup:
                cooked = _cook(tied_group(best, contestants), where, ring, len(contestants))
                if cooked is not None:
                    contestants.append(cooked)
                    best = race(contestants, question, exhaustive=exhaustive)
            p_at_most = None
            if best is not None and known_base is not None:
                winner = ruled(rule, best, contestants)
                if confirm is None or winner.bound <= known_base.bound + TOLERANCE:  # else the confirming queries tell
                    p_at_most = _beaten(known_base, winner)
        finally:
            ring.flush(now=True)  # also where it is interrupted
        return standings(
            ring, contestants, best, rule, confirm=confirm, tied=tied or soup, base=known_base, p_at_most=p_at_most
        )


def _beaten(base: Contestant, winner: Contestant) -> float | None:
    """Ranks on for the base until the winner is proved better; returns the largest that the p-value can be, or None."""
    if winner is base or base.scored or base.failed:
        return None
    known, mark = base.entry.beaten, winner.entry.fingerprint
    if mark not in known:
        base.open(anew=True)
        p = settle(winner, base)
        if p is None:
            return None
        known[mark] = p
    return known[mark]


def _start(found: Sequence[Candidate]) -> Candidate | None:
    """Returns the base model where it is a folder of the run: step 0."""
    return next((c for c in found if c.step == 0 and not c.problem), None)


def _source(found: Sequence[Candidate], base: str | None) -> str | None:
    """Returns path or hub id of the base model: the one given, else the first that an adapter names."""
    return base or next((c.base for c in found if c.base and not c.problem), None)


def _contestants(found: Sequence[Candidate], ring: Ring, base: str | None, root: Path) -> list[Contestant]:
    """Returns the base model, where one is known, and the candidates by rising step."""
    contestants: list[Contestant] = []
    start, source = _start(found), _source(found, base)
    if start is None and source is not None:
        likes = sorted((c for c in found if not c.problem), key=lambda c: c.kind != "adapter")[:LIKES]
        model = Candidate(BASE, Path(source).expanduser(), 0, "model", False, BASE)
        contestants.append(Contestant(0, model, ring, is_base=True, source=source, likes=likes, key=f"/{BASE}"))
    for candidate in found:
        key = "/" if candidate.path == root else ""  # a folder in it may have its name
        contestants.append(Contestant(len(contestants), candidate, ring, is_base=candidate is start, key=key))
    return contestants


def _report_progress(ring: Ring, contestants: Sequence[Contestant], progress: Progress | None) -> None:
    if progress is None:
        return
    total = sum(len(g.corpus) for g in ring.golden.values()) * sum(not c.failed for c in contestants)

    def report() -> None:
        progress("documents", min(total, sum(c.entry.n_encoded for c in contestants)), total)

    ring.progress = report


def _settings(
    sets: Mapping[str, GoldenSet],
    objective: Objective,
    metrics: Iterable[Metric],
    ties: TieRule,
    precision: Precision,
    guards: Sequence[Guard],
    found: Sequence[Candidate],
    *,
    base: str | None,
) -> dict[str, Any]:
    source = _source(found, base)
    start = _start(found)
    folder = start.path if start is not None else Path(source).expanduser() if source is not None else None
    # The floors of guards are the base's scores.
    try:
        floor = fingerprint(folder) if guards and folder is not None and folder.is_dir() else source
    except OSError as error:
        raise DataError(f"the base model cannot be read, with which guards compare: {error}") from error
    return {
        "data": {name: golden.fingerprint() for name, golden in sets.items()},
        "objective": [[name, str(metric), weight] for name, metric, weight in objective.terms],
        "metrics": [str(metric) for metric in metrics],
        "ties": ties,
        "precision": precision,
        "base": base,
        "guards": [[guard.golden.fingerprint(), str(guard.metric), guard.max_drop] for guard in guards],
        "floor": floor if guards else None,
    }


def _refuse_overlap(confirm: GoldenSet, used: Mapping[str, GoldenSet]) -> None:
    confirm.require_answerable()
    for name, golden in used.items():
        texts = set(golden.query_texts)
        same = [qid for qid, text in zip(confirm.query_ids, confirm.query_texts, strict=True) if text in texts]
        if same:
            raise DataError(
                f"{len(same)} queries of the confirming set are among those of {name!r} that choose: "
                f"{first_few(same)}. Confirm with queries that took no part in the choice"
            )


def _cook(group: Sequence[Contestant], journal: Path, ring: Ring, order: int) -> Contestant | None:
    """Returns the mean of the group as one more contestant; None where there is nothing to average."""
    members = sorted((c for c in group if not c.is_base), key=lambda c: c.order)
    if len(members) < 2:
        logger.warning("nothing to average: %d candidates beside the base are tied with the best", len(members))
        return None
    target = journal.with_suffix(".results") / SOUP
    try:
        path = write_soup([c.candidate for c in members], target)
    except (DataError, OSError) as error:
        logger.error("the mean of %s cannot be made: %s", ", ".join(c.candidate.name for c in members), error)
        return None
    candidate = inspect_folder(path, SOUP, origin=SOUP)
    if candidate is None:
        return None
    names = ", ".join(c.candidate.name for c in members)
    logger.info("soup: the mean of %s", names)
    return Contestant(order, replace(candidate, step=None), ring, key=f"/{SOUP}")
