"""The journal of a run: one line for each evaluation, the truth about what happened.

Promise: a line is there whole or not at all; a run that starts where a journal lies moves the old one aside and deletes
nothing.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote

from fullrank._errors import DataError
from fullrank._files import write_atomically
from fullrank.checkpoints import Evaluation, Status
from fullrank.result import Result

__all__ = [
    "ABANDONED",
    "FLOORS_FILE",
    "RULES_FILE",
    "Journal",
    "move_aside",
    "read_history",
    "read_result",
    "result_name",
]

logger = logging.getLogger(__name__)

FILE, FLOORS_FILE = "history.jsonl", "guards.json"
ABANDONED = "abandoned branch"
RULES_FILE = "rules.json"


class Journal:
    """The evaluations of a run, in ``FOLDER/history.jsonl``, and their results in ``FOLDER/step-N.json``.

    Args:
        folder: usually ``OUTPUT_DIR/fullrank``.
        write: False on ranks that only read.
    """

    def __init__(self, folder: Path, *, write: bool = True) -> None:
        self.folder, self.write = folder, write
        self.lines: list[Evaluation] = []

    def resume(self, step: int, stored_steps: Sequence[int]) -> None:
        """Reads the journal back and cuts it to ``step``; stored steps of a later branch keep their line, marked."""
        lines = read_history(self.folder / FILE)
        stored = set(stored_steps)
        past = [line for line in lines if line.step <= step]
        later = [replace(line, note=ABANDONED) for line in lines if line.step > step and line.step in stored]
        self.lines = past + later
        self._flush()

    def begin(self, rules: dict[str, Any]) -> None:
        """Notes by what a run that begins here will choose."""
        if self.write:
            write_atomically(self.folder / RULES_FILE, json.dumps(rules, indent=2) + "\n")

    def refuse_other_rules(self, rules: dict[str, Any]) -> None:
        """Raises `DataError` where the run was begun with other rules: scores by two rules cannot be ranked."""
        path = self.folder / RULES_FILE
        if not path.is_file():
            return
        try:
            begun = json.loads(path.read_text(encoding="utf-8"))
            unlike = [
                f"{name}={begun.get(name)!r}, not {value!r}"
                for name, value in rules.items()
                if begun.get(name) != value
            ]
        except (ValueError, AttributeError) as error:
            raise DataError(f"{path} cannot be read ({error}); it says by what the run chooses") from error
        if unlike:
            raise DataError(
                f"this run was begun with {'; '.join(unlike)}: scores by two rules cannot be ranked. Resume with the "
                f"same ones, or start anew in another output_dir than that of {self.folder}"
            )

    @property
    def current(self) -> list[Evaluation]:
        """The evaluations of this branch: what patience counts."""
        return [line for line in self.lines if line.note != ABANDONED]

    def add(self, line: Evaluation, results: dict[str, Result]) -> None:
        """Appends a line; a line of the same step and branch is replaced. ``results``: by golden set name."""
        self.lines = [old for old in self.lines if old.step != line.step or old.note == ABANDONED] + [line]
        if not self.write:
            return
        for name, result in results.items():
            result.save(self.folder / result_name(f"step-{line.step}", name if len(results) > 1 else None))
        self._flush()

    def amend(self, step: int, score: float, metrics: dict[str, float]) -> None:
        """Adds metrics to the line of a step that had that score."""
        self.lines = [
            replace(line, metrics=line.metrics | metrics) if (line.step, line.score) == (step, score) else line
            for line in self.lines
        ]
        self._flush()

    def _flush(self) -> None:
        if self.write:
            text = "".join(json.dumps(line.as_dict()) + "\n" for line in self.lines)
            write_atomically(self.folder / FILE, text)


def result_name(stem: str, golden_name: str | None = None) -> str:
    """Returns the file name of a stored result; with several golden sets it carries the name of the set."""
    return f"{stem}.json" if golden_name is None else f"{stem}.{quote(golden_name, safe='')}.json"


def read_result(path: Path) -> Result | None:
    """Returns the stored result, or None where there is none."""
    return Result.load(path) if path.is_file() else None


def move_aside(folder: Path) -> Path | None:
    """Renames a folder that an earlier run left to ``NAME.1``, ``NAME.2``, ... and returns the new path."""
    if not folder.exists():
        return None
    n = 1
    while (target := folder.with_name(f"{folder.name}.{n}")).exists():
        n += 1
    folder.rename(target)
    logger.warning("%s is of an earlier run; moved to %s", folder, target)
    return target


def read_history(path: Path, *, notes: list[str] | None = None) -> list[Evaluation]:
    """Returns the evaluations of a ``history.jsonl``, in its order; none where there is no such file.

    Args:
        path: of the file.
        notes: where given, a line that is no entry is named here and left out.

    Raises:
        DataError: a line that is no entry of a journal; with ``notes`` only where none is one.
    """
    if not path.is_file() or not path.stat().st_size:
        return []
    lines: list[Evaluation] = []
    for number, text in enumerate(path.read_bytes().removesuffix(b"\n").split(b"\n"), 1):
        try:
            lines.append(_evaluation(json.loads(text)))
        except (ValueError, TypeError, RecursionError) as error:
            said = f"{path}, line {number}: not an entry of a journal ({error})"
            if notes is None:
                raise DataError(said) from error
            notes.append(said)
    if notes and not lines:
        raise DataError(notes[0])
    return lines


def _evaluation(body: dict[str, Any]) -> Evaluation:
    line = Evaluation(**body)
    right = {
        "step": type(line.step) is int and line.step >= 0,
        "epoch": _is_number(line.epoch),
        "status": line.status in get_args(Status),
        "score": line.score is None or _is_number(line.score),
        "metrics": isinstance(line.metrics, dict) and all(map(_is_number, line.metrics.values())),
        "seconds": _is_number(line.seconds),
        "error": line.error is None or isinstance(line.error, str),
        "note": line.note is None or isinstance(line.note, str),
        "findings": isinstance(line.findings, list) and all(isinstance(text, str) for text in line.findings),
        "fingerprint": isinstance(line.fingerprint, str),
    }
    if wrong := [name for name, fits in right.items() if not fits]:
        raise ValueError(f"{wrong[0]} is {getattr(line, wrong[0])!r}")
    return line


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
