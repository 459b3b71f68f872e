"""One question's search environment: it reads the policy's action and answers with an observation.

Single-use: one instance per rollout, stepped until it names a StopReason. N turns, each a search or
a malformed action, then one completion without search. Retrieval errors pass through: they are
infrastructure's, so they never become text or a reward.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from actors import actions
from actors.prompt import Prompter
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Search, StopReason
from retrieval_server.protocol import Passage

MIN_ACTION_TOKENS = 8  # a completion shorter than this could not hold an action
_NOTHING = np.empty(0, np.int32)


class Retriever(Protocol):
    """Per query at most `top_k` passages, best first. Raises RetrievalError."""

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Ask for passages."""
        ...


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one turn led to; `stop` is None while it goes on. observation_tokens: int32[O]."""

    observation_tokens: NDArray[np.int32]
    searches: tuple[Search, ...] = ()
    malformed: bool = False
    stop: StopReason | None = None
    answer: str | None = None


def shown_order(seed: int, group_id: int, sibling: int, turn: int, count: int) -> list[int]:
    """The ranks of `count` passages in the order in which `actors.shuffle_passages` shows them;
    `seed` is the lease's.
    """
    order = list(range(count))
    random.Random(f"{seed} {group_id} {sibling} {turn}").shuffle(order)
    return order


class Environment:
    """Answers one rollout's actions. Use once."""

    def __init__(
        self, lease: Lease, *, retriever: Retriever, prompter: Prompter, config: Config
    ) -> None:
        self._lease, self._retriever, self._prompter = lease, retriever, prompter
        self._top_k = config.retrieval.top_k
        self._actors, self._max_len = config.actors, config.model.max_model_len
        self._turn = 0

    def budget(self, context_tokens: int) -> int:
        """How many tokens the next completion may have; 0 when the model has no room for one."""
        left = self._max_len - context_tokens
        wanted = self._actors.max_action_tokens
        return min(wanted, left) if left >= min(MIN_ACTION_TOKENS, wanted) else 0

    async def step(self, action_tokens: NDArray[np.int32], context_tokens: int) -> Outcome:
        """Act on the tokens just sampled; `context_tokens` counts everything up to their end."""
        action = actions.parse_action(self._prompter.decode(action_tokens))
        malformed = isinstance(action, actions.Malformed)
        turn, self._turn = self._turn, self._turn + 1
        if isinstance(action, actions.Answer):
            return Outcome(_NOTHING, stop=StopReason.ANSWERED, answer=action.text)
        if turn >= self._actors.max_turns:
            return Outcome(_NOTHING, malformed=malformed, stop=StopReason.TURN_LIMIT)
        if isinstance(action, actions.Search):
            search, passages = await self._search(action.query, turn)
            searches: tuple[Search, ...] = (search,)
            observation = self._prompter.observation(passages)
        else:
            searches, observation = (), self._prompter.correction()
        if not self.budget(context_tokens + len(observation)):
            # The policy will never read it, so it is no part of what went through the engine.
            return Outcome(_NOTHING, searches, malformed, StopReason.CONTEXT_LIMIT)
        return Outcome(observation, searches, malformed)

    async def _search(self, query: str, turn: int) -> tuple[Search, list[Passage]]:
        if not self._top_k:
            return Search(query, (), 0.0, "skipped"), []
        started = time.perf_counter()
        (passages,) = await self._retriever.retrieve([query], self._top_k)
        seconds = time.perf_counter() - started
        passages = list(passages)
        if self._actors.shuffle_passages:
            lease = self._lease
            key = (lease.sampling.seed, lease.group_id, lease.sibling, turn)
            passages = [passages[rank] for rank in shown_order(*key, len(passages))]
        ids = tuple(passage.id for passage in passages)
        return Search(query, ids, seconds, "ok" if passages else "empty"), passages
