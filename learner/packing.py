"""Trajectories → flat sequences → padded micro-batches under a token budget. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.trajectory import Trajectory

# A micro-batch ends where the next row is shorter than this share of its longest: little padding.
SHORTEST_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory as the model sees it; all [T], column t about token t.

    `staleness` counts steps from the version that sampled a token to the batch's; it, `advantages`
    and `behaviour_logprobs` are 0 where the policy sampled nothing.
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    staleness: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that go through the model together, right-padded with zeros.

    `behaviour_logprobs` may be non-finite on `loss_mask`. `row_ids` index the batch's trajectories
    in (group, sibling) order.
    """

    row_ids: Tensor  # int64[B]
    tokens: Tensor  # int64[B, T]
    loss_mask: Tensor  # bool[B, T]
    behaviour_logprobs: Tensor  # float32[B, T]
    advantages: Tensor  # float32[B, T]
    staleness: Tensor  # int32[B, T]


def to_row(trajectory: Trajectory, advantage: float, newest_version: int) -> Row:
    """Lay a trajectory out; its action segments are the loss mask."""
    tokens = trajectory.tokens.astype(np.int64)
    row = Row(
        tokens=tokens,
        loss_mask=np.zeros(len(tokens), np.bool_),
        behaviour_logprobs=np.zeros(len(tokens), np.float32),
        advantages=np.zeros(len(tokens), np.float32),
        staleness=np.zeros(len(tokens), np.int32),
    )
    start = len(trajectory.prompt_tokens)
    for turn in trajectory.turns:
        action = slice(start, start + len(turn.action_tokens))
        row.loss_mask[action] = True
        row.behaviour_logprobs[action] = turn.behaviour_logprobs
        row.advantages[action] = advantage
        row.staleness[action] = newest_version - turn.policy_versions
        start = action.stop + len(turn.observation_tokens)
    return row


def pack(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Indices in micro-batches, longest first, each of at most `budget_tokens` padded tokens.

    A row longer than the budget goes alone. Equal lengths keep their order: packing is
    deterministic.
    """
    packed: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        full = packed and (len(packed[-1]) + 1) * longest > budget_tokens
        if not packed or full or lengths[index] < SHORTEST_SHARE * longest:
            packed.append([])
            longest = lengths[index]
        packed[-1].append(index)
    return packed


def pad(row_ids: Sequence[int], rows: Sequence[Row]) -> MicroBatch:
    """The rows of these indices as one micro-batch."""
    chosen = [rows[i] for i in row_ids]
    longest = max(len(row) for row in chosen)

    def stack(name: str) -> Tensor:
        padded = np.zeros((len(chosen), longest), getattr(chosen[0], name).dtype)
        for target, row in zip(padded, chosen, strict=True):
            target[: len(row)] = getattr(row, name)
        return torch.from_numpy(padded)

    return MicroBatch(
        row_ids=torch.tensor(list(row_ids)),
        tokens=stack("tokens"),
        loss_mask=stack("loss_mask"),
        behaviour_logprobs=stack("behaviour_logprobs"),
        advantages=stack("advantages"),
        staleness=stack("staleness"),
    )
