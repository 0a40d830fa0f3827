"""What a run left behind: its checkpoints, the best store, model folders and adapters, and which of them are whole.

Promise: only names, small configurations and headers are read; a half-written folder is named with what it lacks, never
taken on trust; nothing is written.
"""

import filecmp
import hashlib
import json
import logging
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fullrank._errors import DataError
from fullrank.store import MANIFEST, BestStore

__all__ = [
    "Candidate",
    "Kind",
    "checkpoint_folders",
    "discover",
    "fingerprint",
    "inspect_folder",
    "refuse_mixed",
    "state_of",
    "weight_files",
]

logger = logging.getLogger(__name__)

Kind = Literal["model", "adapter"]
STORE = Path("fullrank") / "best"
MAX_CONFIG_BYTES, MAX_HEADER_BYTES = 16 << 20, 100 << 20
HASHED_WHOLE, SAMPLES, SAMPLE_BYTES = 32 << 20, 256, 4_096
ADAPTER, ADAPTER_CONFIG, MODULES, STATE = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "modules.json",
    "trainer_state.json",
)
_STEP = re.compile(r"(?:checkpoint|step|global_step)[-_]?(\d{1,15})(?:\.\d+)?")
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
        origin: ``store`` (fullrank's best), ``checkpoint`` (a numbered folder) or ``folder``.
        base: the base model that an adapter names.
        problem: why it cannot be used, or None.
    """

    name: str
    path: Path
    step: int | None
    kind: Kind
    bare: bool
    origin: Literal["store", "checkpoint", "folder"]
    base: str | None = None
    problem: str | None = None


def discover(run_dir: str | Path) -> list[Candidate]:
    """Returns the candidates of a run, by rising step, those without a step last; what cannot be used has a `problem`.

    Of one step in several places the whole one is taken, fullrank's best store first. A folder without a step whose
    weights are those of another candidate is left out.

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
    numbered: dict[int, Candidate] = {}
    plain: list[Candidate] = []
    for candidate in sorted(found, key=_rank):
        if candidate.step is None:
            plain.append(candidate)
        else:
            numbered.setdefault(candidate.step, candidate)
    kept = [numbered[step] for step in sorted(numbered)]
    return kept + [one for one in plain if not any(_same_weights(one, other) for other in kept)]


def inspect_folder(path: Path, name: str, *, step: int | None = None, origin: Any = "folder") -> Candidate | None:
    """Returns what a folder is, or None where nothing in it looks like a model.

    Reads configurations and the headers of weight files; sizes must be those that the headers say.
    """
    try:
        weights = weight_files(path)
        adapter = any((p / ADAPTER_CONFIG).is_file() for p in parts(path)) or any(f.name == ADAPTER for f in weights)
        known = adapter or weights or any((path / n).exists() for n in (MODULES, STATE, "config.json"))
        if not known and not _pickles(path):
            return None if origin == "folder" else _broken(path, name, step, origin, "it is empty")
        candidate = Candidate(
            name=name,
            path=path,
            step=step if step is not None else _step_of_state(path),
            kind="adapter" if adapter else "model",
            bare=not (path / MODULES).is_file(),
            origin=origin,
        )
        config = _adapter_config(path) if adapter else {}
        base = config.get("base_model_name_or_path")
        candidate = replace(candidate, base=base if isinstance(base, str) and base else None)
        return replace(candidate, problem=_problem(path, weights, adapter, config))
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
        body = {} if file is None else _json(file)
    except (OSError, DataError):
        return None
    if "model_type" not in body:
        return None
    sizes = (("hidden_size", "wide"), ("num_hidden_layers", "layers"), ("vocab_size", "words"))
    return ", ".join([str(body["model_type"]), *(f"{body[key]} {word}" for key, word in sizes if key in body)])


def fingerprint(candidate: Candidate) -> str:
    """Returns a hash of a candidate's weight files: whole where small, else header and evenly spaced pieces.

    Any training step changes nearly all values, so pieces are enough to tell.

    Raises:
        OSError: the folder has vanished or cannot be read.
    """
    digest = hashlib.sha256()
    files = weight_files(candidate.path)
    if not files:
        raise FileNotFoundError(f"{candidate.path} holds no weights any more")
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(candidate.path)} {size}\n".encode("utf-8", "surrogateescape"))
        with file.open("rb") as stream:
            if size <= HASHED_WHOLE:
                digest.update(stream.read())
                continue
            for start in range(0, size, size // SAMPLES):
                stream.seek(start)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


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
        match = _STEP.fullmatch(path.name)
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
        entries = BestStore(store).stored
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


def _rank(candidate: Candidate) -> tuple[bool, int, str]:
    return candidate.problem is not None, _PREFERENCE.index(candidate.origin), candidate.name


def _broken(path: Path, name: str, step: int | None, origin: Any, problem: str) -> Candidate:
    return Candidate(name, path, step, "model", True, origin, problem=problem)


def parts(path: Path) -> list[Path]:
    """Returns a model folder and the folders of its modules and named adapters, not those of models beside it."""
    inside = (p for p in sorted(path.iterdir()) if p.is_dir() and not p.name.startswith("."))
    others = (p for p in inside if not _STEP.fullmatch(p.name) and p.name != STORE.parts[0])
    return [path, *(p for p in others if not any((p / own).is_file() for own in (MODULES, STATE)))]


def weight_files(path: Path) -> list[Path]:
    """Returns the safetensors files that hold weights of a model folder."""
    names = ("model", "adapter_model", "extra")
    return [f for p in parts(path) for f in sorted(p.glob("*.safetensors")) if f.name.startswith(names)]


def _pickles(path: Path) -> list[Path]:
    return [*path.glob("pytorch_model*.bin"), *path.glob("adapter_model.bin")]


def _problem(path: Path, weights: list[Path], adapter: bool, config: dict[str, Any]) -> str | None:
    """Returns what a folder lacks, or None."""
    needed = [f for f in weights if f.name == ADAPTER] if adapter else [f for f in weights if f.stem != "extra"]
    modules = _modules(path)
    if not needed:
        pickled = next((p.name for p in _pickles(path)), None)
        if pickled:
            return f"its weights are a pickle ({pickled}), which may run code; only safetensors are read"
        if not (modules and not (path / "config.json").is_file() and not adapter):  # a static or bag-of-words model
            return f"it holds no {ADAPTER if adapter else 'model.safetensors'}"
    for file in weights:
        if fault := _fault(file):
            return f"{file.relative_to(path).as_posix()} {fault}"
    for index in (p / "model.safetensors.index.json" for p in parts(path)):
        if not index.is_file():
            continue
        names = set((_json(index).get("weight_map") or {}).values())
        if lost := sorted(str(n) for n in names if not (index.parent / Path(str(n)).name).is_file()):
            return f"{lost[0]} is missing, which {index.name} names"
    if config.get("megatron_config"):
        return f"{ADAPTER_CONFIG} names a module to import, which is refused"
    trainers = ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state.pth")
    if any((path / n).exists() for n in trainers) and (path / "optimizer.pt").exists() and not (path / STATE).is_file():
        return f"it holds no {STATE}, which the Trainer writes last: half-written"
    return None


def _fault(file: Path) -> str | None:
    """Returns what is wrong with a safetensors file by its header, or None."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        if len(first) < 8:
            return f"has {size} bytes: half-written"
        (length,) = struct.unpack("<Q", first)
        if length > min(MAX_HEADER_BYTES, size):
            return "has no readable safetensors header: half-written or no safetensors file"
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return "has no readable safetensors header: half-written or no safetensors file"
    expected = 8 + length + max(ends, default=0)
    return None if size == expected else f"has {size:,} bytes where its header says {expected:,}: half-written"


def _modules(path: Path) -> list[Any]:
    """Returns the entries of modules.json."""
    if not (path / MODULES).is_file():
        return []
    body = _read(path / MODULES)
    if not isinstance(body, list) or not all(isinstance(e, dict) and isinstance(e.get("path"), str) for e in body):
        raise DataError(f"{MODULES} is no list of modules")
    if outside := [e["path"] for e in body if e["path"].startswith(("/", "~")) or ".." in Path(e["path"]).parts]:
        raise DataError(f"{MODULES} names {outside[0]!r}, which lies outside the folder")
    return body


def _adapter_config(path: Path) -> dict[str, Any]:
    file = next((p / ADAPTER_CONFIG for p in parts(path) if (p / ADAPTER_CONFIG).is_file()), None)
    if file is None:
        raise DataError(f"it holds no {ADAPTER_CONFIG}")
    return _json(file)


def _step_of_state(path: Path) -> int | None:
    step = state_of(path).get("global_step")
    return step if type(step) is int and step >= 0 else None


def state_of(path: Path) -> dict[str, Any]:
    """Returns the ``trainer_state.json`` of a checkpoint; empty where there is none.

    Raises:
        DataError: it cannot be read.
    """
    return _json(path / STATE) if (path / STATE).is_file() else {}


def checkpoint_folders(root: Path) -> list[tuple[int, Path]]:
    """Returns (step, path) of the ``checkpoint-N`` folders right below ``root``, by rising step."""
    matches = ((re.fullmatch(r"checkpoint-(\d{1,15})", path.name), path) for path in root.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def _json(file: Path) -> dict[str, Any]:
    body = _read(file)
    if not isinstance(body, dict):
        raise DataError(f"{file.name} is no JSON object")
    return body


def _read(file: Path) -> Any:
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise DataError(f"{file.name} is larger than {MAX_CONFIG_BYTES >> 20} MiB")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file.name} cannot be read ({error}): half-written or no JSON") from error


def _same_weights(one: Candidate, other: Candidate) -> bool:
    if one.problem or other.problem:
        return False
    try:
        ours, theirs = (_sized(c) for c in (one, other))
        return ours.keys() == theirs.keys() and all(
            ours[n][0] == theirs[n][0] and filecmp.cmp(ours[n][1], theirs[n][1], shallow=False) for n in ours
        )
    except OSError:
        return False


def _sized(candidate: Candidate) -> dict[str, tuple[int, Path]]:
    files: Iterable[Path] = (f for f in weight_files(candidate.path) if f.stem != "extra")
    return {str(f.relative_to(candidate.path)): (f.stat().st_size, f) for f in files}
