"""A workload taken from a run that was."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from pytest import approx

from configs.load import ConfigError
from replay.trajectory import Sampling, Search, StopReason, TokenSequence, Trajectory
from replay.trajectory import Turn as Said
from scripts.plan.past import latency_of, workload_of_groups, workload_of_run
from scripts.plan.workload import Latency, Shape, Turn

ALL_ALIKE = Shape(5, (Turn(4, 2), Turn(4, 0)))


def test_rollouts_are_those_of_the_log(make_recorded_run: Callable[..., Any]) -> None:
    run = make_recorded_run()
    run.train(0)
    run.train(1)
    found = workload_of_run(run.path, 0.25, 16)
    assert found.shapes == (ALL_ALIKE,) * 8 and found.no_signal == 0.25
    assert found.siblings == 2
    assert found.latency == Latency(0.0, 0.0)  # it made no searches


def test_a_run_without_rollouts_is_refused(make_recorded_run: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="holds no rollouts"):
        workload_of_run(make_recorded_run().path, 0.0, 16)


def rollout(*queries: str, status: str = "ok") -> Trajectory:
    """One of a turn for each query, of a token each."""
    ids = np.array([1], np.int32)
    asked = [(Search(query, ("d",), 0.1, status),) for query in queries]  # type: ignore[arg-type]
    turns = tuple(Said(ids, ids.astype(np.float32), ids, ids, each) for each in asked)
    return Trajectory(
        group_id=1, sibling=0, question_id="q", kind="train", actor_id="a", sampling=Sampling(),
        sequences=(TokenSequence(ids, turns),), stop_reason=StopReason.ANSWERED, answer="",
        reward=0.0,
    )  # fmt: skip


def test_siblings_that_asked_the_same_have_the_same_query() -> None:
    groups = [[rollout("a", "b"), rollout("a", "c")], [rollout("a")] * 2, [rollout("d")]]
    found = workload_of_groups(groups, Latency(0.1, 0.1), 16)
    assert found.siblings == 2  # the third group lacks one
    queries = [[turn.query for turn in shape.turns] for shape in found.shapes]
    assert queries == [[1, 2], [1, 3], [1], [1]]


def test_what_was_not_asked_is_no_search() -> None:
    groups = [[rollout("a", status="skipped")]]
    (shape,) = workload_of_groups(groups, Latency(0, 0), 16).shapes
    assert shape.turns == (Turn(1, 1),)


def written(*turns: tuple[list[int], list[int]]) -> Trajectory:
    """One with these ids, sampled and read, after a prompt of four."""
    said = tuple(
        Said(ids(sampled), ids(sampled).astype(np.float32), ids(sampled), ids(read), ())
        for sampled, read in turns
    )
    only = TokenSequence(np.arange(4, dtype=np.int32), said)
    return msgspec.structs.replace(rollout("a"), sequences=(only,))


def ids(numbers: list[int]) -> Any:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize(
    ("block", "shared"),
    [
        (1, [[4, 7], [4, 7, 10], [4, 5]]),
        (4, [[4, 4], [4, 4, 8], [4, 4]]),
        (16, [[0, 0], [0] * 3, [0, 0]]),
    ],
)
def test_what_siblings_share_is_told_in_whole_blocks(block: int, shared: list[list[int]]) -> None:
    """Of the context before each turn, as much as any other sibling's begins with."""
    group = [
        written(([7, 8], [9]), ([5, 5], [6, 2])),
        written(([7, 8], [9]), ([5, 5], [6]), ([3], [])),
        written(([7, 1], [9]), ([5], [])),
    ]
    found = workload_of_groups([group], Latency(0.0, 0.0), block)
    assert [[turn.shared for turn in shape.turns] for shape in found.shapes] == shared


def several(*sequences: tuple[list[int], list[int], list[int]]) -> Trajectory:
    """One of a sequence for each prompt, sampled and read, of a turn."""
    made = []
    for prompt, sampled, read in sequences:
        numbers = ids(sampled).astype(np.float32), ids(sampled)
        made.append(TokenSequence(ids(prompt), (Said(ids(sampled), *numbers, ids(read)),)))
    return msgspec.structs.replace(rollout("a"), sequences=tuple(made))


def test_each_sequence_has_the_context_that_it_had() -> None:
    """And shares with its own earlier ones, and with any of a sibling's, what they began with."""
    one = several(([0, 1, 2, 3], [7], []), ([0, 1, 9], [8, 8], []), ([5, 5, 5], [6], [2]))
    other = several(([0, 1, 2, 3], [4], []), ([5, 5, 1], [6], []))
    (first, second) = workload_of_groups([[one, other]], Latency(0.0, 0.0), 1).shapes
    assert first == Shape(
        4,
        (
            Turn(1, shared=4),
            Turn(2, shared=2, prompt=3, known=2),
            Turn(1, 1, shared=2, prompt=3),
        ),
    )
    assert second == Shape(4, (Turn(1, shared=4), Turn(1, shared=2, prompt=3)))
    assert first.tokens == sum(len(sequence.tokens) for sequence in one.sequences)


def test_one_alone_shares_nothing() -> None:
    (shape,) = workload_of_groups([[rollout("a")]], Latency(0.0, 0.0), 1).shapes
    assert shape.turns[0].shared == 0


def test_latencies_are_told_by_median_and_p99() -> None:
    found = latency_of([n / 100 for n in range(1, 102)])
    assert (found.p50_s, found.p99_s) == (approx(0.51), approx(1.0))
    assert latency_of([0.3]) == Latency(0.0, 0.0)
