"""Rollouts of several sequences: advantage and denominator are of whole rollouts, staleness of each
sequence's own tokens, as the formulas written out have them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, product

import numpy as np
import pytest

from configs.runtime.files import MOST_IDS
from configs.schema import LearnerConfig
from learner.batch import TrainingBatch, build, build_shares
from replay.codec import encode_trajectory
from replay.protocol import Batch
from replay.trajectory import TokenSequence, Trajectory

STEP, GROUPS, SIBLINGS = 6, 3, 4
REDUCTIONS = ("token_mean", "sequence_mean", "constant_length")
WAYS = [
    *product(("mean", "leave_one_out"), ("none", "group", "batch", "whiten")),
    *product(("none",), ("none", "whiten")),
]


@dataclass
class Row:
    """A sequence as the learner should see it: of each sampled token its number, version's lag and
    weight times advantage; and what its tokens earned in all."""

    ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    credit: list[float] = field(default_factory=list)
    earned: float = 0.0


def drawn(seed: int, trajectory: Callable[..., Trajectory]) -> list[list[Trajectory]]:
    """Groups whose rollouts have one to four sequences, each by versions of its own; some cannot be
    scored."""
    draw = np.random.default_rng(seed)

    def sequence() -> TokenSequence:
        made = trajectory(int(draw.integers(1 << 30)), version=int(draw.integers(STEP)))
        return made.sequences[0]

    def rollout(group_id: int, sibling: int) -> Trajectory:
        told = {"reward": float(draw.integers(3))}
        if draw.random() < 0.15:
            told = {"reward": None, "reward_cause": "nobody knows"}
        made = trajectory(group_id=group_id, sibling=sibling, **told)
        sequences = tuple(sequence() for _ in range(int(draw.integers(1, 5))))
        return type(made)(**{n: getattr(made, n) for n in made.__struct_fields__}
                          | {"sequences": sequences})  # fmt: skip

    return [[rollout(group, n) for n in range(SIBLINGS)] for group in range(1, GROUPS + 1)]


def batch_of(groups: Sequence[Sequence[Trajectory]]) -> Batch:
    payloads = tuple(tuple(map(encode_trajectory, group)) for group in groups)
    return Batch(STEP, tuple(range(1, GROUPS + 1)), (0,) * GROUPS, payloads, {}, {}, ())


def transcribed(groups: Sequence[Sequence[Trajectory]], config: LearnerConfig) -> list[Row]:
    """The formulas, written out over whole rollouts."""
    counts = [[sum(map(sampled, t.sequences)) for t in group] for group in groups]
    rewards = [[t.reward for t in group] for group in groups]
    credit = chain.from_iterable(advantages(rewards, counts, config))
    total, rollouts, rows = sum(map(sum, counts)), GROUPS * SIBLINGS, []
    for own, advantage in zip(chain.from_iterable(groups), credit, strict=True):
        below = {
            "token_mean": total,
            "sequence_mean": rollouts * sum(map(sampled, own.sequences)),
            "constant_length": rollouts * config.constant_length_tokens,
        }[config.reduction or "token_mean"]
        for sequence in own.sequences:
            row = Row(sequence.tokens.tolist())
            for turn in sequence.turns:
                row.logprobs += turn.behaviour_logprobs.tolist()
                row.lags += [STEP - 1 - version for version in turn.policy_versions.tolist()]
                row.credit += [advantage / below] * len(turn.action_tokens)
            row.earned = float("nan") if own.reward is None else own.reward
            rows.append(row)
    return rows


def sampled(sequence: TokenSequence) -> int:
    return sum(len(turn.action_tokens) for turn in sequence.turns)


def advantages(
    rewards: Sequence[Sequence[float | None]],
    counts: Sequence[Sequence[int]],
    config: LearnerConfig,
) -> list[list[float]]:
    """GRPO's, RLOO's, ScaleRL's and REINFORCE++'s, of what could be scored; the others' are 0."""
    centred, own_spread, apart = [], [], list[float]()
    for group in rewards:
        told = [each for each in group if each is not None]
        mean = statistics.fmean(told) if told else 0.0
        apart += [0.0 if len(told) < 2 else each - mean for each in told]
        own_spread.append(statistics.stdev(told) if len(told) > 1 else 1.0)
        if config.baseline == "leave_one_out" and len(told) > 1:
            others = [(sum(told) - each) / (len(told) - 1) if each is not None else 0.0
                      for each in group]  # fmt: skip
        else:
            others = [mean if config.baseline != "none" else 0.0] * len(group)
        silent = config.baseline != "none" and len(set(told)) < 2
        centred.append([
            0.0 if each is None or silent else each - other
            for each, other in zip(group, others, strict=True)
        ])  # fmt: skip
    if config.advantage_std == "group":
        return [[a / (s + 1e-6) for a in group]
                for group, s in zip(centred, own_spread, strict=True)]  # fmt: skip
    if config.advantage_std == "batch":
        return [[a / (statistics.stdev(apart) + 1e-6) for a in group] for group in centred]
    if config.advantage_std == "whiten":
        return whitened(rewards, centred, counts)
    return centred


def whitened(
    rewards: Sequence[Sequence[float | None]],
    centred: Sequence[Sequence[float]],
    counts: Sequence[Sequence[int]],
) -> list[list[float]]:
    """Over the tokens of all rollouts that could be scored."""
    flat = zip(*map(chain.from_iterable, (rewards, centred, counts)), strict=True)
    tokens = [a for reward, a, n in flat if reward is not None for _ in range(n)]
    mean, scale = statistics.fmean(tokens), (statistics.variance(tokens) + 1e-8) ** 0.5
    return [
        [0.0 if reward is None else (a - mean) / scale for reward, a in zip(*each, strict=True)]
        for each in zip(rewards, centred, strict=True)
    ]


def rows_of(*shares: TrainingBatch) -> list[Row]:
    """What the learner made of each sequence, in the batch's order."""
    found: dict[int, Row] = {}
    for micro in chain.from_iterable(share.micro_batches for share in shares):
        for row, number in enumerate(micro.row_ids.tolist()):
            if number < 0:
                continue  # a rank without one left
            mask, weight = micro.loss_mask[row], float(micro.coefficients[row])
            own = Row(micro.tokens[row].tolist(), micro.behaviour_logprobs[row][mask].tolist())
            own.lags = micro.staleness[row][mask].tolist()
            own.credit = [weight * a for a in micro.advantages[row][mask].tolist()]
            own.earned = float(micro.rewards[row].sum())
            found[number] = own
    return [found[number] for number in range(len(found))]


def check(found: Sequence[Row], expected: Sequence[Row]) -> None:
    assert len(found) == len(expected)
    for own, written in zip(found, expected, strict=True):
        assert own.ids == written.ids + [0] * (len(own.ids) - len(written.ids))
        assert own.logprobs == written.logprobs and own.lags == written.lags
        assert own.credit == pytest.approx(written.credit, rel=1e-5, abs=1e-9)
        assert own.earned == pytest.approx(written.earned, nan_ok=True)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("baseline", "std"), WAYS)
def test_credit_and_denominator_are_those_of_whole_rollouts(
    trajectory: Callable[..., Trajectory], reduction: str, baseline: str, std: str
) -> None:
    config = LearnerConfig(
        reduction=reduction,
        baseline=baseline,
        advantage_std=std,
        micro_batch_tokens=60,
        constant_length_tokens=40 if reduction == "constant_length" else 0,
    )
    for seed in range(4):
        groups = drawn(seed, trajectory)
        training = build(batch_of(groups), config, MOST_IDS)
        check(rows_of(training), transcribed(groups, config))


@pytest.mark.parametrize("ranks", [2, 3])
def test_sequences_of_a_rollout_may_lie_on_any_ranks(
    trajectory: Callable[..., Trajectory], ranks: int
) -> None:
    config = LearnerConfig(micro_batch_tokens=60, ranks=ranks)
    groups = drawn(7, trajectory)
    shares = build_shares(batch_of(groups), config, MOST_IDS)
    check(rows_of(*shares), transcribed(groups, config))
    lies = [{share.rollouts[i] for m in share.micro_batches for i in m.row_ids if i >= 0}
            for share in shares]  # fmt: skip
    assert set.intersection(*lies), "of some rollouts each rank has a part"


def test_gauges_are_of_tokens_sequences_and_rollouts_each(
    trajectory: Callable[..., Trajectory],
) -> None:
    groups = drawn(3, trajectory)
    flat = list(chain.from_iterable(groups))
    gauges = build(batch_of(groups), LearnerConfig(), MOST_IDS).gauges
    lags = [lag for row in transcribed(groups, LearnerConfig()) for lag in row.lags]
    assert gauges["replay/staleness"] == pytest.approx(statistics.fmean(lags))
    assert gauges["replay/staleness_max"] == max(lags)
    spans = [t.newest_version - t.oldest_version + 1 for t in flat]
    assert gauges["learner/versions_per_rollout"] == pytest.approx(statistics.fmean(spans))
    assert max(spans) > 1, "of a sequence each has one version alone"
    assert gauges["learner/sequences"] == sum(len(t.sequences) for t in flat)
    assert gauges["learner/action_tokens"] == len(lags)
    told = [t.reward for t in flat if t.reward is not None]
    assert gauges["learner/reward"] == pytest.approx(statistics.fmean(told))
