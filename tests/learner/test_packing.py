"""Rows and micro-batches: every token once, the budget kept, the mask the action segments."""

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.packing import SHORTEST_SHARE, pack, pad, to_row
from replay.trajectory import Trajectory

lengths = st.lists(st.integers(1, 200), min_size=1, max_size=40)


@settings(deadline=None)
@given(lengths, st.integers(1, 600))
def test_every_row_once_within_the_budget(sizes: list[int], budget: int) -> None:
    packed = pack(sizes, budget)
    assert sorted(i for ids in packed for i in ids) == list(range(len(sizes)))
    for ids in packed:
        chosen = [sizes[i] for i in ids]
        assert len(ids) == 1 or len(ids) * max(chosen) <= budget
        assert min(chosen) >= SHORTEST_SHARE * max(chosen)


def test_fill_at_the_demo_tasks_lengths() -> None:
    rng = np.random.default_rng(0)
    sizes = [int(n) for n in np.concatenate([rng.integers(40, 52, 64), rng.integers(78, 92, 64)])]
    padded = sum(len(ids) * max(sizes[i] for i in ids) for ids in pack(sizes, 16384))
    assert sum(sizes) / padded >= 0.9


def test_the_mask_is_what_the_policy_sampled(trajectory: Callable[..., Trajectory]) -> None:
    record = trajectory(seed=3)
    row = to_row(record, advantage=0.5, newest_version=4)
    actions = np.concatenate([turn.action_tokens for turn in record.turns])
    assert row.tokens.tolist() == record.tokens.tolist()
    assert row.tokens[row.loss_mask].tolist() == actions.tolist()
    assert row.loss_mask.sum() == record.action_count
    logprobs = np.concatenate([turn.behaviour_logprobs for turn in record.turns])
    assert row.behaviour_logprobs[row.loss_mask].tolist() == logprobs.tolist()
    assert set(row.advantages[row.loss_mask]) == {0.5} and not row.advantages[~row.loss_mask].any()
    assert set(row.staleness[row.loss_mask]) == {4} and not row.staleness[~row.loss_mask].any()


def test_padding_adds_only_masked_zeros(trajectory: Callable[..., Trajectory]) -> None:
    rows = [to_row(trajectory(seed=seed), 1.0, 0) for seed in range(4)]
    micro = pad([2, 0], rows)
    assert micro.row_ids.tolist() == [2, 0]
    for row, index in enumerate([2, 0]):
        size = len(rows[index])
        assert micro.tokens[row, :size].tolist() == rows[index].tokens.tolist()
        assert not micro.tokens[row, size:].any() and not micro.loss_mask[row, size:].any()
