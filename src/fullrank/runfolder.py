"""What a run left behind, read back for a report: journal, results, in-batch curves.

Promise: reads and never writes. What cannot be read is named in `Run.notes` and left out; it is never taken for a 0.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tqdm.auto import tqdm

from fullrank._errors import DataError, FullrankError, SettingError, first_few
from fullrank.checkpoints import NOT_ELIGIBLE, Evaluation, best_of
from fullrank.journal import ABANDONED, FILE, FLOORS_FILE, RULES_FILE, read_history, result_name
from fullrank.objective import POOL
from fullrank.result import Result
from fullrank.sources import PROGRESS_AFTER_SECONDS
from fullrank.stats import Interval
from fullrank.store import BestStore

__all__ = ["Run", "read_run_folder", "run_of_results"]

COMPOSITE = "objective"
GUARD = "guard/"
MAX_EVENT_BYTES, MAX_FLOOR_BYTES = 256 << 20, 1 << 20
MAX_INTERVALS = 60
"""Evaluations whose result is read for its interval; more would not show in a figure, and take seconds each."""
IN_BATCH_TAGS = {"train/in_batch_acc": "in-batch accuracy", "train/in_batch_mrr": "in-batch MRR", "train/loss": "loss"}

T = TypeVar("T")
Curve = tuple[tuple[int, float], ...]
"""(step, value) pairs."""


@dataclass(frozen=True)
class Run:
    """A run, or a row of stored results, as a report needs it.

    Attributes:
        name: of the folder or file.
        metric: what chose, as it stands in the results: ``recall@1``.
        label: what chose, as the run calls it: ``recall@1``, ``dev/recall@1`` or ``objective``.
        history: the evaluations in their order; empty for plain results.
        base, best: results at step 0 (or the first) and of the best step; None where there is none.
        best_step: the step that was kept, or None.
        best_line: its line of the journal: a step may have been evaluated on two branches.
        passed_over: the line that scored highest, and higher, and was not eligible; None where there is none.
        others: (name, base, best) of the golden sets that did not choose, where both are there.
        candidates: (name, result) of plain results, in the order given.
        intervals: ``{step: interval of the objective's metric}``, of some steps of the branch that went on.
        curves: ``{"in-batch accuracy": ((step, value), ...)}`` from the trackers.
        guards: floors, ``{"guard/<set>/<metric>": floor}``.
        improved: whether the best step beat the base model.
        base_known: whether the base model was scored at all.
        composite: of a weighted sum: its value at the base model and at the best step, and its term that is shown.
        confirmed: name of the second golden set, which did not choose, and the results of the best step and the base
            model on it.
        pooled: evaluations ranked a pool of the corpus; the scores of ``history`` are upper bounds.
        folder: where the best weights lie, or None.
        notes: what could not be read.
    """

    name: str
    metric: str
    label: str
    history: tuple[Evaluation, ...] = ()
    base: Result | None = None
    best: Result | None = None
    best_step: int | None = None
    best_line: Evaluation | None = None
    passed_over: Evaluation | None = None
    others: tuple[tuple[str, Result, Result], ...] = ()
    candidates: tuple[tuple[str, Result], ...] = ()
    intervals: dict[int, Interval] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    guards: dict[str, float] = field(default_factory=dict)
    improved: bool = False
    base_known: bool = True
    composite: tuple[float | None, float, str] | None = None
    confirmed: tuple[str, Result, Result | None] | None = None
    pooled: bool = False
    folder: Path | None = None
    notes: tuple[str, ...] = ()


def read_run_folder(path: Path, *, metric: str | None = None, guards: dict[str, float] | None = None) -> Run:
    """Returns what lies in the output folder of a run (or in the ``fullrank`` folder in it).

    Args:
        path: the folder.
        metric: what chose; default: the metric that equals the score in every line of the journal.
        guards: floors, ``{"guard/<set>/<metric>": floor}``; default: those that the run has written.

    Raises:
        DataError: no journal there, an empty one, or one that cannot be read.
        SettingError: ``metric`` is not what chose.
    """
    folder = path if (path / FILE).is_file() else path / "fullrank"
    notes: list[str] = []
    history = read_history(folder / FILE, notes=notes)
    if not history:
        raise DataError(
            f"{path} holds no run: expected a {FILE} with one line for each evaluation, in it or in fullrank/"
        )
    rule = _noted(lambda: _rule(folder / RULES_FILE), notes) or {}
    label = _label(history, metric, rule)
    sets = _sets(folder, history)
    pooled = label.endswith(POOL) or any(name.endswith(POOL) for line in history for name in line.metrics)
    label = label.removesuffix(POOL)
    leading, name = _leading(label, sets, history, rule)
    kept = _noted(lambda: BestStore(folder / "best").stored, notes) or []
    stored = kept[0] if kept else None
    found = best_of(history)
    best_step = stored.step if stored else found.step if found else None
    best_line = _line_of(history, stored.step, stored.score) if stored else found
    base_score, best_score = _scores(history, {entry.step: entry.score for entry in kept}, best_line)

    def result(step: int, set_name: str | None) -> Result | None:
        if stored and step == stored.step:
            beside = stored.path / result_name("result", set_name or _only_set(folder, step))
            if beside.is_file():
                return _noted(lambda: Result.load(beside), notes)
        file = folder / result_name(f"full-step-{step}", set_name)
        if not file.is_file():
            file = folder / result_name(f"step-{step}", set_name)
        return _noted(lambda: Result.load(file), notes) if file.is_file() else None

    base = result(0, leading)
    for step, what in ((0, "base"), (best_step, "best step")):
        if step is not None and not (folder / result_name(f"step-{step}", leading)).is_file():
            notes.append(f"there is no result of the {what}, {folder / result_name(f'step-{step}', leading)}")
    best = None if best_step is None else base if best_step == 0 else result(best_step, leading)
    name = name if best is None or name in best.metrics else next(iter(best.metrics))
    confirmed = _confirmed(folder, name, notes)
    others = [(s, result(0, s), result(best_step or 0, s)) for s in sets if s is not None and s != leading]
    return Run(
        name=(folder.parent if folder.name == "fullrank" else folder).resolve().name,
        metric=name,
        label=label,
        history=tuple(history),
        base=base,
        best=best,
        best_step=best_step,
        best_line=best_line,
        passed_over=_passed_over(history, best_line),
        others=tuple((s, b, a) for s, b, a in others if s and b and a),
        # The interval of one metric is not that of a weighted sum.
        intervals={} if label == COMPOSITE else _intervals(folder, history, leading, name, best_step, notes),
        curves=_curves(folder, notes),
        guards=dict(guards or _noted(lambda: _floors(folder / FLOORS_FILE), notes) or {}),
        improved=bool(best_step) and (base_score is None or (best_score or math.inf) > base_score),
        base_known=any(line.step == 0 for line in history),
        composite=(base_score, best_score, f"{leading}/{name}" if leading else name)
        if label == COMPOSITE and best_score is not None
        else None,
        confirmed=confirmed,
        pooled=pooled,
        folder=stored.path if stored else None,
        notes=tuple(dict.fromkeys(notes)),
    )


def run_of_results(results: Sequence[tuple[str, Result]], *, metric: str | None = None) -> Run:
    """Returns plain results as a run: the first is the base, the highest of the others the best.

    Raises:
        DataError: no result, or a result without metrics.
        SettingError: ``metric`` was not computed.
    """
    if not results:
        raise DataError("there is no result to report on; name a run folder or files written by Result.save")
    if empty := [name for name, result in results if not result.metrics or not result.query_ids]:
        raise DataError(f"{empty[0]} holds no metric or no query, so there is nothing to report")
    (name, base), *rest = results
    chosen = base.name_of(metric) if metric else next(iter(base.metrics))
    fit = [(n, r) for n, r in rest if chosen in r.metrics]
    notes = [f"{n} has no {chosen} and is not compared" for n, r in rest if chosen not in r.metrics]
    top = max(fit, key=lambda entry: entry[1].metrics[chosen], default=None)
    title = name if len(results) == 1 else f"{(top or (name,))[0]} against {name}"
    return Run(
        title, chosen, chosen, base=base, best=top[1] if top else None, candidates=tuple(results), notes=tuple(notes)
    )


def _noted(read: Callable[[], T], notes: list[str]) -> T | None:
    try:
        return read()
    except (FullrankError, OSError) as error:
        notes.append(str(error))
        return None


def _line_of(history: Sequence[Evaluation], step: int, score: float) -> Evaluation | None:
    """Returns the line of a stored step: that of its score, where the step was evaluated on two branches."""
    lines = [line for line in history if line.step == step and line.status == "ok"]
    return next((line for line in lines if line.score == score), lines[-1] if lines else None)


def _scores(
    history: Sequence[Evaluation], kept: dict[int, float], best: Evaluation | None
) -> tuple[float | None, float | None]:
    """Returns the scores of the base model and of the best step: those of the store, where it has them."""
    base = next((line.score for line in history if line.step == 0 and line.status == "ok"), None)
    return kept.get(0, base), None if best is None else kept.get(best.step, best.score)


def _passed_over(history: Sequence[Evaluation], best: Evaluation | None) -> Evaluation | None:
    """Returns the line that scored highest, higher than the best one, and was not eligible."""
    floor = -math.inf if best is None or best.score is None else best.score
    above = [line for line in history if line.note == NOT_ELIGIBLE and line.score is not None and line.score > floor]
    return max(above, key=lambda line: (line.score, -line.step), default=None)


def _confirmed(folder: Path, metric: str, notes: list[str]) -> tuple[str, Result, Result | None] | None:
    """Returns what a second golden set, which did not choose, says of the best step and of the base model."""
    files = [folder / name for name in ("confirm.json", "confirm-base.json")]
    now, base = (_noted(lambda file=file: Result.load(file), notes) if file.is_file() else None for file in files)  # type: ignore[misc]
    if now is None or metric not in now.metrics or now.bound:
        return None
    return str(now.provenance.get("name") or "confirm"), now, base


def _rule(path: Path) -> dict[str, float]:
    """Returns the weights by which a run chooses, ``{"<set>/<metric>": weight}``."""
    if not path.is_file():
        return {}
    try:
        return {str(name): float(weight) for name, weight in json.loads(_small_text(path))["select"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}); it says by what the run chooses") from error


def _small_text(path: Path) -> str:
    if path.stat().st_size > MAX_FLOOR_BYTES:
        raise DataError(f"{path}: over {MAX_FLOOR_BYTES >> 20} MiB, which no such list is")
    return path.read_text("utf-8")


def _floors(path: Path) -> dict[str, float]:
    """Returns the floors of guards that a run has written."""
    if not path.is_file():
        return {}
    try:
        return {str(name): float(floor) for name, floor in json.loads(_small_text(path)).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is no list of floors ({error})") from error


def _label(history: Sequence[Evaluation], metric: str | None, rule: dict[str, float]) -> str:
    """Returns what chose: the first metric that is the score wherever there is one, else the composite."""
    if metric is None and len(rule) > 1:
        return COMPOSITE
    scored = [line for line in history if line.status == "ok" and line.metrics]
    names = [name for name in scored[0].metrics if all(_equals(line, name) for line in scored)] if scored else []
    if metric is None or metric == COMPOSITE:
        return names[0] if names and metric is None else COMPOSITE
    fitting = [name for name in names if metric in (plain := name.removesuffix(POOL), plain.rpartition("/")[2], name)]
    if scored and not fitting:
        raise SettingError(f"{metric!r} did not choose in this run; what did is {first_few(names) or COMPOSITE}")
    return fitting[0] if fitting else metric


def _equals(line: Evaluation, name: str) -> bool:
    value = line.metrics.get(name)
    return (
        value is not None and line.score is not None and math.isclose(value, line.score, rel_tol=1e-12, abs_tol=1e-15)
    )


def _sets(folder: Path, history: Sequence[Evaluation]) -> list[str | None]:
    """Returns the names of the golden sets, [None] where there is one."""
    names = [name for line in history for name in line.metrics if not name.startswith(GUARD)]
    return list(dict.fromkeys(name.rpartition("/")[0] or None for name in names)) or [None]


def _leading(
    label: str, sets: Sequence[str | None], history: Sequence[Evaluation], rule: dict[str, float]
) -> tuple[str | None, str]:
    """Returns (golden set, metric) whose queries the report shows: of a weighted sum the term of the largest weight."""
    set_name, _, metric = label.rpartition("/")
    if label != COMPOSITE:
        return set_name or (sets[0] if None not in sets else None), metric
    names = (name for line in history for name in line.metrics if not name.startswith(GUARD))
    first = max(rule, key=rule.__getitem__) if rule else next(names, "recall@1").removesuffix(POOL)
    set_name, _, metric = first.rpartition("/")
    return set_name if set_name in sets else None, metric


def _only_set(folder: Path, step: int) -> str | None:
    """Returns the name of the one golden set: the store writes it into the file name, the journal does not."""
    file = folder / result_name(f"step-{step}")
    try:
        return str(Result.load(file).provenance.get("name") or "") or None
    except (FullrankError, OSError):
        return None


def _intervals(
    folder: Path, history: Sequence[Evaluation], leading: str | None, metric: str, best: int | None, notes: list[str]
) -> dict[int, Interval]:
    # The file of a step that two branches evaluated is that of the later one.
    steps = list(dict.fromkeys(line.step for line in history if line.status == "ok" and line.note != ABANDONED))
    stride = max(1, math.ceil(len(steps) / MAX_INTERVALS))
    wanted = sorted({*steps[::stride], *steps[-1:], *({best} & {*steps} if best is not None else ())})
    found = {}
    for step in tqdm(wanted, "read results", delay=PROGRESS_AFTER_SECONDS, disable=None, leave=False):
        file = folder / result_name(f"step-{step}", leading)
        result = _noted(lambda file=file: Result.load(file), notes) if file.is_file() else None  # type: ignore[misc]
        if result is not None and not result.bound and metric in result.metrics and len(result.query_ids):
            found[step] = result.ci(metric)
    return found


def _curves(folder: Path, notes: list[str]) -> dict[str, Curve]:
    """Returns in-batch and loss curves from the TensorBoard events of the run, which hold all that was logged."""
    files = sorted(folder.parent.glob("runs/*/events.out.tfevents.*")) if folder.name == "fullrank" else []
    files += sorted(folder.glob("tensorboard/events.out.tfevents.*"))
    if not files:
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    newest = max(files, key=lambda file: (file.stat().st_mtime, file.name)).parent
    if (size := sum(file.stat().st_size for file in newest.glob("events.out.tfevents.*"))) > MAX_EVENT_BYTES:
        notes.append(f"the TensorBoard events in {newest} have {size >> 20} MiB and were not read")
        return {}
    try:
        events = EventAccumulator(str(newest), size_guidance={"scalars": 2_000}).Reload()
        tags = set(events.Tags()["scalars"])
        return {
            label: tuple((event.step, event.value) for event in events.Scalars(tag))
            for tag, label in IN_BATCH_TAGS.items()
            if tag in tags
        }
    except Exception as error:  # whatever a damaged event file makes of its reader
        notes.append(f"the TensorBoard events in {newest} could not be read ({type(error).__name__}: {error})")
        return {}
