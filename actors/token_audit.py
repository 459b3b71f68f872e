"""The audit of every rollout: its record holds, id for id, the tokens that went through the policy,
or the rollout fails with TokenMismatch. To train on another record would be to train on tokens that
were never sampled, or never read. Arrays are compared, and the last tokens of a completion are
decoded.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from actors.environments.base import Retriever
from actors.errors import TokenMismatch
from actors.policies.base import Completion, Policy, Stops
from actors.prompt import Prompter, Tokens, end_tokens
from actors.rewards.scorer import Rewards
from actors.rollout import rollout
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Trajectory

_SHOWN = 8  # ids on each side of a mismatch


@dataclass(frozen=True)
class StopCheck:
    """Recognises the end of a completion: a token of `ends`, or one of the request's stop texts."""

    decode: Callable[[Tokens], str]
    ends: Collection[int]

    def end(self, tokens: Tokens, texts: Sequence[str]) -> bool:
        """True where the last token is an end token, or completes one of the texts."""
        if int(tokens[-1]) in self.ends:
            return True
        # Each token has one character of the text at least: so many hold it all.
        reach = max(map(len, texts), default=0)
        return self._completes(tokens[-reach:], texts) or self._completes(tokens, texts)

    def _completes(self, tokens: Tokens, texts: Sequence[str]) -> bool:
        text, before = self.decode(tokens), self.decode(tokens[:-1])
        found = ((text.rfind(stop), len(stop)) for stop in texts)
        return any(at >= 0 and at + length > len(before) for at, length in found)


class AuditedPolicy:
    """The policy of one rollout; keeps its requests and completions."""

    def __init__(self, policy: Policy, stop_check: StopCheck) -> None:
        self._policy, self._stop_check = policy, stop_check
        self._ids: Tokens = np.empty(0, np.int32)  # all that went through the policy so far
        self._said: list[slice] = []  # where among them each completion stands

    async def complete(
        self,
        tokens: Sequence[int],
        *,
        temperature: float,
        seed: int,
        max_tokens: int,
        stops: Stops,
        priority: int = 0,
    ) -> Completion:
        """Complete what continues all before it. Raises TokenMismatch, PolicyError."""
        turn, asked = len(self._said), np.array(tokens, np.int32)
        before = asked[: len(self._ids)]
        _require_same(f"turn {turn}: prompt and what went before", before, self._ids)
        completion = await self._policy.complete(
            tokens,
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            stops=stops,
            priority=priority,
        )
        stopped = completion.finish_reason == "stop"
        if stopped and not self._stop_check.end(completion.tokens, stops):
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
        self._stop_check = StopCheck(prompter.decode, end_tokens(prompter, config.model.path))
        self.mismatches = 0

    async def rollout(
        self,
        lease: Lease,
        *,
        policy: Policy,
        retriever: Retriever,
        prompter: Prompter,
        rewards: Rewards,
        config: Config,
        actor_id: str,
    ) -> Trajectory:
        """Roll a lease out and audit its record. Raises TokenMismatch, naming the place and ids."""
        heard = AuditedPolicy(policy, self._stop_check)
        try:
            trajectory = await rollout(
                lease,
                policy=heard,
                retriever=retriever,
                prompter=prompter,
                rewards=rewards,
                config=config,
                actor_id=actor_id,
            )
            heard.check(trajectory)
        except TokenMismatch:
            self.mismatches += 1
            raise
        return trajectory

    def gauges(self) -> dict[str, float]:
        """Return the count of refused rollouts; the log names the mismatch of each."""
        return {"actor/token_mismatch": float(self.mismatches)}


def _require_same(what: str, found: Tokens, expected: Tokens, begin: int = 0) -> None:
    """Raise TokenMismatch unless the two are equal; `begin` is their position."""
    if np.array_equal(found, expected):
        return
    common = min(len(found), len(expected))
    different = np.flatnonzero(found[:common] != expected[:common])
    at = int(different[0]) if len(different) else common
    ids, others = (each[at : at + _SHOWN].tolist() for each in (found, expected))
    raise TokenMismatch(f"{what} differ from position {begin + at} on: {ids} and {others}")
