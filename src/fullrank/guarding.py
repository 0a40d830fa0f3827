"""The guards of a run on duty: general sets, measured beside the evaluations.

Promise: a step is only kept where every guard was measured on its weights and none fell below its floor.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from fullrank._errors import DataError, NonFiniteError
from fullrank._files import write_atomically
from fullrank.encode import Precision
from fullrank.guards import Breach, Guard, breach_of, guard_key, guard_names
from fullrank.journal import FLOORS_FILE, read_result, result_name
from fullrank.metrics import TieRule
from fullrank.plan import EvaluationPlan
from fullrank.result import Finding, Result
from fullrank.scoring import score_all

__all__ = ["Look", "Watch"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Look:
    """What the guards said at a step.

    Attributes:
        results: by guard set, of those that were measured.
        breaches: of those that fell below their floor.
        failed: why a guard could not be measured.
        logs: for the trackers.
    """

    results: dict[str, Result] = field(default_factory=dict)
    breaches: tuple[Breach, ...] = ()
    failed: str | None = None
    logs: dict[str, float] = field(default_factory=dict)

    @property
    def eligible(self) -> bool:
        """Whether the weights may be kept."""
        return not self.breaches and self.failed is None

    @property
    def stop(self) -> bool:
        """Whether a breach asks for the end of the training."""
        return any(breach.guard.on_breach == "stop" for breach in self.breaches)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What to say of it."""
        found = tuple(breach.finding for breach in self.breaches)
        if self.failed is None:
            return found
        message = f"a guard could not be measured, so this step is not eligible: {self.failed}"
        return (*found, Finding("guard-failed", "error", message))


class Watch:
    """Measures the guards of a run.

    Args:
        guards: what to measure; plans: by the name of their sets.
        folder: of the journal, where results are stored.
        writes: False on ranks that only take part.
        ties, precision: of the evaluations.
    """

    def __init__(
        self,
        guards: Sequence[Guard],
        plans: Mapping[str, EvaluationPlan],
        *,
        folder: Path,
        writes: bool,
        ties: TieRule,
        precision: Precision | None,
    ) -> None:
        self.guards, self.plans, self.folder, self.writes = guards, plans, folder, writes
        self.ties, self.precision = ties, precision
        self.bases = {guard.golden.name: guard.baseline for guard in guards if guard.baseline is not None}
        self._looks = 0

    def read_back(self) -> None:
        """Finds the base model of a resumed run.

        Raises:
            DataError: it was not measured, or on other data.
        """
        for guard in self.guards:
            name = guard.golden.name
            if name in self.bases:
                continue
            base = read_result(self.path(0, name))
            if base is None or guard.metric not in base.metrics:
                raise DataError(
                    f"the guard {name!r} has no {guard.metric} of the base model in {self.folder}: pass "
                    "Guard(..., baseline=evaluate(base_model, golden)) to resume with it"
                )
            if base.provenance.get("data") != guard.golden.fingerprint():
                raise DataError(
                    f"the guard {name!r} is not the set that this run began with; resume with the same data"
                )
            self.bases[name] = base

    @property
    def floors(self) -> dict[str, float]:
        """The floor of each guard whose base model is known, as the journal names it."""
        known = [guard for guard in self.guards if guard.golden.name in self.bases]
        return {guard_key(g): float(self.bases[g.golden.name][g.metric] - g.max_drop) for g in known}

    @property
    def tags(self) -> dict[str, str]:
        """The tag of each guard in TensorBoard, by its name in the journal."""
        return {guard_key(guard): f"eval/guard_{guard.golden.name}_{guard.metric}" for guard in self.guards}

    @property
    def tagged_floors(self) -> dict[str, float]:
        """The floors by the tag of their guard."""
        return {self.tags[name]: floor for name, floor in self.floors.items()}

    def look(self, model: nn.Module, step: int, *, wanted: bool) -> Look:
        """Measures the guards that are due, or all where the step would be kept.

        Raises:
            Exception: at step 0, as an evaluation does.
        """
        k, self._looks = self._looks, self._looks + 1
        due = [guard for guard in self.guards if wanted or step == 0 or k % guard.every_kth == 0]
        results: dict[str, Result] = {}
        for guard in due:
            name = guard.golden.name
            outcome = score_all(
                model,
                {name: self.plans[name]},
                None,
                metrics=[guard.metric],
                ties=self.ties,
                precision=self.precision,
            )
            if outcome.error is not None:
                if step == 0 and not isinstance(outcome.error, NonFiniteError):
                    raise outcome.error
                return Look(results, failed=f"{name!r}: {outcome.error}")
            results[name] = outcome.results[name]
            self._save(step, name, results[name])
            if step == 0:
                self.bases.setdefault(name, results[name])
            if name not in self.bases:  # step 0 had no finite embeddings
                return Look(results, failed=f"{name!r}: the base model could not be measured")
        if step == 0:
            self._write_floors()
        pairs = [(guard, self.bases[guard.golden.name], results[guard.golden.name]) for guard in due]
        return Look(
            results,
            tuple(found for pair in pairs if (found := breach_of(*pair, step=step)) is not None),
            logs={name: value for pair in pairs for name, value in guard_names(*pair).items()},
        )

    def breaches(self, step: int) -> list[Breach]:
        """Returns the breaches of a step from the stored results; for the end of a run, also of a resumed one."""
        found = []
        for guard in self.guards:
            base, now = self.bases.get(guard.golden.name), read_result(self.path(step, guard.golden.name))
            if base is not None and now is not None and (breach := breach_of(guard, base, now, step=step)):
                found.append(breach)
        return found

    def path(self, step: int, name: str) -> Path:
        """Returns where the result of a guard is stored."""
        return self.folder / result_name(f"guard-step-{step}", name)

    def _write_floors(self) -> None:
        """Writes the floors for the report, which knows the journal only."""
        if not self.writes or not self.guards:
            return
        try:
            write_atomically(self.folder / FLOORS_FILE, json.dumps(self.floors, indent=2) + "\n")
        except OSError as error:
            logger.error("the floors of the guards could not be written to %s: %s", self.folder, error)

    def _save(self, step: int, name: str, result: Result) -> None:
        if not self.writes:
            return
        try:
            result.save(self.path(step, name))
        except OSError as error:
            logger.error("the result of the guard %r could not be written to %s: %s", name, self.folder, error)
