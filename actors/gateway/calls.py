"""A call of a program to the policy, as the engine had it."""

from dataclasses import dataclass

from actors.policies.base import Completion
from actors.prompt import Tokens


@dataclass(frozen=True, eq=False)
class Call:
    """A completed call: `prompt` int32[P], exactly what the engine read, and what it sampled then.
    `malformed`: what it sampled could not be read. Seconds since the epoch: `started_at`, when it
    was asked for; `ended_at`, when it was whole.
    """

    prompt: Tokens
    completion: Completion
    started_at: float
    ended_at: float
    malformed: bool = False
