"""Which ranks share a host, and where a copy of the weights on each host is possible."""

import pytest

from configs.schema import LearnerConfig
from learner.errors import BadModel
from learner.model.placement import Placement

STAGE_3 = LearnerConfig(zero_stage=3)


def places(nodes: str) -> list[Placement]:
    return [Placement(rank, tuple(nodes)) for rank in range(len(nodes))]


@pytest.mark.parametrize(
    ("nodes", "local", "hosts", "each"),
    [
        ("a", [0], 1, 1),
        ("aaa", [0, 1, 2], 1, 3),
        ("ab", [0, 0], 2, 1),
        ("aabb", [0, 1, 0, 1], 2, 2),
        ("aab", [0, 1, 0], 2, 0),
        ("abab", [0, 0, 1, 1], 2, 0),
        ("aaabbc", [0, 1, 2, 0, 1, 0], 3, 0),
    ],
)
def test_ranks_are_counted_within_their_hosts(
    nodes: str, local: list[int], hosts: int, each: int
) -> None:
    found = places(nodes)
    assert [place.local_rank for place in found] == local
    assert (found[0].hosts, found[0].ranks_per_host) == (hosts, each)


@pytest.mark.parametrize(
    ("nodes", "stage", "asked", "on_gpus", "expected"),
    [
        ("aabb", 3, None, True, 2),
        ("aabb", 3, None, False, 1),
        ("aabb", 3, True, False, 2),
        ("aabb", 3, False, True, 1),
        ("aabb", 2, None, True, 1),
        ("aaaa", 3, None, True, 1),
        ("ab", 3, None, True, 1),
        ("aab", 3, None, True, 1),
    ],
)
def test_each_host_keeps_a_copy_where_that_serves(
    nodes: str, stage: int, asked: bool | None, on_gpus: bool, expected: int
) -> None:
    learner = LearnerConfig(zero_stage=stage, hierarchical=asked)
    assert places(nodes)[0].secondary_partition(learner, on_gpus) == expected


@pytest.mark.parametrize("nodes", ["aa", "ab", "aab", "abab"])
def test_a_copy_that_cannot_be_is_refused(nodes: str) -> None:
    learner = LearnerConfig(zero_stage=3, hierarchical=True)
    with pytest.raises(BadModel, match=r"hierarchical = True: .* ranks on . hosts.*: it"):
        places(nodes)[0].secondary_partition(learner, True)
