"""Search by tantivy's BM25, for corpora of tens of millions. The only module that imports tantivy.

It is another ranker than `bm25`: its k1 and b are fixed, and it keeps a passage's length in one
byte, so many more passages tie. Its index stays in its files, memory-mapped.

Its Python binding scores every passage that holds a word of the query. So the frequent words, which
together are worth less than the last of the best hits has, are looked up only where a passage holds
one of the others (MaxScore: Turtle & Flood 1995); the hits are the same.

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
from retrieval_server.protocol import MAX_TOP_K, BadIndex, CorpusError

VERSION = f"tantivy {tantivy.__version__}"
K1, B = 1.2, 0.75  # tantivy's own; it takes no others
MOST_SEGMENTS = 7  # tantivy merges 8 of a size, in an order of its own
SEGMENT_PASSAGES = 1 << 20  # of a segment, where they fit into MOST_SEGMENTS
_LIMITS = (4, 16, MAX_TOP_K)  # hits; the fewer they are, the more passages are left out
_ENOUGH = 4  # times as many passages as hits
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
        # One of few numbers: what is left out decides in which order words are added up.
        limit = next((limit for limit in _LIMITS if top_k <= limit), top_k)
        terms = self._terms(bag)
        first = _enough(terms, limit)
        hits = self._found(terms, first, limit)
        least = hits[-1][0] if len(hits) == limit else 0.0
        if (needed := _needed(terms, least)) > first:
            hits = self._found(terms, needed, limit)
        begins = self._begins
        return [Hit(begins[at.segment_ord] + at.doc, score) for score, at in hits[:top_k]]

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

    def _found(
        self, terms: Sequence[_Term], needed: int, limit: int
    ) -> list[tuple[float, tantivy.DocAddress]]:
        """The best passages that hold one of the first `needed` terms, by all terms."""
        if not terms:
            return []
        any_of = [(tantivy.Occur.Should, term.query) for term in terms[:needed]]
        query = tantivy.Query.boolean_query(any_of)
        for term in terms[needed:]:  # one in another: of several at once it would read all postings
            both = [(tantivy.Occur.Must, query), (tantivy.Occur.Should, term.query)]
            query = tantivy.Query.boolean_query(both)
        found: list[tuple[float, tantivy.DocAddress]]
        found = self._searcher.search(query, limit, count=False).hits
        return found


def _enough(terms: Sequence[_Term], limit: int) -> int:
    """How many of the rarest terms hold passages enough to tell what the best ones score."""
    total = 0
    for number, term in enumerate(terms, start=1):
        total += term.passages
        if total >= _ENOUGH * limit:
            return max(number, len(terms) - _MOST_OPTIONAL)
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
    builder.add_unsigned_field(_POSITION, fast=True)
    return builder.build()


def _opened(folder: Path) -> tantivy.Index:
    try:
        index = tantivy.Index.open(str(folder))
        index.config_reader("manual")  # nobody writes to it any more: no thread watches it
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
