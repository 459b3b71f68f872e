"""Shares of a batch on their way from rank 0. Numbers only: nothing received is executed."""

from dataclasses import fields

import msgspec
from safetensors.torch import load, save

from learner.batch import TrainingBatch
from learner.health.tokens import SequenceKey
from learner.packing import MicroBatch


class Envelope(msgspec.Struct, frozen=True):
    """A share on the wire; `tensors` is one safetensors blob of all its micro-batches."""

    step: int
    temperature: float
    micro_batches: int
    gauges: dict[str, float]
    rewards: tuple[tuple[float, ...], ...]
    action_counts: tuple[tuple[int, ...], ...]
    rollouts: tuple[int, ...]
    sequences: tuple[SequenceKey, ...]
    tensors: bytes


def encode_share(share: TrainingBatch) -> bytes:
    """Encode one rank's share, whole."""
    tensors = {
        f"{i}.{field.name}": getattr(micro, field.name).contiguous()
        for i, micro in enumerate(share.micro_batches)
        for field in fields(MicroBatch)
    }
    envelope = Envelope(
        step=share.step,
        temperature=share.temperature,
        micro_batches=len(share.micro_batches),
        gauges=share.gauges,
        rewards=share.rewards,
        action_counts=share.action_counts,
        rollouts=share.rollouts,
        sequences=share.sequences,
        tensors=save(tensors),
    )
    return msgspec.msgpack.encode(envelope)


def decode_share(encoded: bytes) -> TrainingBatch:
    """Decode what `encode_share` encoded, bit for bit."""
    envelope = msgspec.msgpack.decode(encoded, type=Envelope)
    tensors = load(envelope.tensors)
    micro_batches = tuple(
        MicroBatch(**{field.name: tensors[f"{i}.{field.name}"] for field in fields(MicroBatch)})
        for i in range(envelope.micro_batches)
    )
    return TrainingBatch(
        step=envelope.step,
        temperature=envelope.temperature,
        micro_batches=micro_batches,
        gauges=envelope.gauges,
        rewards=envelope.rewards,
        action_counts=envelope.action_counts,
        rollouts=envelope.rollouts,
        sequences=envelope.sequences,
    )
