"""Which words are counted, and how a passage's length is told."""

from retrieval_server.index import frequent
from retrieval_server.index.frequent import WORDS, choose, stretches


def test_the_words_of_most_texts_are_chosen() -> None:
    texts = ["the the the mayor", "The king", "bore, the", "of kelu", "kelu, of, of"]
    assert choose(texts)[:3] == ["the", "kelu", "of"]
    assert len(choose([f"{i}" for i in range(1000)])) == WORDS


def test_stretches_lie_evenly_over_the_corpus() -> None:
    assert [*stretches(1)] == [0] and [*stretches(2500)] == [0, 1000, 2000]
    begins = [*stretches(2_000_000)]
    assert len(begins) == 64 and begins[-1] == 63 * 31_250


def test_lengths_are_those_of_lucenes_byte() -> None:
    told = frequent._LENGTHS.tolist()
    assert told[:45] == [*range(41), 42, 44, 46, 48] and len(told) == 256
    assert told == sorted(set(told)) and told[-1] == 2_013_265_944
