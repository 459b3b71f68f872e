"""From replay's bytes to tensors, and what is refused by name."""

import statistics
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
import torch

from configs.runtime.files import MOST_IDS
from configs.schema import LearnerConfig
from learner.batch import TrainingBatch, build, build_shares
from learner.errors import BadBatch
from replay.codec import decode_trajectory, encode_trajectory
from replay.protocol import Batch
from replay.trajectory import Sampling, TokenSequence, Trajectory, Turn

SMALL = LearnerConfig(micro_batch_tokens=60)


def with_trajectory(batch: Batch, record: Trajectory) -> Batch:
    """The batch with its last group's last sibling replaced."""
    *groups, last = batch.groups
    payloads = (*groups, (*last[:-1], encode_trajectory(record)))
    return msgspec.structs.replace(batch, groups=payloads)


def sampled(training: TrainingBatch) -> int:
    return sum(int(micro.loss_mask.sum()) for micro in training.micro_batches)


def credit(training: TrainingBatch) -> list[float]:
    """Each row's advantage, in (group, sibling) order."""
    found = {
        int(row_id): float(micro.advantages[row][micro.loss_mask[row]].unique())
        for micro in training.micro_batches
        for row, row_id in enumerate(micro.row_ids)
    }
    return [found[i] for i in sorted(found)]


def test_a_batch_becomes_what_the_trajectories_say(batch: Callable[..., Batch]) -> None:
    given = batch(step=3, version=1)
    training = build(given, SMALL, vocabulary=MOST_IDS)
    records = [decode_trajectory(payload) for group in given.groups for payload in group]
    assert training.step == 3 and training.temperature == 0.7
    assert sampled(training) == sum(record.action_count for record in records)
    assert training.gauges["learner/action_tokens"] == sampled(training)
    assert training.gauges["learner/tokens"] == sum(
        len(record.sequences[0].tokens) for record in records
    )
    assert len(training.micro_batches) > 1 and 0.9 <= training.gauges["learner/fill"] <= 1.0


def test_sequences_of_a_rollout_share_its_advantage_and_denominator(
    batch: Callable[..., Batch], trajectory: Callable[..., Trajectory]
) -> None:
    several = trajectory(seed=9, group_id=2, sibling=2, sequences=3, reward=0.0)
    given = with_trajectory(batch(), several)
    config = LearnerConfig(advantage_std="none", reduction="sequence_mean")
    training = build(given, config, vocabulary=MOST_IDS)
    assert credit(training) == pytest.approx([2 / 3, -1 / 3, -1 / 3] * 2 + [-1 / 3] * 2)
    found = {
        int(row_id): float(micro.coefficients[row])
        for micro in training.micro_batches
        for row, row_id in enumerate(micro.row_ids)
    }
    counts = [t.action_count for t in rollouts(given)]
    expected = [1 / (6 * n) for n in counts]
    assert [found[i] for i in range(8)] == pytest.approx(expected[:5] + [expected[5]] * 3)
    assert training.gauges["learner/sequences"] == 8
    assert sampled(training) == sum(counts)


def rollouts(given: Batch) -> list[Trajectory]:
    return [decode_trajectory(payload) for group in given.groups for payload in group]


def test_advantages_are_centred_within_each_group(batch: Callable[..., Batch]) -> None:
    advantages = credit(build(batch(), LearnerConfig(advantage_std="none"), vocabulary=MOST_IDS))
    assert advantages == pytest.approx([2 / 3, -1 / 3, -1 / 3] * 2)


def test_each_turn_adds_its_own_credit_among_those_in_its_state(
    batch: Callable[..., Batch], trajectory: Callable[..., Trajectory]
) -> None:
    ids = lambda *given: np.array(given, np.int32)  # noqa: E731

    def rollout(sibling: int, read: int, *rewards: float, **fields: object) -> bytes:
        turns = tuple(
            Turn(ids(5, 6), np.float32([-1, -1]), ids(0, 0), ids(*[read] * (i == 0)), reward=r)
            for i, r in enumerate(rewards)
        )
        made = trajectory(group_id=1, sibling=sibling, **{"reward": 1.0} | fields)
        sequences = (TokenSequence(ids(2, 3), turns),)
        return encode_trajectory(msgspec.structs.replace(made, sequences=sequences))

    group = (
        rollout(0, 7, 1.0, 2.0),
        rollout(1, 7, 0.0, 4.0),
        rollout(2, 9, 0.0, 1.0),  # it read something else: its second turn is alone
        rollout(3, 7, 8.0, 8.0, reward=None, reward_cause="none"),
    )
    config = LearnerConfig(advantage_std="none", turn_credit=0.5, turn_discount=0.5)
    given = msgspec.structs.replace(batch(groups=1), groups=(group,))
    training = build(given, config, vocabulary=MOST_IDS)
    found = {
        int(row_id): micro.advantages[row][micro.loss_mask[row]].tolist()
        for micro in training.micro_batches
        for row, row_id in enumerate(micro.row_ids)
    }
    first = [1.0 + 0.5 * 2.0, 0.5 * 4.0, 0.5 * 1.0]  # step returns; of the second turns 2, 4 and 1
    credit = [[0.5 * (each - 1.5)] * 2 for each in first]
    expected = [credit[0] + [-0.5] * 2, credit[1] + [0.5] * 2, credit[2] + [0.0] * 2, [0.0] * 4]
    assert [found[i] for i in range(4)] == [pytest.approx(each) for each in expected]


def test_a_sub_agent_s_turn_has_led_to_what_came_after_it(
    batch: Callable[..., Batch], trajectory: Callable[..., Trajectory]
) -> None:
    """Its sequence stands behind the first one, whose last turn was rewarded after it."""
    ids = lambda *given: np.array(given, np.int32)  # noqa: E731

    def turn(ended_at: float, reward: float) -> Turn:
        zeros = np.zeros(1, np.float32)
        return Turn(ids(5), zeros, ids(0), ids(6), reward=reward, ended_at=ended_at)

    def rollout(sibling: int, reward: float) -> bytes:
        main = TokenSequence(ids(2), (turn(1.0, 0.0), turn(3.0, reward)))
        sequences = main, TokenSequence(ids(3), (turn(2.0, 0.0),), "2")
        made = trajectory(group_id=1, sibling=sibling, reward=1.0)
        return encode_trajectory(msgspec.structs.replace(made, sequences=sequences))

    config = LearnerConfig(advantage_std="none", turn_credit=1.0, turn_discount=0.5)
    group = tuple(rollout(n, reward) for n, reward in enumerate((1.0, 0.0)))
    given = msgspec.structs.replace(batch(groups=1), groups=(group,))
    found = {
        int(row_id): micro.advantages[row][micro.loss_mask[row]].tolist()
        for micro in build(given, config, vocabulary=MOST_IDS).micro_batches
        for row, row_id in enumerate(micro.row_ids)
    }
    assert found == {0: [0.125, 0.5], 1: [0.25], 2: [-0.125, -0.5], 3: [-0.25]}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("std", ["none", "group"])
def test_credit_by_turns_is_of_whole_rollouts_of_several_sequences(
    batch: Callable[..., Batch], seed: int, std: str
) -> None:
    draw = np.random.default_rng(seed)
    ids = lambda *given: np.array(given, np.int32)  # noqa: E731
    made = []
    for record in rollouts(batch(groups=1)):
        sequences = []
        for _ in range(int(draw.integers(1, 4))):
            turns = tuple(
                Turn(ids(5), np.float32([-1]), ids(0), ids(draw.integers(7, 9)),
                     reward=float(draw.normal()), ended_at=float(draw.integers(1, 5)))
                for _ in range(int(draw.integers(1, 4)))
            )  # fmt: skip
            sequences.append(TokenSequence(ids(draw.integers(2, 4)), turns))
        made.append(msgspec.structs.replace(record, sequences=tuple(sequences), reward=1.0))
    given = msgspec.structs.replace(batch(groups=1), groups=(tuple(map(encode_trajectory, made)),))
    config = LearnerConfig(advantage_std=std, turn_credit=1.0, turn_discount=0.5)
    training = build(given, config, vocabulary=MOST_IDS)
    found = {
        int(row_id): micro.advantages[row][micro.loss_mask[row]].tolist()
        for micro in training.micro_batches
        for row, row_id in enumerate(micro.row_ids)
    }
    flat = [each for row_id in sorted(found) for each in found[row_id]]
    assert flat == pytest.approx(by_turns(made, 0.5, std), rel=1e-5, abs=1e-6)


def by_turns(made: Sequence[Trajectory], discount: float, std: str) -> list[float]:
    """Each turn's credit, written out: a rollout's turns follow one another in time, of equal ones
    by their place, none before one that its sequence has before it, and the group are those that
    had just read the same.
    """
    told: list[tuple[int, float]] = []  # what was read last, and the step return
    for record in made:
        turns = [turn for sequence in record.sequences for turn in sequence.turns]
        read: list[int] = []
        ends: list[float] = []
        for sequence in record.sequences:
            own = [turn.ended_at for turn in sequence.turns]
            ends += [max(own[: i + 1]) for i in range(len(own))]
            read.append(int(sequence.prompt_tokens[-1]))
            read += [int(turn.observation_tokens[-1]) for turn in sequence.turns[:-1]]
        for t, state in enumerate(read):
            value, steps = 0.0, 0
            for end, place in sorted((end, place) for place, end in enumerate(ends)):
                if (end, place) >= (ends[t], t):
                    value += discount**steps * turns[place].reward
                    steps += 1
            told.append((state, value))
    credit = []
    for state, value in told:
        same = [other for at, other in told if at == state]
        spread = statistics.stdev(same) + 1e-6 if std == "group" and len(same) > 1 else 1.0
        credit.append((value - statistics.fmean(same)) / spread)
    return credit


def test_unscorable_is_left_out(
    batch: Callable[..., Batch], trajectory: Callable[..., Trajectory]
) -> None:
    lost = trajectory(group_id=2, sibling=2, reward=None, reward_cause="no gold answer")
    training = build(
        with_trajectory(batch(), lost), LearnerConfig(advantage_std="none"), vocabulary=MOST_IDS
    )
    assert credit(training)[3:] == pytest.approx([0.5, -0.5, 0.0])
    assert training.gauges["learner/unscorable"] == 1
    assert training.gauges["learner/reward"] == pytest.approx(2 / 5)


def test_equal_rewards_carry_no_signal(
    batch: Callable[..., Batch], trajectory: Callable[..., Trajectory]
) -> None:
    group = [trajectory(group_id=2, sibling=i, reward=1.0) for i in range(3)]
    given = batch()
    groups = (given.groups[0], tuple(map(encode_trajectory, group)))
    training = build(msgspec.structs.replace(given, groups=groups), SMALL, vocabulary=MOST_IDS)
    assert credit(training)[3:] == [0.0] * 3
    assert training.gauges["learner/no_signal_fraction"] == 0.5


def test_staleness_is_per_token_from_the_step_the_batch_was_taken_at(
    batch: Callable[..., Batch], trajectory: Callable[..., Trajectory]
) -> None:
    fresh = trajectory(seed=9, version=4, group_id=2, sibling=2)
    training = build(with_trajectory(batch(step=5, version=1), fresh), SMALL, vocabulary=MOST_IDS)
    older = sampled(training) - fresh.action_count
    assert training.gauges["replay/staleness"] == pytest.approx(3 * older / sampled(training))
    assert training.gauges["replay/staleness_max"] == 3


@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_hold_the_step_once_under_its_one_denominator(
    batch: Callable[..., Batch], ranks: int
) -> None:
    given = batch(groups=3)
    learner = LearnerConfig(micro_batch_tokens=60, ranks=ranks)
    whole, shares = (
        build(given, learner, vocabulary=MOST_IDS),
        build_shares(given, learner, vocabulary=MOST_IDS),
    )
    assert len({len(share.micro_batches) for share in shares}) == 1
    rows = [int(i) for s in shares for m in s.micro_batches for i in m.row_ids if i >= 0]
    assert sorted(rows) == list(range(9)) and sum(map(sampled, shares)) == sampled(whole)
    coefficients = {
        float(c) for s in shares for m in s.micro_batches for c in m.coefficients[m.rows]
    }
    assert coefficients == {float(torch.tensor(1.0 / sampled(whole)))}
    assert shares[0].gauges["learner/tokens"] == whole.gauges["learner/tokens"]
    assert not any(share.gauges for share in shares[1:])


def test_siblings_come_in_order_however_they_arrived(batch: Callable[..., Batch]) -> None:
    given = batch()
    turned = msgspec.structs.replace(given, groups=tuple(g[::-1] for g in given.groups))
    for one, other in zip(
        build(given, SMALL, vocabulary=MOST_IDS).micro_batches,
        build(turned, SMALL, vocabulary=MOST_IDS).micro_batches,
        strict=True,
    ):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.row_ids, other.row_ids)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "eval"}, "group 2: sibling 2 is of kind 'eval'"),
        ({"group_id": 7}, "group 2: sibling 2 belongs to group 7"),
        ({"sibling": 1}, r"group 2: siblings \[0, 1, 1\]"),
        ({"version": 1}, "group 2: sibling 2 has tokens of version 1 in the batch of step 1"),
        ({"sampling": Sampling(1.0)}, r"temperatures \[0.7, 1.0\]"),
    ],
)
def test_what_must_not_be_trained_on_is_refused(
    batch: Callable[..., Batch],
    trajectory: Callable[..., Trajectory],
    fields: dict[str, object],
    message: str,
) -> None:
    record = trajectory(**({"group_id": 2, "sibling": 2} | fields))
    with pytest.raises(BadBatch, match=f"{message}.*: start a new run from a checkpoint: model"):
        build(with_trajectory(batch(), record), SMALL, vocabulary=MOST_IDS)


@pytest.mark.parametrize("token", [-1, 500])
def test_an_id_that_the_model_does_not_embed_is_refused_by_name(
    batch: Callable[..., Batch], trajectory: Callable[..., Trajectory], token: int
) -> None:
    record = trajectory(group_id=2, sibling=2)
    assert build(with_trajectory(batch(), record), SMALL, vocabulary=500)
    record.sequences[0].turns[0].action_tokens[0] = token
    words = f"group 2: sibling 2: token id {token}: the model's vocabulary has 500, .*model.path="
    with pytest.raises(BadBatch, match=words):
        build_shares(with_trajectory(batch(), record), SMALL, vocabulary=500)


def test_lengths_that_disagree_name_the_group(batch: Callable[..., Batch]) -> None:
    given = batch()
    tree = msgspec.msgpack.decode(given.groups[1][2])
    tree["sequences"][0]["turns"][0]["behaviour_logprobs"] += b"\0\0\0\0"
    broken = (*given.groups[1][:2], msgspec.msgpack.encode(tree))
    with pytest.raises(BadBatch, match=r"group 2: .*lengths.*: start a new run from"):
        build(
            msgspec.structs.replace(given, groups=(given.groups[0], broken)),
            SMALL,
            vocabulary=MOST_IDS,
        )


def test_no_groups() -> None:
    with pytest.raises(BadBatch, match="batch of step 4: 0 groups for 0 ids: start a new run from"):
        build(Batch(4, (), (), (), {}, {}, ()), SMALL, vocabulary=MOST_IDS)
