"""How long one query takes: what a user waits for, beside how well it is answered.

Promise: one text at a time, from text to embedding, after a warm-up; the model and the random states are left as they
were.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fullrank._errors import SettingError
from fullrank.encode import Adapter, Backbone, Precision, at_precision
from fullrank.isolate import undisturbed
from fullrank.result import Result
from fullrank.tokens import encode_tokens

__all__ = ["N_TIMED", "query_latency", "sampled", "with_latency"]

N_TIMED = 64
N_WARM_UP = 3
_CPU = torch.device("cpu")


def query_latency(
    encoder: Adapter, queries: Sequence[str], *, n: int = N_TIMED, precision: Precision | None = None
) -> dict[str, float]:
    """Returns ``query_ms_p50`` and ``query_ms_p95``: milliseconds from one text to its embedding in main memory.

    Args:
        encoder: from `as_encoder`.
        queries: at most ``n`` of them are timed, evenly spaced, so that the sample is the same every time.
        n: how many.
        precision: of encoding, see `fullrank.evaluate`.

    Raises:
        SettingError: no queries, or ``n`` below 1.
    """
    if not queries or n < 1:
        raise SettingError(f"latency needs at least one query, got {len(queries)} and n={n}")
    texts = sampled(queries, n)
    model = getattr(encoder, "model", None)
    with undisturbed(model):
        encode_one, device = _way(encoder)
        with at_precision(precision, device):
            for text in texts[:N_WARM_UP]:
                encode_one(text).cpu()
            seconds = [_timed(encode_one, text) for text in texts]
    p50, p95 = np.percentile(seconds, [50, 95])
    return {"query_ms_p50": 1_000 * float(p50), "query_ms_p95": 1_000 * float(p95)}


def with_latency(result: Result, encoder: Adapter, *, precision: Precision | None = None) -> Result:
    """Returns ``result`` with the latency of its queries in its timing."""
    queries = list(result.queries.values())
    return replace(result, timing={**result.timing, **query_latency(encoder, queries, precision=precision)})


def sampled(texts: Sequence[str], n: int) -> list[str]:
    """Returns at most ``n`` of ``texts``, evenly spaced.

    >>> sampled(["a", "b", "c", "d", "e"], 3)
    ['a', 'c', 'e']
    """
    index = np.unique(np.linspace(0, len(texts) - 1, min(n, len(texts))).round().astype(int))
    return [texts[i] for i in index]


def _way(encoder: Adapter) -> tuple[Callable[[str], Tensor], torch.device]:
    """Returns (text to embedding, device). Whether the fast path fits is found out once, not for every text."""
    how = encoder.tokenised("query")
    if how is not None:
        prompt, one = encoder.prompt("query"), np.arange(1)
        return (lambda text: encode_tokens(how, how.store([prompt + text]), one)), how.device
    assert not isinstance(encoder, Backbone)  # a backbone always encodes from tokens
    device = getattr(getattr(encoder, "model", None), "device", None)
    return (lambda text: encoder.whole([text], "query")), device if isinstance(device, torch.device) else _CPU


def _timed(encode_one: Callable[[str], Tensor], text: str) -> float:
    start = time.perf_counter()
    encode_one(text).cpu()  # waits for an accelerator
    return time.perf_counter() - start
