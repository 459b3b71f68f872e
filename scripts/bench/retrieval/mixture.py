"""Vectors by the million, drawn from a mixture that was fitted to encoded passages.

A component for each of COMPONENTS centroids (k-means), as likely as its passages are many, with the
covariance that all share within their components, and unit length in the end. So vectors lie as
close to one another as encoded passages do, in as few directions.
`python -m scripts.bench.retrieval.mixture PLAN OUT` measures one kind of index over them.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from configs.runtime.files import replacing
from configs.runtime.process import begin
from retrieval_server.corpus import load_corpus
from scripts.bench.harness import status_bytes
from scripts.bench.retrieval.recall import TOP_K, Lsa, positions

COMPONENTS = 256
QUERIES = 1000
_BLOCK = 4096
_QUERY_SEED = 1 << 40  # others than the blocks'
Vectors = NDArray[np.float32]


class Plan(msgspec.Struct, frozen=True):
    """One measurement: `fitted`: where the mixture is kept, once it is made of `corpus`."""

    corpus: str
    fitted: str
    vectors: int
    factory: str
    threads: int


class Mixture:
    """The mixture: centres [K, D], the components' odds [K] and a root [D, D] of the covariance."""

    def __init__(self, centres: Vectors, odds: Vectors, root: Vectors) -> None:
        self.centres, self.odds, self.root = centres, odds, root

    @classmethod
    def fitted(cls, vectors: Vectors) -> "Mixture":
        """The mixture of these unit vectors [N, D]."""
        centres = vectors[np.linspace(0, len(vectors) - 1, COMPONENTS).astype(np.int64)].copy()
        for _ in range(10):
            nearest = np.argmax(vectors @ centres.T - (centres**2).sum(1) / 2, axis=1)
            for each in np.unique(nearest):
                centres[each] = vectors[nearest == each].mean(0)
        within = vectors - centres[nearest]
        values, axes = np.linalg.eigh(within.T @ within / len(vectors))
        odds = (np.bincount(nearest, minlength=COMPONENTS) / len(vectors)).astype(np.float32)
        return cls(centres, odds, np.sqrt(np.maximum(values, 0.0)) * axes)

    def draw(self, count: int, seed: int) -> Vectors:
        """Unit vectors [count, D]."""
        chance = np.random.default_rng(seed)
        odds = self.odds.astype(np.float64)
        component = chance.choice(len(odds), count, p=odds / odds.sum())
        noise = chance.standard_normal((count, len(self.root)), np.float32)
        drawn = self.centres[component] + noise @ self.root.T
        unit: Vectors = (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)
        return unit

    def blocks(self, count: int) -> Iterator[Vectors]:
        """`count` vectors, the same each time."""
        for block, first in enumerate(range(0, count, _BLOCK)):
            yield self.draw(min(_BLOCK, count - first), block)


class Asked:
    """An encoder's stand-in: a query is the number of a drawn vector."""

    name = "drawn"

    def __init__(self, mixture: Mixture) -> None:
        self._vectors = mixture.draw(QUERIES, _QUERY_SEED)
        self.dimension = self._vectors.shape[1]

    def queries(self, texts: Sequence[str]) -> Vectors:
        """float32[N, D]."""
        return self._vectors[[int(text) for text in texts]]


def mixture_of(corpus: Path, place: Path) -> Mixture:
    """The mixture of a corpus' vectors (`recall.Lsa`), kept in a file."""
    if not place.exists():
        texts = [document.contents for document in load_corpus(corpus)]
        made = Mixture.fitted(Lsa(texts).vectors)
        with replacing(place, durable=False) as draft, draft.open("wb") as file:
            np.savez(file, centres=made.centres, odds=made.odds, root=made.root)
    with np.load(place) as kept:
        return Mixture(kept["centres"], kept["odds"], kept["root"])


def measure(plan: Plan) -> dict[str, Any]:
    """Cost, memory, milliseconds a query in batches of 64, and what each query finds."""
    from retrieval_server.index import faiss_index

    mixture = mixture_of(Path(plan.corpus), Path(plan.fitted))
    asked = Asked(mixture)
    before, began_s = status_bytes("VmRSS"), time.monotonic()
    vectors = faiss_index.build(
        lambda: mixture.blocks(plan.vectors), asked.dimension, plan.vectors, plan.factory,
        plan.threads,
    )  # fmt: skip
    built_s, rss_bytes = time.monotonic() - began_s, status_bytes("VmRSS") - before
    index = faiss_index.DenseIndex(vectors, asked, threads=plan.threads)  # type: ignore[arg-type]
    names, began_s = [str(number) for number in range(QUERIES)], time.monotonic()
    found = [row for at in range(0, QUERIES, 64) for row in positions(index, names[at : at + 64])]
    return {
        "index": index.name,
        "vectors": plan.vectors,
        "build_s": built_s,
        "rss_bytes": rss_bytes,
        "peak_rss_bytes": status_bytes("VmHWM"),
        "ms_per_query": 1000 * (time.monotonic() - began_s) / QUERIES,
        "parameters": faiss_index.parameters(vectors, plan.factory, plan.vectors),
        f"top{TOP_K}": found,
    }


if __name__ == "__main__":
    begin("mixture", threads=2)
    given = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)
    Path(sys.argv[2]).write_text(json.dumps(measure(given)), encoding="utf-8")
