"""The one door through which a process rolls leases out, whatever their environment."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from actors.environments.base import Retriever
from actors.policies.base import Policy
from actors.prompt import Prompter
from actors.rewards.scorer import Rewards
from actors.token_audit import TokenAudit
from configs.environment import PROGRAM
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Trajectory

Verified = Callable[[Collection[int]], Awaitable[None]]  # waits until these versions are


class Roll(Protocol):
    """Rolls a lease out. Raises ActorError or RetrievalError, no fault of the policy's."""

    def __call__(self, lease: Lease, retriever: Retriever) -> Awaitable[Trajectory]:
        """Roll it out."""
        ...


class _Source(Protocol):
    def gauges(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class Rollouts:
    """What rolls leases out; `sources`: those that tell its numbers."""

    roll: Roll
    sources: Sequence[_Source]

    def gauges(self) -> dict[str, float]:
        """Return the numbers of all that it consists of."""
        return {name: value for each in self.sources for name, value in each.gauges().items()}


async def nothing_to_verify(_versions: Collection[int]) -> None:
    """Wait for nothing: of a process that loads its weights itself, and lets no others serve."""


@asynccontextmanager
async def rolling(
    config: Config,
    *,
    policy: Policy,
    prompter: Prompter,
    rewards: Rewards,
    actor_id: str,
    verified: Verified = nothing_to_verify,
) -> AsyncIterator[Rollouts]:
    """Open what rolls leases out under this configuration, every record audited: a gateway and
    programs where the environment is `program`.
    """
    if config.environment.name == PROGRAM:
        from actors.gateway.rollout import ProgramRollouts  # a web server, for these alone

        async with ProgramRollouts.open(
            config,
            policy=policy,
            prompter=prompter,
            rewards=rewards,
            actor_id=actor_id,
            verified=verified,
        ) as programs:
            yield Rollouts(programs.roll, (programs,))
        return
    audit = TokenAudit(prompter, config)

    def roll(lease: Lease, retriever: Retriever) -> Awaitable[Trajectory]:
        return audit.rollout(
            lease,
            policy=policy,
            retriever=retriever,
            prompter=prompter,
            rewards=rewards,
            config=config,
            actor_id=actor_id,
        )

    yield Rollouts(roll, (audit,))
