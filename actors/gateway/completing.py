"""One call of the policy: sampled by the lease's settings, verified, cut at its stop, recorded.

Nothing leaves before the versions that sampled it have passed their probe here. A completion is on
record once it is whole and verified, whether or not its client is still there to read it.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.environments.base import completion_budget
from actors.gateway.calls import Call
from actors.gateway.chat import Conversation, Reader, Said, key_of
from actors.gateway.history import key_after
from actors.gateway.protocol import TooLong, Wanted
from actors.gateway.sessions import Session
from actors.gateway.text import Text
from actors.policies.base import Completion, Policy, deltas, priority_of
from actors.prompt import Prompter, Tokens, end_tokens
from actors.rollout import turn_seed
from configs.schema import Config

Verified = Callable[[Collection[int]], Awaitable[None]]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Asked:
    """A call as it goes to the policy: its prompt int32[P], and whose it is: a `conversation`, or a
    prompt's `text`, or ids alone. `opened`: the prompt has opened the policy's thought.
    """

    wanted: Wanted
    prompt: Tokens
    conversation: Conversation | None = None
    text: str | None = None
    reader: Reader = Reader("")  # noqa: RUF009 - it has no state
    opened: bool = False


@dataclass(frozen=True, eq=False)
class Made:
    """A whole call: what was sampled, and what the policy has said by it."""

    completion: Completion
    said: Said


@dataclass(frozen=True, eq=False)
class Piece:
    """Text that may leave, and the tokens int32[n] that have come since the piece before, with
    their log-probs float32[n]. `made`: the whole call, with its last piece.
    """

    text: str
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    made: Made | None = None


class Completer:
    """Makes the calls of all sessions. `overridden`: calls that asked for another temperature or
    seed than their lease's; `continued`: those whose prompt went on from an earlier call's ids.
    """

    def __init__(
        self, policy: Policy, prompter: Prompter, config: Config, verified: Verified
    ) -> None:
        self._policy, self._prompter, self._config = policy, prompter, config
        self._verified = verified
        self._ends = end_tokens(prompter, config.model.path)
        self.overridden = self.calls = 0

    async def complete(self, session: Session, asked: Asked, told: Callable[[Made], T]) -> T:
        """Make a call; `told` makes its reply, before it is on record. Raises Refused, PolicyError,
        UnverifiedWeights.
        """
        sampling, started_at = self._sampling(session, asked), time.time()
        completion = await self._policy.complete(asked.prompt.tolist(), **sampling)
        await self._verified(_versions(completion))
        text = self._text(asked)
        text.put(completion.tokens.tolist())
        made = self._made(asked, text, completion)
        reply = told(made)
        self._record(session, asked, text, made, started_at)
        return reply

    async def stream(
        self, session: Session, asked: Asked, told: Callable[[Piece], T]
    ) -> AsyncGenerator[T, None]:
        """Make a call, telling what is said as it comes. Raises as `complete` does."""
        sampling, started_at = self._sampling(session, asked), time.time()
        text, shown = self._text(asked), 0
        completion: Completion | None = None
        async with aclosing(deltas(self._policy, asked.prompt.tolist(), **sampling)) as parts:
            async for delta in parts:
                completion = delta.done
                await self._verified(_versions(completion) if completion else delta.versions)
                before = text.kept
                text.put(delta.tokens.tolist())
                fresh = slice(0, text.kept - before)
                piece = Piece("", delta.tokens[fresh], delta.logprobs[fresh])
                if completion is None:
                    sure = asked.reader.certain(text.full[: text.certain], asked.opened)
                    yield told(replace(piece, text=text.full[shown:sure]))
                    shown = max(shown, sure)
        assert completion is not None  # the last delta has it
        made = self._made(asked, text, completion)
        reply = told(replace(piece, text=made.said.content[shown:], made=made))
        self._record(session, asked, text, made, started_at)
        yield reply

    def _sampling(self, session: Session, asked: Asked) -> dict[str, Any]:
        lease, wanted = session.lease, asked.wanted
        budget = completion_budget(self._config, len(asked.prompt))
        if not budget:
            raise TooLong(
                f"the prompt is {len(asked.prompt)} tokens long and leaves no room for a "
                "completion: shorten it, or raise model.max_model_len",
                param="prompt" if asked.conversation is None else "messages",
                tokens=self._config.model.max_model_len,
            )
        number = session.begin(asked.prompt)
        temperature = lease.sampling.temperature
        seed = turn_seed(lease.sampling.seed, lease.group_id, lease.sibling, number, lease.attempt)
        if session.free:
            temperature = temperature if wanted.temperature is None else wanted.temperature
            seed = seed if wanted.seed is None else wanted.seed
        elif wanted.temperature not in (None, temperature) or wanted.seed is not None:
            self.overridden += 1
        return {
            "temperature": temperature,
            "seed": seed,
            "max_tokens": min(budget, wanted.max_tokens or budget),
            "stops": wanted.stops,
            "priority": priority_of(lease),
        }

    def _text(self, asked: Asked) -> Text:
        wanted, decode = asked.wanted, self._prompter.decode
        return Text(decode, asked.prompt, wanted.stops, self._ends, wanted.include_stop)

    def _made(self, asked: Asked, text: Text, completion: Completion) -> Made:
        text.finish()
        if text.stopped:
            completion = _cut(completion, text.kept)
        return Made(completion, asked.reader.read(text.whole, asked.opened))

    def _record(self, session: Session, asked: Asked, text: Text, made: Made, began: float) -> None:
        said, sampled = made.said, made.completion.tokens
        session.record(Call(asked.prompt, made.completion, began, time.time(), said.malformed))
        if asked.conversation is not None:
            if text.whole == text.full:  # else the client knows less than was sampled
                key = key_after(asked.conversation.keys, key_of(said))
                session.history.keep_conversation(key, asked.prompt, sampled)
        elif asked.text is not None:
            end = self._prompter.decode(sampled[-1:]) if int(sampled[-1]) in self._ends else ""
            whole = asked.text + text.full + end * (not text.full.endswith(end))
            session.history.keep_text(whole, asked.prompt, sampled)
        self.calls += 1


def _versions(completion: Completion) -> frozenset[int]:
    return frozenset(completion.versions.tolist())


def _cut(completion: Completion, length: int) -> Completion:
    """Return a completion up to the token that completed its stop."""
    return Completion(
        tokens=completion.tokens[:length],
        logprobs=completion.logprobs[:length],
        versions=completion.versions[:length],
        finish_reason="stop",
        first_token_at=completion.first_token_at,
    )
