"""Weight averaging: the uniform mean of several stored models, as one more model folder.

Promise: means are taken in fp32 and stored so; only safetensors are read and written; the members stay as they are.
"""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fullrank._errors import DataError
from fullrank._files import weights_as_files
from fullrank.discover import Candidate
from fullrank.modelfiles import STATE, weight_files

__all__ = ["copy_model", "write_soup"]

NOT_MODEL = (
    "optimizer*",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*.pth",
    "training_args.bin",
    "global_step*",
    STATE,
    "result*.json",
    "probe.safetensors",
    "checkpoint-*",
    "fullrank*",
    "runs",
    "selection.*",
)
"""What stands in the folder of a checkpoint and is no part of the model."""


def copy_model(source: Path, target: Path) -> None:
    """Copies the model in a folder, without the state of its training; ``target`` may lie inside that folder.

    Raises:
        OSError: it cannot be read or written; what was written is taken away again.
    """
    other, around = shutil.ignore_patterns(*NOT_MODEL), set(target.resolve().parents)

    def ignored(folder: str, names: list[str]) -> set[str]:
        return {*other(folder, names), *(name for name in names if (Path(folder) / name).resolve() in around)}

    try:
        shutil.copytree(source, target, ignore=ignored)
    except shutil.Error as error:  # a list of what failed
        shutil.rmtree(target, ignore_errors=True)
        raise OSError(f"{source} cannot be copied to {target}: {error.args[0][0][2]}") from error
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def write_soup(members: Sequence[Candidate], target: Path) -> Path:
    """Writes the uniform mean of the members' weights as a model folder, and returns its path.

    Of adapters, the tensors of the adapters are averaged. What cannot be averaged (integers) is taken from the first.

    Raises:
        DataError: members of different kinds or shapes.
        OSError: it cannot be written.
    """
    first, *others = members
    if any(m.kind != first.kind for m in others):
        raise DataError("adapters and full models cannot be averaged with each other")
    files = [p.relative_to(first.path) for p in weight_files(first.path)]
    for member in others:
        if [p.relative_to(member.path) for p in weight_files(member.path)] != files:
            raise DataError(f"{member.name} and {first.name} hold their weights in different files")
    if target.exists():
        shutil.rmtree(target)  # ours: of the selection before
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        copy_model(first.path, partial)
        for file in files:
            _average([m.path / file for m in members], partial / file)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _average(sources: Sequence[Path], target: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(weights_as_files())
        opened = [stack.enter_context(safe_open(source, framework="pt")) for source in sources]
        names = sorted(opened[0].keys())
        if any(sorted(file.keys()) != names for file in opened):
            raise DataError(f"{sources[0]} and the others hold different tensors")
        out = {name: _mean([file.get_tensor(name) for file in opened], name, sources[0]) for name in names}
        save_file(out, target, metadata=opened[0].metadata())


def _mean(tensors: Sequence[Tensor], name: str, source: Path) -> Tensor:
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        raise DataError(f"{name} has other shapes than in {source}")
    if not tensors[0].is_floating_point():
        return tensors[0]
    return torch.stack([tensor.float() for tensor in tensors]).mean(dim=0)
