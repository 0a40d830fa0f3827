"""The texts of one side of a golden set, ready to be encoded again and again.

Promise: each distinct text is tokenised once and encoded once an evaluation; equal texts get the same embedding.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fullrank.encode import Adapter, Backbone, Side
from fullrank.tokens import TokenStore, encode_tokens

__all__ = ["TextSide"]


class TextSide:
    """The distinct texts of one side, tokenised once where the adapter understands its model."""

    def __init__(self, encoder: Adapter, side: Side, texts: list[str], batch_tokens: int | None) -> None:
        place: dict[str, int] = {}
        self.inverse = np.array([place.setdefault(text, len(place)) for text in texts], dtype=np.int64)
        self.texts = list(place)
        self.encoder, self.side, self.batch_tokens = encoder, side, batch_tokens
        self._how = encoder.tokenised(side)
        self.store: TokenStore | None = (
            None if self._how is None else self._how.store([encoder.prompt(side) + text for text in self.texts])
        )

    @property
    def device(self) -> torch.device:
        """Where the model stands now; a trainer may move it after this was made."""
        if self._how is not None:
            return self._how.device
        device = getattr(getattr(self.encoder, "model", None), "device", None)
        return device if isinstance(device, torch.device) else torch.device("cpu")

    def lengths(self) -> NDArray[np.int64]:
        """Length of each distinct text: in tokens, or in characters where the model tokenises itself."""
        return self.store.lengths if self.store is not None else np.array([len(t) for t in self.texts], dtype=np.int64)

    def by_length(self) -> NDArray[np.int64]:
        """All positions, longest text first and equal texts together."""
        lengths = self.lengths()[self.inverse]
        return np.lexsort((self.inverse, -lengths))

    def encode(self, index: NDArray[np.int64], on_progress: Callable[[int], None] | None = None) -> Tensor:
        """Returns the embeddings of the texts at the positions ``index``, each distinct text encoded once."""
        distinct, inverse = np.unique(self.inverse[index], return_inverse=True)
        if self._how is not None and self.store is not None:
            rows = encode_tokens(
                self._how, self.store, distinct, batch_tokens=self.batch_tokens, on_progress=on_progress
            )
        else:
            assert not isinstance(self.encoder, Backbone)  # a backbone always encodes from tokens
            rows = self.encoder.whole([self.texts[i] for i in distinct], self.side)
            if on_progress:
                on_progress(len(distinct))
        return rows[torch.from_numpy(inverse.reshape(-1)).to(rows.device)]

    @property
    def n_truncated(self) -> int | None:
        """Texts that the tokenizer cut, or None where the model tokenises itself."""
        return None if self.store is None else int(self.store.truncated[self.inverse].sum())
