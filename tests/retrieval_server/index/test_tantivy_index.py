"""tantivy's BM25 against a transcription of its formula; order, ties, limits and names."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from pathlib import Path

import pytest
import tantivy
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.retrieval import RetrievalConfig
from retrieval_server.index import kinds, tantivy_index
from retrieval_server.index.base import Hit
from retrieval_server.index.build import build_bm25, build_tantivy
from retrieval_server.index.frequent import K1, B
from retrieval_server.index.open_index import look, open_index
from retrieval_server.index.tantivy_index import TantivyIndex, build, segments
from retrieval_server.protocol import BadIndex, CorpusError

TEXTS = ["bore kelu"] * 5 + ["the mayor of bore is kelu"] * 5 + ["the who", "vitamin c", "a b"]


def _quiet(step: str, done: int, total: int) -> None:
    pass


def _built(folder: Path, texts: list[str], frequent: Sequence[str] | None = None) -> TantivyIndex:
    """`frequent`: the words that are counted, where not all are."""
    with pytest.MonkeyPatch.context() as patch:
        if frequent is not None:
            patch.setattr(tantivy_index, "choose", lambda sample: frequent)
        build(folder, lambda begin: texts[begin:], len(texts), texts)
    return TantivyIndex(folder)


@pytest.fixture(scope="module", params=[None, (), ("bore", "the")], ids=["all", "none", "some"])
def index(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TantivyIndex:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tantivy_index, "SEGMENT_PASSAGES", 5)  # three segments
        return _built(tmp_path_factory.mktemp("tantivy"), TEXTS, request.param)


def _naive(texts: list[str], query: str) -> list[float]:
    """BM25 with tantivy's constants, word by word, passage by passage."""
    bags = [Counter(text.split()) for text in texts]
    mean = sum(bag.total() for bag in bags) / len(bags)
    scores = [0.0] * len(bags)
    for term in query.split():
        df = sum(term in bag for bag in bags)
        idf = math.log(1 + (len(bags) - df + 0.5) / (df + 0.5))
        for i, bag in enumerate(bags):
            norm = K1 * (1 - B + B * bag.total() / mean)
            scores[i] += idf * (K1 + 1) * bag[term] / (bag[term] + norm)
    return scores


words = st.sampled_from([*dict.fromkeys(" ".join(TEXTS).split()), "unheard"])


@settings(max_examples=50)
@given(query=st.lists(words, min_size=1, max_size=6).map(" ".join), top_k=st.integers(1, 15))
def test_hits_are_those_of_the_formula_ties_in_corpus_order(
    index: TantivyIndex, query: str, top_k: int
) -> None:
    scores = [round(score, 4) for score in _naive(TEXTS, query)]
    order = sorted((-score, i) for i, score in enumerate(scores) if score > 0)[:top_k]
    [hits] = index.search([query], top_k)
    assert [hit.position for hit in hits] == [i for _, i in order]
    assert [hit.score for hit in hits] == pytest.approx([-score for score, _ in order], abs=1e-4)


SOME = ["the", "of", "in", "mayor", "bore", "kelu", "xanu", "miro", "tapo", "zuri"]
ODDS = [60, 40, 30, 8, 4, 2, 2, 1, 1, 1]


@pytest.mark.parametrize(("few", "frequent"), [(1, SOME[:7]), (3, SOME[:3]), (3, []), (3, SOME)])
def test_what_is_left_out_is_no_hit(
    tmp_path: Path, few: int, frequent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rare words and frequent ones, and frequent ones alone, against the formula."""
    chance = random.Random(few)
    texts = [" ".join(chance.choices(SOME, ODDS, k=chance.randint(1, 20))) for _ in range(400)]
    index = _built(tmp_path / "out", texts, frequent)
    for name, value in {"_SEEN": few, "_MORE": 2, "_FEW": 1, "_ENOUGH": 1, "_CHEAP": 0}.items():
        monkeypatch.setattr(tantivy_index, name, value)
    any_of, searches = tantivy_index._any_of, Counter[int]()
    monkeypatch.setattr(
        tantivy_index, "_any_of", lambda terms: searches.update([len(terms)]) or any_of(terms)
    )
    questions = [chance.choices(SOME, k=chance.randint(1, 7)) for _ in range(40)]
    for question in [
        *questions,
        *([*each] for n in (1, 2, 3) for each in combinations(SOME[:4], n)),
    ]:
        [best] = index.search([" ".join(question)], few)
        scores = _naive(texts, " ".join(question))
        most = sorted(filter(None, scores), reverse=True)[:few]
        assert [hit.score for hit in best] == pytest.approx(most, rel=1e-5)
        assert [scores[hit.position] for hit in best] == pytest.approx(most, rel=1e-5)
        assert best == sorted(best, key=lambda hit: (-hit.score, hit.position))
    assert len(searches) > 3, "words were left out, not always as many"
    assert searches.total() > 2 * len(questions), "more passages were looked at, where it took more"


@pytest.mark.parametrize("longest", [60, 3000])
def test_words_counted_score_as_those_that_tantivy_finds(tmp_path: Path, longest: int) -> None:
    """Its lengths of passages, which are of a byte, and its mean. Where a count does not fit its
    byte, the word is tantivy's.
    """
    chance = random.Random(longest)
    texts = [" ".join(chance.choices(SOME, ODDS, k=chance.randint(1, longest))) for _ in range(200)]
    counted, found = _built(tmp_path / "all", texts), _built(tmp_path / "none", texts, ())
    assert len(counted._counts.words) == (10 if longest == 60 else 7), "full: the, of, in"
    for _ in range(20):
        query = " ".join(chance.choices(SOME, k=chance.randint(1, 7)))
        [ours], [theirs] = counted.search([query], 200), found.search([query], 200)
        expected = {hit.position: pytest.approx(hit.score, rel=1e-5) for hit in theirs}
        assert dict(ours) == expected and len(theirs) > 20


def test_fewer_hits_are_a_prefix_of_more_also_where_scores_are_nearly_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores are sums of floats: each must be added up in the same order, whatever is left out,
    and whichever words' passages have all been seen.
    """
    monkeypatch.setattr(tantivy_index, "SEGMENT_PASSAGES", 5000)
    chance = random.Random(0)
    some = [f"w{i}" for i in range(12)]

    def text(position: int) -> str:
        early = [f"r{chance.randrange(4)}"] if position < 400 and position % 9 == 0 else []
        return " ".join([*chance.choices(some, range(1, 13), k=chance.randint(4, 24)), *early])

    texts = [text(position) for position in range(6000)]
    index = _built(tmp_path / "out", texts, some[-5:])
    any_of, asked = tantivy_index._any_of, set[int]()
    monkeypatch.setattr(tantivy_index, "_CHEAP", 1000)
    monkeypatch.setattr(
        tantivy_index, "_any_of", lambda terms: asked.add(len(terms)) or any_of(terms)
    )
    for _ in range(20):
        query = " ".join([*chance.sample(some, 7), *chance.sample(["r0", "r1", "r2", "r3"], 2)])
        [most] = index.search([query], 400)
        for top_k in (1, 3, 4, 5, 10, 17):
            assert index.search([query], top_k) == [most[:top_k]]
    assert len(asked) > 3, "words were left out, not always as many"


def test_equal_passages_come_in_corpus_order_however_many(tmp_path: Path) -> None:
    texts = ["the mayor of bore", "the king of bore"] * 500 + ["xanu"] * 200
    for frequent in (None, ("the", "of"), ()):
        index = _built(tmp_path / f"out{frequent}", texts, frequent)
        [hits] = index.search(["who is the mayor of bore"], 5)
        assert [hit.position for hit in hits] == [0, 2, 4, 6, 8]


def test_a_long_question_is_answered(index: TantivyIndex) -> None:
    many = " ".join(f"w{i}" for i in range(5000))
    [hits] = index.search([f"{many} who {' '.join(TEXTS)}"], 3)
    assert len(hits) == 3


def test_words_in_any_order_and_company_find_the_same(index: TantivyIndex) -> None:
    one, _, other = index.search(["of bore BORE the mayor", "kelu", "mayor bore the of bore"], 4)
    assert one == other == index.search(["the mayor of bore bore"], 9)[0][:4]


@pytest.mark.parametrize(
    "query", ['"who" AND (vitamin OR c)', "+who -vitamin text:c^9", "who [vitamin TO c] \\ ~ * :"]
)
def test_nothing_in_a_question_is_syntax(index: TantivyIndex, query: str) -> None:
    [hits] = index.search([query], 9)
    assert sorted(hit.position for hit in hits) == [10, 11]


@pytest.mark.parametrize("query", ["", "unheard", "?!", '"', "AND"])
def test_no_shared_word_is_no_hit(index: TantivyIndex, query: str) -> None:
    assert index.search([query], 3) == [[]]


@given(count=st.integers(1, 28_000_000))
def test_segments_shrink_and_are_too_few_to_be_merged(count: int) -> None:
    sizes = segments(count)
    assert sum(sizes) == count and min(sizes) > 0 and len(sizes) <= 7
    assert sizes == sorted(set(sizes), reverse=True)


def test_a_corpus_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no passage holds a word"):
        _built(tmp_path / "out", ["!!", "…"])


def test_a_build_that_was_killed_keeps_its_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tantivy_index, "SEGMENT_PASSAGES", 5)
    begins = []

    def texts(begin: int) -> Iterable[str]:
        begins.append(begin)
        yield from TEXTS[begin:11]
        if len(begins) == 1:
            raise KeyboardInterrupt
        yield from TEXTS[11:]

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "out", texts, len(TEXTS), TEXTS)
    build(tmp_path / "out", texts, len(TEXTS), TEXTS)
    assert begins == [0, sum(segments(len(TEXTS))[:2])] == [0, 10]
    [hits] = TantivyIndex(tmp_path / "out").search(["kelu"], 99)
    assert [hit.position for hit in hits] == [*range(10)]
    _built(tmp_path / "whole", TEXTS)
    for name in ("frequent.rows", "frequent.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_counts_that_are_not_of_the_index_are_refused(tmp_path: Path) -> None:
    _built(tmp_path, TEXTS)
    path = tmp_path / "frequent.rows"
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(BadIndex, match=r"frequent.rows' is of 12 passages instead of 13"):
        TantivyIndex(tmp_path)
    with pytest.raises(BadIndex, match=r"frequent.rows' is cut short: remove the folder"):
        build(tmp_path, lambda begin: TEXTS[begin:], len(TEXTS), TEXTS)
    (tmp_path / "frequent.json").unlink()
    with pytest.raises(BadIndex, match=r"counts no frequent words: .*: build it"):
        TantivyIndex(tmp_path)


@pytest.fixture
def corpus(write_corpus: Callable[..., Path]) -> Path:
    return write_corpus(*({"id": f"p{i}", "contents": text} for i, text in enumerate(TEXTS)))


def test_a_folder_says_what_ranks_and_opens_as_it_is(tmp_path: Path, corpus: Path) -> None:
    made = build_tantivy(corpus, tmp_path / "out", _quiet)
    assert (made.kind, made.parameters, made.passages) == ("tantivy", {"k1": 1.2, "b": 0.75}, 13)
    asked = RetrievalConfig(index=str(tmp_path / "out"), kind="tantivy")
    look(asked)
    passages, index = open_index(asked)
    assert index.name == "tantivy (BM25, k1 1.2, b 0.75)"
    assert passages[index.search(["who"], 1)[0][0].position].contents == "the who"
    path = tmp_path / "out" / next(name for name in made.files if name.endswith(".idx"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadIndex, match=r"\.idx' has \d+ bytes instead of \d+: copy it again"):
        open_index(asked)


def test_another_ranker_is_never_chosen_unsaid(tmp_path: Path, corpus: Path) -> None:
    tantivy, bm25 = str(tmp_path / "tantivy"), str(tmp_path / "bm25")
    build_tantivy(corpus, Path(tantivy), _quiet)
    build_bm25(corpus, Path(bm25), _quiet)
    for asked, said in (
        (RetrievalConfig(index=tantivy), "is an index of tantivy's BM25.*retrieval.kind=tantivy"),
        (RetrievalConfig(index=tantivy, kind="bm25"), "of kind 'tantivy'.*retrieval.kind=tantivy"),
        (RetrievalConfig(index=bm25, kind="tantivy"), "of kind 'bm25'.*retrieval.kind=bm25"),
        (RetrievalConfig(corpus=str(corpus), kind="tantivy"), "OUT --kind tantivy, and name it"),
        (RetrievalConfig(corpus=str(corpus), kind="dense"), "OUT --encoder MODEL, and name it"),
    ):
        for each in (look, open_index):
            with pytest.raises(BadIndex, match=said):
                each(asked)


def test_a_corpus_beyond_its_kind_is_refused_with_the_other(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kinds.MOST_PASSAGES, "bm25", 12)
    said = r"corpus.jsonl' holds more passages than an index of kind 'bm25' takes, 12: .*tantivy"
    for refused in (
        lambda: look(RetrievalConfig(corpus=str(corpus))),
        lambda: open_index(RetrievalConfig(corpus=str(corpus))),
        lambda: build_bm25(corpus, tmp_path / "bm25", _quiet),
    ):
        with pytest.raises(CorpusError, match=said):
            refused()
    assert build_tantivy(corpus, tmp_path / "out", _quiet).passages == 13
    monkeypatch.setitem(kinds.MOST_PASSAGES, "tantivy", 12)
    with pytest.raises(CorpusError, match="kind 'tantivy' takes, 12: leave some out, or"):
        build_tantivy(corpus, tmp_path / "tantivy", _quiet)


def test_segments_out_of_order_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tantivy_index, "segments", lambda count: [3, 10])
        with pytest.raises(BadIndex, match="is not in the corpus' order"):
            _built(tmp_path / "out", TEXTS)
    with pytest.raises(BadIndex, match=r"holds no index of tantivy: .*: build it"):
        TantivyIndex(tmp_path / "none")


def test_hits_are_plain_numbers(index: TantivyIndex) -> None:
    [[hit]] = index.search(["who"], 1)
    assert hit == Hit(10, hit.score) and type(hit.position) is int and type(hit.score) is float


def test_an_index_that_finds_no_passage_by_its_position_is_refused(tmp_path: Path) -> None:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("text", tokenizer_name="whitespace", index_option="freq")
    builder.add_unsigned_field("position", fast=True)
    tantivy.Index(builder.build(), str(tmp_path))
    with pytest.raises(BadIndex, match=r"is not indexed.*: build it"):
        TantivyIndex(tmp_path)
