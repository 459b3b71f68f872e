"""Fusion against its formula; two indexes are fused where both are named, of one corpus."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.retrieval import RetrievalConfig
from retrieval_server.encoder import Encoder
from retrieval_server.index.base import Hit
from retrieval_server.index.build import build_bm25, build_dense, build_tantivy
from retrieval_server.index.hybrid import Hybrid, fused
from retrieval_server.index.open_index import look, open_index
from retrieval_server.protocol import BadIndex
from tests.retrieval_server.encoders import make_encoder

rows = st.lists(st.permutations(range(12)).map(lambda order: order[:7]), min_size=1, max_size=3)


@given(rows=rows, top_k=st.integers(1, 15))
def test_ranks_are_fused_ties_in_corpus_order(rows: list[list[int]], top_k: int) -> None:
    scores: defaultdict[int, float] = defaultdict(float)
    for row in rows:
        for place, position in enumerate(row):
            scores[position] += 1 / (61 + place)
    expected = sorted(scores, key=lambda position: (-scores[position], position))
    hits = fused([[Hit(position, 9.0) for position in row] for row in rows], top_k)
    assert [hit.position for hit in hits] == expected[:top_k]
    assert [hit.score for hit in hits] == [scores[hit.position] for hit in hits]


class Fixed:
    """An index that finds the same for every query."""

    name, fingerprint = "fixed", ""

    def __init__(self, *positions: int) -> None:
        self._hits = [Hit(position, 1.0) for position in positions]

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        return [self._hits[:top_k] for _ in queries]


def test_a_smaller_top_k_is_a_prefix_and_nothing_found_is_nothing() -> None:
    index = Hybrid([Fixed(3, 1, 2), Fixed(1, 4)])
    [whole] = index.search(["q"], 9)
    assert [hit.position for hit in whole] == [1, 3, 4, 2]
    assert index.search(["q", "r"], 2) == [whole[:2]] * 2
    assert Hybrid([Fixed(), Fixed()]).search(["q"], 3) == [[]]
    assert index.name == "hybrid (reciprocal ranks, k 60, of the best 100): fixed + fixed"


def _quiet(step: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Indexes of one corpus, `dense`, `tantivy` and `bm25`, and `other`, of another."""
    root = tmp_path_factory.mktemp("hybrid")
    encoder = Encoder(make_encoder(root / "tiny"))
    texts = [f"the mayor of town {i} is {i * 7}" for i in range(30)]
    for name, some in (("corpus", texts), ("others", texts[1:])):
        lines = [msgspec.json.encode({"id": text, "contents": text}) for text in some]
        (root / name).write_bytes(b"\n".join(lines))
    build_dense(root / "corpus", root / "dense", encoder, "Flat", 1, _quiet)
    for build, corpus, name in (
        (build_tantivy, "corpus", "tantivy"),
        (build_bm25, "corpus", "bm25"),
        (build_tantivy, "others", "other"),
    ):
        build(root / corpus, root / name, _quiet)
    return root


@pytest.mark.parametrize(("words", "named"), [("tantivy", "tantivy (BM25"), ("bm25", "bm25 (Luc")])
def test_an_index_of_words_and_one_of_vectors(folders: Path, words: str, named: str) -> None:
    asked = RetrievalConfig(
        index=str(folders / "dense"), word_index=str(folders / words), kind=f"{words}+dense"
    )
    look(asked)
    passages, index = open_index(asked)
    assert index.name.startswith("hybrid (reciprocal ranks, k 60, of the best 100): " + named)
    assert "+ faiss Flat" in index.name
    [hits] = index.search([passages[5].contents], 3)
    assert hits[0] == Hit(5, pytest.approx(2 / 61))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"word_index": "other"}, "other' was built from .*others', 29 passages, and .*corpus'"),
        ({"word_index": "bm25"}, r"kind 'bm25'.*word_index\), or say retrieval.kind=bm25\+dense"),
        ({"word_index": "dense"}, r"'dense', and retrieval.kind = 'tantivy\+dense': name another"),
        ({"index": "bm25"}, r"'bm25', and .*: name another one \(retrieval.index\)$"),
        ({"word_index": "corpus"}, "holds no manifest.json"),
    ],
)
def test_what_does_not_go_together_is_refused(
    folders: Path, given: dict[str, str], said: str
) -> None:
    named = {"index": "dense", "word_index": "tantivy"} | given
    paths = {field: str(folders / name) for field, name in named.items()}
    asked = RetrievalConfig(kind="tantivy+dense", **paths)
    for each in (look, open_index):
        with pytest.raises(BadIndex, match=said):
            each(asked)


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "tantivy+dense", "index": "a"},
        {"kind": "dense", "index": "a", "word_index": "b"},
        {"index": "a", "word_index": "b"},
        {"kind": "bm25+dense", "word_index": "b"},
    ],
)
def test_half_a_fusion_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"kind=bm25\+dense or tantivy\+dense, and both"):
        RetrievalConfig(**given)
