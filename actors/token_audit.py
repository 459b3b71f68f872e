"""The audit of every rollout: its record holds, id for id, the tokens that went through the policy,
or the rollout fails with TokenMismatch. To train on another record would be to train on tokens that
were never sampled, or never read. Arrays are compared, and the last tokens of a completion are
decoded. A rollout of an environment is one sequence; a program's calls may make several.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Unpack

import numpy as np
from numpy.typing import NDArray

from actors.environments.base import Retriever
from actors.errors import TokenMismatch
from actors.policies.base import Completion, Policy, SamplingParams
from actors.prompt import Prompter, Tokens, end_tokens
from actors.rewards.scorer import Rewards
from actors.rollout import rollout
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import TokenSequence, Trajectory, Turn

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
        self, tokens: Sequence[int], **sampling: Unpack[SamplingParams]
    ) -> Completion:
        """Complete what continues all before it. Raises TokenMismatch, PolicyError."""
        turn, asked = len(self._said), np.array(tokens, np.int32)
        before = asked[: len(self._ids)]
        _require_same(f"turn {turn}: prompt and what went before", before, self._ids)
        completion = await self._policy.complete(tokens, **sampling)
        stopped = completion.finish_reason == "stop"
        if stopped and not self._stop_check.end(completion.tokens, sampling["stops"]):
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
        turns, ids, several = trajectory.turns, self._ids, len(trajectory.sequences)
        if several != 1:
            raise TokenMismatch(f"sequences: {several} are on record, one went through the policy")
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


class Heard(Protocol):
    """A completed call of the policy: what the engine read, and what it sampled then."""

    @property
    def prompt(self) -> Tokens:
        """int32[P]: all that the engine read."""
        ...

    @property
    def completion(self) -> Completion:
        """What it sampled."""
        ...


def require_recorded(sequences: Sequence[TokenSequence], calls: Sequence[Heard]) -> None:
    """Compare a rollout's sequences with all calls that went through the policy: each turn is one
    of them, ids, log-probs and versions, behind all that the engine had read then; each call is one
    turn. Raises TokenMismatch, naming sequence, turn, place and ids.

    An observation behind a sequence's last turn was read by nobody, and may be anything.
    """
    left = defaultdict[bytes, list[Heard]](list)  # by what was sampled
    for call in calls:
        left[call.completion.tokens.tobytes()].append(call)
    for number, sequence in enumerate(sequences, 1):
        ids, begin = sequence.tokens, len(sequence.prompt_tokens)
        for place, turn in enumerate(sequence.turns):
            where = f"sequence {number}, turn {place}"
            said = left[turn.action_tokens.tobytes()]
            said.remove(_call_of(turn, ids[:begin], said, where))
            begin += len(turn.action_tokens) + len(turn.observation_tokens)
    if lost := [call for each in left.values() for call in each]:
        raise TokenMismatch(
            f"calls: {len(lost)} of {len(calls)} stand in no sequence, such as that which sampled "
            f"{lost[0].completion.tokens[:_SHOWN].tolist()}"
        )


def _call_of(turn: Turn, context: Tokens, said: Sequence[Heard], where: str) -> Heard:
    """Return the call that a turn is, of those that sampled its ids."""
    if not said:
        ids = turn.action_tokens[:_SHOWN].tolist()
        raise TokenMismatch(f"{where}: trained ids {ids} were sampled by no call that is left")
    read = [call for call in said if np.array_equal(call.prompt, context)]
    if not read:
        nearest = max(said, key=lambda call: _common(call.prompt, context))
        _require_same(f"{where}: what stands before it and as read", context, nearest.prompt)
    for call in read:
        sampled = call.completion
        if _same(turn.behaviour_logprobs, sampled.logprobs) and _same(
            turn.policy_versions, sampled.versions
        ):
            return call
    raise TokenMismatch(f"{where}: log-probs or versions on record are not those of its sampling")


def _common(one: Tokens, other: Tokens) -> int:
    """Return how many ids two prompts begin with alike."""
    length = min(len(one), len(other))
    apart = np.flatnonzero(one[:length] != other[:length])
    return int(apart[0]) if len(apart) else length


def _same(found: NDArray[Any], expected: NDArray[Any]) -> bool:
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


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

    def check(self, sequences: Sequence[TokenSequence], calls: Sequence[Heard]) -> None:
        """Audit the sequences that a program's calls were merged into. Raises TokenMismatch."""
        try:
            require_recorded(sequences, calls)
        except TokenMismatch:
            self.mismatches += 1
            raise

    def gauges(self) -> dict[str, float]:
        """Return the count of refused rollouts; the log names the mismatch of each."""
        return {"actor/token_mismatch": float(self.mismatches)}


def _require_same(what: str, found: Tokens, expected: Tokens, begin: int = 0) -> None:
    """Raise TokenMismatch unless the two are equal; `begin` is their position."""
    if np.array_equal(found, expected):
        return
    at = _common(found, expected)
    ids, others = (each[at : at + _SHOWN].tolist() for each in (found, expected))
    raise TokenMismatch(f"{what} differ from position {begin + at} on: {ids} and {others}")
