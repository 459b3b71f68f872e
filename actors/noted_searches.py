"""The searches of one rollout, for replay's record should it fail."""

import time
from collections.abc import Sequence

from actors.environment import Retriever
from actors.searching import search_records
from replay.trajectory import Search
from retrieval_server.protocol import Passage


class NotedSearches:
    """A retriever that records one rollout's searches: a delivered rollout has them in its
    trajectory, a failed one has only these. `made`: those that were answered, their passages best
    first.
    """

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self.made: list[Search] = []

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Search and record. Raises RetrievalError."""
        started = time.perf_counter()
        found = await self._retriever.retrieve(queries, top_k)
        seconds = time.perf_counter() - started
        self.made += search_records(queries, found, seconds)
        return found
