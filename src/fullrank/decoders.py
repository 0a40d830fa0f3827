"""What decoders need to be embedding models: a token that every text ends with; and a tiny one to try things out on.

Promise: `end_every_text` leaves alone a tokenizer that ends texts itself; nothing is downloaded.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from fullrank._errors import SettingError
from fullrank.settings import refuse_unknown

__all__ = ["end_every_text", "tiny_decoder"]

PaddingSide = Literal["left", "right"]


def end_every_text(tokenizer: Any, *, padding: PaddingSide = "left") -> Any:
    """Returns ``tokenizer``, changed so that every text ends with the end-of-text token, also where it is cut off.

    With pooling by the last token, that token is where a decoder puts what it has read.

    Args:
        tokenizer: a fast one, with an ``eos_token``; it gets a ``pad_token`` where it has none.
        padding: side that is padded.

    Raises:
        SettingError: no end-of-text token, no fast tokenizer, or an unknown side.
    """
    from tokenizers import processors

    refuse_unknown("padding", padding, ("left", "right"))
    if tokenizer.eos_token is None or not getattr(tokenizer, "is_fast", False):
        raise SettingError(
            f"{type(tokenizer).__name__} has no end-of-text token or is no fast tokenizer; set tokenizer.eos_token, or "
            "load it with use_fast=True"
        )
    tokenizer.padding_side = padding
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    ids = tokenizer("a").input_ids
    if ids and ids[-1] == tokenizer.eos_token_id:
        return tokenizer
    token = {"id": "<end>", "ids": [tokenizer.eos_token_id], "tokens": [tokenizer.eos_token]}
    end = processors.TemplateProcessing(single="$A <end>", pair="$A <end> $B:1 <end>:1", special_tokens=[token])
    inner = tokenizer.backend_tokenizer
    inner.post_processor = end if inner.post_processor is None else processors.Sequence([inner.post_processor, end])
    return tokenizer


def tiny_decoder(folder: str | os.PathLike[str], texts: Iterable[str], *, seed: int = 0) -> str:
    """Writes a random decoder of 2 layers, 32 wide, with a tokenizer learned from ``texts``; returns the folder."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator(texts, vocab_size=1_000, special_tokens=["<end>", "<pad>"], show_progress=False)
    Path(folder).mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(tokenizer_object=learned._tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(
        folder
    )
    config = Qwen3Config(
        vocab_size=1_000,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3Model(config).save_pretrained(folder)
    return str(folder)
