"""Search by tantivy's BM25, for corpora of tens of millions. The only module that imports tantivy.

It is another ranker than `bm25`: its k1 and b are fixed, and it keeps a passage's length in one
byte, so many more passages tie. Its index stays in its files, memory-mapped.

Its Python binding scores every passage that holds a word of the query. So the frequent words, which
together are worth less than the last of the best hits has, are looked up only where a passage holds
one of the others (MaxScore: Turtle & Flood 1995), and there only in the passages that the others
put first, unless one behind them could still come up to the best. The hits are the same.

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

import tantivy

from retrieval_server.index.base import Hit
from retrieval_server.index.words import words
from retrieval_server.protocol import BadIndex, CorpusError

VERSION = f"tantivy {tantivy.__version__}"
K1, B = 1.2, 0.75  # tantivy's own; it takes no others
MOST_SEGMENTS = 7  # tantivy merges 8 of a size, in an order of its own
SEGMENT_PASSAGES = 1 << 20  # of a segment, where they fit into MOST_SEGMENTS
_SEEN = (32, 512)  # passages, beside the hits, in which frequent words are looked up; then in all
_ENOUGH = 4  # times as many passages as hits
_CHEAP = 20_000  # passages that take less time than a frequent word in a few
_MOST_OPTIONAL = 64  # terms; tantivy's calls nest as deep
_ROUNDED = 1.00001  # scores are sums of float32
_ARENA_BYTES = 4_000_000_000  # tantivy's most for a segment in the making; taken as it is filled
_TEXT, _POSITION = "text", "position"
Texts = Callable[[int], Iterable[str]]


class _Term(NamedTuple):
    """A word of a query: how many passages hold it, and the score that it stays below."""

    passages: int
    most: float
    query: tantivy.Query


class TantivyIndex:
    """A folder that `build` made. Raises BadIndex."""

    name = f"tantivy (BM25, k1 {K1}, b {B})"
    fingerprint = ""  # the passages decide the rest

    def __init__(self, folder: Path) -> None:
        index = _opened(folder)
        self._schema, self._searcher = index.schema, index.searcher()
        self._begins = _begins(self._searcher, folder)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Passages that share a word with the query, best first, ties in corpus order.

        A query is a bag of words: nothing in it is syntax.
        """
        bags = [frozenset(Counter(words(query)).items()) for query in queries]
        found = {bag: self._best(bag, top_k) if bag else [] for bag in dict.fromkeys(bags)}
        return [found[bag] for bag in bags]

    def _best(self, bag: frozenset[tuple[str, int]], top_k: int) -> list[Hit]:
        terms = self._terms(bag)
        needed = _enough(terms, top_k)
        for seen in _SEEN:
            while True:
                found = self._found(terms[:needed], top_k + seen)
                if needed == len(terms):
                    return self._hits(found[:top_k])
                hits = self._scored(terms, found)
                least = hits[top_k - 1][0] if len(hits) >= top_k else 0.0
                if (more := _needed(terms, least)) <= needed:
                    break
                needed = more
            others = sum(term.most for term in terms[needed:])
            if len(found) < top_k + seen or (found[-1][0] + others) * _ROUNDED < least:
                return self._hits(hits[:top_k])
        return self._hits(self._in_all(terms, needed, top_k))

    def _hits(self, found: "_Found") -> list[Hit]:
        return [Hit(self._position(at), score) for score, at in found]

    def _position(self, at: tantivy.DocAddress) -> int:
        begin: int = self._begins[at.segment_ord]
        return begin + int(at.doc)

    def _terms(self, bag: frozenset[tuple[str, int]]) -> list[_Term]:
        """The words that some passage holds, the rarest first."""
        count, found = self._searcher.num_docs, []
        for word, times in sorted(bag):
            if passages := self._searcher.doc_freq(_TEXT, word):
                idf = math.log(1 + (count - passages + 0.5) / (passages + 0.5))
                query = tantivy.Query.term_query(self._schema, _TEXT, word, "freq")
                if times > 1:
                    query = tantivy.Query.boost_query(query, float(times))
                found.append(_Term(passages, times * idf * (K1 + 1), query))
        return sorted(found, key=lambda term: term.passages)

    def _found(self, terms: Sequence[_Term], limit: int) -> "_Found":
        """The best passages by these terms alone."""
        return self._searched(_any_of(terms), limit) if terms else []

    def _scored(self, terms: Sequence[_Term], found: "_Found") -> "_Found":
        """These passages by all terms, best first."""
        if not found:
            return []
        positions = [self._position(at) for _, at in found]
        these = tantivy.Query.term_set_query(self._schema, _POSITION, positions)
        query = tantivy.Query.const_score_query(these, 0.0)
        flat = max(0, len(terms) - _MOST_OPTIONAL)
        if flat:
            query = _with(query, _any_of(terms[:flat]))
        for term in terms[flat:]:
            query = _with(query, term.query)
        return self._searched(query, len(found))

    def _in_all(self, terms: Sequence[_Term], needed: int, limit: int) -> "_Found":
        """The best passages that hold one of the first `needed` terms, by all terms."""
        query = _any_of(terms[:needed])
        for term in terms[needed:]:
            query = _with(query, term.query)
        return self._searched(query, limit)

    def _searched(self, query: tantivy.Query, limit: int) -> "_Found":
        found: _Found = self._searcher.search(query, limit, count=False).hits
        return found


_Found = list[tuple[float, tantivy.DocAddress]]


def _any_of(terms: Sequence[_Term]) -> tantivy.Query:
    return tantivy.Query.boolean_query([(tantivy.Occur.Should, term.query) for term in terms])


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


def build(folder: Path, texts: Texts, count: int) -> None:
    """Write an index of `count` texts, `texts(n)` being those from the n-th on, or go on with one.

    A segment that is on the disk stays. Raises CorpusError when no text holds a word, BadIndex.
    """
    folder.mkdir(exist_ok=True)
    index = tantivy.Index(_schema(), str(folder))
    index.reload()
    done = index.searcher().num_docs
    writer = index.writer(_ARENA_BYTES, 1)
    ends = [end for end in accumulate(segments(count)) if end > done]
    for position, text in enumerate(texts(done) if ends else (), start=done):
        passage = tantivy.Document()
        passage.add_text(_TEXT, " ".join(words(text)))
        passage.add_unsigned(_POSITION, position)
        writer.add_document(passage)
        if position + 1 in ends:
            writer.commit()
    writer.wait_merging_threads()
    searcher = _opened(folder).searcher()
    _begins(searcher, folder)
    if not searcher.terms_with_prefix(_TEXT, "", limit=1):
        raise CorpusError("no passage holds a word (letters or digits): nothing to search")


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
