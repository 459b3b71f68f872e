"""Gauges of what a step's rollouts do: how often they search, repeat themselves, break the form or
end at a limit.

They are of the trained rollouts; a mean over nothing is left out.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from replay.trajectory import Search, StopReason, Trajectory, Turn
from retrieval_server.protocol import TELLS_ERROR

GRAM = 4  # tokens that make a repetition where they come again in one completion
SKIPPED = "skipped"  # the status of a search that was not made
LIMITS = (StopReason.TURN_LIMIT, StopReason.CONTEXT_LIMIT)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Searched(Protocol):
    """A search, also as it travels."""

    @property
    def query(self) -> str: ...
    @property
    def passage_ids(self) -> Sequence[str]: ...
    @property
    def status(self) -> str: ...


def habits(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The gauges of a step's rollouts."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    searches = [list(_searches(trajectory)) for trajectory in trajectories]
    asked = [search for each in searches for search in each if search.status != SKIPPED]
    count = sum(map(len, searches))
    shares = {
        "learner/searches_per_rollout": (count, len(trajectories)),
        "learner/repeated_queries": (sum(map(repeated, searches)), count),
        "learner/empty_searches": (empty(asked), len(asked)),
        "learner/malformed_fraction": (sum(turn.malformed for turn in turns), len(turns)),
        "learner/limit_fraction": (
            sum(trajectory.stop_reason in LIMITS for trajectory in trajectories),
            len(trajectories),
        ),
        "learner/repetition": _repetition(turns),
    }
    return {name: above / below for name, (above, below) in shares.items() if below}


def _searches(trajectory: Trajectory) -> Iterator[Search]:
    return chain.from_iterable(turn.searches for turn in trajectory.turns)


def repeated(searches: Sequence[Searched]) -> int:
    """How many queries of one rollout it had asked before, but for case and spaces."""
    queries = [" ".join(search.query.casefold().split()) for search in searches]
    return len(queries) - len(set(queries))


def empty(searches: Iterable[Searched]) -> int:
    """How many searches found nothing, asked nothing, or were told of an error alone."""
    return sum(_is_empty(search) for search in searches if search.status != SKIPPED)


def _is_empty(search: Searched) -> bool:
    if search.status == "empty" or not search.query.strip():
        return True
    shown = search.passage_ids
    return bool(shown) and all(passage.startswith(TELLS_ERROR) for passage in shown)


def _repetition(turns: Sequence[Turn]) -> tuple[int, int]:
    """How many runs of GRAM tokens had stood before in their completion, and of how many."""
    lengths = [len(turn.action_tokens) for turn in turns]
    if not turns or sum(lengths) < GRAM:
        return 0, 0
    tokens = np.concatenate([turn.action_tokens for turn in turns])
    turn_of = np.repeat(np.arange(len(turns)), lengths)
    within = turn_of[: 1 - GRAM] == turn_of[GRAM - 1 :]
    # Sorted by hand: `np.unique` takes many times as long over a million numbers.
    grams = np.sort(_hashed([turn_of[: 1 - GRAM], *_shifted(tokens)])[within])
    return int(np.count_nonzero(grams[1:] == grams[:-1])), len(grams)


def _shifted(tokens: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    last = len(tokens) - GRAM + 1
    return [tokens[first : first + last] for first in range(GRAM)]


def _hashed(columns: Sequence[NDArray[np.int_] | NDArray[np.int32]]) -> NDArray[np.uint64]:
    """One number for each row, as good as different where the rows are: sorted faster than rows."""
    hashed = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        hashed = (hashed ^ column.astype(np.uint64)) * _MULTIPLIER
        hashed ^= hashed >> np.uint64(29)
    return hashed
