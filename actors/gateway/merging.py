"""A program's calls, merged into the sequences of one rollout. Pure.

A call whose prompt continues a sequence id for id (it begins with all that the sequence has read
and sampled so far) is that sequence's next turn; what lies between is the observation of the turn
before. Any other call (a summary, a sub-agent, a history that was edited, cut or written again
otherwise) begins a further sequence, with its whole prompt. Ids alone decide. So each sampled token
is on record once, behind exactly what the engine had read when it sampled it.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from actors.errors import TooManyCalls
from actors.gateway.calls import Call
from actors.policies.base import read_only
from replay.codec import MAX_SEQUENCES, MAX_TURNS
from replay.trajectory import TokenSequence

_REMEDY = (
    "let the program make fewer calls, or send a conversation back as it was, so that calls merge"
)


def merged(calls: Sequence[Call]) -> tuple[TokenSequence, ...]:
    """Merge the completed calls of a rollout, given in the order of their ends.

    The longest sequence that a call continues takes it; of equal ones, that which was continued
    last. Sequences come in the order in which their first calls were asked for: the first has no
    name, the others are "2", "3" …. Raises TooManyCalls where a record could not hold them.
    """
    grown: list[_Growing] = []
    for number, call in enumerate(calls):
        prompt = call.prompt.tobytes()
        fitting = [each for each in grown if prompt.startswith(each.ids)]
        if fitting:
            chosen = max(fitting, key=lambda each: (len(each.ids), each.last))
        else:
            grown.append(chosen := _Growing())
        chosen.take(call, prompt, number)
        _require_room(len(calls), len(grown), len(chosen.calls))
    grown.sort(key=lambda each: each.calls[0].started_at)
    return tuple(
        each.sequence("" if place == 1 else str(place)) for place, each in enumerate(grown, 1)
    )


class _Growing:
    """A sequence so far: its calls, the bytes of all its ids, the number of its last call."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.ids, self.last = b"", 0

    def take(self, call: Call, prompt: bytes, number: int) -> None:
        self.calls.append(call)
        self.ids, self.last = prompt + call.completion.tokens.tobytes(), number

    def sequence(self, name: str) -> TokenSequence:
        turns = [
            call.turn(following.prompt[len(call.prompt) + len(call.completion.tokens) :])
            for call, following in pairwise(self.calls)
        ]
        turns.append(self.calls[-1].turn(np.empty(0, np.int32)))
        return TokenSequence(read_only(self.calls[0].prompt), tuple(turns), name)


def _require_room(calls: int, sequences: int, turns: int) -> None:
    if sequences > MAX_SEQUENCES:
        raise TooManyCalls(
            f"{calls} calls make over {MAX_SEQUENCES} sequences, the most that a record holds: "
            f"{_REMEDY}"
        )
    if turns > MAX_TURNS:
        raise TooManyCalls(
            f"{calls} calls make a sequence of over {MAX_TURNS} turns, the most that a record "
            f"holds: {_REMEDY}"
        )
