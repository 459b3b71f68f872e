"""What ranks exchange: shares of a batch from rank 0, facts about tokens between all.

Numbers only: nothing received is executed.
"""

from collections.abc import Sequence
from dataclasses import fields

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor, distributed

from learner.batch import TrainingBatch
from learner.diagnostics import TokenFacts
from learner.packing import MicroBatch


class Envelope(msgspec.Struct, frozen=True):
    """A share on the wire; `tensors` is one safetensors blob, micro-batch by micro-batch."""

    step: int
    temperature: float
    micro_batches: int
    gauges: dict[str, float]
    tensors: bytes


def encode_share(share: TrainingBatch) -> bytes:
    """One rank's share, whole."""
    tensors = {
        f"{i}.{field.name}": getattr(micro, field.name).contiguous()
        for i, micro in enumerate(share.micro_batches)
        for field in fields(MicroBatch)
    }
    count = len(share.micro_batches)
    envelope = Envelope(share.step, share.temperature, count, share.gauges, save(tensors))
    return msgspec.msgpack.encode(envelope)


def decode_share(encoded: bytes) -> TrainingBatch:
    """What `encode_share` encoded, bit for bit."""
    envelope = msgspec.msgpack.decode(encoded, type=Envelope)
    tensors = load(envelope.tensors)
    micro_batches = tuple(
        MicroBatch(**{field.name: tensors[f"{i}.{field.name}"] for field in fields(MicroBatch)})
        for i in range(envelope.micro_batches)
    )
    return TrainingBatch(envelope.step, envelope.temperature, micro_batches, envelope.gauges)


def gather_facts(facts: list[TokenFacts], device: torch.device) -> list[TokenFacts]:
    """All ranks' micro-batches in the order of ranks; every rank brings equally many.

    float64 carries every field exactly: float32, bool, and integers up to 2^53.
    """
    names = [field.name for field in fields(TokenFacts)]
    columns = [[getattr(fact, name) for name in names] for fact in facts]
    sizes = torch.tensor([len(column[0]) for column in columns], device=device)
    everybody = _all_gather(sizes)
    own = torch.cat([torch.stack([c.double() for c in column]) for column in columns], dim=1)
    longest = int(max(counts.sum() for counts in everybody))
    padded = own.new_zeros((len(names), longest))
    padded[:, : own.shape[1]] = own
    gathered = []
    for counts, table in zip(everybody, _all_gather(padded), strict=True):
        for part in table[:, : int(counts.sum())].split(counts.tolist(), dim=1):
            values = (v.to(like.dtype) for v, like in zip(part, columns[0], strict=True))
            gathered.append(TokenFacts(*values))
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
