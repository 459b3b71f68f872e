"""How often the most frequent words are in each passage: what they add to its score, at once.

Tantivy finds a passage in the postings of a frequent word in microseconds, of which a question's
many words make milliseconds. Here they are a row of 64 bytes for each passage, memory-mapped: how
many words it has, and how many of each frequent one.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from pathlib import Path
from typing import IO, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from configs.runtime.files import write_json
from retrieval_server.index.words import words
from retrieval_server.protocol import BadIndex

K1, B = 1.2, 0.75  # tantivy's own; it takes no others
WORDS = 60
STRETCH, _STRETCHES = 1000, 64  # passages in a row that are looked at, and how many times
_ROW = np.dtype([("length", "<u4"), ("counts", "u1", (WORDS,))])
_FULL = 255  # a count: so many or more
_CHUNK = 1 << 16
_ROWS, _WORDS = "frequent.rows", "frequent.json"


def _lengths() -> NDArray[np.int64]:
    """The lengths of a passage that tantivy tells apart: one of a byte's 256 stands for all up to
    the next (Lucene's SmallFloat).
    """
    codes = np.arange(232)
    scaled = np.where(codes < 8, codes, (codes & 7 | 8) << np.maximum(codes // 8 - 1, 0))
    return np.concatenate([np.arange(24), 24 + scaled])


_LENGTHS = _lengths()


class Frequent(NamedTuple):
    """A word's column, and the most of its weight that a passage has."""

    column: int
    most: float


class _Words(msgspec.Struct, frozen=True):
    """How many words a passage has in the mean; the frequent ones."""

    mean: float
    words: dict[str, Frequent]


class FrequentWords:
    """The rows that a `FrequentWriter` wrote. Raises BadIndex."""

    def __init__(self, folder: Path, passages: int) -> None:
        try:
            self._words = msgspec.json.decode((folder / _WORDS).read_bytes(), type=_Words)
            self._rows = np.asarray(np.memmap(folder / _ROWS, _ROW, "r"))
        except (OSError, ValueError) as error:
            raise BadIndex(
                f"{str(folder)!r} counts no frequent words: {error}: build it"
            ) from error
        if len(self._rows) != passages:
            raise BadIndex(
                f"{str(folder / _ROWS)!r} is of {len(self._rows)} passages instead of {passages}: "
                "copy it again, or build it"
            )

    @property
    def words(self) -> Mapping[str, Frequent]:
        return self._words.words

    def scores(
        self, positions: NDArray[np.int64], weights: Sequence[tuple[int, float]]
    ) -> NDArray[np.float64]:
        """What columns of these weights add to the scores of passages [N]: each passage's is added
        up in the order of the columns, whatever the others are.
        """
        if not weights:
            return np.zeros(len(positions))
        rows = self._rows[positions]
        norms = _norms(rows["length"], self._words.mean)
        columns, each = zip(*weights, strict=True)
        counts = rows["counts"][:, columns].T.astype(np.float64)
        found: NDArray[np.float64] = (np.array(each)[:, None] * (counts / (counts + norms))).sum(0)
        return found


def _norms(lengths: NDArray[np.uint32], mean: float) -> NDArray[np.float64]:
    """What BM25 adds to a word's count in passages of these lengths."""
    told = _LENGTHS[np.searchsorted(_LENGTHS, lengths, "right") - 1]
    found: NDArray[np.float64] = K1 * (1 - B + B * told.astype(np.float64) / mean)
    return found


def stretches(passages: int) -> Iterator[int]:
    """Where the stretches begin that `choose` had best look at, evenly over the corpus."""
    return iter(range(0, passages, max(STRETCH, passages // _STRETCHES)))


def choose(texts: Iterable[str]) -> list[str]:
    """The words that most texts hold, the most frequent first."""
    texts_with = Counter[str]()
    for text in texts:
        texts_with.update(set(words(text)))
    return nsmallest(WORDS, texts_with, key=lambda word: (-texts_with[word], word))


class FrequentWriter:
    """Writes the rows, one passage after another, behind the first `done` that are there."""

    def __init__(self, folder: Path, chosen: Sequence[str], done: int) -> None:
        self._folder, self._chosen = folder, chosen
        self._column = {word: 4 + at for at, word in enumerate(chosen)}
        path = folder / _ROWS
        there = path.stat().st_size // _ROW.itemsize if path.exists() else 0
        if there < done:
            raise BadIndex(f"{str(path)!r} is cut short: remove the folder, and build it again")
        self._file: IO[bytes] = path.open("ab")
        self._file.truncate(done * _ROW.itemsize)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, passage: Sequence[str]) -> None:
        """The words of the next passage."""
        row = bytearray(_ROW.itemsize)
        row[:4] = len(passage).to_bytes(4, "little")
        for column in map(self._column.get, passage):
            if column and row[column] < _FULL:
                row[column] += 1
        self._file.write(row)

    def keep(self) -> None:
        """Force to the disk what has been added."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Write what the rows come to. A word that fills its count anywhere is left out."""
        self.keep()
        rows = np.memmap(self._folder / _ROWS, _ROW, "r")
        chunks = [rows[at : at + _CHUNK] for at in range(0, len(rows), _CHUNK)]
        mean = sum(int(chunk["length"].sum(dtype=np.int64)) for chunk in chunks) / len(rows)
        most, full = np.zeros(WORDS, np.float32), np.zeros(WORDS, bool)
        for chunk in chunks:
            counts = chunk["counts"].astype(np.float32)
            norms = _norms(chunk["length"], mean).astype(np.float32)
            most = np.maximum(most, (counts / (counts + norms[:, None])).max(0))
            full |= (chunk["counts"] == _FULL).any(0)
        whole = {
            word: Frequent(column, float(most[column]))
            for column, word in enumerate(self._chosen)
            if not full[column]
        }
        write_json(self._folder / _WORDS, _Words(mean, whole))
