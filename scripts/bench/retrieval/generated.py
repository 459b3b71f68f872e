"""A corpus of any size, shaped as wiki-18 is, and queries for it; the same for the same size.

Articles of a geometric number of passages (6.5 in the mean) of a hundred words, the last of them
shorter, each under its article's title. Words are drawn by Zipf's and Mandelbrot's law; the most
frequent are English's. So postings are as long as those of text; what is said makes no sense.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from configs.runtime.files import replacing

WORDS, VOCABULARY = 100, 1_000_000
ARTICLE_PASSAGES = 6.5
STOP_WORDS = (
    "the", "of", "and", "in", "to", "a", "was", "is", "for", "on", "as", "with", "by", "he",
    "at", "from", "his", "it", "an", "were", "that", "which", "are", "this", "also", "be",
    "had", "first", "has", "its", "one", "their", "not", "after", "new", "who", "they", "but",
    "or", "two", "her", "she", "been", "other",
)  # fmt: skip
_SHIFT, _POWER = 2.7, 1.05
_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er")]
_ARTICLES = 256  # of a block, which has a seed of its own
_RARE = 20_000  # titles are of words from this rank on


def word(rank: int) -> str:
    """The word of a rank; each another one."""
    if rank < len(STOP_WORDS):
        return STOP_WORDS[rank]
    found, left = "", rank
    while left:
        left, syllable = divmod(left, len(_SYLLABLES))
        found += _SYLLABLES[syllable]
    return f"{found}x" if found in STOP_WORDS else found


class _Words(dict[int, str]):
    """The words of the ranks that have been drawn."""

    def __missing__(self, rank: int) -> str:
        self[rank] = found = word(rank)
        return found


def corpus(folder: Path, passages: int) -> Path:
    """The file of so many passages in `folder`, made where it is missing."""
    path = folder / f"generated-{passages}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=False) as draft, draft.open("w", encoding="ascii") as file:
            for number, contents in zip(range(passages), texts(), strict=False):
                file.write(json.dumps({"id": str(number), "contents": contents}) + "\n")
    return path


def texts() -> Iterator[str]:
    """Contents without end."""
    known = _Words()
    odds = np.cumsum(1.0 / (np.arange(VOCABULARY) + _SHIFT) ** _POWER)
    block = 0
    while True:
        chance = np.random.default_rng(block)
        for length in chance.geometric(1.0 / ARTICLE_PASSAGES, _ARTICLES).tolist():
            title = [known[rank] for rank in chance.integers(_RARE, VOCABULARY, 2).tolist()]
            drawn = np.searchsorted(odds, chance.random((length, WORDS)) * odds[-1]).tolist()
            ends = [WORDS] * (length - 1) + [int(chance.integers(1, WORDS + 1))]
            for row, end in zip(drawn, ends, strict=True):
                yield f'"{" ".join(title)}"\n' + " ".join([known[rank] for rank in row[:end]])
        block += 1


def queries(path: Path, passages: int, count: int) -> dict[str, list[str]]:
    """`count` keyword queries (a title, and a word of its passage), and as many questions, which
    hold stop words too.
    """
    chance = random.Random(passages)
    chosen = frozenset(chance.sample(range(passages), min(count, passages)))
    keyword, question = [], []
    with path.open(encoding="ascii") as file:
        for number, line in enumerate(file):
            if number not in chosen:
                continue
            title, _, text = json.loads(line)["contents"].partition("\n")
            name = title.strip('"')
            rare = [each for each in text.split() if each not in STOP_WORDS] or [name]
            one, other = chance.choice(rare), chance.choice(rare)
            keyword.append(f"{name} {one}")
            question.append(f"who was the {one} of the {other} in {name} and what is it for?")
    return {"keyword": keyword, "question": question}
