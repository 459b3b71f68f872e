"""Names in texts: of countries, with what is of them, and of articles. Pure.

Longest names first, so that "South African" is not "African" and "Guinea-Bissau" not "Guinea". Case
counts: "turkey" is a bird.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from scripts.wiki.articles import Article
from scripts.wiki.countries import Country

_WORD = re.compile(r"(?<![\w-])\w+")
_NO_COUNTRY = (  # longer than the country in them
    "South American", "North American", "Central American", "Latin American", "Native American",
    "Mesoamerican", "South America", "North America", "Central America", "Latin America",
    "Indian Ocean", "East Indies", "West Indies", "New Guinea", "Gulf of Guinea", "New Mexico",
    "Gulf of Mexico", "English Channel", "English language", "New England", "Jordan River",
    "Niger River", "Indian subcontinent", "Native Americans", "Indian Peninsula",
)  # fmt: skip


class Names:
    """Names and what they are the names of."""

    def __init__(self, meanings: Mapping[str, Sequence[str]]) -> None:
        """`meanings`: keys by name; none for a name that is to hide shorter ones."""
        self._meanings = meanings
        self._by_word: dict[str, list[str]] = {}
        for name in sorted(meanings, key=lambda each: (-len(each), each)):
            if first := _WORD.search(name):
                self._by_word.setdefault(first[0], []).append(name)

    def found(self, text: str) -> list[tuple[str, tuple[str, ...]]]:
        """Each name in a text, in its order, with its keys."""
        names, end = [], 0
        for word in _WORD.finditer(text):
            if word.start() < end:
                continue
            for name in self._by_word.get(word[0], ()):
                if _stands(name, text, word.start()):
                    end = word.start() + len(name)
                    names.append((name, tuple(self._meanings[name])))
                    break
        return [(name, keys) for name, keys in names if keys]

    def keys(self, text: str) -> set[str]:
        """All keys of the names in a text."""
        return {key for _, keys in self.found(text) for key in keys}


def _stands(name: str, text: str, start: int) -> bool:
    end = start + len(name)
    return text.startswith(name, start) and not re.match(r"[\w-]", text[end : end + 1])


def of_countries(countries: Iterable[Country]) -> Names:
    """The names of countries and of what is of them; keys are their codes."""
    meanings: dict[str, list[str]] = {name: [] for name in _NO_COUNTRY}
    for country in countries:
        for name in dict.fromkeys((*country.names, *country.adjectives)):
            meanings.setdefault(name, []).append(country.code)
            meanings.setdefault(f"{name}s", []).append(country.code)
    return Names(meanings)


def of_articles(articles: Iterable[Article]) -> Names:
    """The titles with a capital letter, and without their qualifiers; keys are ids."""
    meanings: dict[str, list[str]] = {}
    for article in articles:
        for name in dict.fromkeys((article.title, article.name)):
            if len(name) > 2 and any(c.isupper() for c in name):
                meanings.setdefault(name, []).append(article.id)
    return Names(meanings)
