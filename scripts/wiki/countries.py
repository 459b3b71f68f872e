"""Countries: their names, their facts with every accepted spelling, and passages of the facts.

Source: npm's world-countries (ODbL). A fact is asked for only where it has one answer; the passages
say the others as well. Some names are written as Wikipedia's titles are.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from scripts.wiki.packages import WikiError, member

MEMBER = "package/countries.json"
RELATIONS = (
    "capital", "currency", "official language", "official name", "calling code", "internet domain",
)  # fmt: skip
PEOPLE = "people"  # what they are called: asked for in other words
_TITLES = {  # where the package's name is another
    "COD": "Democratic Republic of the Congo",
    "CZE": "Czech Republic",
    "TUR": "Turkey",
    "FSM": "Federated States of Micronesia",
}
_ARTICLES = (
    "Bahamas", "British", "Cayman", "Central African", "Comoros", "Cook", "Czech", "Democratic",
    "Dominican", "Falkland", "Faroe", "Federated", "Gambia", "Maldives", "Marshall", "Netherlands",
    "Northern Mariana", "Philippines", "Republic", "Seychelles", "Solomon", "Turks", "United",
)  # fmt: skip
_LANGUAGES = {"AUT": "German", "IRN": "Persian", "MDA": "Romanian", "MDV": "Dhivehi"}
_OWN_MONEY = {  # that no two countries call theirs
    "sol", "yen", "baht", "forint", "zloty", "złoty", "rand", "naira", "ruble", "hryvnia", "real",
    "yuan", "shekel", "lek", "lev", "leu", "lari", "dram", "tenge", "som", "kyat", "kip", "riel",
    "dong", "đồng", "taka", "rupiah", "ringgit", "birr", "cedi", "kwanza", "quetzal", "lempira",
    "boliviano", "guaraní", "balboa", "gourde", "tugrik", "tögrög", "afghani", "won",
}  # fmt: skip
_KINDS = ("Republic", "Confederation", "States", "Kingdom", "Emirates")
PARTS = {"English": "England", "Scottish": "Scotland", "Welsh": "Wales"}  # of the United Kingdom
_PARTS = {"GBR": (*PARTS.values(), "Northern Ireland")}
_ADJECTIVES = {  # beside the package's own
    "ARG": ("Argentinian",), "BGD": ("Bangladeshi",), "GBR": ("English", "Scottish", "Welsh"),
    "ISL": ("Icelandic",), "KAZ": ("Kazakh",), "NZL": ("New Zealand",), "PHL": ("Philippine",),
    "TUR": ("Turkish",), "UZB": ("Uzbek",),
}  # fmt: skip
_OTHERS = {  # further names in texts
    "USA": ("U.S.", "US", "USA"), "GBR": ("UK", "U.K.", "Great Britain", "Britain"),
    "MMR": ("Burma",), "SWZ": ("Swaziland",), "CIV": ("Côte d'Ivoire",), "CPV": ("Cabo Verde",),
    "TLS": ("East Timor",), "IRL": ("Republic of Ireland",), "CHN": ("People's Republic of China",),
    "NLD": ("Holland",), "CZE": ("Czechia",), "TUR": ("Türkiye",), "COD": ("DR Congo",),
}  # fmt: skip


class _Name(msgspec.Struct):
    common: str
    official: str


class _Currency(msgspec.Struct):
    name: str


class _Idd(msgspec.Struct):
    root: str = ""
    suffixes: list[str] = []


class _Given(msgspec.Struct):
    cca3: str
    name: _Name
    independent: bool | None
    capital: list[str]
    currencies: dict[str, _Currency] | list[str] | None
    languages: dict[str, str]
    idd: _Idd
    tld: list[str]
    altSpellings: list[str]
    demonyms: dict[str, dict[str, str]] = {}


@dataclass(frozen=True)
class Fact:
    """What a relation says of a country: its sentence, and every spelling of the answer."""

    sentence: str
    answers: tuple[str, ...]  # none where there are several things to name


@dataclass(frozen=True)
class Country:
    """`name`: as its title; `names` and `adjectives`: as texts may call it, and what is of it."""

    code: str
    name: str
    names: tuple[str, ...]
    adjectives: tuple[str, ...]
    answers: tuple[str, ...]
    facts: dict[str, Fact] = field(default_factory=dict)

    @property
    def prose(self) -> str:
        """The name inside a sentence: the Netherlands."""
        return with_article(self.name)

    def passage_of(self, relation: str) -> str:
        """The id of the passage that says it."""
        return f"facts-{self.code}-{1 if relation in _FIRST else 2}"

    @property
    def passages(self) -> list[tuple[str, str]]:
        """The id and contents of the passages of its facts."""
        told: dict[str, list[str]] = {}
        for relation, fact in self.facts.items():
            told.setdefault(self.passage_of(relation), []).append(fact.sentence)
        return [(id, f"Facts about {self.prose}\n{' '.join(s)}") for id, s in told.items()]


_FIRST = ("capital", "currency", "official language", PEOPLE)


def read(archive: Path) -> list[Country]:
    """The countries of the package; without facts, where they are not independent. Raises
    WikiError.
    """
    try:
        return decode(member(archive, MEMBER))
    except msgspec.DecodeError as error:
        raise WikiError(f"{archive}: {MEMBER} is no list of countries ({error})") from error


def decode(text: bytes) -> list[Country]:
    """The countries of the package's JSON."""
    return [_country(each) for each in msgspec.json.decode(text, type=list[_Given])]


def with_article(name: str) -> str:
    """A name with `the` where it takes one."""
    return f"the {name}" if name.startswith(_ARTICLES) and "Ireland" not in name else name


def spellings(*texts: str) -> tuple[str, ...]:
    """The texts, and each without diacritics, once."""
    plain = (
        "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
        for text in texts
    )
    return tuple(dict.fromkeys((*texts, *plain)))


def _country(given: _Given) -> Country:
    code = given.cca3
    name = _TITLES.get(code, given.name.common)
    others = [each for each in given.altSpellings if len(each) > 3 and each.isascii()]
    names = (name, given.name.common, *_OTHERS.get(code, ()), *_PARTS.get(code, ()))
    people = given.demonyms.get("eng", {}).get("m", "")
    known = people and given.independent
    adjectives = (*people.split(", "),) if known else ()
    return Country(
        code=code,
        name=name,
        names=tuple(dict.fromkeys(names)),
        adjectives=(*adjectives, *_ADJECTIVES.get(code, ())),
        answers=spellings(
            name, given.name.common, given.name.official, *others, *_OTHERS.get(code, ())
        ),
        facts=_facts(given, with_article(name)) if given.independent else {},
    )


def _facts(given: _Given, name: str) -> dict[str, Fact]:
    money = given.currencies
    currencies = [each.name for each in money.values()] if isinstance(money, dict) else []
    official = given.name.official
    values = {
        "capital": given.capital,
        "currency": currencies,
        "official language": [
            _LANGUAGES.get(given.cca3, each) for each in given.languages.values()
        ],
        "official name": [official] if official != given.name.common else [],
        "calling code": _codes(given.idd),
        "internet domain": [each for each in given.tld if each.isascii()],
    }
    found = {relation: _fact(relation, name, each) for relation, each in values.items() if each}
    people = given.demonyms.get("eng", {}).get("m", "")
    if people and "," not in people:
        told = f"People from {name} are called {people}."
        found[PEOPLE] = Fact(told, spellings(people, f"{people}s"))
    if parts := _PARTS.get(given.cca3):
        found["parts"] = Fact(f"{_listed(parts)} are parts of {name}.", ())
    return found


def _fact(relation: str, name: str, values: Sequence[str]) -> Fact:
    shown = [_shown(relation, value) for value in values]
    if len(values) == 1:
        told = f"The {relation} of {name} is {shown[0]}."
        return Fact(told, spellings(values[0], *_also(relation, values[0])))
    several = "currencies" if relation == "currency" else f"{relation}s"
    return Fact(f"The {several} of {name} are {_listed(shown)}.", ())


def _shown(relation: str, value: str) -> str:
    if relation == "currency":
        return f"the {'euro' if value == 'Euro' else value}"
    if relation == "official name" and (" of " in value or value.endswith(_KINDS)):
        return f"the {value}"
    return value


def _also(relation: str, value: str) -> tuple[str, ...]:
    """Further answers that are right."""
    if relation == "currency" and value.startswith("United States"):
        return ("US dollar", "U.S. dollar", "American dollar")
    if relation == "currency" and value.split()[-1] in _OWN_MONEY:
        return (value.split()[-1],)
    if relation == "capital" and value == "Washington D.C.":
        return ("Washington",)
    return (value.removeprefix("+"),) if relation == "calling code" else ()


def _codes(idd: _Idd) -> list[str]:
    """The calling code; none where numbers of one country begin in several ways."""
    return [idd.root + idd.suffixes[0]] if len(idd.suffixes) == 1 else []


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
