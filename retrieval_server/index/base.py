"""The interface of an index: queries in, positions of passages and scores out. A leaf module."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Hit(NamedTuple):
    """A match: the passage's position in the corpus and its score (higher is better)."""

    position: int
    score: float


class Index(Protocol):
    """Anything that can be searched; called from one thread at a time."""

    name: str  # kind and settings, for those who ask what is served
    fingerprint: str  # changes with what the name does not say and results depend on

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Per query at most `top_k` hits, best first, ties in corpus order.

        A smaller `top_k` gives a prefix of a larger one's hits.
        """
        ...
