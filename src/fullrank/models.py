"""Models by path or hub id, and what tells their weights apart.

Promise: code that comes with a model is never run, weights are read from safetensors, and a model that is not there, or
not whole, is one clear error: no weight is made up at random.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import distributed, nn

from fullrank._errors import DataError, FullrankError, first_few
from fullrank.result import Finding

__all__ = [
    "bare_backbone",
    "is_gone",
    "is_sharded",
    "load_sentence_transformer",
    "model_fingerprint",
    "refusing_made_up",
]

SAMPLED_VALUES = 64
ADAPTER_INSIDE = (
    ". It holds the tensors of a PEFT adapter instead, as a run writes it that assigned get_peft_model to .auto_model: "
    "no loader finds them again. Train model[0].model = get_peft_model(model[0].model, config)"
)
_PATCHED = threading.RLock()
COMPUTED = ("pooler", ".ranknum.")
"""Parts of names of parameters that files may lack: sentence-transformers has no use for a pooler, AdaLoRA counts."""


def load_sentence_transformer(source: str, *, adapter_follows: bool = False) -> Any:
    """Returns the ``SentenceTransformer`` at a path or of a hub id; code that comes with a model is never run.

    Args:
        source: path or hub id.
        adapter_follows: tensors of an adapter may be missing, as the caller puts them in.

    Raises:
        DataError: nothing is there, it is no model, or its files lack weights.
    """
    from sentence_transformers import SentenceTransformer

    path = Path(source).expanduser()
    if is_gone(source):
        raise DataError(f"model folder {source!r} does not exist")
    try:
        with refusing_made_up(source, adapter_follows=adapter_follows):
            return SentenceTransformer(
                str(path) if path.is_dir() else source,
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True},
            )
    except FullrankError:
        raise
    except Exception as error:  # a broken file raises what its reader likes: OSError, SafetensorError, KeyError, ...
        first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise DataError(
            f"cannot load the model {source!r}: {first} Expected a folder written by save_pretrained, or a hub id "
            "that can be reached"
        ) from error


def is_gone(source: str) -> bool:
    """Returns whether a source looks like a path rather than a hub id, and no folder is there."""
    path = Path(source).expanduser()
    return (path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1) and not path.is_dir()


@contextmanager
def refusing_made_up(source: str, *, adapter_follows: bool = False) -> Iterator[None]:
    """Refuses what is loaded inside where transformers filled in, at random, what the files lack.

    transformers alone knows how names in files and in a model correspond, and tells only who calls ``from_pretrained``:
    sentence-transformers does, and does not pass it on, so the method is wrapped while this lasts. A pooler may be
    missing, as BERT's is after most trainings: sentence-transformers does not use it. So may what is computed and
    never trains (sinusoidal positions). Loads in other threads are not looked at.

    Args:
        source: of the model, for the message.
        adapter_follows: whether tensors of an adapter may be missing.

    Raises:
        DataError: weights were filled in.
    """
    from transformers import PreTrainedModel

    faults: list[str] = []
    thread = threading.get_ident()
    with _PATCHED:
        method = PreTrainedModel.__dict__["from_pretrained"]

        def recorded(kind: type[Any], /, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
            model, info = method.__get__(None, kind)(*args, output_loading_info=True, **options)
            if threading.get_ident() == thread and not (
                adapter_follows and getattr(model, "_hf_peft_config_loaded", False)
            ):
                faults.extend(_made_up(model, info))
            return (model, info) if output_loading_info else model

        PreTrainedModel.from_pretrained = classmethod(recorded)
        try:
            yield
        finally:
            PreTrainedModel.from_pretrained = method
    if faults:
        raise DataError(f"{source} {faults[0]}")


def _made_up(model: nn.Module, info: dict[str, Any]) -> list[str]:
    """Returns what is to be said of the parameters that a model's files lack; nothing where they lack none."""
    adapter = getattr(model, "_hf_peft_config_loaded", False)
    lost = sorted(
        name
        for name, value in model.named_parameters()
        if name in info["missing_keys"]
        and not any(part in name for part in COMPUTED)
        and (value.requires_grad or adapter)  # with an adapter all others are frozen
    )
    if not lost:
        return []
    shown = first_few(lost, n=3)
    if adapter:
        return [f"is an adapter of which transformers does not find {len(lost)} weights, and makes them up: {shown}"]
    inside = any("lora_" in name or ".base_layer." in name for name in info["unexpected_keys"])
    text = f"lacks {len(lost)} weights of a {type(model).__name__}, which would be made up at random: {shown}"
    return [text + ADAPTER_INSIDE if inside else text]


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
