"""A call of a program to the policy, as the engine had it."""

from dataclasses import dataclass

import numpy as np

from actors.policies.base import Completion, read_only
from actors.prompt import Tokens
from replay.trajectory import Turn


@dataclass(frozen=True, eq=False)
class Call:
    """A completed call: `prompt` int32[P], exactly what the engine read, and what it sampled then.
    `malformed`: what it sampled could not be read. Seconds since the epoch: `started_at`, when it
    was asked for; `ended_at`, when it was whole.

    Raises ValueError where the prompt is empty or of another dtype.
    """

    prompt: Tokens
    completion: Completion
    started_at: float
    ended_at: float
    malformed: bool = False

    def __post_init__(self) -> None:
        if self.prompt.dtype != np.int32 or self.prompt.ndim != 1 or not len(self.prompt):
            found = f"{self.prompt.dtype}{list(self.prompt.shape)!r}"
            raise ValueError(f"Call.prompt must be int32[n], n at least 1, got {found}")

    def turn(self, observation: Tokens) -> Turn:
        """Return the turn that it is on record: what was sampled, and what was read after it."""
        said = self.completion
        started_at, first_token_at, ended_at = said.stamps(self.started_at, self.ended_at)
        return Turn(
            action_tokens=read_only(said.tokens),
            behaviour_logprobs=read_only(said.logprobs),
            policy_versions=read_only(said.versions),
            observation_tokens=read_only(observation),
            malformed=self.malformed,
            started_at=started_at,
            first_token_at=first_token_at,
            ended_at=ended_at,
        )
