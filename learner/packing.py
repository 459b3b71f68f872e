"""Trajectories → flat sequences → shares of the ranks → padded micro-batches under a token budget.

Pure and deterministic: the same rows give the same micro-batches in the same order.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.trajectory import TokenSequence

# A micro-batch ends where the next row would make padding, that of its width included, more than a
# tenth of it.
LEAST_FILL = 0.9
WIDTHS_PER_DOUBLING = 16  # rounding up adds at most a sixteenth to the longest row


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a trajectory as the model sees it; all [T], entry t about token t.

    `staleness` counts steps from the version that sampled a token to the batch's; it, `advantages`,
    `behaviour_logprobs` and `rewards` are 0 where the policy sampled nothing.
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    staleness: NDArray[np.int32]
    rewards: NDArray[np.float32]  # what each token earned; NaN at the last: nobody could score it
    coefficient: float  # factor of each of its token losses

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that go through the model together, right-padded with zeros.

    `behaviour_logprobs` may be non-finite on `loss_mask`. `row_ids` index the batch's sequences in
    (group, sibling, sequence) order; -1 is none: a rank without one left runs the model on zeros.
    """

    row_ids: Tensor  # int64[B]
    tokens: Tensor  # int64[B, T]
    loss_mask: Tensor  # bool[B, T]
    behaviour_logprobs: Tensor  # float32[B, T]
    advantages: Tensor  # float32[B, T]
    staleness: Tensor  # int32[B, T]
    rewards: Tensor  # float32[B, T]; NaN in a row that nobody could score
    coefficients: Tensor  # float32[B]

    @property
    def rows(self) -> Tensor:
        """int64[N]: the row of each action token, in the order in which the mask lists them."""
        return self.loss_mask.nonzero()[:, 0]

    @property
    def actions(self) -> Tensor:
        """int64[N]: the number of each action token's action, counted through the micro-batch; two
        with no observation between them are one.
        """
        before = torch.nn.functional.pad(self.loss_mask[:, :-1], (1, 0))
        begins = (self.loss_mask & ~before).flatten().cumsum(0)
        return begins[self.loss_mask.flatten()] - 1

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on a device."""
        return MicroBatch(**{name: getattr(self, name).to(device) for name in self.__slots__})


_EMPTY_ROW = Row(
    tokens=np.zeros(2, np.int64),
    loss_mask=np.zeros(2, np.bool_),
    behaviour_logprobs=np.zeros(2, np.float32),
    advantages=np.zeros(2, np.float32),
    staleness=np.zeros(2, np.int32),
    rewards=np.zeros(2, np.float32),
    coefficient=0.0,
)


def to_row(
    sequence: TokenSequence,
    advantage: float,
    newest_version: int,
    coefficient: float,
    *,
    reward: float = math.nan,
    turn_weight: float = 0.0,
    turn_credit: Sequence[float] = (),
) -> Row:
    """Lay a sequence out; its action segments are the loss mask. `turn_credit` (none: 0) is added
    to the advantage of each turn.

    A turn's own reward, times `turn_weight`, stands at its last token, and what then is left of the
    rollout's `reward` at the last of all: together they are that reward.
    """
    tokens = sequence.tokens.astype(np.int64)
    row = Row(
        tokens=tokens,
        loss_mask=np.zeros(len(tokens), np.bool_),
        behaviour_logprobs=np.zeros(len(tokens), np.float32),
        advantages=np.zeros(len(tokens), np.float32),
        staleness=np.zeros(len(tokens), np.int32),
        rewards=np.zeros(len(tokens), np.float32),
        coefficient=coefficient,
    )
    start = len(sequence.prompt_tokens)
    credit = turn_credit or [0.0] * len(sequence.turns)
    for turn, own in zip(sequence.turns, credit, strict=True):
        action = slice(start, start + len(turn.action_tokens))
        row.loss_mask[action] = True
        row.behaviour_logprobs[action] = turn.behaviour_logprobs
        row.advantages[action] = advantage + own
        row.staleness[action] = newest_version - turn.policy_versions
        row.rewards[action.stop - 1] = turn_weight * turn.reward
        start = action.stop + len(turn.observation_tokens)
    earlier = sum(turn.reward for turn in sequence.turns[:-1])
    row.rewards[action.stop - 1] = reward - turn_weight * earlier
    return row


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices per rank, longest first; the ranks' sums differ by at most the longest row.

    Each row goes to the rank with the fewest tokens so far (longest processing time first).
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for index in _longest_first(lengths):
        tokens, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (tokens + lengths[index], rank))
    return shares


def padded_width(length: int) -> int:
    """The columns of a micro-batch whose longest row has `length` tokens: `length` below 32, else
    rounded up to one of 16 values per power of two (33 → 34, 257 → 272).

    The same few widths come again and again, and with them the sizes of tensors: were each new, an
    allocator would be left with ever more free blocks that no later tensor fits. Padding may exceed
    a model's number of positions where that is no such value; powers of two are.
    """
    step = max(1, (1 << length.bit_length() >> 1) // WIDTHS_PER_DOUBLING)
    return -(-length // step) * step


def pack(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Indices in micro-batches, longest first, each of at most `budget_tokens` padded tokens and
    filled to at least LEAST_FILL.

    A row whose padded width exceeds the budget goes alone, and exceeds it. Equal lengths keep their
    order.
    """
    packed: list[list[int]] = []
    width = tokens = 0
    for index in _longest_first(lengths):
        padded = width * (len(packed[-1]) + 1) if packed else 0
        if not packed or padded > budget_tokens or tokens + lengths[index] < LEAST_FILL * padded:
            packed.append([])
            width, tokens = padded_width(lengths[index]), 0
        packed[-1].append(index)
        tokens += lengths[index]
    return packed


def pack_shares(lengths: Sequence[int], budget_tokens: int, ranks: int) -> list[list[list[int]]]:
    """Micro-batches of indices per rank, equally many on each: ranks meet in every one of them.

    A rank with fewer halves its widest; where no row is left to part with, an empty one follows.
    """
    shares = []
    for dealt in deal(lengths, ranks):
        packed = pack([lengths[i] for i in dealt], budget_tokens)
        shares.append([[dealt[i] for i in indices] for indices in packed])
    count = max(len(share) for share in shares)
    for share in shares:
        while len(share) < count:
            widest = max(range(len(share)), key=lambda i: len(share[i]), default=0)
            indices = share[widest] if share else []
            if len(indices) > 1:
                half = len(indices) // 2
                share[widest : widest + 1] = [indices[:half], indices[half:]]
            else:
                share.append([])
    return shares


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


def pad(row_ids: Sequence[int], rows: Sequence[Row]) -> MicroBatch:
    """The rows of these indices as one micro-batch; without any, one row that trains nothing."""
    chosen = [rows[i] for i in row_ids] or [_EMPTY_ROW]
    width = padded_width(max(len(row) for row in chosen))

    def stack(name: str) -> Tensor:
        padded = np.zeros((len(chosen), width), getattr(chosen[0], name).dtype)
        for target, row in zip(padded, chosen, strict=True):
            target[: len(row)] = getattr(row, name)
        return torch.from_numpy(padded)

    return MicroBatch(
        row_ids=torch.tensor(list(row_ids) or [-1]),
        tokens=stack("tokens"),
        loss_mask=stack("loss_mask"),
        behaviour_logprobs=stack("behaviour_logprobs"),
        advantages=stack("advantages"),
        staleness=stack("staleness"),
        rewards=stack("rewards"),
        coefficients=torch.tensor([row.coefficient for row in chosen]),
    )
