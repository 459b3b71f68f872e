"""The searches of one rollout, a turn's at a time. Retrieval errors pass through: they are
infrastructure's, so they never become text or a reward.
"""

import time
from collections.abc import Sequence

from actors.environment import Retriever, shown_order
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Search
from retrieval_server.protocol import Passage

Found = tuple[tuple[Search, ...], list[list[Passage]]]


def search_records(
    queries: Sequence[str], found: Sequence[Sequence[Passage]], seconds: float
) -> tuple[Search, ...]:
    """Return the record of searches that were asked in one call."""
    return tuple(
        Search(query, tuple(each.id for each in passages), seconds, "ok" if passages else "empty")
        for query, passages in zip(queries, found, strict=True)
    )


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
