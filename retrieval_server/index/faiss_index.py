"""Search by FAISS: exact (Flat), HNSW, IVF, vectors in fewer bits (SQ, PQ), any factory string.

Hits that FAISS could not fill in (position −1) are dropped. Scores are inner products or
negative distances: higher is better in any case.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray

from retrieval_server.encoder import Encoder
from retrieval_server.index.base import Hit
from retrieval_server.protocol import MAX_TOP_K, BadIndex

VERSION = f"faiss {faiss.__version__}"
EF_SEARCH = 256
_AHEAD = 32  # queries that are encoded while those before them are searched for
_LISTS = 5.0  # times the root of their number: a third of 256, a fiftieth of 65,536
_EF_CONSTRUCTION = 100  # FAISS's 40 costs half the time and a few neighbours in a hundred
# Vectors for each centroid: FAISS itself takes no more than the first, and warns below 39. They lie
# in memory: many lists get fewer.
_TRAINED_ON, _TRAINED_ON_LEAST, _TRAINED_ON_AT_ONCE = 256, 64, 1 << 20
_READ_BYTES = 1 << 24


class DenseIndex:
    """Searches the vectors of passages by those of queries.

    `ef_search` (HNSW; at least MAX_TOP_K, so that what is found does not depend on how many others
    want) and `nprobe` (IVF; 0: by the number of lists) buy recall with time; they mean nothing to
    other kinds.
    """

    def __init__(
        self,
        vectors: faiss.Index,
        encoder: Encoder,
        ef_search: int = EF_SEARCH,
        nprobe: int = 0,
        threads: int = 1,
        *,
        gpus: bool = False,
        overlapped: bool = False,
        fingerprint: str = "",
    ) -> None:
        """`gpus`: search on all of them. `overlapped`: encode the next queries while these are
        searched for. `fingerprint`: of the vectors' file and its encoder.
        """
        if vectors.d != encoder.dimension:
            raise BadIndex(
                f"the index holds vectors of {vectors.d} numbers, the encoder {encoder.path} makes "
                f"{encoder.dimension}: name the encoder that the index was built with"
            )
        self._encoder, self._threads, self._overlapped = encoder, threads, overlapped
        self._sign = 1.0 if vectors.metric_type == faiss.METRIC_INNER_PRODUCT else -1.0
        self.name = f"{_kind(vectors)}{_tuned(vectors, ef_search, nprobe)}, {encoder.name}"
        self.fingerprint = fingerprint
        self._vectors = on_gpus(vectors) if gpus else vectors  # which take their settings along

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """The nearest passages, best first; equal queries are encoded once."""
        different = list(dict.fromkeys(queries))
        faiss.omp_set_num_threads(self._threads)
        # Always as many: the heap's size would decide which of equal scores are seen.
        wanted = min(max(top_k, MAX_TOP_K), self._vectors.ntotal)
        found: list[list[Hit]] = []
        for vectors in self._encoded(different):
            scores, positions = self._vectors.search(vectors, wanted)
            found += [
                _hits(row_scores * self._sign, row, top_k)
                for row_scores, row in zip(scores, positions, strict=True)
            ]
        places = {query: i for i, query in enumerate(different)}
        return [list(found[places[query]]) for query in queries]

    def _encoded(self, queries: list[str]) -> Iterator[NDArray[np.float32]]:
        """The vectors of queries, some at a time; the next ones are on their way meanwhile."""
        size = _AHEAD if self._overlapped else len(queries)
        parts = [queries[at : at + size] for at in range(0, len(queries), size or 1)]
        if len(parts) < 2:
            yield from map(self._encoder.queries, parts)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="encoder") as thread:
            coming = thread.submit(self._encoder.queries, parts[0])
            for part in parts[1:]:
                vectors = coming.result()
                coming = thread.submit(self._encoder.queries, part)
                yield vectors
            yield coming.result()


def _hits(scores: NDArray[np.float32], positions: NDArray[np.int64], top_k: int) -> list[Hit]:
    there = positions >= 0
    scores, positions = scores[there], positions[there]
    order = np.lexsort((positions, -scores))[:top_k]
    pairs = zip(positions[order].tolist(), scores[order].tolist(), strict=True)
    return [Hit(*pair) for pair in pairs]


def made(factory: str, dimension: int) -> faiss.Index:
    """An empty index. Raises BadIndex naming the factory string."""
    try:
        return faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise BadIndex(
            f"{factory!r} is no FAISS factory string for {dimension} numbers: {_said(error)}; "
            "Flat, HNSW32, SQ8, IVF256,Flat or IVF256,PQ96 are"
        ) from error


def build(
    blocks: Callable[[], Iterator[NDArray[np.float32]]],
    dimension: int,
    count: int,
    factory: str,
    threads: int,
    progress: Callable[[int], None] = lambda done: None,
) -> faiss.Index:
    """An index of `count` vectors that come in blocks [n, D], the same for the same vectors.

    What needs training is trained on every n-th vector. A graph (HNSW) is grown by one thread:
    several would grow another one each time. Raises BadIndex naming the factory string.
    """
    index = made(factory, dimension)
    if hasattr(_inner(index), "hnsw"):
        _inner(index).hnsw.efConstruction = _EF_CONSTRUCTION
    if hasattr(_inner(index), "do_polysemous_training"):
        # Minutes of annealing for a filter by Hamming distance that no search asks for.
        _inner(index).do_polysemous_training = False
    try:
        faiss.omp_set_num_threads(threads)
        if not index.is_trained:
            index.train(_sample(blocks, count, _wanted(index, count)))
        faiss.omp_set_num_threads(1 if "HNSW" in factory or "NSG" in factory else threads)
        for block in blocks():
            index.add(block)
            progress(index.ntotal)
    except RuntimeError as error:
        raise BadIndex(
            f"{factory!r} cannot hold {count} passages: {_said(error)}; choose another kind, fewer "
            "lists or fewer bits"
        ) from error
    return index


def parameters(index: faiss.Index, factory: str, count: int) -> dict[str, int | float | str]:
    """What an index of so many vectors was made with, and how many of them it was trained on."""
    inner = _inner(index)
    stored = faiss.downcast_index(inner.storage) if hasattr(inner, "hnsw") else inner
    told: dict[str, int | float | str] = {}
    if hasattr(stored, "code_size"):
        told["bytes_per_vector"] = int(stored.code_size)
    if not made(factory, index.d).is_trained:
        told["trained_on"] = _wanted(index, count)
    if hasattr(inner, "nlist"):
        told["lists"] = int(inner.nlist)
    if hasattr(inner, "hnsw"):
        told |= {"neighbours": int(inner.hnsw.nb_neighbors(1)), "ef_construction": _EF_CONSTRUCTION}
    if hasattr(stored, "pq"):
        told |= {"pq_parts": int(stored.pq.M), "pq_bits": int(stored.pq.nbits)}
    if hasattr(stored, "sq"):
        told["sq_bits"] = int(stored.sq.bits)
    return told


def write(index: faiss.Index, path: Path) -> None:
    """Write an index to a file."""
    faiss.write_index(index, str(path))


def read(paths: Sequence[Path], mapped: bool = False) -> faiss.Index:
    """The index of a file, or of its parts in order, as `split` leaves them.

    `mapped`: its vectors stay in the file and are read when needed (one file; Flat and HNSW).
    Raises BadIndex naming the file.
    """
    if mapped and len(paths) > 1:
        raise BadIndex(
            f"retrieval.map_index = True: parts cannot be mapped: join them first: cat "
            f"{paths[0].parent}/part_* > one.index"
        )
    flags = faiss.IO_FLAG_MMAP_IFC if mapped else 0
    try:
        if len(paths) == 1:
            return faiss.read_index(str(paths[0]), flags)
        parts = _Parts(paths)
        with parts:
            return faiss.read_index(faiss.PyCallbackIOReader(parts.read, _READ_BYTES))
    except (RuntimeError, MemoryError) as error:
        raise BadIndex(
            f"{', '.join(map(str, paths))}: {_said(error)}: the file is cut short, damaged or no "
            "FAISS index: copy or build it again"
        ) from error


def on_gpus(index: faiss.Index) -> faiss.Index:
    """The index over all GPUs, in halves of float32, as Search-R1 does. Raises BadIndex."""
    if not hasattr(faiss, "StandardGpuResources") or not faiss.get_num_gpus():
        raise BadIndex(
            f"{VERSION} here has no GPU: install faiss-gpu in the retrieval server's environment, "
            "or set retrieval.index_device=cpu"
        )
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = options.shard = True
    try:
        return faiss.index_cpu_to_all_gpus(index, co=options)
    except RuntimeError as error:
        raise BadIndex(
            f"{_kind(index)} cannot be searched on GPUs: {_said(error)}: set "
            "retrieval.index_device=cpu"
        ) from error


class _Parts:
    """Files read as one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._left = list(paths)
        self._file = self._left.pop(0).open("rb")

    def __enter__(self) -> "_Parts":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        """At most `size` bytes, fewer at the end alone."""
        data = self._file.read(size)
        while len(data) < size and self._left:
            self._file.close()
            self._file = self._left.pop(0).open("rb")
            data += self._file.read(size - len(data))
        return data


def _wanted(index: faiss.Index, count: int) -> int:
    """The number of vectors to train on, by the number of centroids."""
    lists = max(getattr(_inner(index), "nlist", 0), 1024)
    return min(count, lists * _TRAINED_ON, max(lists * _TRAINED_ON_LEAST, _TRAINED_ON_AT_ONCE))


def _sample(
    blocks: Callable[[], Iterator[NDArray[np.float32]]], count: int, wanted: int
) -> NDArray[np.float32]:
    chosen = np.linspace(0, count, wanted, endpoint=False).astype(np.int64)
    parts, begin = [], 0
    for block in blocks():
        inside = chosen[(chosen >= begin) & (chosen < begin + len(block))] - begin
        parts.append(block[inside])
        begin += len(block)
    return np.concatenate(parts)


def _inner(index: faiss.Index) -> faiss.Index:
    """The index under its wrappers (a rotation before, a re-ranking after)."""
    index = faiss.downcast_index(index)
    while hasattr(index, "base_index") or isinstance(index, faiss.IndexPreTransform):
        inner = index.base_index if hasattr(index, "base_index") else index.index
        index = faiss.downcast_index(inner)
    return index


def _kind(index: faiss.Index) -> str:
    return f"faiss {type(faiss.downcast_index(index)).__name__.removeprefix('Index')}"


def _tuned(index: faiss.Index, ef_search: int, nprobe: int) -> str:
    inner = _inner(index)
    if hasattr(inner, "hnsw"):
        inner.hnsw.efSearch = ef_search
        return f" (efSearch {ef_search})"
    if hasattr(inner, "nprobe"):
        inner.nprobe = min(nprobe or math.ceil(_LISTS * math.sqrt(inner.nlist)), inner.nlist)
        return f" (nprobe {inner.nprobe} of {inner.nlist})"
    return ""


def _said(error: BaseException) -> str:
    """FAISS's own words without the place in its source."""
    words = re.sub(r"^Error in .*?:\d+: ", "", str(error).splitlines()[0] if str(error) else "")
    return words.removeprefix("Error: ") or repr(error)
