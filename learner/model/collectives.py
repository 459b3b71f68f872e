"""Sums and gathered columns over all ranks."""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, distributed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Facts = TypeVar("Facts", bound="DataclassInstance")  # a dataclass whose every field is a Tensor [N]


def gather_facts(facts: list[Facts], device: torch.device) -> list[Facts]:
    """All ranks' micro-batches in the order of ranks; every rank brings equally many.

    float64 carries every field exactly: float32, bool, and integers up to 2^53.
    """
    kind, names = type(facts[0]), [field.name for field in fields(facts[0])]
    columns = [[getattr(fact, name) for name in names] for fact in facts]
    sizes_by_rank = _all_gather(torch.tensor([len(c[0]) for c in columns], device=device))
    own = torch.cat([torch.stack([c.double() for c in column]) for column in columns], dim=1)
    longest = int(max(sizes.sum() for sizes in sizes_by_rank))
    padded = own.new_zeros((len(names), longest))
    padded[:, : own.shape[1]] = own
    gathered = []
    for sizes, table in zip(sizes_by_rank, _all_gather(padded), strict=True):
        for part in table[:, : int(sizes.sum())].split(sizes.tolist(), dim=1):
            values = (row.to(like.dtype) for row, like in zip(part, columns[0], strict=True))
            gathered.append(kind(**dict(zip(names, values, strict=True))))
    return gathered


def sums(values: Sequence[float], device: torch.device) -> list[float]:
    """Each number's sum over all ranks, on every rank."""
    summed = torch.tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(summed)
    found: list[float] = summed.tolist()
    return found


def _all_gather(tensor: Tensor) -> list[Tensor]:
    received = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(received, tensor.contiguous())
    return received
