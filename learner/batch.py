"""protocol.Batch → TrainingBatch: masks, staleness and advantages are derived here, and only here.

Consumes whole groups of encoded trajectories; refuses by name what cannot be trained on. Pure apart
from decoding: the same bytes always give the same tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from configs.schema import LearnerConfig
from learner.advantage import group_advantages
from learner.errors import BadBatch
from learner.packing import MicroBatch, Row, pack, pad, to_row
from replay.codec import decode_trajectory
from replay.protocol import Batch, CodecError
from replay.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """One optimiser step: `action_tokens` is its loss denominator, fixed before any masking.

    `step` k is the step it trains: versions ≤ k − 1 sampled it, and training it makes version k.
    `gauges` holds what is known before the model runs.
    """

    step: int
    temperature: float
    micro_batches: tuple[MicroBatch, ...]
    action_tokens: int
    gauges: dict[str, float]


def build(batch: Batch, config: LearnerConfig) -> TrainingBatch:
    """Decode, check, credit and pack a batch. Raises BadBatch naming the group that is refused."""
    groups = _decode(batch)
    credit = [group_advantages(_rewards(group), config.advantage_std).tolist() for group in groups]
    trajectories = list(chain.from_iterable(groups))
    rows = [
        to_row(trajectory, advantage, batch.step - 1)
        for trajectory, advantage in zip(trajectories, chain.from_iterable(credit), strict=True)
    ]
    packed = pack([len(row) for row in rows], config.micro_batch_tokens)
    micro_batches = tuple(pad(row_ids, rows) for row_ids in packed)
    return TrainingBatch(
        step=batch.step,
        temperature=_temperature(trajectories),
        micro_batches=micro_batches,
        action_tokens=sum(trajectory.action_count for trajectory in trajectories),
        gauges={
            **_reward_gauges(trajectories, credit),
            **_size_gauges(rows, micro_batches),
            **_staleness_gauges(rows, trajectories),
        },
    )


def _decode(batch: Batch) -> list[list[Trajectory]]:
    if not batch.groups or len(batch.groups) != len(batch.group_ids):
        raise BadBatch(
            f"batch of step {batch.step}: {len(batch.groups)} groups for {len(batch.group_ids)} ids"
        )
    return [
        _decode_group(group_id, payloads, batch.step - 1)
        for group_id, payloads in zip(batch.group_ids, batch.groups, strict=True)
    ]


def _decode_group(group_id: int, payloads: Sequence[bytes], newest: int) -> list[Trajectory]:
    try:
        # Trajectory's own constructor refuses arrays whose lengths disagree.
        group = [decode_trajectory(payload) for payload in payloads]
    except (CodecError, ValueError) as error:
        raise BadBatch(f"group {group_id}: {error}") from error
    siblings = [trajectory.sibling for trajectory in group]
    if not group or len(set(siblings)) != len(siblings):
        raise BadBatch(f"group {group_id}: siblings {siblings!r}, expected each once")
    for trajectory in group:
        where = f"group {group_id}: sibling {trajectory.sibling}"
        if trajectory.group_id != group_id:
            raise BadBatch(f"{where} belongs to group {trajectory.group_id}")
        if trajectory.kind != "train":
            raise BadBatch(f"{where} is of kind {trajectory.kind!r}: only 'train' is trained on")
        if trajectory.newest_version > newest:
            raise BadBatch(
                f"{where} has tokens of version {trajectory.newest_version} in the batch of step "
                f"{newest + 1}: versions up to {newest} exist"
            )
    return sorted(group, key=lambda trajectory: trajectory.sibling)


def _temperature(trajectories: Sequence[Trajectory]) -> float:
    temperatures = {trajectory.sampling.temperature for trajectory in trajectories}
    if len(temperatures) != 1 or min(temperatures) <= 0.0:
        raise BadBatch(
            f"sampling temperatures {sorted(temperatures)!r}: one, and above 0, is needed"
        )
    return temperatures.pop()


def _rewards(group: Sequence[Trajectory]) -> torch.Tensor:
    rewards = [float("nan") if t.reward is None else t.reward for t in group]
    return torch.tensor(rewards, dtype=torch.float64)


def _reward_gauges(
    trajectories: Sequence[Trajectory], credit: Sequence[Sequence[float]]
) -> dict[str, float]:
    rewards = [t.reward for t in trajectories if t.reward is not None]
    advantages = list(chain.from_iterable(credit))
    return {
        "learner/reward": float(np.mean(rewards)) if rewards else 0.0,
        "learner/unscorable": float(len(advantages) - len(rewards)),
        "learner/no_signal_fraction": sum(not any(group) for group in credit) / len(credit),
        "learner/advantage_mean": float(np.mean(advantages)),
        "learner/advantage_abs": float(np.mean(np.abs(advantages))),
    }


def _size_gauges(rows: Sequence[Row], micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
    tokens = sum(len(row) for row in rows)
    return {
        "learner/sequences": float(len(rows)),
        "learner/tokens": float(tokens),
        "learner/action_tokens": float(sum(int(row.loss_mask.sum()) for row in rows)),
        "learner/micro_batches": float(len(micro_batches)),
        "learner/fill": tokens / sum(micro.tokens.numel() for micro in micro_batches),
    }


def _staleness_gauges(rows: Sequence[Row], trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean over the trained tokens, maximum over the trained groups."""
    staleness = np.concatenate([row.staleness[row.loss_mask] for row in rows])
    spans = [t.newest_version - t.oldest_version + 1 for t in trajectories]
    return {
        "replay/staleness": float(staleness.mean()),
        "replay/staleness_max": float(staleness.max()),
        "learner/versions_per_rollout": float(np.mean(spans)),
    }
