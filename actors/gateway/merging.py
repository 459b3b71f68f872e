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
from actors.prompt import Tokens
from replay.codec import MAX_SEQUENCES, MAX_TRAJECTORY_BYTES, MAX_TURNS
from replay.trajectory import TokenSequence

_REMEDY = (
    "let the program make fewer calls, or send a conversation back as it was, so that calls merge"
)


MOST_BYTES = MAX_TRAJECTORY_BYTES - (1 << 20)  # of calls; the rest: an answer, searches, a header
_TURN_BYTES = 512  # what a record has of a turn beside its ids, log-probs and versions
_READ, _SAMPLED = 4, 12  # bytes of a token: its id; and its log-prob and version, too


def merged(calls: Sequence[Call]) -> tuple[TokenSequence, ...]:
    """Merge the completed calls of a rollout, given in the order of their ends.

    The longest sequence that a call continues takes it; of equal ones, that which was continued
    last. Sequences come in the order in which their first calls were asked for: the first has no
    name, the others are "2", "3" …. Raises TooManyCalls where a record could not hold them.
    """
    merging = Merging()
    for call in calls:
        merging.take(call)
    return merging.sequences()


class Merging:
    """Calls as they are merged, one after the other, and the bytes that their record takes."""

    def __init__(self) -> None:
        self._grown: list[_Growing] = []
        self._calls = self.bytes = 0

    def require_room(self, prompt: Tokens, sampled: int = 1) -> None:
        """Raise TooManyCalls where a record could not hold a call more, of so many tokens."""
        self._require_room(self._continued(prompt), prompt, sampled)

    def take(self, call: Call) -> None:
        """Merge a call. Raises TooManyCalls, and has not taken it then."""
        chosen = self._continued(call.prompt)
        size = self._require_room(chosen, call.prompt, len(call.completion.tokens))
        if chosen is None:
            self._grown.append(chosen := _Growing())
        chosen.calls.append(call)
        chosen.last, self.bytes = self._calls, size
        self._calls += 1

    def sequences(self) -> tuple[TokenSequence, ...]:
        """Return what they have come to."""
        grown = sorted(self._grown, key=lambda each: each.calls[0].started_at)
        return tuple(
            each.sequence("" if place == 1 else str(place)) for place, each in enumerate(grown, 1)
        )

    def _continued(self, prompt: Tokens) -> "_Growing | None":
        fitting = [each for each in self._grown if each.begins(prompt)]
        return max(fitting, key=lambda each: (each.length, each.last), default=None)

    def _require_room(self, chosen: "_Growing | None", prompt: Tokens, sampled: int) -> int:
        """Return the bytes of all with this call."""
        calls, known = self._calls + 1, chosen.length if chosen else 0
        if chosen is None and len(self._grown) == MAX_SEQUENCES:
            raise _too_many(f"{calls} calls make over {MAX_SEQUENCES} sequences")
        if chosen and len(chosen.calls) == MAX_TURNS:
            raise _too_many(f"{calls} calls make a sequence of over {MAX_TURNS} turns")
        fresh = _READ * (len(prompt) - known) + _SAMPLED * sampled + _TURN_BYTES
        if self.bytes + fresh > MOST_BYTES:
            raise _too_many(f"{calls} calls make over {MOST_BYTES >> 20} MiB")
        return self.bytes + fresh


class _Growing:
    """A sequence so far: its calls, and the number of the last one."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.last = 0

    @property
    def length(self) -> int:
        """The count of all its ids."""
        call = self.calls[-1]
        return len(call.prompt) + len(call.completion.tokens)

    def begins(self, prompt: Tokens) -> bool:
        """True where a prompt begins with all its ids."""
        call = self.calls[-1]
        read, sampled = call.prompt, call.completion.tokens
        return np.array_equal(prompt[len(read) : self.length], sampled) and np.array_equal(
            prompt[: len(read)], read
        )

    def sequence(self, name: str) -> TokenSequence:
        """Return the sequence that they make."""
        turns = [
            call.turn(following.prompt[len(call.prompt) + len(call.completion.tokens) :])
            for call, following in pairwise(self.calls)
        ]
        turns.append(self.calls[-1].turn(np.empty(0, np.int32)))
        return TokenSequence(read_only(self.calls[0].prompt), tuple(turns), name)


def _too_many(what: str) -> TooManyCalls:
    return TooManyCalls(f"{what}, the most that a record holds: {_REMEDY}")
