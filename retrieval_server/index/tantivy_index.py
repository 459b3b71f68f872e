"""Search by tantivy's BM25, for corpora of tens of millions. The only module that imports tantivy.

It is another ranker than `bm25`: its k1 and b are fixed, and it keeps a passage's length in one
byte, so many more passages tie. Its index stays in its files, memory-mapped.

Its Python binding scores every passage that holds a word of the query. So words that together are
worth less than the last of the best hits has, the most frequent first, are looked up only where a
passage holds one of the others (MaxScore: Turtle & Flood 1995): the most frequent of the corpus in
counts of their own (`frequent`), others by tantivy, and only in passages that can come up to the
best. More are asked for until none behind them could. The hits are those of the whole formula, but
for the rounding of their scores.

Equal scores come in the order of segments, larger ones first, and within one as passages were
added. So segments are consecutive parts of the corpus, each a little smaller than the one before,
and fewer than tantivy would merge.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tantivy
from numpy.typing import NDArray

from retrieval_server.index.base import Hit
from retrieval_server.index.frequent import K1, B, FrequentWords, FrequentWriter, choose
from retrieval_server.index.words import words
from retrieval_server.protocol import BadIndex, CorpusError

VERSION = f"tantivy {tantivy.__version__}"
MOST_SEGMENTS = 7  # tantivy merges 8 of a size, in an order of its own
SEGMENT_PASSAGES = 1 << 20  # of a segment, where they fit into MOST_SEGMENTS
_SEEN = 128  # passages, beside the hits, that are looked at first
_MORE = 16  # times as many, should they not do
_FEW = 16  # passages, beside the hits, in which a word is looked up first
_TOGETHER = 32  # passages that tantivy finds together sooner than apart
_ENOUGH = 4  # times as many passages as hits
_CHEAP = 20_000  # passages that take less time than a word in a few
_MOST_OPTIONAL = 64  # terms; tantivy's calls nest as deep
_ROUNDED = 1.00001  # scores are sums of float32
_ARENA_BYTES = 4_000_000_000  # tantivy's most for a segment in the making; taken as it is filled
_TEXT, _POSITION = "text", "position"
Texts = Callable[[int], Iterable[str]]


class _Term(NamedTuple):
    """A word of a query: how many passages hold it, its weight, and the score that it stays below.

    `column`: of a frequent word, whose counts are at hand.
    """

    passages: int
    weight: float
    most: float
    query: tantivy.Query
    column: int | None = None


class _Found(NamedTuple):
    """Passages with scores, best first: int64[N], float64[N]."""

    positions: NDArray[np.int64]
    scores: NDArray[np.float64]


class TantivyIndex:
    """A folder that `build` made. Raises BadIndex."""

    name = f"tantivy (BM25, k1 {K1}, b {B})"
    fingerprint = ""  # the passages decide the rest

    def __init__(self, folder: Path) -> None:
        index = _opened(folder)
        self._schema, self._searcher = index.schema, index.searcher()
        self._begins = _begins(self._searcher, folder)
        self._counts = FrequentWords(folder, self._searcher.num_docs)
        self._frequent = {word: self._term(word) for word in self._counts.words}

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Passages that share a word with the query, best first, ties in corpus order.

        A query is a bag of words: nothing in it is syntax.
        """
        bags = [frozenset(Counter(words(query)).items()) for query in queries]
        found = {bag: self._best(bag, top_k) if bag else [] for bag in dict.fromkeys(bags)}
        return [found[bag] for bag in bags]

    def _best(self, bag: frozenset[tuple[str, int]], top_k: int) -> list[Hit]:
        terms = self._terms(bag)
        needed, limit = _enough(terms, top_k), top_k + _SEEN
        while terms:
            found = self._searched(_any_of(terms[:needed]), limit)
            hits = self._scored(terms, needed, found, top_k)
            least = float(hits.scores[top_k - 1]) if len(hits.scores) >= top_k else 0.0
            if (more := _needed(terms, least)) > needed:
                needed = more
                continue
            unseen = found.scores[-1] + sum(term.most for term in terms[needed:])
            if len(found.scores) < limit or needed == len(terms) or unseen * _ROUNDED < least:
                pairs = zip(hits.positions.tolist(), hits.scores.tolist(), strict=True)
                return [Hit(*pair) for pair in pairs][:top_k]
            limit *= _MORE
        return []

    def _terms(self, bag: frozenset[tuple[str, int]]) -> list[_Term]:
        """The words that some passage holds, the rarest first."""
        found = []
        for word, times in sorted(bag):
            term = self._frequent.get(word) or self._term(word)
            if times > 1:
                query = tantivy.Query.boost_query(term.query, float(times))
                weight, most = times * term.weight, times * term.most
                term = term._replace(weight=weight, most=most, query=query)
            if term.passages:
                found.append(term)
        return sorted(found, key=lambda term: term.passages)

    def _term(self, word: str) -> _Term:
        count, passages = self._searcher.num_docs, self._searcher.doc_freq(_TEXT, word)
        weight = (K1 + 1) * math.log(1 + (count - passages + 0.5) / (passages + 0.5))
        query = tantivy.Query.term_query(self._schema, _TEXT, word, "freq")
        column, most = self._counts.words.get(word, (None, 1.0))
        return _Term(passages, weight, most * weight, query, column)

    def _scored(self, terms: Sequence[_Term], needed: int, found: _Found, top_k: int) -> _Found:
        """The best of what the first `needed` terms found, by all terms; `top_k` at least, and all
        that score as much as these.
        """
        others = terms[needed:]
        sums = found.scores + self._counts.scores(found.positions, _columns(others))
        unknown = sum(term.most for term in others if term.column is None)
        order = np.argsort(-sums, kind="stable")
        some = order[: top_k + (_FEW if unknown else 0)]
        exact = self._exact(terms, found.positions[some])
        if len(order) > len(some):
            least = np.partition(exact, -top_k)[-top_k]
            left = order[len(some) :]
            left = left[(sums[left] + unknown) * _ROUNDED >= least]
            some = np.concatenate([some, left])
            exact = np.concatenate([exact, self._exact(terms, found.positions[left])])
        positions = found.positions[some]
        order = np.lexsort((positions, -exact))
        return _Found(positions[order], exact[order])

    def _exact(self, terms: Sequence[_Term], positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """The scores of passages by all terms: float64[N], each added up in the same order."""
        scores = self._counts.scores(positions, _columns(terms))
        rare = [term for term in terms if term.column is None]
        if rare and len(positions):
            found = self._searched(self._these(positions, rare), len(positions))
            order = np.argsort(positions)
            scores[order[np.searchsorted(positions, found.positions, sorter=order)]] += found.scores
        return scores

    def _these(self, positions: NDArray[np.int64], terms: Sequence[_Term]) -> tantivy.Query:
        """These passages, by these terms."""
        each = [
            tantivy.Query.term_query(self._schema, _POSITION, position)
            for position in np.sort(positions).tolist()
        ]
        some = [_any(each[at : at + _TOGETHER]) for at in range(0, len(each), _TOGETHER)]
        query = tantivy.Query.const_score_query(_any(some), 0.0)
        flat = max(0, len(terms) - _MOST_OPTIONAL)
        if flat:
            query = _with(query, _any_of(terms[:flat]))
        for term in terms[flat:]:
            query = _with(query, term.query)
        return query

    def _searched(self, query: tantivy.Query, limit: int) -> _Found:
        hits = self._searcher.search(query, limit, count=False).hits
        begins = self._begins
        positions = (begins[at.segment_ord] + at.doc for _, at in hits)
        return _Found(
            np.fromiter(positions, np.int64, len(hits)),
            np.fromiter((score for score, _ in hits), np.float64, len(hits)),
        )


def _columns(terms: Sequence[_Term]) -> list[tuple[int, float]]:
    """Of frequent words: their columns and weights."""
    return [(term.column, term.weight) for term in terms if term.column is not None]


def _any_of(terms: Sequence[_Term]) -> tantivy.Query:
    return _any([term.query for term in terms])


def _any(queries: Sequence[tantivy.Query]) -> tantivy.Query:
    return tantivy.Query.boolean_query([(tantivy.Occur.Should, query) for query in queries])


def _with(query: tantivy.Query, other: tantivy.Query) -> tantivy.Query:
    """What `query` finds, with the score of `other` added where that finds it too. One in another:
    of several at once tantivy would read all postings. Words are always added up in one order.
    """
    return tantivy.Query.boolean_query([(tantivy.Occur.Must, query), (tantivy.Occur.Should, other)])


def _enough(terms: Sequence[_Term], limit: int) -> int:
    """How many of the rarest terms hold passages enough to tell what the best ones score, and how
    many more are as cheap.
    """
    total = 0
    for number, term in enumerate(terms):
        if total >= _ENOUGH * limit and total + term.passages > _CHEAP:
            return max(number, len(terms) - _MOST_OPTIONAL)
        total += term.passages
    return len(terms)


def _needed(terms: Sequence[_Term], least: float) -> int:
    """How many of the rarest terms a passage must hold one of to score `least`: the others
    together are worth less.
    """
    worth, needed = 0.0, len(terms)
    while needed > 1 and (worth + terms[needed - 1].most) * _ROUNDED <= least:
        needed -= 1
        worth += terms[needed].most
    return max(needed, len(terms) - _MOST_OPTIONAL)


def build(folder: Path, texts: Texts, count: int, sample: Iterable[str]) -> None:
    """Write an index of `count` texts, `texts(n)` being those from the n-th on, or go on with one.
    `sample`: texts that tell which words are frequent.

    A segment that is on the disk stays. Raises CorpusError when no text holds a word, BadIndex.
    """
    folder.mkdir(exist_ok=True)
    index = tantivy.Index(_schema(), str(folder))
    index.reload()
    done = index.searcher().num_docs
    writer = index.writer(_ARENA_BYTES, 1)
    ends = [end for end in accumulate(segments(count)) if end > done]
    with FrequentWriter(folder, choose(sample), done) as counts:
        for position, text in enumerate(texts(done) if ends else (), start=done):
            passage, found = tantivy.Document(), words(text)
            passage.add_text(_TEXT, " ".join(found))
            passage.add_unsigned(_POSITION, position)
            writer.add_document(passage)
            counts.add(found)
            if position + 1 in ends:
                counts.keep()
                writer.commit()
        writer.wait_merging_threads()
        searcher = _opened(folder).searcher()
        _begins(searcher, folder)
        if not searcher.terms_with_prefix(_TEXT, "", limit=1):
            raise CorpusError("no passage holds a word (letters or digits): nothing to search")
        counts.finish()


def segments(count: int) -> list[int]:
    """The passages of each segment: each fewer than the one before."""
    number = min(MOST_SEGMENTS, math.ceil(count / SEGMENT_PASSAGES))
    least = (count - number * (number - 1) // 2) // number
    sizes = [least + after for after in reversed(range(number))]
    return [sizes[0] + count - sum(sizes), *sizes[1:]]


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field(_TEXT, tokenizer_name="whitespace", index_option="freq")
    builder.add_unsigned_field(_POSITION, indexed=True, fast=True)
    return builder.build()


def _opened(folder: Path) -> tantivy.Index:
    try:
        index = tantivy.Index.open(str(folder))
        index.config_reader("manual")  # nobody writes to it any more: no thread watches it
        by_position = tantivy.Query.term_set_query(index.schema, _POSITION, [0])
        index.searcher().search(by_position, 1)
    except (ValueError, OSError) as error:
        raise BadIndex(f"{str(folder)!r} holds no index of tantivy: {error}: build it") from error
    return index


def _begins(searcher: tantivy.Searcher, folder: Path) -> list[int]:
    """The first position of each segment. Raises BadIndex unless they follow one another."""
    firsts = [tantivy.DocAddress(each, 0) for each in range(searcher.num_segments)]
    begins = [*searcher.fast_field_values(_POSITION, firsts), searcher.num_docs]
    lasts = [
        tantivy.DocAddress(each, end - begin - 1)
        for each, (begin, end) in enumerate(pairwise(begins))
        if end > begin
    ]
    told = searcher.fast_field_values(_POSITION, lasts) if len(lasts) == len(firsts) else []
    if begins[0] != 0 or told != [end - 1 for end in begins[1:]]:
        raise BadIndex(
            f"{str(folder)!r} is not in the corpus' order: its passages are too long for one index "
            "of tantivy: cut them, or build a dense index"
        )
    return begins
