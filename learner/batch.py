"""Training batches: masks, staleness and advantages are derived here, and only here.

Whole groups of encoded trajectories go in; what cannot be trained on is refused by name. The same
bytes always give the same tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch

from configs.schema import LearnerConfig
from learner.algorithm.advantage import advantages
from learner.algorithm.loss import row_coefficients
from learner.algorithm.objectives import choose
from learner.algorithm.turns import DISCOUNT, step_returns, turn_advantages
from learner.errors import BadBatch
from learner.health.habits import habits
from learner.health.tokens import SequenceKey
from learner.packing import MicroBatch, Row, pack_shares, pad, to_row
from replay.codec import decode_trajectory
from replay.protocol import Batch, CodecError
from replay.trajectory import TokenSequence, Trajectory

REMEDY = "start a new run from a checkpoint: model.path=RUN/checkpoints/step-N/model"


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """One rank's share of an optimiser step; the coefficients are those of the whole step's one
    denominator, so that shares add up.

    `step` k is the step it trains: versions ≤ k − 1 sampled it, and training it makes version k.
    `gauges`, in rank 0's share alone, are those of the whole step that need no model; `sequences`,
    there alone too, says of every row of the step whose it is. `rewards` and `action_counts` are
    the step's, by group (NaN: unscorable), and `rollouts` tells of every row which of these is its
    own; all are whole in every share, and empty where nothing is rewarded.
    """

    step: int
    temperature: float
    micro_batches: tuple[MicroBatch, ...]
    gauges: dict[str, float]
    rewards: tuple[tuple[float, ...], ...] = ()
    action_counts: tuple[tuple[int, ...], ...] = ()
    rollouts: tuple[int, ...] = ()
    sequences: tuple[SequenceKey, ...] = ()


def build(
    batch: Batch, config: LearnerConfig, vocabulary: int, turn_weight: float = 0.0
) -> TrainingBatch:
    """Decode, check, credit and pack a batch for one rank, of a model that embeds so many ids.
    `turn_weight` is that of turns' own rewards in the rollouts' (`rewards.weights.environment`).
    Raises BadBatch naming the group.
    """
    return _build(batch, config, 1, vocabulary, turn_weight)[0]


def build_shares(
    batch: Batch, config: LearnerConfig, vocabulary: int, turn_weight: float = 0.0
) -> tuple[TrainingBatch, ...]:
    """Build for `config.ranks` ranks: balanced by tokens, equally many micro-batches on each."""
    return _build(batch, config, config.ranks, vocabulary, turn_weight)


def _build(
    batch: Batch, config: LearnerConfig, ranks: int, vocabulary: int, turn_weight: float
) -> tuple[TrainingBatch, ...]:
    groups = _decode(batch)
    _check_ids(groups, vocabulary)
    rewards = [_rewards(group) for group in groups]
    counts = [torch.tensor([t.action_count for t in group]) for group in groups]
    credit = credit_of(rewards, counts, (), config)
    trajectories = list(chain.from_iterable(groups))
    temperature = _temperature(trajectories)
    turns = list(chain.from_iterable(_turn_credit(group, config) for group in groups))
    flat = list(chain.from_iterable(credit))
    rows = _rows(trajectories, flat, turns, turn_weight, batch.step - 1, config)
    packed = pack_shares([len(row) for row in rows], config.micro_batch_tokens, ranks)
    shares = [tuple(pad(row_ids, rows) for row_ids in share) for share in packed]
    gauges = {
        **_reward_gauges(rewards),
        **credit_gauges(credit),
        **_size_gauges(rows, shares),
        **_staleness_gauges(rows, trajectories),
        **habits(trajectories),
    }
    return tuple(
        TrainingBatch(
            step=batch.step,
            temperature=temperature,
            micro_batches=share,
            gauges={} if rank else gauges,
            rewards=tuple(tuple(group.tolist()) for group in rewards),
            action_counts=tuple(tuple(group.tolist()) for group in counts),
            rollouts=tuple(n for n, each in enumerate(trajectories) for _ in each.sequences),
            sequences=() if rank else _keys(trajectories),
        )
        for rank, share in enumerate(shares)
    )


def _keys(trajectories: Sequence[Trajectory]) -> tuple[SequenceKey, ...]:
    return tuple(
        (each.group_id, each.sibling, place)
        for each in trajectories
        for place in range(len(each.sequences))
    )


def credit_of(
    rewards: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor],
    log_ratios: Sequence[torch.Tensor],
    config: LearnerConfig,
) -> list[list[float]]:
    """The advantages of each group's rollouts, from their rewards float[n] (NaN: unscorable), the
    counts of their action tokens and their log ratios of current to behaviour policy (none: 0); 0
    where a critic will make them.
    """
    if config.baseline == "critic":
        return [[0.0] * len(group) for group in rewards]
    made = advantages(
        rewards, config.baseline, config.advantage_std, tokens=counts, log_ratios=log_ratios
    )
    return [group.tolist() for group in made]


def credit_gauges(credit: Sequence[Sequence[float]]) -> dict[str, float]:
    """What the advantages of a step's groups amount to."""
    flat = list(chain.from_iterable(credit))
    return {
        "learner/advantage_mean": float(np.mean(flat)),
        "learner/advantage_abs": float(np.mean(np.abs(flat))),
    }


def _bad(cause: str, instead: str = "") -> BadBatch:
    return BadBatch(f"{cause}: {instead}{REMEDY}")


def _rows(
    trajectories: Sequence[Trajectory],
    credit: Sequence[float],
    turns: Sequence[Sequence[Sequence[float]]],
    turn_weight: float,
    newest_version: int,
    config: LearnerConfig,
) -> list[Row]:
    """A row for each sequence; advantage and denominator are those of its whole rollout, to which
    each turn adds its own.
    """
    coefficients = row_coefficients(
        [trajectory.action_count for trajectory in trajectories],
        choose(config).reduction,
        config.constant_length_tokens,
    )
    return [
        to_row(
            sequence,
            advantage,
            newest_version,
            coefficient,
            reward=_reward(trajectory),
            turn_weight=turn_weight,
            turn_credit=own,
        )
        for trajectory, advantage, each, coefficient in zip(
            trajectories, credit, turns, coefficients, strict=True
        )
        for sequence, own in zip(trajectory.sequences, each, strict=True)
    ]


def _turn_credit(group: Sequence[Trajectory], config: LearnerConfig) -> list[list[list[float]]]:
    """What each turn of each sequence of each rollout adds to its advantage: a rollout's turns
    follow one another in time, whatever sequences they are of. Unscorable rollouts are compared
    with nothing.
    """
    credit = [[[0.0] * len(s.turns) for s in t.sequences] for t in group]
    if not config.turn_credit:
        return credit
    told = [
        (trajectory, each)
        for trajectory, each in zip(group, credit, strict=True)
        if trajectory.reward is not None
    ]
    discount = DISCOUNT if config.turn_discount is None else config.turn_discount
    states = [state for t, _ in told for sequence in t.sequences for state in _states(sequence)]
    returns = [value for trajectory, _ in told for value in _returns(trajectory, discount)]
    made = iter(turn_advantages(states, returns, config.advantage_std))
    for own in chain.from_iterable(each for _, each in told):
        own[:] = [config.turn_credit * next(made) for _ in own]
    return credit


def _returns(trajectory: Trajectory, discount: float) -> list[float]:
    """The step return of each turn, in their order by sequences, of those that ended no sooner.
    Within a sequence they keep their order, though a clock was set back.
    """
    turns = trajectory.turns
    ends = [
        end
        for sequence in trajectory.sequences
        for end in accumulate((turn.ended_at for turn in sequence.turns), max)
    ]
    order = sorted(range(len(turns)), key=ends.__getitem__)
    made = step_returns([turns[place].reward for place in order], discount)
    found = dict(zip(order, made, strict=True))
    return [found[place] for place in range(len(turns))]


def _states(sequence: TokenSequence) -> list[bytes]:
    """What the policy had read last when it took each turn: the prompt, then observations."""
    read = [sequence.prompt_tokens, *(turn.observation_tokens for turn in sequence.turns)]
    return [ids.tobytes() for ids in read[:-1]]


def _decode(batch: Batch) -> list[list[Trajectory]]:
    if not batch.groups or len(batch.groups) != len(batch.group_ids):
        raise _bad(
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
        raise _bad(f"group {group_id}: {error}") from error
    siblings = [trajectory.sibling for trajectory in group]
    if not group or len(set(siblings)) != len(siblings):
        raise _bad(f"group {group_id}: siblings {siblings!r}, expected each once")
    for trajectory in group:
        where = f"group {group_id}: sibling {trajectory.sibling}"
        if trajectory.group_id != group_id:
            raise _bad(f"{where} belongs to group {trajectory.group_id}")
        if trajectory.kind != "train":
            raise _bad(f"{where} is of kind {trajectory.kind!r}: only 'train' is trained on")
        if trajectory.newest_version > newest:
            raise _bad(
                f"{where} has tokens of version {trajectory.newest_version} in the batch of step "
                f"{newest + 1}: versions up to {newest} exist"
            )
    return sorted(group, key=lambda trajectory: trajectory.sibling)


def _check_ids(groups: Sequence[Sequence[Trajectory]], vocabulary: int) -> None:
    """Raise BadBatch for an id that the model does not embed: replay takes none, but a log may be
    of another model, or of a program that did not look.
    """
    for trajectory in chain.from_iterable(groups):
        ids = [sequence.tokens for sequence in trajectory.sequences]
        least = min(each.min(initial=0) for each in ids)
        most = max(each.max(initial=0) for each in ids)
        if least < 0 or most >= vocabulary:
            raise _bad(
                f"group {trajectory.group_id}: sibling {trajectory.sibling}: token id "
                f"{least if least < 0 else most}: the model's vocabulary has {vocabulary}, from 0",
                "put back the model that sampled it, or ",
            )


def _temperature(trajectories: Sequence[Trajectory]) -> float:
    temperatures = {trajectory.sampling.temperature for trajectory in trajectories}
    if len(temperatures) != 1 or min(temperatures) <= 0.0:
        raise _bad(f"sampling temperatures {sorted(temperatures)!r}: one, and above 0, is needed")
    return temperatures.pop()


def _rewards(group: Sequence[Trajectory]) -> torch.Tensor:
    return torch.tensor([_reward(trajectory) for trajectory in group], dtype=torch.float64)


def _reward(trajectory: Trajectory) -> float:
    return math.nan if trajectory.reward is None else trajectory.reward


def _reward_gauges(groups: Sequence[torch.Tensor]) -> dict[str, float]:
    scored = [group[~group.isnan()].tolist() for group in groups]
    rewards = list(chain.from_iterable(scored))
    return {
        "learner/reward": float(np.mean(rewards)) if rewards else 0.0,
        "learner/unscorable": float(sum(map(len, groups)) - len(rewards)),
        "learner/no_signal_fraction": sum(len({*each}) < 2 for each in scored) / len(scored),
    }


def _size_gauges(rows: Sequence[Row], shares: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
    """`learner/micro_batches` counts one rank's; `learner/fill` is over all of them."""
    tokens = sum(len(row) for row in rows)
    padded = sum(micro.tokens.numel() for micro in chain.from_iterable(shares))
    return {
        "learner/sequences": float(len(rows)),
        "learner/tokens": float(tokens),
        "learner/action_tokens": float(sum(int(row.loss_mask.sum()) for row in rows)),
        "learner/micro_batches": float(len(shares[0])),
        "learner/fill": tokens / padded,
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
