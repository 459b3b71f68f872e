"""The key-value cache of a batch: buffers made once, and columns kept for the next batch.

A rollout's next turn begins with its whole context so far: those columns are copied, not computed
again. Columns that a row does not own (padding, a neighbour's longer turn) are masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class KeysValues:
    """The cache that a transformers model's attention calls: written in place, column by column.

    Per layer keys and values [B, heads, capacity, head size]; `seen` bool[B, capacity]: a row's own
    columns; the first `used` columns are written.
    """

    def __init__(self, seen: Tensor) -> None:
        self.seen, self.used, self._new = seen, 0, 0
        self._layers: dict[int, list[Tensor]] = {}

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Put new columns after the used ones; return all columns so far."""
        if layer not in self._layers:
            self._layers[layer] = self._buffers(keys)
        self._new = keys.shape[2]
        end = self.used + self._new
        own_keys, own_values = self._layers[layer]
        own_keys[:, :, self.used : end] = keys
        own_values[:, :, self.used : end] = values
        return own_keys[:, :, :end], own_values[:, :, :end]

    def get_seq_length(self, *_: Any) -> int:
        """Return the number of used columns."""
        return self.used

    def advance(self) -> None:
        """Count the columns of the last forward pass."""
        self.used += self._new

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows of the batch."""
        self.seen = self.seen[rows]
        for pair in self._layers.values():
            pair[:] = [buffer.index_select(0, rows) for buffer in pair]

    def block(self, rows: Tensor, who: Tensor) -> "Block":
        """Copy these rows' used columns; `who` are their requests."""
        layers = {
            layer: [buffer[:, :, : self.used].index_select(0, rows) for buffer in pair]
            for layer, pair in self._layers.items()
        }
        return Block(who, self.seen[rows, : self.used], layers)

    def recall(self, block: "Block", rows: Tensor, theirs: Tensor) -> None:
        """Begin `rows` with the columns of rows `theirs` of `block`."""
        used = block.seen.shape[1]
        self.seen[rows, :used] = block.seen[theirs]
        for layer, pair in block.layers.items():
            if layer not in self._layers:
                self._layers[layer] = self._buffers(pair[0])
            for buffer, kept in zip(self._layers[layer], pair, strict=True):
                buffer[rows, :, :used] = kept.index_select(0, theirs)

    def _buffers(self, like: Tensor) -> list[Tensor]:
        # Zeros: a masked column still takes part, times 0, and 0 times NaN is NaN.
        shape = (len(self.seen), like.shape[1], self.seen.shape[1], like.shape[3])
        return [like.new_zeros(shape), like.new_zeros(shape)]


@dataclass(frozen=True, eq=False)
class Block:
    """Columns kept from a batch: who int64[n] are their requests, seen bool[n, columns]."""

    who: Tensor
    seen: Tensor
    layers: dict[int, list[Tensor]]


class PrefixCache:
    """An index from token prefixes to the blocks and rows that hold their columns."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, ...], tuple[Block, int]] = {}
        self._lengths: list[int] = []

    def remember(self, block: Block, texts: Sequence[Sequence[int]], ends: Tensor) -> None:
        """Index row i of `block`: it holds the tokens `texts[i]` before its column `ends[i]`."""
        columns = torch.arange(block.seen.shape[1], device=block.seen.device)
        block.seen.logical_and_(columns < ends[:, None])
        for row, tokens in enumerate(texts):
            self._rows[tuple(tokens)] = block, row
        self._lengths = sorted({len(tokens) for tokens in self._rows}, reverse=True)

    def find(self, tokens: Sequence[int]) -> tuple[int, tuple[Block, int] | None]:
        """Return the length of the longest known prefix, the last token excepted, and its place."""
        for length in self._lengths:
            if length < len(tokens):
                found = self._rows.get(tuple(tokens[:length]))
                if found is not None:
                    return length, found
        return 0, None

    def fill(self, cache: KeysValues, found: Sequence[tuple[Block, int] | None]) -> None:
        """Copy the found columns into the rows of a new cache."""
        blocks = {id(place[0]): place[0] for place in found if place is not None}
        for number, block in blocks.items():
            pairs = [
                (row, place[1])
                for row, place in enumerate(found)
                if place is not None and id(place[0]) == number
            ]
            rows, theirs = torch.tensor(pairs, device=block.seen.device).unbind(1)
            cache.recall(block, rows, theirs)
