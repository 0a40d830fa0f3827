"""What a run left behind: its checkpoints, the best store, model folders and adapters, and which of them are whole.

Promise: only names, small configurations and headers are read; a half-written folder is named with what it lacks, never
taken on trust; nothing is written.
"""

import filecmp
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fullrank._errors import DataError
from fullrank.modelfiles import (
    ADAPTER,
    ADAPTER_CONFIG,
    CHECKPOINT,
    EXTRA,
    MODULES,
    STATE,
    STEP,
    STORE,
    adapter_config,
    fingerprint,
    json_object,
    parts,
    pickles,
    problem_of,
    shape_of,
    state_of,
    weight_files,
)
from fullrank.store import MANIFEST, BestStore

__all__ = [
    "Candidate",
    "Kind",
    "Origin",
    "checkpoint_folders",
    "discover",
    "fingerprint_of",
    "inspect_folder",
    "refuse_mixed",
]

logger = logging.getLogger(__name__)

Kind = Literal["model", "adapter"]
Origin = Literal["store", "checkpoint", "folder", "base", "soup"]
_PREFERENCE = ("store", "checkpoint", "folder")


@dataclass(frozen=True)
class Candidate:
    """A folder that may hold weights of a run.

    Attributes:
        name: its path below the run's folder.
        path: where it is.
        step: training step, or None where nothing tells it.
        kind: ``model`` (all weights) or ``adapter`` (a PEFT adapter, which needs its base).
        bare: without the files of a SentenceTransformer: pooling and prompts have to come from the base.
        origin: ``store`` (fullrank's best), ``checkpoint`` (a numbered folder) or ``folder``; of what is no folder of
            the run: ``base`` or ``soup``, the mean of what is tied.
        base: the base model that an adapter names.
        problem: why it cannot be used, or None.
    """

    name: str
    path: Path
    step: int | None
    kind: Kind
    bare: bool
    origin: Origin
    base: str | None = None
    problem: str | None = None

    @property
    def needs_base(self) -> bool:
        """Whether it is no whole model: an adapter, or a backbone without pooling."""
        return self.kind == "adapter" or self.bare


def discover(run_dir: str | Path) -> list[Candidate]:
    """Returns the candidates of a run, by rising step, those without a step last; what cannot be used has a `problem`.

    Folders of one step with unlike weights are candidates each; of equal weights one is taken, fullrank's best store
    first. So it is with a folder without a step whose weights are those of another candidate. Weights are equal only in
    models of one shape: of other pooling, or an adapter of other scale, they are another candidate.

    Raises:
        DataError: no such folder, or nothing in it that could be a model.
    """
    root = Path(run_dir).expanduser()
    if not root.is_dir():
        raise DataError(f"run folder {str(run_dir)!r} does not exist")
    found = list(_found(root))
    if not found:
        raise DataError(
            f"{root} holds no checkpoints: looked for checkpoint-N, {STORE.as_posix()}/step-N and folders with "
            "*.safetensors or adapter_config.json"
        )
    kept: list[Candidate] = []
    for one in sorted(found, key=_rank):
        if not any(one.step in (None, other.step) and _same_weights(one, other) for other in kept):
            kept.append(one)
    return sorted(kept, key=lambda c: (c.step is None, c.step or 0))


def inspect_folder(path: Path, name: str, *, step: int | None = None, origin: Any = "folder") -> Candidate | None:
    """Returns what a folder is, or None where nothing in it looks like a model.

    Reads configurations and the headers of weight files; sizes must be those that the headers say.
    """
    try:
        weights = weight_files(path)
        adapter = any((p / ADAPTER_CONFIG).is_file() for p in parts(path)) or any(f.name == ADAPTER for f in weights)
        known = adapter or weights or any((path / n).exists() for n in (MODULES, STATE, "config.json"))
        if not known and not pickles(path):
            return None if origin == "folder" else _broken(path, name, step, origin, "it is empty")
        candidate = Candidate(
            name=name,
            path=path,
            step=step if step is not None else _step_of_state(path),
            kind="adapter" if adapter else "model",
            bare=not (path / MODULES).is_file(),
            origin=origin,
        )
        config = adapter_config(path) if adapter else {}
        base = config.get("base_model_name_or_path")
        candidate = replace(candidate, base=base if isinstance(base, str) and base else None)
        return replace(candidate, problem=problem_of(path, weights, adapter, config))
    except (OSError, DataError) as error:
        return _broken(path, name, step, origin, str(error))


def refuse_mixed(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns the candidates, those of another architecture than most marked with that problem.

    The architecture is what ``config.json`` says; a folder without one is left to the loader.
    """
    listed = list(candidates)
    shapes = {c.name: shape for c in listed if not c.problem and (shape := _architecture(c.path))}
    counts = Counter(shapes.values())
    if len(counts) < 2:
        return listed
    usual, n = counts.most_common(1)[0]  # of equals the one seen first, the earliest step
    return [
        c
        if shapes.get(c.name, usual) == usual
        else replace(c, problem=f"mixed architectures: it is {shapes[c.name]}, and {n} of the others {usual}")
        for c in listed
    ]


def _architecture(path: Path) -> str | None:
    file = next((p / "config.json" for p in parts(path) if (p / "config.json").is_file()), None)
    try:
        body = {} if file is None else json_object(file)
    except (OSError, DataError):
        return None
    if "model_type" not in body:
        return None
    sizes = (("hidden_size", "wide"), ("num_hidden_layers", "layers"), ("vocab_size", "words"))
    return ", ".join([str(body["model_type"]), *(f"{body[key]} {word}" for key, word in sizes if key in body)])


def fingerprint_of(candidate: Candidate, base: str | None = None) -> str:
    """Returns the `fingerprint` of a candidate with the base it needs: ``base``, else the one that an adapter names.

    Raises:
        OSError: the folder has vanished or cannot be read.
    """
    return fingerprint(candidate.path, base=(base or candidate.base) if candidate.needs_base else None)


def _found(root: Path) -> Iterator[Candidate]:
    # The folder given may be a run, a store, or a model folder that the trainer wrote beside its checkpoints.
    for store in (root / STORE, root):
        if (store / MANIFEST).is_file():
            yield from _stored(store, root)
    own_files = ("model.safetensors", "model.safetensors.index.json", ADAPTER, ADAPTER_CONFIG, MODULES)
    is_model = any((root / file).is_file() for file in own_files)
    own = inspect_folder(root, root.resolve().name or "model") if is_model else None
    if own is not None:
        yield own
    stored = (root / MANIFEST).is_file()
    for path in sorted(root.iterdir()):
        if not path.is_dir() or path.name.startswith("."):
            continue
        match = STEP.fullmatch(path.name)
        if match and not (stored and path.name.startswith("step")):
            found = inspect_folder(path, path.name, step=int(match[1]), origin="checkpoint")
        elif (
            match
            or (own is not None and _is_module(path))
            or path.name.startswith(STORE.parts[0])
            or path.name.endswith(".results")
        ):
            continue
        else:
            found = inspect_folder(path, path.name)
        if found is not None:
            yield found


def _stored(store: Path, root: Path) -> Iterator[Candidate]:
    try:
        opened = BestStore(store, resume=True)
        entries = [*opened.stored, *opened.damaged]
    except DataError as error:
        logger.warning("%s; its steps are not candidates", error)
        return
    for entry in entries:
        name = entry.path.relative_to(root).as_posix()
        found = inspect_folder(entry.path, name, step=entry.step, origin="store")
        if found is not None:
            yield found


def _is_module(path: Path) -> bool:
    """Returns whether a folder is a part of the SentenceTransformer around it, such as ``1_Pooling``."""
    return re.fullmatch(r"\d+_\w+", path.name) is not None


def _rank(candidate: Candidate) -> tuple[bool, bool, int, str]:
    # Those without a step come last: they may be copies of one that has a step.
    return candidate.problem is not None, candidate.step is None, _PREFERENCE.index(candidate.origin), candidate.name


def _broken(path: Path, name: str, step: int | None, origin: Any, problem: str) -> Candidate:
    return Candidate(name, path, step, "model", True, origin, problem=problem)


def _step_of_state(path: Path) -> int | None:
    try:
        step = state_of(path).get("global_step")
    except DataError as error:
        logger.warning("%s: %s; its step is not known", path, error)
        return None
    return step if type(step) is int and step >= 0 else None


def checkpoint_folders(root: Path) -> list[tuple[int, Path]]:
    """Returns (step, path) of the ``checkpoint-N`` folders right below ``root``, by rising step."""
    matches = ((CHECKPOINT.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def _same_weights(one: Candidate, other: Candidate) -> bool:
    if one.problem or other.problem:
        return False
    try:
        ours, theirs = (_sized(c) for c in (one, other))
        if EXTRA not in ours:  # the trainer writes none beside the adapter that fullrank's store holds with it
            theirs.pop(EXTRA, None)
        return (
            ours.keys() == theirs.keys()
            and all(ours[n][0] == theirs[n][0] and filecmp.cmp(ours[n][1], theirs[n][1], shallow=False) for n in ours)
            and shape_of(one.path) == shape_of(other.path)
        )
    except OSError:
        return False


def _sized(candidate: Candidate) -> dict[str, tuple[int, Path]]:
    files = weight_files(candidate.path)
    return {str(f.relative_to(candidate.path)): (f.stat().st_size, f) for f in files}
