"""The fp32 masters that this rank owns, and the way from master values to the weights that compute.

One class per layout: whole (ZeRO 0), partitions of flat buffers (1 and 2), partitions of each
weight (3). `load` is collective: every rank brings its part. Tensors are copied into in place,
never replaced: the engine's buffers alias the weights.

Pieces say which elements of which weight a master holds, so that a state saved under one layout and
number of ranks can be read under another. Padding is in no piece.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `start + count` of a flat weight, in a flat master from element `at`."""

    weight: str  # Hugging Face name
    start: int
    count: int
    master: str
    at: int

    def of(self, values: Values) -> Tensor:
        """The view of these elements in values shaped like the masters."""
        return values[self.master].view(-1)[self.at : self.at + self.count]


class Shards(Protocol):
    """An engine's weights, as averages, swaps and checkpoints use them."""

    def masters(self) -> Values:
        """The live masters of this rank by name: fp32, in whatever shape the layout has."""
        ...

    def own(self) -> Values:
        """The masters' values, safe from `load`: `load(own)` gives back the same bits."""
        ...

    def load(self, values: Values) -> None:
        """Put values shaped like the masters into the weights of all ranks, cast to their dtype."""
        ...

    def pieces(self) -> Sequence[Piece]:
        """What the masters hold, at most one run of each weight's elements."""
        ...

    def saved(self) -> Sequence[Piece]:
        """This rank's share of them: all ranks' together hold every element once."""
        ...


class Whole:
    """Every rank holds everything; in fp32 the weights are their own masters."""

    def __init__(
        self, weights: Values, masters: Values | None = None, rank: int = 0, ranks: int = 1
    ) -> None:
        """Both by Hugging Face name; `masters` None: the weights themselves."""
        self._weights, self._masters = weights, masters
        self._rank, self._ranks = rank, ranks

    def masters(self) -> Values:
        """The live masters."""
        return self._weights if self._masters is None else self._masters

    def own(self) -> Values:
        """The masters, copied where `load` would overwrite them."""
        if self._masters is not None:
            return self._masters
        return {name: weight.detach().clone() for name, weight in self._weights.items()}

    def load(self, values: Values) -> None:
        """Copy, name by name."""
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(values[name])

    def pieces(self) -> Sequence[Piece]:
        """Every weight, whole."""
        return [Piece(name, 0, master.numel(), name, 0) for name, master in self.masters().items()]

    def saved(self) -> Sequence[Piece]:
        """An equal share of each weight."""
        found = []
        for whole in self.pieces():
            start = whole.count * self._rank // self._ranks
            end = whole.count * (self._rank + 1) // self._ranks
            if start < end:
                found.append(Piece(whole.weight, start, end - start, whole.master, start))
        return found


class _Parts:
    """This rank's fp32 masters, and the parts of the weights that are computed from them."""

    def __init__(
        self, masters: Sequence[Tensor], partitions: Sequence[Tensor], pieces: Sequence[Piece]
    ) -> None:
        self._masters = {_name(i): master for i, master in enumerate(masters)}
        self._partitions, self._pieces = partitions, pieces

    def pieces(self) -> Sequence[Piece]:
        """What this rank owns."""
        return self._pieces

    def saved(self) -> Sequence[Piece]:
        """What this rank owns: nobody else does."""
        return self._pieces

    def masters(self) -> Values:
        """The live masters."""
        return self._masters

    def own(self) -> Values:
        """The masters, copied where `load` would overwrite them."""
        # In fp32 a master can be the very memory that is computed from.
        return {
            name: master.detach().clone() if master.data_ptr() == part.data_ptr() else master
            for (name, master), part in zip(self._masters.items(), self._partitions, strict=True)
        }


class Partitioned(_Parts):
    """Weights are views of flat buffers, of which each rank owns an equal part (ZeRO 1 and 2)."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        masters: Sequence[Tensor],
        flats: Sequence[Tensor],
        partitions: Sequence[Tensor],
    ) -> None:
        """Per buffer: this rank's fp32 master, the whole buffer, and this rank's part of it; the
        weights lie in the buffers.
        """
        super().__init__(masters, partitions, list(_pieces_of(weights, flats, partitions)))
        self._flats = flats

    def load(self, values: Values) -> None:
        """Cast into this rank's parts, then gather all ranks'."""
        with torch.no_grad():
            for name, flat, part in zip(self._masters, self._flats, self._partitions, strict=True):
                part.copy_(values[name])
                if part.numel() != flat.numel():
                    distributed.all_gather_into_tensor(flat, part.clone())


class Scattered(_Parts):
    """Each rank owns a part of every weight, which is gathered only while it computes (ZeRO 3)."""

    def __init__(
        self,
        weights: Mapping[str, Any],
        masters: Sequence[Tensor],
        partitions: Sequence[Tensor],
        release: Callable[[], None],
    ) -> None:
        """Per sub-group: this rank's fp32 master and what it computes from, where DeepSpeed keeps
        its part of each weight. `release` drops weights that are still gathered: they would outlive
        the swap.
        """
        super().__init__(masters, partitions, list(_scattered_pieces(weights, partitions)))
        self._release = release

    def load(self, values: Values) -> None:
        """Cast into this rank's parts; the next forward pass gathers them."""
        with torch.no_grad():
            self._release()
            for name, part in zip(self._masters, self._partitions, strict=True):
                part.copy_(values[name])


def _name(partition: int) -> str:
    return f"partition.{partition}"


def _offset(inner: Tensor, outer: Tensor) -> int | None:
    """The element of a flat tensor at which another one begins that lies in its memory."""
    behind = inner.data_ptr() - outer.data_ptr()
    return behind // outer.element_size() if 0 <= behind < outer.nbytes else None


def _pieces_of(
    weights: Mapping[str, Tensor], flats: Sequence[Tensor], partitions: Sequence[Tensor]
) -> Iterator[Piece]:
    for i, (flat, part) in enumerate(zip(flats, partitions, strict=True)):
        begin = (part.data_ptr() - flat.data_ptr()) // flat.element_size()
        for name, weight in weights.items():
            if (offset := _offset(weight, flat)) is None:
                continue
            start = max(begin - offset, 0)
            count = min(begin + part.numel() - offset, weight.numel()) - start
            if count > 0:
                yield Piece(name, start, count, _name(i), offset + start - begin)


def _scattered_pieces(weights: Mapping[str, Any], partitions: Sequence[Tensor]) -> Iterator[Piece]:
    for i, part in enumerate(partitions):
        for name, weight in weights.items():
            own = weight.ds_tensor
            start = weight.ds_zero_partition_rank * own.numel()
            count = min(own.numel(), weight.ds_numel - start)  # behind that it is padding
            if count > 0 and (at := _offset(own, part)) is not None:
                yield Piece(name, start, count, _name(i), at)
