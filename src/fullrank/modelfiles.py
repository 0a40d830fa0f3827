"""What lies in a model folder: weight files by their headers, configurations, and a hash of all that shapes the model.

Promise: only small configurations, headers and pieces of weights are read, none larger than its limit; nothing is
written or run.
"""

import hashlib
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullrank._errors import DataError

__all__ = [
    "ADAPTER",
    "ADAPTER_CONFIG",
    "EXTRA",
    "MODULES",
    "STATE",
    "adapter_config",
    "fingerprint",
    "is_own_checkpoint",
    "json_object",
    "parts",
    "pickles",
    "problem_of",
    "settled",
    "shape_of",
    "shaping_files",
    "state_of",
    "weight_files",
]

MAX_CONFIG_BYTES, MAX_HEADER_BYTES = 16 << 20, 100 << 20
HASHED_WHOLE, SAMPLES, SAMPLE_BYTES = 32 << 20, 256, 4_096
ADAPTER, ADAPTER_CONFIG, MODULES, STATE = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "modules.json",
    "trainer_state.json",
)
EXTRA = "extra.safetensors"
"""What trained beside an adapter, in folders that fullrank writes."""
STEP = re.compile(r"(?:checkpoint|step|global_step)[-_]?(\d{1,15})(?:\.\d+)?")
CHECKPOINT = re.compile(r"checkpoint-(\d{1,15})")
STORE = Path("fullrank") / "best"
SHAPING = (
    MODULES,
    "*config*.json",
    "sentence_*.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
)
"""Files that shape a model besides its weights."""
PASSING = ("transformers_version", "__version__", "_name_or_path", "name_or_path")
"""What differs between writings of the same model."""


def shaping_files(path: Path) -> list[Path]:
    """Returns the files of a model folder and its modules that shape the model besides its weights."""
    return sorted({f for part in parts(path) for pattern in SHAPING for f in part.glob(pattern) if f.is_file()})


def is_own_checkpoint(path: Path) -> bool:
    """Returns whether a folder is one that keeping decides on: ``checkpoint-N`` and no link."""
    return CHECKPOINT.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()


def shape_of(path: Path) -> str:
    """Returns a hash of all that shapes a model besides its weights."""
    digest = hashlib.sha256()
    for part in _content(path, []):
        digest.update(part)
    return digest.hexdigest()[:16]


def settled(path: Path) -> bytes:
    """Returns a file's content, JSON without what differs between writings of the same model."""
    raw = path.read_bytes()
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    if not isinstance(body, dict):
        return raw
    kept = {name: value for name, value in body.items() if name not in PASSING}
    if isinstance(targets := kept.get("target_modules"), list):  # a set, written in any order
        kept["target_modules"] = sorted(map(str, targets))
    return json.dumps(kept, sort_keys=True).encode()


def fingerprint(path: Path, *, base: str | None = None) -> str:
    """Returns a hash of a model folder: its weights, all that shapes the model around them, and its base.

    Weights are hashed whole where small, else in evenly spaced pieces: any training step changes nearly all values.

    Args:
        path: of the folder.
        base: path or hub id of the model that the folder needs below it; None where it stands alone.

    Raises:
        OSError: the folder has vanished or cannot be read.
    """
    files = weight_files(path)
    if not files and not (path / MODULES).is_file():  # a static or bag-of-words model may have none
        raise FileNotFoundError(f"{path} holds no weights any more")
    digest = hashlib.sha256()
    for part in _content(path, files):
        digest.update(part)
    if base is not None:
        below = Path(base).expanduser()
        digest.update(f"base {base}\n".encode("utf-8", "surrogateescape"))
        for part in _content(below, weight_files(below)) if below.is_dir() else ():
            digest.update(part)
    return digest.hexdigest()[:16]


def _content(path: Path, weights: list[Path]) -> Iterator[bytes]:
    for file in shaping_files(path):
        yield f"{file.relative_to(path)}\n".encode("utf-8", "surrogateescape")
        yield settled(file)
    for file in weights:
        size = file.stat().st_size
        yield f"{file.relative_to(path)} {size}\n".encode("utf-8", "surrogateescape")
        with file.open("rb") as stream:
            if size <= HASHED_WHOLE:
                yield stream.read()
                continue
            for start in range(0, size, size // SAMPLES):
                stream.seek(start)
                yield stream.read(SAMPLE_BYTES)


def parts(path: Path) -> list[Path]:
    """Returns a model folder and the folders of its modules and named adapters, not those of models beside it."""
    inside = (p for p in sorted(path.iterdir()) if p.is_dir() and not p.name.startswith("."))
    others = (p for p in inside if not STEP.fullmatch(p.name) and p.name != STORE.parts[0])
    return [path, *(p for p in others if not any((p / own).is_file() for own in (MODULES, STATE)))]


def weight_files(path: Path) -> list[Path]:
    """Returns the safetensors files that hold weights of a model folder."""
    names = ("model", "adapter_model", "extra")
    return [f for p in parts(path) for f in sorted(p.glob("*.safetensors")) if f.name.startswith(names)]


def pickles(path: Path) -> list[Path]:
    """Returns the weight files that are pickles, which are never read."""
    return [*path.glob("pytorch_model*.bin"), *path.glob("adapter_model.bin")]


def problem_of(path: Path, weights: list[Path], adapter: bool, config: dict[str, Any]) -> str | None:
    """Returns what a folder lacks, or None."""
    needed = [f for f in weights if f.name == ADAPTER] if adapter else [f for f in weights if f.stem != "extra"]
    modules = _modules(path)
    if not needed:
        pickled = next((p.name for p in pickles(path)), None)
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
        names = set((json_object(index).get("weight_map") or {}).values())
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


def adapter_config(path: Path) -> dict[str, Any]:
    """Returns the ``adapter_config.json`` of a folder; `DataError` where there is none."""
    file = next((p / ADAPTER_CONFIG for p in parts(path) if (p / ADAPTER_CONFIG).is_file()), None)
    if file is None:
        raise DataError(f"it holds no {ADAPTER_CONFIG}")
    return json_object(file)


def state_of(path: Path) -> dict[str, Any]:
    """Returns the ``trainer_state.json`` of a checkpoint; empty where there is none.

    Raises:
        DataError: it cannot be read.
    """
    return json_object(path / STATE) if (path / STATE).is_file() else {}


def json_object(file: Path) -> dict[str, Any]:
    """Returns what a small JSON file holds; `DataError` where that is no object."""
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
