"""A policy: one async function from tokens to sampled tokens; and whose turn comes first.

Priorities are whole numbers of 64 bits, the smallest first: the probe of new weights, which all
deliveries wait for; evaluation, which the learner waits for; then the rollouts of training, the
oldest first. So a rollout that has begun ends before a younger one takes the cache of its context.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, NotRequired, Protocol, TypedDict, TypeVar, Unpack, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from actors.errors import BadCompletion
from replay.protocol import Lease

T = TypeVar("T", bound=np.generic)
FinishReason = Literal["stop", "length"]
Stops = tuple[str, ...]  # texts at which a completion ends

PROBE = -(1 << 62)
_EVALUATION = -(1 << 61)
_SIBLINGS = 1 << 20
_GROUPS = 1 << 41  # more than a run ever has; a group named by a hash counts modulo this


def priority_of(lease: Lease) -> int:
    """Return the priority of all turns of a lease's rollout: its ordinal in the run."""
    first = _EVALUATION if lease.kind == "eval" else 0
    return first + lease.group_id % _GROUPS * _SIBLINGS + lease.sibling


@dataclass(frozen=True, eq=False)
class Completion:
    """A sampled completion: tokens int32[A] (the stop included), their log-probs float32[A] after
    temperature, and the policy version int32[A] that sampled each. `first_token_at`: when the first
    token was there, in seconds since the epoch; 0 where the policy cannot tell.

    Raises BadCompletion unless the three are equally long and not empty.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: FinishReason
    first_token_at: float = 0.0

    def __post_init__(self) -> None:
        lengths = len(self.tokens), len(self.logprobs), len(self.versions)
        if len(set(lengths)) != 1 or not lengths[0]:
            raise BadCompletion(f"tokens, log-probs and versions number {lengths!r}")

    def stamps(self, started_at: float, ended_at: float) -> tuple[float, float, float]:
        """When it was asked for, had its first token and was whole: in their order, though two
        clocks tell them, and one may have been set back.
        """
        first, ended_at = self.first_token_at, max(started_at, ended_at)
        return started_at, first and min(max(first, started_at), ended_at), ended_at


def read_only(numbers: NDArray[T]) -> NDArray[T]:
    """Return a view for rewards, a user's own among them, which read the record first."""
    view = numbers.view()
    view.setflags(write=False)
    return view


class SamplingParams(TypedDict):
    """How a completion is sampled. Of those that wait, the one of the lowest `priority` (0) is
    begun first.
    """

    temperature: float  # 0 is greedy
    seed: int
    max_tokens: int
    stops: Stops
    priority: NotRequired[int]


class Policy(Protocol):
    """Samples until one of `stops`, the end token or `max_tokens`. Raises PolicyError."""

    async def complete(
        self, tokens: Sequence[int], **sampling: Unpack[SamplingParams]
    ) -> Completion:
        """Complete exactly `tokens`, keeping the stop."""
        ...


@dataclass(frozen=True, eq=False)
class Delta:
    """Tokens of a completion as they come: int32[n], and their log-probs float32[n]. `versions`:
    those that may have sampled them. `done`: the whole completion, with its last tokens.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: frozenset[int]
    done: Completion | None = None

    @classmethod
    def whole(cls, completion: Completion) -> "Delta":
        """A completion that comes at once."""
        versions = frozenset(completion.versions.tolist())
        return cls(completion.tokens, completion.logprobs, versions, completion)


@runtime_checkable
class StreamingPolicy(Policy, Protocol):
    """A policy that tells tokens as they come."""

    def stream(
        self, tokens: Sequence[int], **sampling: Unpack[SamplingParams]
    ) -> AsyncGenerator[Delta, None]:
        """Complete as `complete` does; the last delta, and no other, has the whole. Closed before,
        the completion is given up.
        """
        ...


async def deltas(
    policy: Policy, tokens: Sequence[int], **sampling: Unpack[SamplingParams]
) -> AsyncGenerator[Delta, None]:
    """Stream a completion where the policy can, else give it whole. Raises PolicyError."""
    if not isinstance(policy, StreamingPolicy):
        completion = await policy.complete(tokens, **sampling)
        yield Delta.whole(completion)
        return
    parts = policy.stream(tokens, **sampling)
    async with aclosing(parts):
        async for delta in parts:
            yield delta
