"""BM25 against a transcription of its formula; order, ties and words."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_server.index.base import Hit
from retrieval_server.index.bm25 import K1, B, BM25Index, best
from retrieval_server.index.words import words
from retrieval_server.protocol import CorpusError

word = st.sampled_from(["the", "of", "mayor", "capital", "bore", "xanu", "kelu", "c", "7"])
sentence = st.lists(word, min_size=1, max_size=9).map(" ".join)


def _naive(texts: list[str], query: str) -> list[float]:
    """Lucene's BM25, word by word, passage by passage."""
    bags = [Counter(text.split()) for text in texts]
    mean = sum(bag.total() for bag in bags) / len(bags)
    scores = [0.0] * len(bags)
    for term in query.split():
        df = sum(term in bag for bag in bags)
        idf = math.log(1 + (len(bags) - df + 0.5) / (df + 0.5))
        for i, bag in enumerate(bags):
            norm = K1 * (1 - B + B * bag.total() / mean)
            scores[i] += idf * bag[term] / (bag[term] + norm)
    return scores


@given(texts=st.lists(sentence, min_size=1, max_size=12), query=sentence, top_k=st.integers(1, 15))
def test_hits_are_those_of_the_formula(texts: list[str], query: str, top_k: int) -> None:
    scores = _naive(texts, query)
    [hits] = BM25Index(texts).search([query], top_k)
    assert len(hits) == min(top_k, sum(score > 0 for score in scores))
    assert len({hit.position for hit in hits}) == len(hits)
    expected = sorted(scores, reverse=True)[: len(hits)]
    assert [hit.score for hit in hits] == pytest.approx(expected, rel=1e-5)
    assert [scores[hit.position] for hit in hits] == pytest.approx(expected, rel=1e-5)


@given(
    values=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=20),
    top_k=st.integers(1, 25),
)
def test_ties_go_to_the_earlier_passage(values: list[float], top_k: int) -> None:
    positive = [Hit(i, value) for i, value in enumerate(values) if value > 0]
    expected = sorted(positive, key=lambda hit: (-hit.score, hit.position))[:top_k]
    assert best(np.array(values, np.float32), top_k) == expected


@given(texts=st.lists(sentence, min_size=1, max_size=12), query=sentence, top_k=st.integers(1, 6))
def test_a_smaller_top_k_is_a_prefix(texts: list[str], query: str, top_k: int) -> None:
    index = BM25Index(texts)
    assert index.search([query], top_k)[0] == index.search([query], 15)[0][:top_k]


@given(texts=st.lists(sentence, min_size=1, max_size=12), query=sentence, others=st.data())
def test_words_in_any_order_and_company_find_the_same(
    texts: list[str], query: str, others: st.DataObject
) -> None:
    index = BM25Index(texts)
    shuffled = " ".join(others.draw(st.permutations(query.upper().split())))
    company = others.draw(st.lists(sentence, max_size=3))
    [alone] = index.search([query], 3)
    assert index.search([*company, shuffled, query], 3)[-2:] == [alone, alone]


def test_equal_passages_come_in_corpus_order() -> None:
    [hits] = BM25Index(["bore kelu"] * 5).search(["kelu"], 3)
    assert [hit.position for hit in hits] == [0, 1, 2]


def test_names_that_are_stop_words_or_letters_are_found() -> None:
    index = BM25Index(["the who", "vitamin c", "it is so", "a b"])
    found = [hits[0].position for hits in index.search(["who", "C", "so", "a of"], 1)]
    assert found == [0, 1, 2, 3]


def test_words_fold_case_and_width() -> None:
    assert words("The MAYOR's ＢＯＲＥ, straße!") == ["the", "mayor", "s", "bore", "strasse"]


@pytest.mark.parametrize("query", ["", "   ", "unheard", "?!", "<information>"])
def test_no_shared_word_is_no_hit(query: str) -> None:
    assert BM25Index(["the mayor", "of bore"]).search([query, "bore"], 3) == [
        [],
        [Hit(1, pytest.approx(0.3, rel=0.5))],
    ]


def test_a_corpus_without_words_is_refused() -> None:
    with pytest.raises(CorpusError, match="no passage holds a word"):
        BM25Index(["!!", "…"])


def test_a_passage_without_words_is_never_found() -> None:
    assert [hit.position for hit in BM25Index(["!!", "bore"]).search(["bore !!"], 3)[0]] == [1]
