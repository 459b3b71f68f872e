"""Queries → the best passages by BM25. The only module that imports bm25s.

A word is a run of letters, digits or underscores after NFKC and case folding. Nothing is stemmed
and no stop word is removed: made-up or lower-case names ("bore", "the who", "vitamin c") must stay
findable, and BM25 itself gives words that are everywhere next to no weight. k1 and b are those of
Lucene's searcher in pyserini, which Search-R1's BM25 server uses.
"""

import logging
import re
import unicodedata
from collections.abc import Iterable, Sequence

import bm25s
import numpy as np
from numpy.typing import NDArray

from retrieval_server.index import Hit
from retrieval_server.protocol import CorpusError

K1 = 0.9
B = 0.4

_word = re.compile(r"\w+")
# bm25s sets its own logger to DEBUG when imported.
logging.getLogger("bm25s").setLevel(logging.WARNING)


def words(text: str) -> list[str]:
    """The words of a text, as indexed and as searched."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return _word.findall(text.casefold())


class BM25Index:
    """BM25 (Lucene's variant) over texts, in memory. Raises CorpusError when none holds a word."""

    name = f"bm25 (Lucene, k1 {K1}, b {B})"

    def __init__(self, texts: Iterable[str]) -> None:
        vocabulary: dict[str, int] = {}
        tokens = [
            [vocabulary.setdefault(word, len(vocabulary)) for word in words(text)] for text in texts
        ]
        if not vocabulary:
            raise CorpusError("no passage holds a word (letters or digits): nothing to search")
        self._vocabulary = vocabulary
        # Its numba backend compiles for seconds; numpy answers in a tenth of a millisecond here.
        self._bm25 = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy", csc_backend="numpy")
        self._bm25.index((tokens, vocabulary), create_empty_token=False, show_progress=False)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Passages that share a word with the query, best first, ties in corpus order."""
        return [self._search(query, top_k) for query in queries]

    def _search(self, query: str, top_k: int) -> list[Hit]:
        ids = [self._vocabulary[word] for word in words(query) if word in self._vocabulary]
        if not ids:
            return []
        return best(self._bm25.get_scores_from_ids(ids), top_k)


def best(scores: NDArray[np.float32], top_k: int) -> list[Hit]:
    """The `top_k` highest positive scores; equal ones by position, also where the cut falls.

    scores float32[N]; `top_k` ≥ 1.
    """
    least = np.partition(scores, -top_k)[-top_k] if top_k < len(scores) else 0.0
    candidates = np.flatnonzero(scores >= least if least > 0 else scores > 0)
    order = np.argsort(-scores[candidates], kind="stable")[:top_k]
    chosen = candidates[order]
    return [Hit(*pair) for pair in zip(chosen.tolist(), scores[chosen].tolist(), strict=True)]
