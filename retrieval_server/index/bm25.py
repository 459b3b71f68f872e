"""Search by BM25. The only module that imports bm25s.

k1 and b are those of Lucene's searcher in pyserini, which Search-R1's BM25 server uses. Every
passage that holds a word of the query is scored, and what is being built is held in memory: large
corpora are for `tantivy_index`.
"""

import logging
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Self, overload

import bm25s
import numpy as np
from numpy.typing import NDArray

from retrieval_server.index.base import Hit
from retrieval_server.index.words import words
from retrieval_server.protocol import BadIndex, CorpusError

VERSION = f"bm25s {bm25s.__version__}"
K1 = 0.9
B = 0.4
_FEW = 16  # hits, each found by a pass that takes a sixteenth of a partition's time or less

# bm25s sets its own logger to DEBUG when imported.
logging.getLogger("bm25s").setLevel(logging.WARNING)


class BM25Index:
    """BM25 (Lucene's variant) over texts. Raises CorpusError when none holds a word."""

    name = f"bm25 (Lucene, k1 {K1}, b {B})"
    fingerprint = ""  # the passages decide the rest

    def __init__(self, texts: Iterable[str]) -> None:
        # Its numba backend compiles for seconds; numpy answers in a tenth of a millisecond here.
        self._bm25 = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy", csc_backend="numpy")
        with _Tokens() as tokens:
            self._vocabulary = tokens.take(texts)
            if not self._vocabulary:
                raise CorpusError("no passage holds a word (letters or digits): nothing to search")
            corpus = SimpleNamespace(ids=tokens, vocab=self._vocabulary)
            self._bm25.index(corpus, create_empty_token=False, show_progress=False)

    def save(self, folder: Path) -> None:
        """Write it as bm25s does, for `load`."""
        self._bm25.save(folder, show_progress=False)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """A saved index; its numbers stay in their files, memory-mapped. Raises BadIndex."""
        self = cls.__new__(cls)
        try:
            self._bm25 = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        except (OSError, ValueError, KeyError) as error:
            raise BadIndex(f"{str(folder)!r} holds no BM25 index: {error}: build it") from error
        self._vocabulary = self._bm25.vocab_dict
        return self

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Passages that share a word with the query, best first, ties in corpus order.

        Queries of the same words, in whatever order, have the same hits and are searched for once.
        """
        bags = [self._bag(query) for query in queries]
        scores = self._bm25.get_scores_from_ids
        found = {bag: best(scores(list(bag)), top_k) if bag else [] for bag in dict.fromkeys(bags)}
        return [found[bag] for bag in bags]

    def _bag(self, query: str) -> tuple[int, ...]:
        """The known words, sorted: in another order scores would add up to other last digits."""
        known = self._vocabulary
        return tuple(sorted(known[word] for word in words(query) if word in known))


class _Tokens(Sequence[list[int]]):
    """The words of every text as numbers, in a file that goes with it: four bytes of disk each."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="forage-words-")  # noqa: SIM115 - see __exit__
        self._ends = array("q", [0])
        self._numbers: NDArray[np.int32] = np.zeros(0, np.int32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take(self, texts: Iterable[str]) -> dict[str, int]:
        """Number the words of all texts; returns each word's number."""
        vocabulary: dict[str, int] = {}
        for text in texts:
            row = array("i", [vocabulary.setdefault(w, len(vocabulary)) for w in words(text)])
            row.tofile(self._file)
            self._ends.append(self._ends[-1] + len(row))
        self._file.flush()
        if vocabulary:
            self._numbers = np.memmap(self._file, np.int32, "r")
        return vocabulary

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, row: int) -> list[int]: ...

    @overload
    def __getitem__(self, row: slice) -> list[list[int]]: ...

    def __getitem__(self, row: int | slice) -> list[int] | list[list[int]]:
        if isinstance(row, slice):
            return [self[i] for i in range(len(self))[row]]
        if row >= len(self):
            raise IndexError(row)
        found: list[int] = self._numbers[self._ends[row] : self._ends[row + 1]].tolist()
        return found


def best(scores: NDArray[np.float32], top_k: int) -> list[Hit]:
    """The `top_k` highest positive scores; equal ones by position, also where the cut falls.

    scores float32[N], which may be changed; `top_k` ≥ 1.
    """
    if top_k <= _FEW:
        return _best_few(scores, top_k)
    least = np.partition(scores, -top_k)[-top_k] if top_k < len(scores) else 0.0
    candidates = np.flatnonzero(scores >= least if least > 0 else scores > 0)
    order = np.argsort(-scores[candidates], kind="stable")[:top_k]
    chosen = candidates[order]
    return [Hit(*pair) for pair in zip(chosen.tolist(), scores[chosen].tolist(), strict=True)]


def _best_few(scores: NDArray[np.float32], top_k: int) -> list[Hit]:
    hits: list[Hit] = []
    while len(hits) < top_k:
        position = int(scores.argmax())  # of equal ones the first
        if scores[position] <= 0:
            break
        hits.append(Hit(position, float(scores[position])))
        scores[position] = 0
    return hits
