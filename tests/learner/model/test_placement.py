"""Which ranks share a host, and where a copy of the weights on each host is possible."""

import pytest

from configs.schema import LearnerConfig
from learner.errors import BadModel
from learner.model.placement import Placement


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
    ("nodes", "asked", "expected"), [("aabb", True, 2), ("aabb", False, 1), ("aaabbb", True, 3)]
)
def test_each_host_keeps_a_copy_where_that_is_asked_for(
    nodes: str, asked: bool, expected: int
) -> None:
    learner = LearnerConfig(zero_stage=3, hierarchical=asked)
    assert places(nodes)[0].secondary_partition(learner) == expected


@pytest.mark.parametrize("nodes", ["aaaa", "ab", "aab", "abab"])
def test_a_copy_that_cannot_be_is_refused(nodes: str) -> None:
    learner = LearnerConfig(zero_stage=3, hierarchical=True)
    with pytest.raises(BadModel, match=r"hierarchical = True: .* ranks on . nodes.*: it"):
        places(nodes)[0].secondary_partition(learner)
