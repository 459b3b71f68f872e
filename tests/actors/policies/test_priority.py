"""Whose turn comes first: the probe, evaluation, then the oldest rollout."""

import random
from typing import Any

import pytest

from actors.policies.base import PROBE, priority_of


def test_the_probe_comes_first_then_evaluation_then_the_oldest(lease_for: Any) -> None:
    ordered = [
        *(lease_for(10**12 + n // 2, n % 2, kind="eval") for n in range(4)),
        *(lease_for(n // 5, n % 5, kind="train") for n in range(20)),
        lease_for(1 << 40, 65535, kind="train"),
    ]
    mixed = random.Random(0).sample(ordered, len(ordered))
    assert sorted(mixed, key=priority_of) == ordered
    assert priority_of(ordered[0]) > PROBE >= -(1 << 63)
    assert priority_of(ordered[-1]) < 1 << 63  # as it travels


@pytest.mark.parametrize("group_id", [(1 << 41) - 1, 1 << 41, (1 << 62) + 5, (1 << 64) - 1])
def test_a_group_named_by_a_hash_has_its_place(lease_for: Any, group_id: int) -> None:
    evaluation, training = (lease_for(group_id, 65535, kind=kind) for kind in ("eval", "train"))
    first = lease_for(0, 0, kind="train")
    assert PROBE < priority_of(evaluation) < priority_of(first) <= priority_of(training) < 1 << 63


def test_every_turn_of_a_rollout_has_its_priority(stage: Any, lease_for: Any) -> None:
    turns = ("<search> bore </search>", "<search> kelu </search>", "<answer> kelu </answer>")
    lease = lease_for(7, 3)
    stage.play(*turns, lease=lease)
    assert stage.policy.priorities == [priority_of(lease)] * 3
