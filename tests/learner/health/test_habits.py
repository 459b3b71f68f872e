"""Gauges of what rollouts do, counted by hand."""

from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np
import pytest

from learner.health.habits import empty, habits, repeated
from replay.trajectory import Search, StopReason, TokenSequence, Trajectory, Turn

Made = Callable[..., Trajectory]


def searched(
    query: str, status: Literal["ok", "empty", "skipped"] = "ok", shown: tuple[str, ...] = ()
) -> Search:
    return Search(query, shown, 0.1, status)


def turn(tokens: list[int], *searches: Search, malformed: bool = False) -> Turn:
    count, no = len(tokens), np.empty(0, np.int32)
    zeros = np.zeros(count, np.float32)
    ids, versions = np.array(tokens, np.int32), np.zeros(count, np.int32)
    return Turn(ids, zeros, versions, no, searches, malformed)


@pytest.fixture
def rollout(trajectory: Made) -> Made:
    def make(*turns: Turn, **fields: object) -> Trajectory:
        prompt = np.array([1], np.int32)
        sequences = (TokenSequence(prompt, turns),)
        return msgspec.structs.replace(trajectory(), sequences=sequences, **fields)

    return make


def test_a_query_is_repeated_within_its_own_rollout_but_for_case_and_spaces(rollout: Made) -> None:
    one = rollout(turn([1], searched("who  Ruled bore")), turn([2], searched("who ruled bore ")))
    other = rollout(turn([1], searched("who ruled bore")), turn([2], searched("who ruled kelu")))
    found = habits([one, other])
    assert found["learner/repeated_queries"] == 0.25
    assert found["learner/searches_per_rollout"] == 2.0


def test_a_search_is_empty_that_finds_or_asks_nothing_and_counts_only_where_asked(
    rollout: Made,
) -> None:
    searches = searched("a", "empty"), searched("b"), searched(" "), searched("c", "skipped")
    assert habits([rollout(turn([1], *searches))])["learner/empty_searches"] == pytest.approx(2 / 3)
    assert "learner/empty_searches" not in habits([rollout(turn([1], searched("c", "skipped")))])
    assert "learner/repeated_queries" not in habits([rollout(turn([1]))])


def test_a_search_is_empty_whose_passages_only_tell_an_error(rollout: Made) -> None:
    spent, refused = "error:BudgetSpent", "error:QueryRefused"
    shown = [(spent,), (spent, refused), ("https://a.example", spent), ("error",)]
    turns = [turn([1], searched("a", shown=ids)) for ids in shown]
    assert habits([rollout(*turns)])["learner/empty_searches"] == 0.5


def test_a_rollout_is_counted_as_its_step_is() -> None:
    searches = searched("who  Ruled bore"), searched("who ruled bore", "empty"), searched(" ")
    assert repeated(searches) == 1 and repeated(()) == 0
    assert empty((*searches, searched("", "skipped"))) == 2


def test_repetition_is_within_a_completion(rollout: Made) -> None:
    loop, plain = [5, 6] * 4, [1, 2, 3, 4, 5, 6, 7, 8]  # of 5 runs of four tokens 3 come again
    assert habits([rollout(turn(loop))])["learner/repetition"] == pytest.approx(3 / 5)
    twice = habits([rollout(turn(plain), turn(plain)), rollout(turn(plain))])
    assert twice["learner/repetition"] == 0.0
    assert "learner/repetition" not in habits([rollout(turn([1, 2, 3]), turn([4, 5, 6]))])


def test_no_two_runs_of_tokens_are_taken_for_one(rollout: Made) -> None:
    tokens = np.random.default_rng(0).permutation(150_000).tolist()
    assert habits([rollout(turn(tokens))])["learner/repetition"] == 0.0


def test_malformed_turns_and_rollouts_at_a_limit(rollout: Made) -> None:
    cut = rollout(turn([1], malformed=True), turn([2]), stop_reason=StopReason.TURN_LIMIT)
    full = rollout(turn([1]), stop_reason=StopReason.CONTEXT_LIMIT)
    found = habits([cut, full, rollout(turn([1]))])
    assert found["learner/malformed_fraction"] == 0.25
    assert found["learner/limit_fraction"] == pytest.approx(2 / 3)
