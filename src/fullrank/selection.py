"""What a selection says: the winner, the leaderboard, and the journal that a killed selection goes on from.

Promise: a journal is written whole or not at all, and numbers in it are used again only for the same weights, the same
data and the same settings.
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fullrank._errors import DataError
from fullrank._files import write_atomically
from fullrank.comparison import Comparison
from fullrank.discover import Origin
from fullrank.result import Result
from fullrank.stats import Interval

__all__ = ["BASE", "SOUP", "Entry", "Row", "Selection", "SelectionJournal"]

logger = logging.getLogger(__name__)

BASE: Literal["base"] = "base"
SOUP: Literal["soup"] = "soup"
"""Names and origins of candidates that are no folder of the run: the base model, and the mean of what is tied."""
KIND, SCHEMA = "fullrank.selection", 1
BELONGS = "selection"
"""Where a stored result says to which weights and settings it belongs."""
MAX_BYTES = 64 << 20
_RESULTS = ("result", "base_result", "base_confirmed")
Status = Literal["complete", "pruned", "failed"]


@dataclass(frozen=True)
class Row:
    """One line of the leaderboard.

    Attributes:
        name: the candidate's path below the run's folder; ``base`` and ``soup`` for what is none, by its `origin`.
        path: where its weights are; for the base a path or hub id.
        step: training step, or None.
        status: ``complete``; ``pruned``, proved lower on these queries by a bound; or ``failed``, which is no score.
        score: value of the objective; None unless complete.
        bound: upper bound of the objective; the score where complete, None where failed.
        interval: of the score.
        delta: paired difference to the base; for a base that was left at its bound, the least that it is.
        coverage: share of the corpus that was ranked.
        documents_per_second: of encoding.
        eligible: whether it may be chosen; None where a guard was not measured, as another was better anyway.
        why: why it was not finished, not judged, not eligible, or failed.
        tied: cannot be told apart from the best (only where that was asked for).
        metrics: all metrics of a complete one; with several golden sets ``{"<set>/recall@1": ...}``.
        fingerprint: of the weights.
        origin: see `fullrank.discover.Candidate`.
    """

    name: str
    path: str
    step: int | None
    status: Status
    score: float | None = None
    bound: float | None = None
    interval: Interval | None = None
    delta: float | None = None
    coverage: float = 0.0
    documents_per_second: float | None = None
    eligible: bool | None = True
    why: str = ""
    tied: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    fingerprint: str = ""
    origin: Origin = "folder"

    def is_that_of(self, other: "Row | None") -> bool:
        """Returns whether both are of one candidate: names may be equal, as a folder may be called ``base``."""
        return other is not None and (self.origin, self.path) == (other.origin, other.path)


@dataclass(frozen=True)
class Selection:
    """The outcome of `select_checkpoint`.

    Attributes:
        winner: the row of the choice, or None where nothing could be evaluated.
        rows: the leaderboard: scores falling, then bounds, then what failed.
        tied: names of the candidates that cannot be told apart from the best (Holm, 95 %); None where not asked for.
        base: the row of the base model, or None where none is known.
        improved: whether the winner scored higher than the base; True where no base is known.
        objective: name of what chose.
        rule: ``max`` or ``one-se``.
        headline: the winner's value of the objective: on the confirming queries where there are some.
        headline_interval: its interval.
        result, base_result: `Result` of the winner and of the base on the golden set of the objective's leading part;
            None where not evaluated in full.
        confirmed, base_confirmed: the same on queries that took no part in the choice, or None.
        leading: the metric of the objective's leading part.
        comparison: paired comparison of the winner with the base, on the confirming queries where there are some; None
            without a base, or where the base was left at its bound.
        p_at_most: then the largest that the p-value against the base can be; None otherwise.
        documents_encoded: for the numbers of this leaderboard, over the candidates that did not fail.
        documents_spent: in all passes of a selection that was resumed, failed candidates included.
        share: `documents_encoded` of what evaluating each in full would have encoded.
        base_shape: path of the candidate whose pooling, length and prompts the base was given, or None.
        passed_over: sentence on a candidate that scored higher and that a guard refused, or "".
        data: name and size of what it was chosen on.
        journal: path of ``selection.json``; None where it could not be written.
    """

    winner: Row | None
    rows: tuple[Row, ...]
    tied: tuple[str, ...] | None
    base: Row | None
    improved: bool
    objective: str
    rule: str
    headline: float | None
    headline_interval: Interval | None
    result: Result | None
    base_result: Result | None
    confirmed: Result | None
    base_confirmed: Result | None
    leading: str
    comparison: Comparison | None
    documents_encoded: int
    documents_spent: int
    share: float
    data: str
    journal: Path | None
    base_shape: str | None = None
    passed_over: str = ""
    p_at_most: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON form, without the values of the queries."""
        body = {name: value for name, value in vars(self).items() if name not in _RESULTS}
        comparison = None
        if self.comparison is not None:
            counts = {"wins": len(self.comparison.wins), "losses": len(self.comparison.losses)}
            comparison = asdict(self.comparison) | counts
        found: dict[str, Any] = _finite(
            body
            | {
                "winner": None if self.winner is None else asdict(self.winner),
                "rows": [asdict(row) for row in self.rows],
                "base": None if self.base is None else asdict(self.base),
                "headline_interval": None if self.headline_interval is None else asdict(self.headline_interval),
                "confirmed": None if self.confirmed is None else self.confirmed.metrics,
                "comparison": comparison,
                "journal": None if self.journal is None else str(self.journal),
            }
        )
        return found


@dataclass
class Entry:
    """What a journal knows of a candidate.

    Attributes:
        fingerprint: of its weights.
        status: ``open`` (bound only), ``complete`` or ``failed``.
        bound: of the objective so far.
        n_encoded: documents encoded for it, in all passes.
        seconds: that this took.
        seen: documents ranked by golden set, guards among them, in the pass that gave the bound.
        results: file names of finished results by golden set, guards among them.
        refused: why a guard refused it.
        beaten: the largest p-value against what was proved better, by the fingerprint of that.
    """

    fingerprint: str
    status: Literal["open", "complete", "failed"] = "open"
    bound: float | None = None
    n_encoded: int = 0
    seconds: float = 0.0
    seen: dict[str, int] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    beaten: dict[str, float] = field(default_factory=dict)


class SelectionJournal:
    """The entries of a selection, in ``selection.json``, and finished results in a folder of the same name.

    Args:
        path: of the journal.
        settings: what the numbers depend on; a journal of other settings is begun anew.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings))
        self.entries: dict[str, Entry] = _read(path, self.settings)
        self._silent = False

    @property
    def folder(self) -> Path:
        """Where the results are."""
        return self.path.with_suffix(".results")

    def known(self, name: str, fingerprint: str) -> Entry | None:
        """Returns the entry of a candidate with these weights, or None."""
        entry = self.entries.get(name)
        return entry if entry is not None and entry.fingerprint == fingerprint else None

    def result(self, file: str, fingerprint: str) -> Result | None:
        """Returns a finished result; None where it cannot be read any more, or is of other weights or settings."""
        path = self.folder / Path(file).name
        try:
            found = Result.load(path)
        except (DataError, OSError) as error:
            logger.warning("%s; it is evaluated again", error)
            return None
        provenance = dict(found.provenance)
        if provenance.pop(BELONGS, None) != self._belongs(fingerprint):
            logger.warning("%s is of other weights or settings; it is evaluated again", path)
            return None
        return replace(found, provenance=provenance)

    def write(self, extra: Mapping[str, Any] | None = None) -> bool:
        """Writes the journal, and returns whether it did: a full disk is an error line, as the selection can go on."""
        entries = {name: vars(entry) for name, entry in self.entries.items()}
        body = {"kind": KIND, "schema": SCHEMA, "settings": self.settings, "candidates": entries, **(extra or {})}
        return self._try(lambda: write_atomically(self.path, json.dumps(_finite(body), indent=1) + "\n"))

    def save(self, file: str, result: Result, fingerprint: str) -> None:
        """Writes a finished result, with what it belongs to: another selection may write the same file."""
        marked = replace(result, provenance={**result.provenance, BELONGS: self._belongs(fingerprint)})
        self._try(lambda: marked.save(self.folder / file))

    def _belongs(self, fingerprint: str) -> str:
        return hashlib.sha256(json.dumps([self.settings, fingerprint], sort_keys=True).encode()).hexdigest()[:16]

    def _try(self, write: Any) -> bool:
        try:
            write()
            return True
        except OSError as error:
            if not self._silent:
                logger.error("%s cannot be written (%s); the selection goes on and cannot be resumed", self.path, error)
            self._silent = True
            return False


def _finite(value: Any) -> Any:
    """Returns a body that JSON can hold: what is not finite becomes null."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read(path: Path, settings: Mapping[str, Any]) -> dict[str, Entry]:
    if not path.exists():
        return {}
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"over {MAX_BYTES >> 20} MiB")
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["kind"] != KIND or body["schema"] != SCHEMA:
            raise ValueError("of another kind or version")
        if body["settings"] != settings:
            logger.warning("%s is of another selection (other data or settings); it is begun anew", path)
            return {}
        return {str(name): _entry(row) for name, row in body["candidates"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} is not the journal of a selection ({error}); move it away, or name another journal"
        ) from error


def _entry(row: dict[str, Any]) -> Entry:
    entry = Entry(**row)
    number = int | float
    right = (
        isinstance(entry.fingerprint, str)
        and entry.status in ("open", "complete", "failed")
        and (entry.bound is None or (isinstance(entry.bound, number) and not isinstance(entry.bound, bool)))
        and type(entry.n_encoded) is int
        and isinstance(entry.seconds, number)
        and isinstance(entry.seen, dict)
        and all(type(n) is int for n in entry.seen.values())
        and isinstance(entry.results, dict)
        and all(isinstance(file, str) for file in entry.results.values())
        and isinstance(entry.refused, str)
        and isinstance(entry.beaten, dict)
        and all(isinstance(p, number) for p in entry.beaten.values())
    )
    if not right:
        raise ValueError(f"not an entry: {row}")
    return entry
