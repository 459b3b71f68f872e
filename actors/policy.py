"""What a policy is to a rollout: one async function from tokens to sampled tokens. A leaf module.

Also this package's errors. None of them is the policy's own fault: each ends a rollout as a failed
lease, never as a reward and never as text in a trajectory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length"]


class ActorError(Exception):
    """Root of this package's errors.

    ActorError
    ├── PromptTooLong         the question leaves no room for a completion
    ├── UnverifiedWeights     a rollout holds tokens of weights that did not pass their probe
    ├── TokenMismatch         a rollout's record is not what went through the policy
    ├── Unscorable            a part of the reward cannot be told; it never leaves `rewards`
    ├── ToolFailed            a user's tool raised, took too long or gave no text
    ├── EnvironmentFailed     a user's environment raised, or gave no Outcome
    └── PolicyError
        ├── EngineUnusable    the engine cannot start in this installation; names the remedy
        ├── EngineDead        the engine's process is gone
        ├── GenerationFailed  the engine gave a completion up
        └── BadCompletion     the engine's reply contradicts itself
    """


class PromptTooLong(ActorError):
    """The question alone leaves no room for a completion."""


class UnverifiedWeights(ActorError):
    """A finished rollout holds tokens of weights that did not pass their probe."""


class TokenMismatch(ActorError):
    """A rollout's record is not, id for id, what went through the policy."""


class Unscorable(ActorError):
    """A part of a finished rollout's reward cannot be told, through no fault of the policy's.

    `whose`: what failed, in a word, as it is counted: question, judge, similarity, custom, sum.
    """

    def __init__(self, whose: str, cause: str) -> None:
        super().__init__(cause)
        self.whose = whose


class ToolFailed(ActorError):
    """A user's tool raised, took too long or gave no text: its owner's fault."""


class EnvironmentFailed(ActorError):
    """A user's environment raised, or gave no Outcome: its owner's fault."""


class PolicyError(ActorError):
    """The policy could not complete; infrastructure's fault."""


class EngineUnusable(PolicyError):
    """The engine cannot start in this installation; the message names the remedy."""


class EngineDead(PolicyError):
    """The engine's process is gone: nothing can be completed any more."""


class GenerationFailed(PolicyError):
    """The engine gave a completion up."""


class BadCompletion(PolicyError):
    """The engine's reply contradicts itself: lengths, ids or versions."""


@dataclass(frozen=True, eq=False)
class Completion:
    """What the policy sampled: tokens int32[A] (the stop included), their log-probs float32[A]
    after temperature, and the policy version int32[A] that sampled each.

    Raises BadCompletion unless the three are equally long and not empty.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        lengths = len(self.tokens), len(self.logprobs), len(self.versions)
        if len(set(lengths)) != 1 or not lengths[0]:
            raise BadCompletion(f"tokens, log-probs and versions number {lengths!r}")


class Policy(Protocol):
    """Samples a completion: tokens in, tokens out, until a closing action tag, the end token or
    `max_tokens`. Raises PolicyError."""

    async def complete(
        self, tokens: Sequence[int], *, temperature: float, seed: int, max_tokens: int
    ) -> Completion:
        """Complete exactly `tokens`; temperature 0 is greedy."""
        ...
