"""Whether the record of a rollout holds, id for id, what went through the policy: asked of every
rollout.

Consumes each request and completion of a rollout, and its Trajectory; produces the Trajectory, or
TokenMismatch: to train on it would be to train on what was never sampled, or never read. Waits for
the rollout alone. Arrays are compared, and the last tokens of a completion are decoded.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.end_tokens import end_tokens
from actors.environments import stops_of
from actors.policy import Completion, Policy, TokenMismatch
from actors.prompt import Prompter, Tokens
from actors.rollout import rollout
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Trajectory

_SHOWN = 8  # ids on each side of a mismatch


@dataclass(frozen=True)
class Stops:
    """What a completion may end with: one of `texts`, or a token of `ends`."""

    decode: Callable[[Tokens], str]
    texts: Sequence[str]
    ends: Collection[int]

    def end(self, tokens: Tokens) -> bool:
        """Whether the last token is an end token, or completes one of the texts."""
        if int(tokens[-1]) in self.ends:
            return True
        # Each token has one character of the text at least: so many hold it all.
        reach = max(map(len, self.texts), default=0)
        return self._completes(tokens[-reach:]) or self._completes(tokens)

    def _completes(self, tokens: Tokens) -> bool:
        text, before = self.decode(tokens), self.decode(tokens[:-1])
        found = ((text.rfind(stop), len(stop)) for stop in self.texts)
        return any(at >= 0 and at + length > len(before) for at, length in found)


class HeardPolicy:
    """The policy of one rollout; keeps what it was asked and what it said."""

    def __init__(self, policy: Policy, stops: Stops) -> None:
        self._policy, self._stops = policy, stops
        self._ids: Tokens = np.empty(0, np.int32)  # all that went through the policy so far
        self._said: list[slice] = []  # where among them each completion stands

    async def complete(
        self, tokens: Sequence[int], *, temperature: float, seed: int, max_tokens: int
    ) -> Completion:
        """Complete what goes on from all that went before, and ends as it says. Raises
        TokenMismatch, PolicyError."""
        turn, asked = len(self._said), np.array(tokens, np.int32)
        before = asked[: len(self._ids)]
        _require_same(f"turn {turn}: prompt and what went before", before, self._ids)
        completion = await self._policy.complete(
            tokens, temperature=temperature, seed=seed, max_tokens=max_tokens
        )
        if completion.finish_reason == "stop" and not self._stops.end(completion.tokens):
            raise TokenMismatch(
                f"turn {turn}: stop: the completion ended by a stop, and its last ids "
                f"{completion.tokens[-_SHOWN:].tolist()} at position "
                f"{len(asked) + len(completion.tokens) - 1} are none"
            )
        self._ids = np.concatenate([asked, completion.tokens])
        self._said.append(slice(len(asked), len(self._ids)))
        return completion

    def check(self, trajectory: Trajectory) -> None:
        """Compare the record, segment for segment. Raises TokenMismatch.

        An observation behind the last completion was read by nobody, and may be anything.
        """
        turns, ids = trajectory.turns, self._ids
        if len(turns) != len(self._said):
            raise TokenMismatch(
                f"turns: {len(turns)} are on record, {len(self._said)} were sampled"
            )
        begin = self._said[0].start
        _require_same("prompt on record and as asked", trajectory.prompt_tokens, ids[:begin])
        following = [said.start for said in self._said[1:]]
        for number, (turn, said) in enumerate(zip(turns, self._said, strict=True)):
            name = f"turn {number}: trained and sampled ids"
            _require_same(name, turn.action_tokens, ids[said], said.start)
            if number < len(following):
                read = ids[said.stop : following[number]]
                name = f"turn {number}: observation on record and as read"
                _require_same(name, turn.observation_tokens, read, said.stop)


class TokenAudit:
    """Audits the rollouts of one process; `mismatches` counts those that it refused."""

    def __init__(self, prompter: Prompter, config: Config) -> None:
        ends = end_tokens(prompter, config.model.path)
        self._stops = Stops(prompter.decode, stops_of(config), ends)
        self.mismatches = 0

    async def rollout(self, lease: Lease, *, policy: Policy, **parts: Any) -> Trajectory:
        """`actors.rollout.rollout`, and TokenMismatch, which names check, turn, position and ids,
        where its record is not what went through the policy."""
        heard = HeardPolicy(policy, self._stops)
        try:
            trajectory = await rollout(lease, policy=heard, **parts)
            heard.check(trajectory)
        except TokenMismatch:
            self.mismatches += 1
            raise
        return trajectory

    def gauges(self) -> dict[str, float]:
        """How many rollouts were refused: 0, or the log says of each what was the matter."""
        return {"actor/token_mismatch": float(self.mismatches)}


def _require_same(what: str, found: Tokens, expected: Tokens, begin: int = 0) -> None:
    """Raise TokenMismatch unless the two are equal; `begin` is where they stand."""
    if np.array_equal(found, expected):
        return
    common = min(len(found), len(expected))
    different = np.flatnonzero(found[:common] != expected[:common])
    at = int(different[0]) if len(different) else common
    ids, others = (each[at : at + _SHOWN].tolist() for each in (found, expected))
    raise TokenMismatch(f"{what} differ from position {begin + at} on: {ids} and {others}")
