"""A retriever that remembers what one rollout searched for, should the rollout never be delivered.

What a delivered rollout searched for is in its trajectory; a failed one leaves this.
"""

import time
from collections.abc import Sequence

from actors.environment import Retriever
from replay.trajectory import Search
from retrieval_server.protocol import Passage


class NotedSearches:
    """Asks `retriever`; `made` are the searches that were answered, their passages best first."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self.made: list[Search] = []

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Ask and note. Raises RetrievalError."""
        started = time.perf_counter()
        found = await self._retriever.retrieve(queries, top_k)
        seconds = time.perf_counter() - started
        for query, passages in zip(queries, found, strict=True):
            ids = tuple(passage.id for passage in passages)
            self.made.append(Search(query, ids, seconds, "ok" if ids else "empty"))
        return found
