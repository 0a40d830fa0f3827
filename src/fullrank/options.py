"""The options of the callback, checked before anything is spent.

Promise: options that exist fit together; what cannot work is one clear error.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, get_args

from fullrank._errors import SettingError
from fullrank._files import refuse_unwritable
from fullrank._optional import require
from fullrank.data import GoldenSet
from fullrank.encode import Encoder, Precision, as_encoder
from fullrank.guards import CollapseThresholds, Guard, checked_confirm, checked_guards
from fullrank.leaks import flat_texts, leaks
from fullrank.metrics import Metric, TieRule
from fullrank.objective import Objective, metrics_needed, named_sets
from fullrank.result import Finding
from fullrank.settings import refuse_no_count, refuse_unknown

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """What `RetrievalCallback` was asked for; see there.

    Attributes:
        golden: by name.
        objective: what chooses.
        metrics: what is computed: those asked for and those of the objective.
        searched: training texts were given, and searched for those of the golden sets.
        findings: what the checks of the options found.
    """

    golden: dict[str, GoldenSet]
    objective: Objective
    metrics: list[Metric]
    every: int | Literal["epoch"] | None
    encoder: Encoder | None
    confirm: GoldenSet | None
    guards: tuple[Guard, ...]
    ties: TieRule
    keep_best: int
    patience: int | None
    min_delta: float
    precision: Precision | Literal["auto"] | None
    batch_tokens: int | None
    collapse: CollapseThresholds
    pool: int | None
    searched: bool
    strict: bool
    report: Path | bool
    verbose: bool | None
    findings: tuple[Finding, ...] = ()

    @classmethod
    def checked(
        cls,
        golden: GoldenSet | Sequence[GoldenSet],
        select: str | Mapping[str, float],
        *,
        every: int | Literal["epoch"] | None,
        encoder: Encoder | None,
        confirm: GoldenSet | None,
        guards: Guard | Sequence[Guard],
        metrics: Sequence[str | Metric],
        ties: TieRule,
        keep_best: int,
        patience: int | None,
        min_delta: float,
        precision: Precision | Literal["auto"] | None,
        batch_tokens: int | None,
        collapse: CollapseThresholds | None,
        pool: int | None,
        train_texts: Iterable[Any] | None,
        strict: bool,
        report: bool | str | PathLike[str],
        verbose: bool | None,
    ) -> "Options":
        """Returns the options.

        Raises:
            SettingError: an option that cannot work.
            DataError: a golden set without an answerable query, sets that do not go together, or with ``strict`` texts
                of a golden set among the training texts.
            MissingExtraError: a report is wanted, and jinja2 or matplotlib is not installed.
        """
        if every != "epoch":
            refuse_no_count("every", every, "a whole number of steps from 1, 'epoch' or None")
        refuse_no_count("patience", patience, "a whole number from 1 or None")
        refuse_no_count("batch_tokens", batch_tokens, "a whole number from 1 or None")
        refuse_no_count("pool", pool, "a whole number of documents from 1 or None")
        refuse_no_count("keep_best", keep_best or 0, "a whole number from 1")
        refuse_unknown("ties", ties, get_args(TieRule))
        refuse_unknown("precision", precision, ("auto", None, *get_args(Precision)))
        if not isinstance(min_delta, int | float) or not 0 <= min_delta < math.inf:
            raise SettingError(f"min_delta={min_delta!r} must be a number from 0")
        if collapse is not None and not isinstance(collapse, CollapseThresholds):
            raise SettingError(f"collapse={collapse!r} must be CollapseThresholds(...) or None")
        if encoder is not None:
            as_encoder(encoder)  # refuses what cannot encode
        sets = named_sets(golden)
        objective = Objective.parse(select, list(sets))
        findings = []
        if confirm is not None:
            findings = [found for one in sets.values() if (found := checked_confirm(confirm, one)) is not None]
            if confirm.name in sets:
                raise SettingError(f"confirm needs a name of its own, got {confirm.name!r}; pass name=... to GoldenSet")
        if train_texts is not None:
            held_out = [*sets.values(), *([] if confirm is None else [confirm])]
            findings += leaks(held_out, flat_texts(train_texts), strict=strict)
        return cls(
            golden=sets,
            objective=objective,
            metrics=metrics_needed(metrics, objective),
            every=every,
            encoder=encoder,
            confirm=confirm,
            guards=checked_guards(guards, list(sets.values())),
            ties=ties,
            keep_best=keep_best,
            patience=patience,
            min_delta=min_delta,
            precision=precision,
            batch_tokens=batch_tokens,
            collapse=collapse or CollapseThresholds(),
            pool=pool,
            searched=train_texts is not None,
            strict=strict,
            report=_checked_report(report),
            verbose=verbose,
            findings=tuple(findings),
        )


def _checked_report(report: bool | str | PathLike[str]) -> Path | bool:
    if isinstance(report, bool):
        path: Path | bool = report
    elif isinstance(report, str | PathLike) and fspath(report):
        path = Path(report)
        refuse_unwritable(path)
    else:
        raise SettingError(f"report={report!r} must be True, or the path of the file to write")
    if report:
        for module in ("jinja2", "matplotlib"):
            require(module, extra="report")
    return path
