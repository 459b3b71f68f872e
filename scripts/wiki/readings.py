"""The facts that articles state in a form that can be read: of people, places and works. Pure.

Everything is read from the short description, with which a passage begins: "French civil engineer
(1832–1923)", "City in Punjab, Pakistan", "1897 novel by Bram Stoker". What is not plain is left
out: circa, two countries, empires that are gone.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scripts.wiki.articles import Article
from scripts.wiki.countries import Country
from scripts.wiki.names import Names

_LIFE = re.compile(r"(?P<what>.+?),? \((?P<born>\d{3,4})\s?[–-]\s?(?P<died>\d{3,4})\)")
_BORN = re.compile(r"(?P<what>.+?),? \(born (?P<born>\d{4})\)")
_OLDEST, _YOUNGEST = 105, 12  # years that people of articles live
_PRONOUN = re.compile(r"\b(?:[Hh]e|[Ss]he|[Hh]is|[Hh]er|[Hh]im)\b")
_NOBODY = re.compile(r"\b(?:series|monarchy|empire|state|war|kingdom|movement|period)\b", re.I)
_GONE = re.compile(
    r"\b(?:ancient|colonial|soviet|roman|byzantine|ottoman|prussian|empire|dynasty|medieval|"
    r"emigrant|former|historical|mughal|song|ming|tang|kingdom of (?!saudi))\b|-born|\bborn in\b",
    re.I,
)
_PLACE = re.compile(
    r"\b(?:city|capital|town|village|metropolis|municipality|district|state|province|region|"
    r"county|prefecture|river|lake|reservoir|mountain|mountains|mountain range|volcano|peak|hill|"
    r"island|islands|archipelago|peninsula|desert|valley|canyon|waterfall|waterfalls|bay|beach|"
    r"forest|national park|park|protected area|plateau|cave|glacier|port|airport|bridge|dam|canal|"
    r"building|skyscraper|tower|palace|castle|fort|fortress|temple|church|cathedral|mosque|abbey|"
    r"monastery|shrine|museum|gallery|library|university|theatre|opera house|stadium|square|street|"
    r"monument|mausoleum|tomb|archaeological site|site|ruins|territory|oblast|suburb|neighborhood|"
    r"borough|citadel|statue|amphitheatre|amphitheater|settlement|basin|strait|complex|wall)\b",
    re.I,
)
_WORK = re.compile(
    r"(?:(?P<year>\d{4}) )?(?P<what>[^()]*?) ?(?:directed |written |composed |created |painted |"
    r"designed )?by (?P<maker>[A-Z][^(),;\d]+?)"
    r"(?: about .+| on .+|, .+| \(.+| written .+| around .+)?"
)
_NUMBERED = re.compile(r"\w+ No\. \d")
_NOUNS = {  # of a work: who makes it, and what happens to it in its year
    "novel": ("author", "published"), "novella": ("author", "published"),
    "essay": ("author", "published"), "treatise": ("author", "published"),
    "pamphlet": ("author", "published"), "book": ("author", "published"),
    "poem": ("author", "published"), "play": ("author", ""), "tragedy": ("author", ""),
    "comedy": ("author", ""), "story collection": ("author", ""), "dialogue": ("author", ""),
    "work": ("author", "published"), "film": ("director", "released"),
    "painting": ("painter", "painted"), "triptych": ("painter", ""), "fresco": ("painter", ""),
    "sculpture": ("sculptor", "made"), "opera": ("composer", ""), "ballet": ("composer", ""),
    "symphony": ("composer", ""), "musical": ("composer", ""), "oratorio": ("composer", ""),
    "concerti": ("composer", ""), "composition": ("composer", ""), "mass": ("composer", ""),
    "manga series": ("creator", ""), "television series": ("creator", ""),
    "comic strip": ("creator", ""), "fictional character": ("creator", ""),
}  # fmt: skip


@dataclass(frozen=True)
class Person:
    """`what`: the description without years; `word`: the country in it, as it is written there."""

    article: Article
    what: str
    born: int
    died: int  # 0: alive
    country: str = ""
    word: str = ""


@dataclass(frozen=True)
class Place:
    """A place that lies in one country, `word` as it is written."""

    article: Article
    country: str
    word: str


@dataclass(frozen=True)
class Work:
    """Something made by one person with an article; `noun`: novel; `maker_is`: author."""

    article: Article
    noun: str
    maker_is: str
    maker: Article
    year: int  # 0: not said
    happened: str  # published; empty: the year is nobody's question

    @property
    def prose(self) -> str:
        """The work inside a question: the novel Dracula."""
        said = self.noun in self.article.name.lower() or self.maker_is == "painter"
        plain = said or self.noun in ("work", "composition")
        return self.article.name if plain else f"the {self.noun} {self.article.name}"


def person(article: Article, names: Names) -> Person | None:
    """The person of an article that tells the years of a life."""
    said = _LIFE.fullmatch(article.description) or _BORN.fullmatch(article.description)
    if not said or _NOBODY.search(said["what"]):
        return None
    born, died = int(said["born"]), int(said.groupdict().get("died") or 0)
    if died and not _YOUNGEST <= died - born <= _OLDEST:
        return None
    if article.topic != "People" and not _PRONOUN.search(article.extract):
        return None
    country, word = _nationality(said["what"], names)
    return Person(article, said["what"], born, died, country, word)


def place(article: Article, names: Names, facts: Mapping[str, Country]) -> Place | None:
    """The place of an article whose description ends with the one country that it is in."""
    described = article.description
    found = [] if "," in article.title else names.found(described)
    if len(found) != 1 or len(found[0][1]) != 1 or _GONE.search(described):
        return None
    word, (code,) = found[0]
    of = re.fullmatch(rf"(?P<what>.+?) (?:in|of|on)\b.*?(?:the )?{re.escape(word)}", described)
    plain = of and not re.search(r"\b(?:and|between|from|off)\b", of[0][len(of["what"]) :])
    known = code in facts and word in facts[code].names
    return (
        Place(article, code, word) if of and plain and known and _PLACE.search(of["what"]) else None
    )


def work(article: Article, titles: Mapping[str, Article]) -> Work | None:
    """The work of an article by one maker who has an article."""
    said = _WORK.fullmatch(article.description)
    maker = titles.get(said["maker"]) if said else None
    if not said or maker is None or maker.name in article.title or _NUMBERED.match(article.title):
        return None
    nouns = [noun for noun in _NOUNS if re.search(rf"\b{noun}\b", said["what"], re.I)]
    if not nouns:
        return None
    noun = max(nouns, key=lambda each: (said["what"].lower().rfind(each), len(each)))
    maker_is, happened = _NOUNS[noun]
    return Work(article, noun, maker_is, maker, int(said["year"] or 0), happened)


def countries_of(articles: Iterable[Article], names: Names) -> dict[str, set[str]]:
    """The countries that title and description name, by article."""
    return {each.id: names.keys(f"{each.title}. {each.description}") for each in articles}


def _nationality(what: str, names: Names) -> tuple[str, str]:
    """The code and word of the one country that begins a description; two empty texts for none."""
    found = names.found(what)
    if len(found) != 1 or len(found[0][1]) != 1 or _GONE.search(what):
        return "", ""
    word, (code,) = found[0]
    begins = re.match(rf"(?:\d+th-century )?{re.escape(word)} \w", what)
    return (code, word) if begins else ("", "")
