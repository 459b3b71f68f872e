"""How many of the truly nearest passages HNSW and IVF find, for `scripts/bench_retrieval.py`:
`python -m scripts.bench_retrieval_recall CORPUS OUT QUERIES`.

Random weights would give vectors that are all alike, so the texts' own are taken: latent semantic
analysis (TF-IDF, truncated SVD to 384 numbers, unit length), queries folded in likewise, through
the server's own index code at its default settings. Also says what each index costs to make and
holds. Waits for nothing.
"""

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from configs.process import begin
from retrieval_server import index_faiss
from retrieval_server.corpus import load_corpus
from retrieval_server.index import Index
from retrieval_server.index_bm25 import words
from scripts.bench_retrieval_corpus import draw_queries
from scripts.bench_retrieval_plan import recall

DIMENSION = 384
TOP_K = 10
FACTORIES = {"flat": "Flat", "hnsw": "HNSW32", "ivf": "IVF256,Flat"}
QUERY_SEED = 7  # others than those that the servers are asked
_BLOCK = 1024
_OVERSAMPLED = 32


class Lsa:
    """Texts → unit vectors by their words' co-occurrence; in place of an encoder."""

    name = "lsa"
    dimension = DIMENSION

    def __init__(self, texts: Sequence[str]) -> None:
        bags = [Counter(words(text)) for text in texts]
        spread = Counter(word for bag in bags for word in bag)
        kept = [word for word, count in spread.items() if 1 < count < len(texts) / 2]
        self._column = {word: i for i, word in enumerate(kept)}
        self._idf = [math.log(len(texts) / spread[word]) for word in kept]
        rows = self._sparse(bags)
        self._axes = _right_singular(rows, DIMENSION)
        self.vectors: NDArray[np.float32] = _unit(rows @ self._axes)

    def queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """float32[N, DIMENSION]; zeros for a text of unknown words."""
        return _unit(self._sparse([Counter(words(text)) for text in texts]) @ self._axes)

    def _sparse(self, bags: Sequence[Counter[str]]) -> torch.Tensor:
        ends, columns, values = [0], [], []
        for bag in bags:
            for word, count in bag.items():
                if (column := self._column.get(word)) is not None:
                    columns.append(column)
                    values.append((1 + math.log(count)) * self._idf[column])
            ends.append(len(columns))
        shape = (len(bags), len(self._column))
        return torch.sparse_csr_tensor(ends, columns, values, shape, dtype=torch.float32)


def _right_singular(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """The first right singular vectors [V, rank] of sparse rows [N, V], by one subspace iteration
    from random directions (Halko, Martinsson & Tropp 2011, algorithms 4.4 and 5.1).
    """
    columns = rows.to_sparse_coo().t().to_sparse_csr()
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(rows.shape[1], rank + _OVERSAMPLED, generator=generator)
    basis = torch.linalg.qr(rows @ start).Q
    basis = torch.linalg.qr(rows @ torch.linalg.qr(columns @ basis).Q).Q
    left: torch.Tensor = torch.linalg.svd(columns @ basis, full_matrices=False).U
    return left[:, :rank]


def _unit(vectors: torch.Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = torch.nn.functional.normalize(vectors, dim=1).numpy()
    return found


def positions(index: Index, queries: Sequence[str]) -> list[list[int]]:
    """What an index finds for each query, best first."""
    return [[hit.position for hit in hits] for hits in index.search(queries, TOP_K)]


def _rss_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) << 10


def measure(corpus: Path, folder: Path, queries: int, threads: int = 1) -> dict[str, Any]:
    """By kind of index: seconds to make it, its file's size, memory, milliseconds a query in
    batches of 64, and recall@10 against Flat.
    """
    documents = list(load_corpus(corpus))
    began_s = time.monotonic()
    lsa = Lsa([document.contents for document in documents])
    found: dict[str, Any] = {"lsa_s": time.monotonic() - began_s, "passages": len(documents)}
    asked = draw_queries(documents, queries, QUERY_SEED)

    def blocks() -> Iterator[NDArray[np.float32]]:
        for first in range(0, len(lsa.vectors), _BLOCK):
            yield lsa.vectors[first : first + _BLOCK]

    exact: list[list[int]] = []
    for kind, factory in FACTORIES.items():
        before, began_s = _rss_bytes(), time.monotonic()
        vectors = index_faiss.build(blocks, DIMENSION, len(documents), factory, threads)
        built_s, rss_bytes = time.monotonic() - began_s, _rss_bytes() - before
        index = index_faiss.DenseIndex(vectors, lsa, threads=threads)  # type: ignore[arg-type]
        began_s = time.monotonic()
        each = [positions(index, asked[at : at + 64]) for at in range(0, len(asked), 64)]
        searched_s = time.monotonic() - began_s
        hits = [row for batch in each for row in batch]
        exact = exact or hits
        file = folder / f"{kind}.index"
        index_faiss.write(vectors, file)
        found[kind] = {
            "index": index.name,
            "build_s": built_s,
            "file_bytes": file.stat().st_size,
            "rss_bytes": rss_bytes,
            "ms_per_query": 1000 * searched_s / len(asked),
            "recall10": recall(hits, exact),
        }
        file.unlink()
    return found


if __name__ == "__main__":
    begin("recall", threads=2)
    corpus_path, out_path, count = sys.argv[1:]
    figures = measure(Path(corpus_path), Path(out_path).parent, int(count), threads=2)
    Path(out_path).write_text(json.dumps(figures), encoding="utf-8")
