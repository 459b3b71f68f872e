"""The indexes of `forage bench retrieval`: what they cost to make, and what they find.

`forage index` makes them, timed, in folders of `.cache`, each with a record of its cost beside it.
`python -m scripts.bench.retrieval.recall CORPUS OUT QUERIES` measures how many of the truly nearest
passages each kind finds. Random weights would give vectors that are all alike, so they are the
texts' own by latent semantic analysis (TF-IDF, truncated SVD, unit length), searched by the
server's own index code at its default settings.
"""

import json
import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from configs.runtime.files import folder_bytes
from configs.runtime.process import begin
from retrieval_server.corpus import load_corpus
from retrieval_server.index.base import Index
from retrieval_server.index.manifest import NAME
from retrieval_server.index.words import words
from scripts.bench.harness import Processes, RunFailed, digest_of, sources, status_bytes
from scripts.bench.retrieval.corpus import draw_queries, make_encoder

if TYPE_CHECKING:  # it is slow to import, and reads how many threads it may use
    import torch

BUILD_S = 3600.0
# The code that decides an index beside its corpus: after a change it is made, and timed, anew.
MAKERS = (
    "retrieval_server.index.build",
    "retrieval_server.encoder",
    "retrieval_server.index.bm25",
    "retrieval_server.index.tantivy_index",
    "retrieval_server.index.faiss_index",
    "retrieval_server.corpus_files",
    "retrieval_server.encoder_settings",
    "scripts.bench.retrieval.corpus",
    "scripts.demo.encoder",
)
DENSE = ("--factory", "HNSW32", "--max-passage-tokens", "32", "--threads", "2")
DIMENSION = 384
TOP_K = 10
FACTORIES = {
    "flat": "Flat",
    "hnsw": "HNSW32",
    "ivf": "IVF256,Flat",
    "sq8": "SQ8",
    "ivf_sq8": "IVF256,SQ8",
    "ivf_pq": "IVF256,PQ96",
}
QUERY_SEED = 7  # others than those that the servers are asked
_BLOCK = 1024
_OVERSAMPLED = 32


def build(
    processes: Processes, corpus: Path, folder: Path, kind: str, fresh: bool
) -> tuple[Path, dict[str, Any]]:
    """An index of the corpus, and its cost over all attempts to make it. Raises RunFailed."""
    given: tuple[str, ...] = ()
    if kind == "dense":
        texts = (document.contents for document in load_corpus(corpus))
        encoder = make_encoder(folder / f"minilm-l6-shape-{digest_of([corpus])}", texts)
        given = ("--encoder", str(encoder), *DENSE)
    elif kind == "tantivy":
        given = ("--kind", "tantivy")
    made = folder / f"{kind}-{digest_of([corpus, *sources(*MAKERS)])}"
    record = made.with_suffix(".json")
    if fresh:
        shutil.rmtree(made, ignore_errors=True)
        record.unlink(missing_ok=True)
    told = json.loads(record.read_text()) if record.exists() else {"seconds": 0.0}
    if not (made / NAME).exists():
        begin_s = time.monotonic()
        command = ("-m", "scripts.cli", "index", str(corpus), str(made), *given)
        try:
            processes.run("build", *command, limit_s=BUILD_S)
        finally:
            told["seconds"] += time.monotonic() - begin_s
            peak = processes.peak_rss_bytes.get("build", 0)
            told["peak_rss_bytes"] = max(told.get("peak_rss_bytes", 0), peak)
            record.write_text(json.dumps(told))
    told["file_bytes"] = folder_bytes(made)
    return made, told


def recalls(processes: Processes, corpus: Path, folder: Path, queries: int) -> dict[str, Any]:
    """The figures of `measure`, in a process of its own. Raises RunFailed."""
    out = folder / "recall.json"
    command = ("-m", "scripts.bench.retrieval.recall", str(corpus), str(out), str(queries))
    processes.run("recall", *command, limit_s=BUILD_S)
    if not out.exists():
        raise RunFailed("recall ended without figures")
    return msgspec.json.decode(out.read_bytes(), type=dict[str, Any])


def recall(found: Sequence[Sequence[int]], exact: Sequence[Sequence[int]]) -> float:
    """The mean share of each query's exact positions that were found."""
    shares = [
        len(set(some) & set(all_)) / len(all_)
        for some, all_ in zip(found, exact, strict=True)
        if all_
    ]
    return sum(shares) / len(shares)


class Lsa:
    """An encoder's stand-in: texts → unit vectors by their words' co-occurrence."""

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

    def _sparse(self, bags: Sequence[Counter[str]]) -> "torch.Tensor":
        import torch

        ends: list[int] = [0]
        columns: list[int] = []
        values: list[float] = []
        for bag in bags:
            for word, count in bag.items():
                if (column := self._column.get(word)) is not None:
                    columns.append(column)
                    values.append((1 + math.log(count)) * self._idf[column])
            ends.append(len(columns))
        shape = (len(bags), len(self._column))
        return torch.sparse_csr_tensor(ends, columns, values, shape, dtype=torch.float32)


def _right_singular(rows: "torch.Tensor", rank: int) -> "torch.Tensor":
    """The first right singular vectors [V, rank] of sparse rows [N, V], by one subspace iteration
    from random directions (Halko, Martinsson & Tropp 2011, algorithms 4.4 and 5.1).
    """
    import torch

    columns = rows.to_sparse_coo().t().to_sparse_csr()
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(rows.shape[1], rank + _OVERSAMPLED, generator=generator)
    basis = torch.linalg.qr(rows @ start).Q
    basis = torch.linalg.qr(rows @ torch.linalg.qr(columns @ basis).Q).Q
    left: torch.Tensor = torch.linalg.svd(columns @ basis, full_matrices=False).U
    return left[:, :rank]


def _unit(vectors: "torch.Tensor") -> NDArray[np.float32]:
    import torch

    found: NDArray[np.float32] = torch.nn.functional.normalize(vectors, dim=1).numpy()
    return found


def positions(index: Index, queries: Sequence[str]) -> list[list[int]]:
    """The passages that an index finds for each query, best first."""
    return [[hit.position for hit in hits] for hits in index.search(queries, TOP_K)]


def measure(corpus: Path, folder: Path, queries: int, threads: int = 1) -> dict[str, Any]:
    """By kind of index: its cost, milliseconds a query in batches of 64, recall@10 against Flat."""
    from retrieval_server.index import faiss_index

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
        before, began_s = status_bytes("VmRSS"), time.monotonic()
        vectors = faiss_index.build(blocks, DIMENSION, len(documents), factory, threads)
        built_s, rss_bytes = time.monotonic() - began_s, status_bytes("VmRSS") - before
        index = faiss_index.DenseIndex(vectors, lsa, threads=threads)  # type: ignore[arg-type]
        began_s = time.monotonic()
        each = [positions(index, asked[at : at + 64]) for at in range(0, len(asked), 64)]
        searched_s = time.monotonic() - began_s
        hits = [row for batch in each for row in batch]
        exact = exact or hits
        file = folder / f"{kind}.index"
        faiss_index.write(vectors, file)
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
