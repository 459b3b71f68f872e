"""Two indexes of one corpus searched as one: their ranks are fused.

Reciprocal rank fusion (Cormack, Clarke & Büttcher 2009): a passage scores the sum over the indexes
of 1 / (K + its rank there, from 1 on). Scores of the indexes themselves, which do not compare, play
no part.
"""

from collections import defaultdict
from collections.abc import Sequence

from blake3 import blake3

from retrieval_server.index.base import Hit, Index
from retrieval_server.protocol import MAX_TOP_K

K = 60  # the paper's


class Hybrid:
    """The fusion of `indexes`, whose positions are those of the same passages."""

    def __init__(self, indexes: Sequence[Index]) -> None:
        self._indexes = indexes
        names = " + ".join(each.name for each in indexes)
        self.name = f"hybrid (reciprocal ranks, k {K}, of the best {MAX_TOP_K}): {names}"
        told = "\0".join(each.fingerprint for each in indexes)
        self.fingerprint = blake3(told.encode()).hexdigest(length=8)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """The best of both, ties in corpus order."""
        # Always as many candidates: a smaller top_k must give a prefix.
        found = [each.search(queries, MAX_TOP_K) for each in self._indexes]
        return [fused(rows, top_k) for rows in zip(*found, strict=True)]


def fused(rows: Sequence[Sequence[Hit]], top_k: int) -> list[Hit]:
    """The `top_k` passages of the highest sums of reciprocal ranks."""
    scores: defaultdict[int, float] = defaultdict(float)
    for row in rows:
        for rank, hit in enumerate(row, start=1):
            scores[hit.position] += 1.0 / (K + rank)
    order = sorted(scores.items(), key=lambda each: (-each[1], each[0]))
    return [Hit(*each) for each in order[:top_k]]
