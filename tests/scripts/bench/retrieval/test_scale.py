"""What is generated is shaped as said and the same each time; figures have their names."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from retrieval_server.corpus import load_corpus
from scripts.bench.retrieval import generated, scale
from scripts.bench.retrieval.mixture import Asked, Mixture


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(itertools.islice(generated.texts(), 3000))


def test_every_rank_has_a_word_of_its_own() -> None:
    assert len({generated.word(rank) for rank in range(20_000)}) == 20_000


def test_passages_are_as_long_and_as_full_of_stop_words_as_wiki_18_s(texts: list[str]) -> None:
    sizes = np.array([len(text.partition("\n")[2].split()) for text in texts])
    assert sizes.max() == 100 and 0.8 < (sizes == 100).mean() < 0.9 and sizes.min() >= 1
    titles = [text.partition("\n")[0] for text in texts]
    assert len(texts) / len(set(titles)) == pytest.approx(6.5, rel=0.15)
    words = [word for text in texts for word in text.partition("\n")[2].split()]
    assert 0.2 < sum(word in generated.STOP_WORDS for word in words) / len(words) < 0.5


def test_a_corpus_is_the_same_each_time_and_is_asked_for(tmp_path: Path) -> None:
    first = generated.corpus(tmp_path / "a", 300)
    assert first.read_bytes() == generated.corpus(tmp_path / "b", 300).read_bytes()
    passages = load_corpus(first)
    asked = generated.queries(first, 300, 40)
    assert asked == generated.queries(first, 300, 40) and len(passages) == 300
    assert [len(each) for each in asked.values()] == [40, 40]
    held = [each.contents for each in passages]
    assert all(any(set(query.split()) <= set(text.replace('"', " ").split()) for text in held)
               for query in asked["keyword"])  # fmt: skip
    assert all({"who", "was", "the", "of", "in"} <= {*query.split()} for query in asked["question"])


def test_a_mixture_is_near_what_it_was_fitted_to() -> None:
    chance = np.random.default_rng(0)
    centres = chance.standard_normal((300, 16)).astype(np.float32)
    given = centres[chance.integers(0, 300, 3000)] + 0.1 * chance.standard_normal((3000, 16))
    given = (given / np.linalg.norm(given, axis=1, keepdims=True)).astype(np.float32)
    mixture = Mixture.fitted(given)
    drawn = np.concatenate(list(mixture.blocks(9000)))
    assert drawn.shape == (9000, 16) and drawn.dtype == np.float32
    assert np.linalg.norm(drawn, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert np.array_equal(drawn, np.concatenate(list(mixture.blocks(9000))))
    nearest = [float((vectors @ given[::2].T).max(1).mean()) for vectors in (given[1::2], drawn)]
    assert nearest[1] == pytest.approx(nearest[0], abs=0.1)
    asked = Asked(mixture)
    assert asked.queries(["3", "0"]).shape == (2, 16)


def test_lists_grow_with_the_vectors() -> None:
    assert scale.factories(2_000_000)["ivf_pq"] == "IVF2048,PQ96"
    assert scale.factories(100_000)["ivf"] == "IVF128,Flat"


def test_figures_have_their_names() -> None:
    one = {"qps": 4.0, "p50_s": 0.25, "p99_s": 0.5}
    words = {
        kind: {"seconds": 10.0, "file_bytes": 1e6, "peak_rss_bytes": 1, "keyword": one,
               "question": one | {"qps": qps}}
        for kind, qps in (("bm25", 2.0), ("tantivy", 40.0))
    }  # fmt: skip
    told = {"index": "Flat", "build_s": 1.0, "rss_bytes": 9, "ms_per_query": 1.0}
    vectors = {"flat": told | {"top10": [[1, 2]]}, "sq8": told | {"top10": [[2, 3]]}}
    found = scale.summary(scale.WIKI_18 // 10, words, vectors)
    assert found["tantivy_over_bm25_questions"] == 20.0
    assert found["scale"]["vectors"]["sq8"]["recall10"] == 0.5
    at = found["scale"]["words"]["bm25"]["at_21m"]
    assert at["seconds"] == pytest.approx(100, rel=1e-3)
    assert at["question_p50_s"] == pytest.approx(2.5, rel=1e-3)
    assert found.keys() >= scale.GOALS.keys() and len(scale.tables(found)) == 2
