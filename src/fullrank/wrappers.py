"""What trainers put around a model, and how to look through it.

Promise: looking changes nothing; what is taken off an instance for a while is put back.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn

__all__ = [
    "Side",
    "declared_prompt",
    "encodes_as_published",
    "is_sentence_transformer",
    "outermost",
    "plain_forward",
    "plain_instance",
    "unwrap",
]

Side = Literal["query", "document"]
_PROMPT_NAMES: dict[Side, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}


def outermost(model: nn.Module) -> nn.Module:
    """Returns the model inside DDP and ``torch.compile``, with a ``PeftModel`` around it left on."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def unwrap(model: object) -> Any:
    """Returns the model inside DDP, ``torch.compile`` and a ``PeftModel`` around a SentenceTransformer."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(model, nn.Module) and hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model") and is_sentence_transformer(model.get_base_model()):
            return model.get_base_model()
        else:
            return model


def declared_prompt(model: object, side: Side) -> str:
    """Returns the prompt that a model declares for a side: by the first of the usual names, else its default."""
    prompts = getattr(model, "prompts", None)
    if not isinstance(prompts, Mapping):
        return ""
    names = (*_PROMPT_NAMES[side], getattr(model, "default_prompt_name", None))
    return next((str(prompts[name] or "") for name in names if name in prompts), "")


def plain_forward(module: nn.Module) -> Any:
    """Returns the forward of a module without accelerate's autocast."""
    # accelerate puts an autocast around `forward` on the instance, which an outer autocast(enabled=False) does not
    # undo; it keeps the method it replaced as `_original_forward`.
    return vars(module).get("_original_forward", module)


@contextmanager
def plain_instance(model: object) -> Iterator[None]:
    """Takes accelerate's autocast off an instance for the time of the body."""
    attributes = vars(model) if isinstance(model, nn.Module) else {}
    patched = attributes.get("forward") if "_original_forward" in attributes else None
    if patched is None:
        yield
        return
    attributes["forward"] = attributes["_original_forward"]
    try:
        yield
    finally:
        attributes["forward"] = patched


def encodes_as_published(model: object) -> bool:
    """Returns whether the ways to embeddings are sentence-transformers' own, not those of a subclass or an instance."""
    ways = ("encode", "encode_query", "encode_document", "preprocess", "forward")
    published = all(getattr(type(model), way).__module__.startswith("sentence_transformers.") for way in ways)
    # accelerate puts its autocast on the instance's `forward`; the class's own is then called instead.
    return published and not any(way in vars(model) for way in ways[:-1])


def is_sentence_transformer(model: object) -> bool:
    """Returns whether a model is a ``SentenceTransformer``, without importing that package."""
    return any(base.__name__ == "SentenceTransformer" for base in type(model).__mro__)
