"""The begin of a run: folders, plans, and where a broken-off one goes on.

Promise: what does not fit is refused here, before anything is spent; an old folder is moved aside, never written into.
"""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fullrank._errors import DataError
from fullrank.encode import as_encoder
from fullrank.guarding import Watch
from fullrank.hooks import TrainerLink, precision_of, refuse_other_model
from fullrank.journal import Journal, move_aside
from fullrank.keeper import Keeper
from fullrank.leaks import dataset_texts, leaks
from fullrank.objective import log_names
from fullrank.options import Options
from fullrank.plan import EvaluationPlan
from fullrank.pooling import pooled_sets
from fullrank.progress import progress_bars
from fullrank.prompting import prompt_findings, trained_prompts
from fullrank.result import Finding
from fullrank.session import Session
from fullrank.store import BestStore
from fullrank.unison import all_or_none

__all__ = ["begin", "look_before", "names_to_log"]

BAR_AFTER_SECONDS = 2


def begin(
    options: Options, link: TrainerLink, model: Any, args: Any, *, step: int, writes: bool, speaks: bool
) -> Session:
    """Returns the session of a run that begins at ``step``, or goes on there.

    Raises:
        SettingError: no way to encode with the model.
        DataError: golden sets or baselines that are not those of the run.
    """
    folder = Path(args.output_dir) / "fullrank"
    for guard in options.guards:
        ties = None if guard.baseline is None else guard.baseline.provenance.get("ties")
        if ties is not None and ties != options.ties:
            raise DataError(f"the baseline of the guard {guard.golden.name!r} has ties={ties!r}, not {options.ties!r}")
    encoder = as_encoder(model if options.encoder is None else options.encoder)
    refuse_other_model(encoder.model, model)
    link.connect()
    # Also a barrier: no rank looks into the folder before an old one has moved.
    all_or_none(lambda: move_aside(folder) if writes and step == 0 else None)
    precision = precision_of(args) if options.precision == "auto" else options.precision
    plans = _plans(encoder, options.golden, options.batch_tokens)
    pooled = pooled_sets(options.golden, options.pool)
    guarded = {guard.golden.name: guard.golden for guard in options.guards}
    session = Session(
        model=model,
        plans=plans,
        confirm=None if options.confirm is None else EvaluationPlan(encoder, options.confirm, options.batch_tokens),
        objective=options.objective,
        metrics=options.metrics,
        ties=options.ties,
        precision=precision,
        thresholds=options.collapse,
        keeper=Keeper(
            # The base model stays a candidate to the end, where the values on a pool do not count any more.
            BestStore(folder / "best", keep_best=options.keep_best, pinned=[0] if pooled else [], resume=True),
            model,
            plans[options.objective.leading[0]],
            link,
            options.objective,
            precision,
        ),
        watch=Watch(
            options.guards,
            _plans(encoder, guarded, options.batch_tokens),
            folder=folder,
            writes=writes,
            ties=options.ties,
            precision=precision,
        ),
        journal=Journal(folder, write=writes),
        writes=writes,
        pool=options.pool,
        bars=partial(progress_bars, after_seconds=BAR_AFTER_SECONDS, leading="evaluate") if speaks else None,
    )
    if step:
        session.resume(step)
    else:
        session.begin()
    return session


def names_to_log(options: Options, pooled: Collection[str]) -> list[str]:
    """Returns the names of the values that each evaluation logs."""
    nothing = {name: dict.fromkeys(map(str, options.metrics), 0.0) for name in options.golden}
    return list(log_names(nothing, options.objective, 0.0, pooled=pooled))


def look_before(options: Options, link: TrainerLink, session: Session) -> list[Finding]:
    """Returns what is worth knowing before step 0: of the options, of the training data, of the prompts.

    Raises:
        DataError: texts of a golden set are in the training data, and ``strict`` was asked for.
    """
    held_out = [*options.golden.values(), *([] if options.confirm is None else [options.confirm])]
    found = list(options.findings)
    if not options.searched and link.trainer is not None:
        texts = dataset_texts(getattr(link.trainer, "train_dataset", None))
        quiet = session.bars is None
        # One process reads, all hear of it.
        found += all_or_none(
            lambda: leaks(held_out, texts, strict=options.strict, quiet=quiet) if session.writes else []
        )
    return found + prompt_findings(session.encoder, trained_prompts(link.trainer))


def _plans(encoder: Any, sets: Mapping[str, Any], batch_tokens: int | None) -> dict[str, EvaluationPlan]:
    return {name: EvaluationPlan(encoder, golden, batch_tokens) for name, golden in sets.items()}
