"""The texts of one side of a golden set, ready to be encoded again and again.

Promise: each distinct text is tokenised once and encoded once an evaluation; equal texts get the same embedding.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fullrank.encode import Adapter, Backbone
from fullrank.models import is_sharded
from fullrank.ranks import Ranks
from fullrank.tokens import OnBatch, TokenStore, default_batch_tokens, encode_tokens, token_batches
from fullrank.wrappers import Side

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

    def encode(self, index: NDArray[np.int64], on_batch: OnBatch | None = None, *, halve: bool = True) -> Tensor:
        """Returns the embeddings of the texts at the positions ``index``, each distinct text encoded once."""
        distinct, inverse = np.unique(self.inverse[index], return_inverse=True)
        if self._how is not None and self.store is not None:
            rows = encode_tokens(
                self._how, self.store, distinct, batch_tokens=self.batch_tokens, on_batch=on_batch, halve=halve
            )
        else:
            assert not isinstance(self.encoder, Backbone)  # a backbone always encodes from tokens
            rows = self.encoder.whole([self.texts[i] for i in distinct], self.side)
            if on_batch:
                on_batch(len(distinct), 0, 0)
        return rows[torch.from_numpy(inverse.reshape(-1)).to(rows.device)]

    def encode_share(
        self, index: NDArray[np.int64], ranks: Ranks, on_batch: OnBatch | None = None
    ) -> tuple[NDArray[np.int64], Tensor | None]:
        """Returns this rank's share of the positions ``index`` and its embeddings; None where it has none.

        A sharded model needs all ranks at each forward: those with fewer batches go on with one text, which is thrown
        away; and where fullrank cannot count the forwards, each rank encodes all.
        """
        parts = self.shares(index, ranks.size)
        mine = parts[ranks.rank]
        if ranks.size == 1 or not is_sharded(getattr(self.encoder, "model", None)):
            return mine, self.encode(mine, on_batch) if len(mine) else None
        if self.store is None:
            rows = self.encode(index, on_batch)
            return mine, rows[torch.from_numpy(np.isin(index, mine)).to(rows.device)] if len(mine) else None
        share = self.encode(mine, on_batch, halve=False) if len(mine) else None
        for _ in range(max(map(self._n_batches, parts)) - self._n_batches(mine)):
            self.encode(index[:1], halve=False)
        return mine, share

    def _batches(self, distinct: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        assert self.store is not None
        return token_batches(self.store, distinct, self.batch_tokens or default_batch_tokens(self.device))

    def _n_batches(self, index: NDArray[np.int64]) -> int:
        return len(self._batches(np.unique(self.inverse[index])))

    def shares(self, index: NDArray[np.int64], n: int) -> list[NDArray[np.int64]]:
        """Returns the positions ``index`` in ``n`` parts of like work; copies of a text stay together.

        Where fullrank tokenises, the parts are whole batches: each text is encoded beside the same others as by one.
        """
        if n == 1:
            return [index]
        distinct, inverse = np.unique(self.inverse[index], return_inverse=True)
        if self.store is None or self._how is None:
            part_of = np.arange(len(distinct)) * n // max(1, len(distinct))
        else:
            part_of = np.empty(len(distinct), dtype=np.int64)
            for i, rows in enumerate(self._batches(distinct)):
                part_of[rows] = i % n
        return [index[part_of[inverse.reshape(-1)] == part] for part in range(n)]

    @property
    def n_truncated(self) -> int | None:
        """Texts that the tokenizer cut, or None where the model tokenises itself."""
        return None if self.store is None else int(self.store.truncated[self.inverse].sum())
