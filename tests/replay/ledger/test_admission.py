"""Admission and the order rule: by example, by property, and simulated against stragglers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.ledger.admission import Bounds, Position, can_open, can_pass, choose_batch

TWO = Bounds(groups_per_step=2, max_staleness=1)


def test_a_group_is_opened_up_to_the_bound_and_no_further() -> None:
    assert can_open(3, 0, TWO)
    assert not can_open(4, 0, TWO)
    assert can_open(4, 1, TWO)


def test_staleness_zero_is_synchronous() -> None:
    sync = Bounds(groups_per_step=2, max_staleness=0)
    assert not can_open(2, 0, sync)
    assert can_open(3, 1, sync)


def test_the_oldest_versions_are_taken() -> None:
    assert choose_batch([(3, 1), (2, 9), (2, 4)], [], 3, TWO).group_ids == (4, 9)


def test_a_batch_is_ordered_by_group_id() -> None:
    assert choose_batch([(3, 1), (2, 9)], [], 3, TWO).group_ids == (1, 9)


def test_too_few_ready_groups_make_no_batch() -> None:
    choice = choose_batch([(0, 1)], [(0, 2)], 0, TWO)
    assert (choice.group_ids, choice.oldest) == ((), False)


def test_an_unfinished_group_with_time_left_is_passed() -> None:
    assert choose_batch([(0, 1), (0, 2)], [(0, 3)], 0, TWO).group_ids == (1, 2)


def test_an_unfinished_group_at_its_bound_must_come_first() -> None:
    choice = choose_batch([(1, 4), (1, 5)], [(0, 3)], 1, TWO)
    assert (choice.group_ids, choice.oldest) == ((), True)


def test_more_than_a_batch_of_old_groups_cannot_be_left_behind() -> None:
    assert can_pass([0, 0], 0, TWO)  # both fit step 1
    assert not can_pass([0, 0, 0], 0, TWO)


@given(
    versions=st.lists(st.integers(0, 12), max_size=12),
    step=st.integers(0, 10),
    groups=st.integers(1, 4),
    staleness=st.integers(0, 4),
)
def test_what_may_be_passed_can_be_trained_in_time(
    versions: list[int], step: int, groups: int, staleness: int
) -> None:
    """Naively: oldest first, `groups` to each step after this one, all within their bound."""
    in_time = all(
        step + 1 + place // groups - version <= staleness
        for place, version in enumerate(sorted(versions))
    )
    assert can_pass(versions, step, Bounds(groups, staleness)) == in_time


def simulate(seed: int, bounds: Bounds, publish_every: int, steps: int = 60) -> int | None:
    """Worst staleness trained with 3 late actors and 3 % stragglers; None where it deadlocks."""
    rng = random.Random(seed)
    step = published = tick = worst = idle = 0
    applied = [0, 0, 0]
    unsampled: dict[int, tuple[int, int]] = {}  # group id → version, tick at which it is ready
    while step < steps and idle <= 2000:
        tick += 1
        idle += 1
        for actor in range(3):
            if applied[actor] < published and rng.random() < 0.5:
                applied[actor], idle = published, 0
        for version in applied:
            admitted = len(unsampled) + step * bounds.groups_per_step
            if can_open(admitted, version, bounds) and rng.random() < 0.7:
                delay = int(rng.expovariate(1 / 3)) + (200 if rng.random() < 0.03 else 0)
                unsampled[tick * 3 + len(unsampled) * 10_000] = (version, tick + delay)
                idle = 0
        batch = choose_batch(*_split(unsampled, tick), step, bounds).group_ids
        if batch:
            worst = max(worst, *(step - unsampled.pop(group_id)[0] for group_id in batch))
            step, idle = step + 1, 0
            published = step if step % publish_every == 0 else published
    return worst if step == steps else None


def _split(
    unsampled: dict[int, tuple[int, int]], tick: int
) -> tuple[list[Position], list[Position]]:
    ready = [(version, i) for i, (version, at) in unsampled.items() if at <= tick]
    unfinished = [(version, i) for i, (version, at) in unsampled.items() if at > tick]
    return ready, unfinished


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_staleness_is_bounded_and_nothing_deadlocks(max_staleness: int) -> None:
    bounds = Bounds(4, max_staleness)
    for seed in range(25):
        publish_every = random.Random(seed).randint(1, max_staleness + 1)
        worst = simulate(seed, bounds, publish_every)
        assert worst is not None, f"deadlock at seed {seed}"
        assert worst <= max_staleness, f"seed {seed}"


def test_publishing_too_seldom_deadlocks() -> None:
    assert simulate(0, Bounds(4, 1), publish_every=4) is None
