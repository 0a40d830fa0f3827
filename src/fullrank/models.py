"""Models by path or hub id, and what tells their weights apart.

Promise: code that comes with a model is never run, weights are read from safetensors, and a model that is not there is
one clear error.
"""

import hashlib
from pathlib import Path
from typing import Any

from torch import distributed, nn

from fullrank._errors import DataError
from fullrank.result import Finding

__all__ = ["bare_backbone", "is_sharded", "load_sentence_transformer", "model_fingerprint"]

SAMPLED_VALUES = 64


def load_sentence_transformer(source: str) -> Any:
    """Returns the ``SentenceTransformer`` at a path or of a hub id; code that comes with a model is never run.

    Raises:
        DataError: nothing is there, or it is no model.
    """
    from sentence_transformers import SentenceTransformer

    path = Path(source).expanduser()
    looks_local = path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1
    if looks_local and not path.is_dir():
        raise DataError(f"model folder {source!r} does not exist")
    try:
        return SentenceTransformer(
            str(path) if path.is_dir() else source,
            trust_remote_code=False,
            model_kwargs={"use_safetensors": True},
        )
    except Exception as error:  # a broken file raises what its reader likes: OSError, SafetensorError, KeyError, ...
        first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise DataError(
            f"cannot load the model {source!r}: {first} Expected a folder written by save_pretrained, or a hub id "
            "that can be reached"
        ) from error


def bare_backbone(source: str) -> list[Finding]:
    """Returns a Finding where a folder holds a backbone and no pooling, for which mean pooling is then made up."""
    path = Path(source).expanduser()
    if not path.is_dir() or (path / "modules.json").is_file():
        return []
    return [
        Finding(
            "bare-backbone",
            "warning",
            f"{source} holds no modules.json: mean pooling was added, which the model may not have been trained for",
            remedy="Save it as a SentenceTransformer with the pooling that it was trained with",
        )
    ]


def is_sharded(model: object) -> bool:
    """Returns whether each forward needs all ranks, because each holds a part of the weights (FSDP2, ZeRO-3)."""
    if not isinstance(model, nn.Module) or not distributed.is_available() or not distributed.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule  # takes a second, which only distributed runs have to spend

    return any(isinstance(part, FSDPModule) for part in model.modules()) or any(
        hasattr(weight, "ds_id") for weight in model.parameters()
    )


def model_fingerprint(model: object) -> str | None:
    """Returns a hash of names, shapes and evenly spaced values of all weights, or None where there are none.

    Any training step moves nearly all values of the tensors that it trains, so a sample of each is enough to tell.
    """
    if not isinstance(model, nn.Module):
        return None
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if hasattr(tensor, "full_tensor"):  # FSDP: each rank holds a part
            tensor = tensor.full_tensor()
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLED_VALUES)][:SAMPLED_VALUES].double().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {sample.tolist()}".encode())
    return digest.hexdigest()[:16]
