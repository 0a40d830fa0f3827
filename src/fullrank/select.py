"""Choosing among the checkpoints that a run left behind, by real retrieval.

Promise: the winner is that of evaluating every checkpoint in full; what failed is failed, never 0; a killed selection
goes on where it was.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from fullrank._errors import DataError, SettingError, first_few
from fullrank.averaging import write_soup
from fullrank.candidates import Loader
from fullrank.comparison import Comparison, compare
from fullrank.contest import Contestant, Ring
from fullrank.data import GoldenSet
from fullrank.discover import Candidate, discover, inspect_folder, refuse_mixed
from fullrank.encode import Precision
from fullrank.evaluate import evaluate
from fullrank.guards import Guard
from fullrank.metrics import Metric, TieRule
from fullrank.objective import Objective, metrics_needed, named_sets
from fullrank.result import Result
from fullrank.selecting import TOLERANCE, Rule, in_question, objective_values, race, ruled, tied_with
from fullrank.selection import BASE, SOUP, Row, Selection, SelectionJournal
from fullrank.settings import DEFAULT_METRICS, refuse_no_count, refuse_unknown
from fullrank.stats import Interval, mean_interval

__all__ = ["JOURNAL", "select_checkpoint"]

logger = logging.getLogger(__name__)

JOURNAL = "selection.json"
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
    exhaustive: bool = False,
    tied: bool = False,
    soup: bool = False,
    keep_best: int = 1,
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
        exhaustive: evaluate every candidate in full.
        tied: find as well which candidates cannot be told apart from the best.
        soup: add the uniform mean of those as one more candidate.
        keep_best: how many of the best have to be known in their order.
        metrics, ties, batch_tokens: see `evaluate`.
        precision: of encoding; None is fp32.
        journal: where the selection is noted; default ``RUN_DIR/selection.json``.
        progress: called with (phase, done, all).

    Raises:
        DataError: nothing to choose from, or confirming queries that took part in the choice.
        SettingError: an option that cannot work.
    """
    refuse_unknown("rule", rule, get_args(Rule))
    refuse_unknown("ties", ties, get_args(TieRule))
    refuse_unknown("precision", precision, (None, *get_args(Precision)))
    refuse_no_count("keep_best", keep_best or 0, "a whole number from 1")
    sets = named_sets(golden)
    objective = Objective.parse(metric, list(sets))
    used = {name: sets[name] for name in dict.fromkeys(name for name, _, _ in objective.terms)}
    if confirm is not None:
        _refuse_overlap(confirm, used)
    folder = Path(run_dir).expanduser()
    found = refuse_mixed(discover(folder))
    wanted = metrics_needed(metrics, objective)
    where = Path(journal) if journal is not None else folder / JOURNAL
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
            where, _settings(used, objective, wanted, ties, precision or "fp32", guards, base=base)
        ),
        remember_bounds=rule == "max" and not tied and not soup,
        progress=lambda: None,
    )
    contestants = _contestants(found, ring, base)
    _report_progress(ring, contestants, progress)
    known_base = next((c for c in contestants if c.is_base), None)
    if guards:
        if known_base is None:
            raise SettingError("guards compare with the base model, and none is known; pass base=... (--base MODEL)")
        ring.guarded = known_base.measure_guards()
    question = in_question(rule, ties=tied or soup, keep=keep_best, contenders=contestants)
    try:
        best = race(contestants, question, exhaustive=exhaustive)
        if best is not None and soup:
            cooked = _cook(_tied_group(best, contestants), where, ring, len(contestants))
            if cooked is not None:
                contestants.append(cooked)
                best = race(contestants, question, exhaustive=exhaustive)
    finally:
        ring.flush(now=True)  # also where it is interrupted
    return _selection(ring, contestants, best, rule, confirm=confirm, tied=tied or soup, base=known_base)


def _contestants(found: Sequence[Candidate], ring: Ring, base: str | None) -> list[Contestant]:
    """Returns the base model, where one is known, and the candidates by rising step."""
    contestants: list[Contestant] = []
    start = next((c for c in found if c.step == 0 and not c.problem), None)
    usable = [c for c in found if not c.problem]
    source = base or next((c.base for c in usable if c.base), None)
    if start is None and source is not None:
        like = next((c for c in usable if c.kind == "adapter"), next(iter(usable), None))
        model = Candidate(BASE, Path(source).expanduser(), 0, "model", False, "folder")
        contestants.append(Contestant(0, model, ring, is_base=True, source=source, like=like))
    for candidate in found:
        contestants.append(Contestant(len(contestants), candidate, ring, is_base=candidate is start))
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
    guards: Iterable[Guard],
    *,
    base: str | None,
) -> dict[str, Any]:
    return {
        "data": {name: golden.fingerprint() for name, golden in sets.items()},
        "objective": [[name, str(metric), weight] for name, metric, weight in objective.terms],
        "metrics": [str(metric) for metric in metrics],
        "ties": ties,
        "precision": precision,
        "base": base,
        "guards": [[guard.golden.fingerprint(), str(guard.metric), guard.max_drop] for guard in guards],
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


def _tied_group(best: Contestant, contestants: Sequence[Contestant]) -> list[Contestant]:
    group = tied_with(best, contestants)
    return [best, *(c for c in contestants if c.order in group)]


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
    candidate = inspect_folder(path, SOUP)
    if candidate is None:
        return None
    names = ", ".join(c.candidate.name for c in members)
    logger.info("soup: the mean of %s", names)
    return Contestant(order, replace(candidate, step=None), ring)


def _selection(
    ring: Ring,
    contestants: Sequence[Contestant],
    best: Contestant | None,
    rule: Rule,
    *,
    confirm: GoldenSet | None,
    tied: bool,
    base: Contestant | None,
) -> Selection:
    winner = None if best is None else ruled(rule, best, contestants)
    group = _tied_group(best, contestants) if best is not None and tied else []
    rows = {c.order: _row(c, ring, base, best, is_tied=c in group) for c in contestants}
    set_name, leading = ring.objective.leading
    result = _full(winner, set_name)
    base_result = _full(base, set_name)
    confirmed = base_confirmed = None
    if confirm is not None and winner is not None:
        confirmed = _confirmed(winner, confirm, ring)
        base_confirmed = confirmed if base is winner else _confirmed(base, confirm, ring) if base else None
    pair = (base_confirmed, confirmed) if confirm is not None else (base_result, result)
    improved = winner is not None and winner is not base and (base is None or base.failed or winner.bound > base.bound)
    row = None if winner is None else rows[winner.order]
    headline, interval = (None, None) if row is None else (row.score, row.interval)
    if confirmed is not None:
        headline, interval = confirmed[leading], confirmed.ci(leading)
    usable = [c for c in contestants if not c.failed]
    encoded = sum(c.entry.n_encoded for c in contestants)
    corpora = [*ring.golden.values(), *(guard.golden for guard in ring.guards)]
    full = len(usable) * sum(len(g.corpus) for g in corpora)
    sizes = (f"{n}: {g.n_answerable:,} queries, {len(g.corpus):,} documents" for n, g in ring.golden.items())
    selection = Selection(
        winner=row,
        rows=tuple(sorted(rows.values(), key=_standing)),
        tied=tuple(c.candidate.name for c in group if c is not winner) if tied else None,
        base=None if base is None else rows[base.order],
        improved=improved,
        objective=ring.objective.label,
        rule=rule,
        headline=headline,
        headline_interval=interval,
        result=result,
        base_result=base_result,
        confirmed=confirmed,
        base_confirmed=base_confirmed,
        leading=str(leading),
        comparison=_comparison(*pair, leading),
        documents_encoded=encoded,
        share=encoded / full if full else 0.0,
        data="; ".join(sizes),
        journal=ring.journal.path,
    )
    ring.journal.write({"selection": selection.as_dict()})
    return selection


def _row(contestant: Contestant, ring: Ring, base: Contestant | None, best: Contestant | None, *, is_tied: bool) -> Row:
    candidate = contestant.candidate
    path = contestant.source or str(candidate.path)
    row = Row(candidate.name, path, candidate.step, "failed", eligible=False, why=contestant.error)
    if contestant.failed:
        return row
    bound = contestant.bound
    row = replace(
        row,
        fingerprint=contestant.entry.fingerprint,
        bound=bound if math.isfinite(bound) else None,
        coverage=contestant.coverage,
        documents_per_second=contestant.documents_per_second,
        eligible=contestant.eligible,
        why=contestant.entry.refused,
        tied=is_tied,
    )
    if not contestant.scored:
        return replace(row, status="pruned", why=row.why or _pruned(bound, best))
    delta = None if base is None or base is contestant or base.failed else bound - base.bound
    several = len(ring.golden) > 1
    metrics = {
        f"{name}/{m}" if several else m: value
        for name in ring.golden
        for m, value in contestant.results[name].metrics.items()
    }
    interval = _interval(contestant, ring)
    return replace(row, status="complete", score=bound, interval=interval, delta=delta, metrics=metrics)


def _pruned(bound: float, best: Contestant | None) -> str:
    if best is None:
        return "not finished"
    lower = bound < best.bound - TOLERANCE
    return "proved lower on these queries" if lower else "proved no higher on these queries, and later"


def _interval(contestant: Contestant, ring: Ring) -> Interval | None:
    """Returns the interval of the score; None for an objective over several sets, whose queries are not one sample."""
    if len(ring.objective.terms) == 1:
        name, metric, _ = ring.objective.terms[0]
        return contestant.results[name].ci(metric)
    values = objective_values(ring.objective, contestant.results)
    return mean_interval(values.flat, bounds=(0.0, values.most[0])) if len(values.parts) == 1 else None


def _standing(row: Row) -> tuple[int, float, float]:
    rank = ("complete", "pruned", "failed").index(row.status)
    return rank, -(row.bound if row.bound is not None else -math.inf), math.inf if row.step is None else row.step


def _full(contestant: Contestant | None, set_name: str) -> Result | None:
    if contestant is None or contestant.failed or not contestant.scored:
        return None
    return contestant.results[set_name]


def _confirmed(contestant: Contestant, confirm: GoldenSet, ring: Ring) -> Result | None:
    try:
        return evaluate(
            contestant.encoder(),
            confirm,
            metrics=ring.metrics,
            ties=ring.ties,
            precision=ring.precision,
            batch_tokens=ring.batch_tokens,
        )
    except Exception as error:
        logger.error("%s cannot be scored on the confirming queries: %s", contestant.candidate.name, error)
        return None


def _comparison(before: Result | None, after: Result | None, metric: Metric) -> Comparison | None:
    if before is None or after is None or before is after:
        return None
    return compare(before, after, metric)
