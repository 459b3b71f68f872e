"""A critic's judgement of a batch, and what it learns from it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from configs.algorithm.critic import CriticConfig
from configs.runtime.files import MOST_IDS
from configs.schema import Config, LearnerConfig
from learner.algorithm.schedule import learning_rate
from learner.batch import build
from learner.errors import Diverged
from learner.model.credit import critic_rate, judge, policy_rate, teach
from learner.model.head import ValueLoss
from learner.packing import MicroBatch
from replay.codec import encode_trajectory
from replay.protocol import Batch
from replay.trajectory import Trajectory

PPO = LearnerConfig(baseline="critic", advantage_std="none", micro_batch_tokens=60)
WHITE = msgspec.structs.replace(PPO, advantage_std="whiten")


def with_critic(config: LearnerConfig, **fields: Any) -> LearnerConfig:
    return msgspec.structs.replace(config, critic=CriticConfig(**fields))


class Table:
    """A critic whose every value is a parameter of its own."""

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        torch.manual_seed(0)
        self.values_of = {
            id(micro.tokens): torch.randn(micro.tokens.shape, requires_grad=True)
            for micro in micro_batches
        }

    def values(self, micro: MicroBatch) -> Tensor:
        return self.values_of[id(micro.tokens)].detach().clone()

    def accumulate(self, micro: MicroBatch, loss: ValueLoss) -> Tensor:
        loss(values := self.values_of[id(micro.tokens)]).backward()
        return values.detach().clone()

    def step(self, lr: float) -> float:
        self.gradients = {key: values.grad for key, values in self.values_of.items()}
        for values in self.values_of.values():
            values.data -= lr * values.grad
            values.grad = None
        return 1.0

    def total(self, values: Sequence[float]) -> list[float]:
        return list(values)


@pytest.fixture
def given(batch: Callable[..., Batch], trajectory: Callable[..., Trajectory]) -> Batch:
    """Four groups; nobody could score the last rollout."""
    made = batch(groups=4)
    lost = trajectory(seed=3, group_id=4, sibling=2, reward=None, reward_cause="no gold answer")
    *groups, last = made.groups
    return msgspec.structs.replace(made, groups=(*groups, (*last[:-1], encode_trajectory(lost))))


def micro_batches(given: Batch, config: LearnerConfig) -> list[MicroBatch]:
    return list(build(given, config, vocabulary=MOST_IDS).micro_batches)


def told(critic: Any, micro: Sequence[MicroBatch]) -> list[Tensor]:
    return [critic.values(each) for each in micro]


def test_advantages_are_of_each_token_and_of_nothing_between(given: Batch) -> None:
    micro = micro_batches(given, PPO)
    critic = Table(micro)
    judged, _, gauges = judge(critic, micro, told(critic, micro), PPO)
    errors, unscored = [], 0
    for before, after in zip(micro, judged, strict=True):
        values = critic.values(before)
        for row, reward in enumerate(before.rewards.sum(1)):
            acts, scored = before.loss_mask[row], not math.isnan(reward)
            expected = reward - values[row][acts] if scored else torch.zeros(int(acts.sum()))
            torch.testing.assert_close(after.advantages[row][acts], expected)
            assert not after.advantages[row][~acts].any()
            unscored += not scored
            errors += expected.tolist() if scored else []
    assert unscored == 1 and len(micro) > 1
    assert gauges["learner/advantage_mean"] == pytest.approx(sum(errors) / len(errors))
    assert gauges["learner/advantage_abs"] == pytest.approx(sum(map(abs, errors)) / len(errors))
    assert gauges["learner/explained_variance"] < 0.0


def written_out(
    earned: list[float], values: list[float], gamma: float, decay: float
) -> list[float]:
    """A_i = Σ_k (γλ)^k δ_{i+k} over the action tokens of a sequence, `decay` being γλ."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * v - own for r, v, own in zip(earned, after, values, strict=True)]
    return [sum(decay**k * delta for k, delta in enumerate(deltas[i:])) for i in range(len(deltas))]


def test_a_penalty_is_taken_off_what_its_own_token_earns(given: Batch) -> None:
    config = with_critic(PPO, gamma=0.9, gae_lambda=0.8)
    micro = micro_batches(given, config)
    critic = Table(micro)
    penalties = [torch.rand(len(each.rows)) for each in micro]
    judged, _, _ = judge(critic, micro, told(critic, micro), config, penalties)
    for before, after, taken in zip(micro, judged, penalties, strict=True):
        for row, reward in enumerate(before.rewards.sum(1).tolist()):
            acts = before.loss_mask[row]
            earned = [-each for each in taken[before.rows == row].tolist()]
            earned[-1] += reward
            values = critic.values(before)[row][acts].tolist()
            expected = written_out(earned, values, 0.9, 0.9 * 0.8)
            if math.isnan(reward):
                expected = [0.0] * len(earned)
            assert after.advantages[row][acts].tolist() == pytest.approx(expected, rel=1e-4)
            assert not after.advantages[row][~acts].any()


def test_what_a_turn_earned_is_credited_to_it_and_to_those_before(
    batch: Callable[..., Batch], trajectory: Callable[..., Trajectory]
) -> None:
    config, made, records = with_critic(PPO, gamma=0.9, gae_lambda=0.8), batch(groups=1), []
    for sibling in range(3):
        record = trajectory(seed=sibling, group_id=1, sibling=sibling, reward=2.0)
        (sequence,) = record.sequences
        turns = [*sequence.turns, *trajectory(seed=5).turns]
        turns = [msgspec.structs.replace(t, reward=i - 1.0) for i, t in enumerate(turns)]
        sequence = msgspec.structs.replace(sequence, turns=tuple(turns))
        records.append(msgspec.structs.replace(record, sequences=(sequence,)))
    given = msgspec.structs.replace(made, groups=(tuple(map(encode_trajectory, records)),))
    micro = list(build(given, config, vocabulary=MOST_IDS, turn_weight=0.5).micro_batches)
    judged, _, _ = judge(critic := Table(micro), micro, told(critic, micro), config)
    for before, after in zip(micro, judged, strict=True):
        for row, rollout in enumerate(before.row_ids.tolist()):
            earned, left = [], 2.0
            for turn in records[rollout].sequences[0].turns:
                earned += [0.0] * (len(turn.action_tokens) - 1) + [0.5 * turn.reward]
                left -= 0.5 * turn.reward
            earned[-1] += left
            acts = before.loss_mask[row]
            values = critic.values(before)[row][acts].tolist()
            expected = written_out(earned, values, 0.9, 0.9 * 0.8)
            assert after.advantages[row][acts].tolist() == pytest.approx(expected, rel=1e-4)


def test_credit_is_whitened_over_the_step_s_tokens(given: Batch) -> None:
    micro = micro_batches(given, WHITE)
    raw, _, _ = judge(critic := Table(micro), micro, told(critic, micro), PPO)
    white, judgements, _ = judge(critic, micro, told(critic, micro), WHITE)
    tokens, whitened = (
        torch.cat([m.advantages[j.mask] for m, j in zip(each, judgements, strict=True)])
        for each in (raw, white)
    )
    torch.testing.assert_close(whitened, (tokens - tokens.mean()) / (tokens.var() + 1e-8).sqrt())
    assert sum(float(m.advantages.abs().sum()) for m in white) == pytest.approx(
        float(whitened.abs().sum()), rel=1e-5
    )


def test_the_critic_learns_from_scored_actions_alone_by_the_step_s_denominator(
    given: Batch,
) -> None:
    micro = micro_batches(given, PPO)
    critic = Table(micro)
    judged, judgements, _ = judge(critic, micro, told(critic, micro), PPO)
    gauges = teach(critic, judged, judgements, 1, PPO)
    count, loss = sum(int(m.loss_mask.sum()) for m in micro), 0.0
    for each in micro:
        gradient, start = critic.gradients[id(each.tokens)], Table(micro).values(each)
        rewards = each.rewards.sum(1, keepdim=True)
        acts = each.loss_mask & ~rewards.isnan()
        off = (start - rewards)[acts]
        torch.testing.assert_close(gradient[acts], off / count)
        assert not gradient[~acts].any()
        loss += float(0.5 * off.square().sum() / count)
    assert gauges["learner/value_loss"] == pytest.approx(loss, rel=1e-5)


def test_values_are_held_near_what_they_were_before_the_batch(given: Batch) -> None:
    fields, moved = {"lr": 10.0, "warmup_steps": 0, "updates": 3}, []
    for clip in (0.01, None):
        config = with_critic(PPO, value_clip=clip, **fields)
        micro = micro_batches(given, config)
        critic = Table(micro)
        judged, judgements, _ = judge(critic, micro, told(critic, micro), config)
        gauges = teach(critic, judged, judgements, 1, config)
        apart = [critic.values(m) - Table(micro).values(m) for m in micro]
        moved.append(max(float(values.abs().max()) for values in apart))
        assert (gauges["learner/value_clip_fraction"] > 0.0) == (clip is not None)
    assert moved[0] < moved[1]


def test_a_critic_comes_to_explain_the_returns(
    config: Config, make_plain_critic: Callable[..., Any], given: Batch
) -> None:
    learner = with_critic(PPO, lr=3e-3, warmup_steps=0, updates=4)
    critic, found = make_plain_critic(config), []
    for _ in range(4):
        micro = micro_batches(given, learner)
        judged, judgements, gauges = judge(critic, micro, told(critic, micro), learner)
        found.append(gauges | teach(critic, judged, judgements, 1, learner))
    assert found[0]["learner/value_mean"] == 0.0
    assert found[-1]["learner/value_loss"] < 0.5 * found[0]["learner/value_loss"]
    assert found[-1]["learner/explained_variance"] > 0.5


def test_micro_batching_does_not_change_what_it_learns(
    config: Config, make_plain_critic: Callable[..., Any], given: Batch
) -> None:
    gradients, credits = [], []
    for budget in (1, 10_000):
        learner = msgspec.structs.replace(WHITE, micro_batch_tokens=budget)
        critic, micro = make_plain_critic(config), micro_batches(given, learner)
        for weight in critic.model.head.parameters():
            torch.nn.init.constant_(weight, 0.05)
        judged, judgements, _ = judge(critic, micro, told(critic, micro), learner)
        teach(critic, judged, judgements, 1, learner)
        gradients.append(critic.gradients)
        rows = {int(i): m.advantages[r][m.loss_mask[r]]
                for m in judged for r, i in enumerate(m.row_ids)}  # fmt: skip
        credits.append(torch.cat([rows[i] for i in sorted(rows)]))
    torch.testing.assert_close(*credits, rtol=1e-3, atol=1e-4)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-6)


def test_a_critic_without_numbers_stops_the_run(given: Batch) -> None:
    micro = micro_batches(given, PPO)
    critic = Table(micro)
    next(iter(critic.values_of.values())).data.fill_(math.nan)
    judged, judgements, _ = judge(critic, micro, told(critic, micro), PPO)
    with pytest.raises(Diverged, match="step 7: the critic's loss is nan"):
        teach(critic, judged, judgements, 7, PPO)


def test_the_policy_waits_while_the_critic_learns_alone() -> None:
    config = with_critic(
        LearnerConfig(baseline="critic", advantage_std="whiten", lr=1e-6, warmup_steps=4),
        lr=1e-3, warmup_steps=2, alone_steps=3,
    )  # fmt: skip
    assert [policy_rate(step, config) for step in (1, 3)] == [0.0, 0.0]
    assert policy_rate(4, config) == learning_rate(4, config) == 1e-6
    assert [critic_rate(step, config) for step in (1, 2, 9)] == [5e-4, 1e-3, 1e-3]
