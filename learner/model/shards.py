"""The fp32 masters that this rank owns, and the way from master values to the weights that compute.

One class per layout: whole (ZeRO 0), partitions of flat buffers (1 and 2), partitions of each
weight (3). `load` is collective: every rank brings its part. Tensors are copied into in place,
never replaced: the engine's buffers alias the weights.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, distributed

Values = dict[str, Tensor]


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


class Whole:
    """Every rank holds everything; in fp32 the weights are their own masters."""

    def __init__(self, weights: Values, masters: Values | None = None) -> None:
        """Both by Hugging Face name; `masters` None: the weights themselves."""
        self._weights, self._masters = weights, masters

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


class _Parts:
    """This rank's fp32 masters, and the parts of the weights that are computed from them."""

    def __init__(self, masters: Sequence[Tensor], partitions: Sequence[Tensor]) -> None:
        self._masters = {f"partition.{i}": master for i, master in enumerate(masters)}
        self._partitions = partitions

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
        self, masters: Sequence[Tensor], flats: Sequence[Tensor], partitions: Sequence[Tensor]
    ) -> None:
        """Per buffer: this rank's fp32 master, the whole buffer, and this rank's part of it."""
        super().__init__(masters, partitions)
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
        self, masters: Sequence[Tensor], partitions: Sequence[Tensor], release: Callable[[], None]
    ) -> None:
        """Per sub-group: this rank's fp32 master and what it computes from. `release` drops weights
        that are still gathered: they would outlive the swap.
        """
        super().__init__(masters, partitions)
        self._release = release

    def load(self, values: Values) -> None:
        """Cast into this rank's parts; the next forward pass gathers them."""
        with torch.no_grad():
            self._release()
            for name, part in zip(self._masters, self._partitions, strict=True):
                part.copy_(values[name])
