"""The interface of environments, which parse the policy's action and return an observation; and
what they share: the retriever of one rollout, the budgets, and the texts that tell them.

Retrieval errors pass through: they are infrastructure's, so they never become text or a reward.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from actors.prompt import Tokens
from configs.environment import EnvironmentConfig
from configs.prompts import LIMITED, UNLIMITED
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Search, StopReason
from retrieval_server.protocol import Passage

MIN_ACTION_TOKENS = 8  # a completion shorter than this could not hold an action
NOTHING: Tokens = np.empty(0, np.int32)
Found = tuple[tuple[Search, ...], list[list[Passage]]]  # of a turn: records, passages as shown


class Retriever(Protocol):
    """Returns at most `top_k` passages per query, best first. Raises RetrievalError."""

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Search."""
        ...


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of one turn; without `stop` the rollout goes on. `observation_tokens` int32[O].

    `reward`: what the environment gives for this turn (the part `environment` adds them up);
    `info`: what else is to be on record of it, whatever JSON can hold.
    """

    observation_tokens: NDArray[np.int32]
    searches: tuple[Search, ...] = ()
    malformed: bool = False
    stop: StopReason | None = None
    answer: str | None = None
    passages: tuple[Passage, ...] = ()  # what the observation shows, in that order
    opened: bool = False  # the environment had opened the answer that this turn gave
    reward: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One question's environment; single-use: stepped until it names a StopReason, then closed.

    `prompt`: int32[P], of the question; `passages`: those that the prompt shows, in order; `stops`:
    the texts at which an action ends, beside the end token.
    """

    prompt: Tokens
    stops: tuple[str, ...]
    passages: tuple[Passage, ...]

    def budget(self, context_tokens: int) -> int:
        """Return the most tokens of the next completion; 0 where the model has no room for one."""
        ...

    async def step(self, action_tokens: NDArray[np.int32], context_tokens: int) -> Outcome:
        """Act on the tokens just sampled; `context_tokens` counts everything up to their end."""
        ...

    async def close(self) -> None:
        """Let go of what the environment holds; awaited once, however its rollout ends."""
        ...


class Searching:
    """The retriever of one rollout: it records searches and orders passages."""

    def __init__(self, lease: Lease, retriever: Retriever, config: Config) -> None:
        self._lease, self._retriever = lease, retriever
        self._top_k, self._shuffle = config.retrieval.top_k, config.actors.shuffle_passages

    async def search(self, queries: Sequence[str], turn: int) -> Found:
        """Ask a turn's queries in one call; return their records, and the passages as shown."""
        if not queries or not self._top_k:
            return tuple(Search(query, (), 0.0, "skipped") for query in queries), []
        started = time.perf_counter()
        found = await self._retriever.retrieve(queries, self._top_k)
        seconds = time.perf_counter() - started
        groups = [self._ordered(passages, turn) for passages in found]
        return search_records(queries, groups, seconds), groups

    def _ordered(self, passages: Sequence[Passage], turn: int) -> list[Passage]:
        if not self._shuffle:
            return list(passages)
        lease = self._lease
        key = (lease.sampling.seed, lease.group_id, lease.sibling, turn)
        return [passages[rank] for rank in shown_order(*key, len(passages))]


def completion_budget(config: Config, context_tokens: int) -> int:
    """Return `max_action_tokens`, or the rest of `max_model_len`; 0 where no action fits in it."""
    left, wanted = config.model.max_model_len - context_tokens, config.actors.max_action_tokens
    return min(wanted, left) if left >= min(MIN_ACTION_TOKENS, wanted) else 0


def instructed(prompt: str, settings: EnvironmentConfig, more: str = "") -> str:
    """Adapt an environment's own prompt to the settings; `more` follows its words on searching."""
    return prompt.replace(UNLIMITED, (LIMITED if settings.tell_budget else UNLIMITED) + more)


def budget_told(settings: EnvironmentConfig, searches: int) -> str:
    """Return the text that tells the policy how many searches it has left."""
    return settings.budget_template.replace("{searches}", str(searches))


def search_records(
    queries: Sequence[str], found: Sequence[Sequence[Passage]], seconds: float
) -> tuple[Search, ...]:
    """Return the record of searches that were asked in one call."""
    return tuple(
        Search(query, tuple(each.id for each in passages), seconds, "ok" if passages else "empty")
        for query, passages in zip(queries, found, strict=True)
    )


def shown_order(seed: int, group_id: int, sibling: int, turn: int, count: int) -> list[int]:
    """Return the ranks of `count` passages as `actors.shuffle_passages` shows them to a lease."""
    order = list(range(count))
    random.Random(f"{seed} {group_id} {sibling} {turn}").shuffle(order)
    return order
