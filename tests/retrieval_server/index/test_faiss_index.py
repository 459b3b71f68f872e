"""FAISS against a naive search of the same vectors; what it cannot fill in is never shown."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from retrieval_server.encoder import Encoder
from retrieval_server.index.base import Hit
from retrieval_server.index.faiss_index import (
    DenseIndex,
    build,
    made,
    on_gpus,
    parameters,
    read,
    write,
)
from retrieval_server.protocol import BadIndex
from tests.retrieval_server.encoders import make_encoder

TEXTS = [
    f"the {r} of {c}{v}{w}"
    for r in ("mayor", "river")
    for c in "bcdfg"
    for v in "aeiou"
    for w in "kmn"
]
QUERIES = ["river of bak", "mayor of gum", "who", "river of bak"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return Encoder(make_encoder(tmp_path_factory.mktemp("encoders") / "tiny"))


@pytest.fixture(scope="module")
def vectors(encoder: Encoder) -> NDArray[np.float32]:
    return encoder.passages(TEXTS)


def _blocks(vectors: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    return iter(np.array_split(vectors, 4))


def _build(vectors: NDArray[np.float32], factory: str, threads: int = 2) -> object:
    return build(lambda: _blocks(vectors), vectors.shape[1], len(vectors), factory, threads)


def _naive(encoder: Encoder, vectors: NDArray[np.float32], query: str, top_k: int) -> list[int]:
    scores = vectors @ encoder.queries([query])[0]
    order: list[int] = np.argsort(-scores, kind="stable")[:top_k].tolist()
    return order


@pytest.mark.parametrize("factory", ["Flat", "HNSW16", "IVF4,Flat"])
def test_hits_agree_with_the_naive_search(
    encoder: Encoder, vectors: NDArray[np.float32], factory: str
) -> None:
    index = DenseIndex(_build(vectors, factory), encoder)
    rows = index.search(QUERIES, 3)
    expected = [_naive(encoder, vectors, query, 3) for query in QUERIES]
    assert [[hit.position for hit in row] for row in rows] == expected
    assert all(a.score >= b.score for row in rows for a, b in itertools.pairwise(row))


def test_fewer_hits_than_asked_for_are_all_there_are(
    encoder: Encoder, vectors: NDArray[np.float32]
) -> None:
    (row,) = DenseIndex(_build(vectors[:2], "Flat"), encoder).search(["who"], 9)
    assert sorted(hit.position for hit in row) == [0, 1]
    (few,) = DenseIndex(_build(vectors, "IVF16,Flat"), encoder, nprobe=1).search(["who"], 100)
    assert 0 < len(few) < 100
    assert all(hit.position >= 0 for hit in few)


def test_a_smaller_top_k_is_a_prefix_and_ties_keep_the_corpus_order(
    encoder: Encoder, vectors: NDArray[np.float32]
) -> None:
    twice = np.concatenate([vectors[:20], vectors[:20]])
    for factory in ("Flat", "HNSW16"):
        index = DenseIndex(_build(twice, factory), encoder)
        (many,), (few,) = index.search(["who"], 40), index.search(["who"], 5)
        assert few == many[:5]
        assert [hit.position for hit in few[:2]] == sorted(hit.position for hit in few[:2])


class Counting:
    """An encoder that counts its calls."""

    def __init__(self, encoder: Encoder) -> None:
        self.calls, self._encoder = 0, encoder
        self.dimension, self.name = encoder.dimension, encoder.name

    def queries(self, texts: list[str]) -> NDArray[np.float32]:
        self.calls += 1
        return self._encoder.queries(texts)


def test_the_next_queries_are_encoded_while_these_are_searched_for(
    encoder: Encoder, vectors: NDArray[np.float32]
) -> None:
    counting = Counting(encoder)
    index = DenseIndex(_build(vectors, "Flat", threads=1), counting, overlapped=True)
    parts = index._encoded(TEXTS)
    next(parts)
    end = time.monotonic() + 20.0
    while counting.calls < 2 and time.monotonic() < end:
        time.sleep(0.001)
    assert counting.calls == 2, "and no more: two stages"
    parts.close()
    plain = DenseIndex(_build(vectors, "Flat", threads=1), encoder).search(TEXTS, 1)
    assert [row[0].position for row in index.search([*TEXTS, TEXTS[0]], 1)] == [
        *(row[0].position for row in plain),
        plain[0][0].position,
    ]
    assert index.search([], 3) == []


def test_distances_become_scores_that_fall(encoder: Encoder, vectors: NDArray[np.float32]) -> None:
    import faiss

    index = faiss.IndexFlatL2(vectors.shape[1])
    index.add(vectors)
    (row,) = DenseIndex(index, encoder).search([QUERIES[0]], 4)
    assert [hit.position for hit in row] == _naive(encoder, vectors, QUERIES[0], 4)
    assert row[0].score > row[-1].score


def test_settings_reach_what_lies_inside(encoder: Encoder, vectors: NDArray[np.float32]) -> None:
    for factory, said in (
        ("PCA8,IVF4,Flat", "(nprobe 3 of 4)"),
        ("HNSW16", "(efSearch 200)"),
        ("IVF4,Flat,RFlat", "(nprobe 3 of 4)"),
    ):
        index = DenseIndex(_build(vectors, factory), encoder, ef_search=200, nprobe=3)
        assert said in index.name


@pytest.mark.parametrize(
    ("factory", "least", "told"),
    [
        ("SQ8", 0.95, {"bytes_per_vector": 32, "trained_on": 150, "sq_bits": 8}),
        ("IVF4,SQ8", 0.9, {"bytes_per_vector": 32, "trained_on": 150, "lists": 4, "sq_bits": 8}),
        ("IVF4,PQ4x4", 0.25, {"bytes_per_vector": 2, "trained_on": 150, "lists": 4,
                              "pq_parts": 4, "pq_bits": 4}),
        ("HNSW8_SQ8", 0.9, {"bytes_per_vector": 32, "trained_on": 150, "neighbours": 8,
                            "ef_construction": 100, "sq_bits": 8}),
        ("Flat", 1.0, {"bytes_per_vector": 128}),
    ],
)  # fmt: skip
def test_fewer_bits_find_most_and_say_what_they_were_trained_on(
    encoder: Encoder, vectors: NDArray[np.float32], factory: str, least: float, told: object
) -> None:
    index = _build(vectors, factory, threads=1)
    assert parameters(index, factory, len(vectors)) == told
    found = DenseIndex(index, encoder, nprobe=4).search(TEXTS[::7], 10)
    rows = [
        {hit.position for hit in row} & {*_naive(encoder, vectors, query, 10)}
        for row, query in zip(found, TEXTS[::7], strict=True)
    ]
    assert sum(map(len, rows)) >= least * 10 * len(rows)


@pytest.mark.parametrize("factory", ["HNSW16", "IVF4,Flat", "SQ8", "IVF4,PQ4x4"])
def test_the_same_vectors_build_the_same_bytes(
    tmp_path: Path, vectors: NDArray[np.float32], factory: str
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        write(_build(vectors, factory, threads=1 if "PQ" in factory else 2), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("factory", ["PQ4x4", "IVF4,PQ4x4"])
def test_no_training_for_a_filter_that_no_search_asks_for(
    vectors: NDArray[np.float32], factory: str
) -> None:
    assert not _build(vectors, factory).do_polysemous_training


@pytest.mark.parametrize("factory", ["Flat", "HNSW16", "IVF4,Flat"])
def test_a_file_its_parts_and_its_map_are_one_index(
    tmp_path: Path, encoder: Encoder, vectors: NDArray[np.float32], factory: str
) -> None:
    path = tmp_path / "e5_Flat.index"
    write(_build(vectors, factory), path)
    data = path.read_bytes()
    parts = [tmp_path / "part_aa", tmp_path / "part_ab", tmp_path / "part_ac"]
    for part, begin, end in zip(parts, (0, 100, 101), (100, 101, len(data)), strict=True):
        part.write_bytes(data[begin:end])
    found = [
        DenseIndex(index, encoder).search(QUERIES, 3)
        for index in (read([path]), read(parts), read([path], mapped=True))
    ]
    assert found[0] == found[1] == found[2]
    assert all(isinstance(hit, Hit) for row in found[0] for hit in row)


def test_faults_are_named(tmp_path: Path, encoder: Encoder, vectors: NDArray[np.float32]) -> None:
    path = tmp_path / "cut.index"
    write(_build(vectors, "Flat"), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadIndex, match=r"cut\.index: .*cut short, damaged or no FAISS index"):
        read([path])
    with pytest.raises(BadIndex, match="'Bogus' is no FAISS factory string for 32 numbers"):
        made("Bogus", 32)
    with pytest.raises(BadIndex, match="'IVF4,PQ5' is no FAISS factory string for 32 numbers"):
        made("IVF4,PQ5", 32)
    with pytest.raises(BadIndex, match="'IVF4096,Flat' cannot hold 150 passages"):
        _build(vectors, "IVF4096,Flat")
    with pytest.raises(BadIndex, match=r"vectors of 16 numbers, the encoder .* makes 32"):
        DenseIndex(_build(np.ascontiguousarray(vectors[:, :16]), "Flat"), encoder)
    with pytest.raises(BadIndex, match=r"set retrieval\.index_device=cpu"):
        on_gpus(made("Flat", 32))
