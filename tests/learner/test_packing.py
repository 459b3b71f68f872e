"""Rows and micro-batches: every token once, the budget kept, the mask the action segments."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.imitation import lay_out
from learner.packing import LEAST_FILL, deal, pack, pack_shares, pad, padded_width, to_row
from replay.trajectory import TokenSequence, Trajectory

lengths = st.lists(st.integers(1, 200), min_size=1, max_size=40)


def padded(packed: list[list[int]], sizes: list[int]) -> int:
    return sum(len(ids) * padded_width(max(sizes[i] for i in ids)) for ids in packed if ids)


@given(lengths, st.integers(1, 600))
def test_every_row_once_within_the_budget_and_hardly_padded(sizes: list[int], budget: int) -> None:
    packed = pack(sizes, budget)
    assert sorted(i for ids in packed for i in ids) == list(range(len(sizes)))
    for ids in packed:
        assert len(ids) == 1 or padded([ids], sizes) <= budget
        assert sum(sizes[i] for i in ids) >= LEAST_FILL * padded([ids], sizes)


@given(st.integers(1, 1 << 18))
def test_a_width_holds_its_row_and_little_more(length: int) -> None:
    width = padded_width(length)
    assert length <= width <= length + length // 16 and padded_width(width) == width
    assert length < 32 or width % (2 ** (len(f"{length:b}") - 5)) == 0
    # Never past the next power of two: a context of 2^k tokens is kept.
    assert width <= 2 ** len(f"{length - 1:b}")


def test_widths_are_few() -> None:
    assert [padded_width(length) for length in (1, 31, 33, 70, 257)] == [1, 31, 34, 72, 272]
    assert len({padded_width(length) for length in range(256, 1024)}) == 33


@given(lengths, st.integers(1, 5))
def test_ranks_get_every_row_once_and_nearly_equal_sums(sizes: list[int], ranks: int) -> None:
    shares = deal(sizes, ranks)
    assert len(shares) == ranks
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    sums = [sum(sizes[i] for i in share) for share in shares]
    assert max(sums) - min(sums) <= max(sizes)


@given(lengths, st.integers(1, 600), st.integers(1, 5))
def test_shares_have_equally_many_micro_batches(sizes: list[int], budget: int, ranks: int) -> None:
    shares = pack_shares(sizes, budget, ranks)
    flat = [ids for share in shares for ids in share]
    assert len({len(share) for share in shares}) == 1 and shares == pack_shares(
        sizes, budget, ranks
    )
    assert sorted(i for ids in flat for i in ids) == list(range(len(sizes)))
    assert all(len(ids) <= 1 or padded([ids], sizes) <= budget for ids in flat)
    assert ranks > 1 or shares == [pack(sizes, budget)]


def test_a_rank_halves_before_it_runs_empty() -> None:
    assert pack_shares([10, 10, 5, 5, 5, 5], 40, 2) == [[[0], [2, 4]], [[1], [3, 5]]]
    assert pack_shares([7], 40, 2) == [[[0]], [[]]]


@pytest.mark.parametrize("budget", [1024, 4096, 16384])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fill_at_the_demo_tasks_lengths(budget: int, ranks: int) -> None:
    rng = np.random.default_rng(0)
    sizes = [int(n) for n in np.concatenate([rng.integers(40, 60, 64), rng.integers(70, 140, 64)])]
    shares = pack_shares(sizes, budget, ranks)
    assert sum(sizes) / sum(padded(share, sizes) for share in shares) >= 0.9


def test_the_mask_is_what_the_policy_sampled(trajectory: Callable[..., Trajectory]) -> None:
    record = trajectory(seed=3)
    row = to_row(record.sequences[0], advantage=0.5, newest_version=4, coefficient=0.25)
    actions = np.concatenate([turn.action_tokens for turn in record.turns])
    assert row.tokens.tolist() == record.sequences[0].tokens.tolist()
    assert row.tokens[row.loss_mask].tolist() == actions.tolist()
    assert row.loss_mask.sum() == record.action_count and row.coefficient == 0.25
    logprobs = np.concatenate([turn.behaviour_logprobs for turn in record.turns])
    assert row.behaviour_logprobs[row.loss_mask].tolist() == logprobs.tolist()
    assert set(row.advantages[row.loss_mask]) == {0.5} and not row.advantages[~row.loss_mask].any()
    assert set(row.staleness[row.loss_mask]) == {4} and not row.staleness[~row.loss_mask].any()


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_turns_earn_their_own_and_the_last_what_is_left(
    trajectory: Callable[..., Trajectory], weight: float
) -> None:
    turns = [
        msgspec.structs.replace(turn, reward=float(i + 1))
        for i, turn in enumerate([*trajectory(seed=3).turns, *trajectory(seed=4).turns])
    ]
    sequence = TokenSequence(np.array([2, 3], np.int32), tuple(turns))
    row = to_row(sequence, 0.0, 4, 1.0, reward=10.0, turn_weight=weight)
    ends = np.cumsum([len(turn.action_tokens) for turn in turns]) - 1
    expected = np.zeros(row.loss_mask.sum())
    expected[ends] = [*(weight * turn.reward for turn in turns[:-1]), 0.0]
    expected[-1] = 10.0 - expected.sum()
    assert len(turns) > 2 and row.rewards[row.loss_mask].tolist() == expected.tolist()
    assert not row.rewards[~row.loss_mask].any()
    unscored = to_row(sequence, 0.0, 4, 1.0, turn_weight=weight)
    assert np.isnan(unscored.rewards[row.loss_mask][-1])


def test_padding_adds_only_masked_zeros(trajectory: Callable[..., Trajectory]) -> None:
    rows = [to_row(trajectory(seed=seed).sequences[0], 1.0, 0, 0.1 * seed) for seed in range(4)]
    micro = pad([2, 0], rows)
    assert micro.row_ids.tolist() == [2, 0]
    assert micro.coefficients.tolist() == pytest.approx([0.2, 0.0])
    assert micro.rows.tolist() == [0] * rows[2].loss_mask.sum() + [1] * rows[0].loss_mask.sum()
    for row, index in enumerate([2, 0]):
        size = len(rows[index])
        assert micro.tokens[row, :size].tolist() == rows[index].tokens.tolist()
        assert not micro.tokens[row, size:].any() and not micro.loss_mask[row, size:].any()


def test_the_longest_row_is_rounded_up_too() -> None:
    prompts = [np.arange(length, dtype=np.int32) for length in (70, 66)]
    rows = lay_out([[(prompt, False), (prompt[:1], True)] for prompt in prompts])
    micro = pad([0, 1], rows)
    assert [len(row) for row in rows] == [71, 67] and micro.tokens.shape == (2, 72)
    assert micro.loss_mask.nonzero().tolist() == [[0, 70], [1, 66]]


def test_no_rows_are_one_row_of_nothing() -> None:
    micro = pad([], [])
    assert micro.row_ids.tolist() == [-1] and micro.rows.tolist() == []
    assert micro.tokens.shape == (1, 2) and not micro.loss_mask.any()
