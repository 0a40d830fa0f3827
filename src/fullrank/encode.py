"""From a model to embeddings: one protocol, and adapters for what people train.

Promise: the embeddings are those of the model's own `encode` (within 1e-5 in fp32), prompts included, at the precision
that was asked for, whatever wrappers a trainer has put around the model.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from fullrank._errors import EvaluationError, SettingError
from fullrank.models import is_sharded
from fullrank.search import Similarity
from fullrank.settings import refuse_no_count
from fullrank.tokens import Features, Tokenised, encode_tokens
from fullrank.wrappers import (
    Side,
    declared_prompt,
    encodes_as_published,
    is_sentence_transformer,
    plain_forward,
    plain_instance,
    unwrap,
)

__all__ = ["Backbone", "Encoder", "Pooling", "Precision", "as_encoder", "at_precision", "pool"]

logger = logging.getLogger(__name__)

Pooling = Literal["mean", "cls", "last"]
Precision = Literal["fp32", "bf16", "fp16"]
_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PROBE = [
    "A short Text",
    "another one, somewhat longer: with punctuation, numbers (42) and ünïcode",
    "",
    "longer than most models read " * 200,
]


@runtime_checkable
class Encoder(Protocol):
    """What fullrank needs of a model. Implement it to evaluate anything."""

    similarity: Similarity
    """``cosine``, ``dot`` or ``euclidean``."""

    def encode_queries(self, texts: list[str]) -> Tensor:
        """Returns float [n, d]."""

    def encode_documents(self, texts: list[str]) -> Tensor:
        """Returns float [n, d]."""


@dataclass(frozen=True)
class Backbone:
    """An `Encoder` made of a Hugging Face model, its tokenizer and a pooling: for the plain ``Trainer``.

    Args:
        model: returns ``last_hidden_state`` [n, tokens, d] (or a tuple that starts with it); PEFT-wrapped or not.
        tokenizer: of the model; either padding side.
        pooling: ``mean`` over the tokens under the mask, ``cls`` (first token) or ``last`` (last token).
        query_prompt, document_prompt: put in front of every text of that side.
        max_length: texts are cut there, in tokens; default: the limit of the tokenizer.
        similarity: ``cosine``, ``dot`` or ``euclidean``.

    Raises:
        SettingError: unknown pooling or similarity, no module, no tokenizer, or texts longer than the model has
            positions.
    """

    model: nn.Module
    tokenizer: Any
    pooling: Pooling = "mean"
    query_prompt: str = ""
    document_prompt: str = ""
    max_length: int | None = None
    similarity: Similarity = "cosine"

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise SettingError(f"pooling={self.pooling!r} is unknown; choose one of {', '.join(get_args(Pooling))}")
        _checked_similarity(self.similarity)
        if not isinstance(self.model, nn.Module):
            raise SettingError(f"Backbone needs a torch module, got {type(self.model).__name__}; load the model first")
        if not callable(self.tokenizer):
            raise SettingError(f"Backbone needs the tokenizer of the model, got {type(self.tokenizer).__name__}")
        refuse_no_count("max_length", self.max_length, "a whole number of tokens from 1 or None")
        limit, longest = _positions(self.model), self.max_length or getattr(self.tokenizer, "model_max_length", None)
        if limit is not None and isinstance(longest, int) and longest > limit:
            whose = "max_length" if self.max_length else "the tokenizer's model_max_length"
            kind = type(unwrap(self.model)).__name__
            raise SettingError(
                f"{whose} is {longest:.15g}, but {kind} has {limit} positions and fails on longer texts; pass "
                f"max_length={limit} or less"
            )

    def encode_queries(self, texts: list[str]) -> Tensor:
        """Returns float [n, d]."""
        return _encode_side(self, texts, "query")

    def encode_documents(self, texts: list[str]) -> Tensor:
        """Returns float [n, d]."""
        return _encode_side(self, texts, "document")

    def prompt(self, side: Side) -> str:
        """Returns the text in front of every text of that side."""
        return self.query_prompt if side == "query" else self.document_prompt

    def tokenised(self, side: Side) -> Tokenised:
        """Returns how to encode from token ids."""
        return Tokenised(self.tokenizer, self._pooled, lambda: next(self.model.parameters()).device, self.max_length)

    def _pooled(self, features: Features) -> Tensor:
        output = plain_forward(self.model)(**features)
        hidden = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", None)
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            inner = unwrap(self.model)
            base = getattr(inner, "base_model_prefix", "") or "base_model"
            raise SettingError(
                f"{type(inner).__name__} gives no last_hidden_state [n, tokens, d] to pool; pass the model without its "
                f"head, for example Backbone(model.{base}, tokenizer)"
            )
        return pool(hidden, features["attention_mask"], self.pooling)


@dataclass(frozen=True)
class SentenceTransformerEncoder:
    """Adapter for ``SentenceTransformer``; see `as_encoder`."""

    model: Any
    similarity: Similarity
    prompts: Mapping[Side, str]
    fast: bool = True

    def encode_queries(self, texts: list[str]) -> Tensor:
        """Returns float [n, d]."""
        return _encode_side(self, texts, "query")

    def encode_documents(self, texts: list[str]) -> Tensor:
        """Returns float [n, d]."""
        return _encode_side(self, texts, "document")

    def prompt(self, side: Side) -> str:
        """Returns the text in front of every text of that side."""
        return self.prompts[side]

    def tokenised(self, side: Side) -> Tokenised | None:
        """Returns how to encode from token ids, or None where the model must do it itself.

        Only what gives the features of the model's own preprocessing on a probe is taken for understood.
        """
        model, prompt = self.model, self.prompt(side)
        try:
            first = model[0]
            plain = (
                self.fast
                and encodes_as_published(model)
                and type(first).__name__ == "Transformer"
                and set(first.modality_config) == {"text"}
                and not any((first.processing_kwargs or {}).values())
                and not (first.query_length or first.document_length or first.query_expansion)
                and not model._can_flatten_inputs()
                and getattr(model, "_hf_hook", None) is None
            )
            if not plain:
                return None
            wanted = model.preprocess([*_PROBE], prompt=prompt or None)
        except (AttributeError, TypeError, KeyError):
            return None
        constant = {name: value for name, value in wanted.items() if not isinstance(value, Tensor)}
        how = Tokenised(model.tokenizer, self._embedding, lambda: model.device, None, constant)
        try:
            got = how.store([prompt + text for text in _PROBE]).batch(range(len(_PROBE)), model.tokenizer)
        except (AttributeError, TypeError, KeyError, ValueError):
            return None
        same = set(got) == set(wanted) and all(
            torch.equal(got[name], value) for name, value in wanted.items() if isinstance(value, Tensor)
        )
        return how if same else None

    def whole(self, texts: list[str], side: Side) -> Tensor:
        """Returns the embeddings of the model's own ``encode_query`` or ``encode_document``."""
        encode = self.model.encode_query if side == "query" else self.model.encode_document
        with plain_instance(self.model):
            return _checked_embeddings(
                encode(texts, prompt=self.prompt(side), convert_to_tensor=True, show_progress_bar=False), len(texts)
            )

    def _embedding(self, features: Features) -> Tensor:
        if is_sharded(self.model):  # only the hooks of `__call__` bring its weights together
            with plain_instance(self.model):
                output: Tensor = self.model(features)["sentence_embedding"]
        else:
            output = type(self.model).forward(self.model, features)["sentence_embedding"]
        return output if self.model.truncate_dim is None else output[:, : self.model.truncate_dim]


@dataclass(frozen=True)
class AnyEncoder:
    """Adapter for anything with ``encode`` (always given a list), or an `Encoder`; see `as_encoder`."""

    model: Any
    similarity: Similarity
    prompts: Mapping[Side, str] = field(default_factory=dict)

    def encode_queries(self, texts: list[str]) -> Tensor:
        """Returns float [n, d]."""
        return _encode_side(self, texts, "query")

    def encode_documents(self, texts: list[str]) -> Tensor:
        """Returns float [n, d]."""
        return _encode_side(self, texts, "document")

    def prompt(self, side: Side) -> str:
        """Returns the text in front of every text of that side."""
        return self.prompts.get(side, "")

    def tokenised(self, side: Side) -> None:
        """Returns None: the model encodes itself."""

    def whole(self, texts: list[str], side: Side) -> Tensor:
        """Returns the embeddings of the model's own method."""
        texts = [self.prompt(side) + text for text in texts]
        if isinstance(self.model, Encoder):
            method = self.model.encode_queries if side == "query" else self.model.encode_documents
        else:
            method = self.model.encode
        with plain_instance(self.model):
            return _checked_embeddings(method(texts), len(texts))


Adapter = Backbone | SentenceTransformerEncoder | AnyEncoder


def as_encoder(
    model: object,
    *,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
    similarity: Similarity | None = None,
    fast: bool = True,
) -> Adapter:
    """Returns the adapter for ``model``.

    Args:
        model: a ``SentenceTransformer`` (PEFT inside or around), an `Encoder`, a `Backbone`, or anything with
            ``encode(list[str])``. DDP and ``torch.compile`` wrappers are looked through.
        query_prompt, document_prompt: instead of those that the model declares; "" for none.
        similarity: instead of the model's own.
        fast: False encodes through the model's own ``encode`` even where fullrank understands it.

    Raises:
        SettingError: no way to encode with ``model``, or a similarity that cannot be ranked.
    """
    if isinstance(model, str):
        raise SettingError(f"cannot encode with a str; load the model first: SentenceTransformer({model!r})")
    inner = unwrap(model)
    given: dict[Side, str | None] = {"query": query_prompt, "document": document_prompt}
    if isinstance(inner, Backbone):
        return replace(
            inner,
            query_prompt=inner.query_prompt if query_prompt is None else query_prompt,
            document_prompt=inner.document_prompt if document_prompt is None else document_prompt,
            similarity=_checked_similarity(similarity or inner.similarity),
        )
    # An `Encoder` has a method for each side and puts its own prompts in front there.
    own_prompts = isinstance(inner, Encoder) and not is_sentence_transformer(inner)
    prompts: dict[Side, str] = {
        side: value if value is not None else "" if own_prompts else declared_prompt(inner, side)
        for side, value in given.items()
    }
    if is_sentence_transformer(inner):
        own = similarity or getattr(inner, "similarity_fn_name", "cosine")
        return SentenceTransformerEncoder(inner, _checked_similarity(own), prompts, fast)
    if isinstance(inner, AnyEncoder | SentenceTransformerEncoder):
        given_prompts = {s: v for s, v in given.items() if v is not None}
        kept = _checked_similarity(similarity or inner.similarity)
        return replace(inner, prompts={**inner.prompts, **given_prompts}, similarity=kept)
    if isinstance(inner, Encoder) or callable(getattr(inner, "encode", None)):
        own = getattr(inner, "similarity", None)
        own = own if isinstance(own, str) else getattr(inner, "similarity_fn_name", None) or "cosine"
        return AnyEncoder(inner, _checked_similarity(similarity or own), prompts)
    raise SettingError(
        f"cannot encode with a {type(inner).__name__}: expected a SentenceTransformer, an object with encode(list) or "
        "with encode_queries(list) and encode_documents(list). For a Hugging Face backbone pass "
        "Backbone(model, tokenizer, pooling='mean')"
    )


def pool(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Returns [n, d] from ``hidden`` [n, tokens, d] and ``mask`` [n, tokens]; padding may stand on either side."""
    if pooling == "mean":
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1e-9)
    if pooling == "cls":
        place = mask.long().argmax(dim=1)
    else:
        place = mask.shape[1] - 1 - mask.long().flip(dims=(1,)).argmax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), place]


def _positions(model: nn.Module) -> int | None:
    """Returns how many positions a model has learned, or None where it computes them for any length."""
    names = {"position_embeddings", "embed_positions", "wpe"}
    for name, part in model.named_modules():
        if name.rpartition(".")[2] in names and isinstance(part, nn.Embedding):
            # Where padding has a row of its own, the count of positions begins behind it.
            return part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1)
    return None


@contextmanager
def at_precision(precision: Precision | None, device: torch.device) -> Iterator[None]:
    """Runs the body under autocast to bf16 or fp16, or without autocast (``fp32`` and None)."""
    if precision is not None and precision not in get_args(Precision):
        raise SettingError(f"precision={precision!r} is unknown; choose fp32, bf16, fp16 or None")
    dtype = _DTYPES.get(precision or "")
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        yield


def _encode_side(encoder: Adapter, texts: list[str], side: Side) -> Tensor:
    how = encoder.tokenised(side)
    if how is None:
        assert not isinstance(encoder, Backbone)  # a backbone always encodes from tokens
        return encoder.whole(texts, side)
    store = how.store([encoder.prompt(side) + text for text in texts])
    with torch.no_grad():
        return encode_tokens(how, store, np.arange(len(texts)))


def _checked_embeddings(raw: object, n: int) -> Tensor:
    """Returns ``raw`` (tensor, array, or list of either) as a tensor [n, d]."""
    if isinstance(raw, Tensor):
        out = raw
    elif isinstance(raw, np.ndarray) and raw.dtype.kind in "fiubc":
        out = torch.from_numpy(np.ascontiguousarray(raw))
    else:
        try:
            tensors = isinstance(raw, Sequence) and len(raw) and isinstance(raw[0], Tensor)
            out = torch.stack(list(raw)) if tensors else torch.as_tensor(np.asarray(raw, dtype=np.float32))  # type: ignore[call-overload]
        except (TypeError, ValueError, RuntimeError) as error:
            raise EvaluationError(f"encode returned a {type(raw).__name__} that is no [n, d] table: {error}") from error
    if out.is_complex():
        raise EvaluationError(f"encode returned {out.dtype}; expected real numbers")
    if out.ndim != 2 or len(out) != n:
        raise EvaluationError(f"encode returned the shape {tuple(out.shape)} for {n} texts; expected [{n}, d]")
    if not out.is_floating_point():
        out = out.to(torch.float32)
    return out.detach()


def _checked_similarity(name: object) -> Similarity:
    if name not in get_args(Similarity):
        raise SettingError(f"similarity {name!r} cannot be ranked; choose one of {', '.join(get_args(Similarity))}")
    return name  # type: ignore[return-value]
