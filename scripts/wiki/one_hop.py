"""Questions that one passage answers. Pure.

definition  What is the capital and largest city of Colombia?
lifetime    Which French civil engineer lived from 1832 to 1923?
year        In what year was Gustave Eiffel born?
origin      In which country is Timbuktu? · What is the nationality of Gustave Eiffel?
country     What is the currency of Peru?
maker       Who is the author of the novel Dracula?
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from scripts.wiki.articles import Article, sentences
from scripts.wiki.countries import PARTS, PEOPLE, RELATIONS, Country, spellings
from scripts.wiki.questions import Hop, Question
from scripts.wiki.readings import Person, Place, Work

_LEAST, _MOST = 30, 150  # characters of a definition
_SAID = re.compile(r" (?:is|are) (?P<what>(?:the|an?) .+)")
_UNCLEAR = re.compile(r"\b(?:it|its|they|their|he|his|she|her|these|this)\b|[()\[\]:;\"“]|, and$")


def definitions(articles: Iterable[Article]) -> Iterator[Question]:
    """One for each article whose first sentence says what it is without naming it."""
    for article in articles:
        if what := _definition(article):
            asked = "What is" if what.startswith("the ") else "What is described as"
            query = re.sub(r"^(?:the|an?) ", "", what)
            yield Question(
                kind="definition",
                text=f"{asked} {what}?",
                answers=names_of(article),
                hops=(Hop(query, article.id, (what,), "I look it up."),),
                conclusion=f"It is {article.name}.",
                about=frozenset([article.id]),
            )


def lifetimes(people: Sequence[Person]) -> Iterator[Question]:
    """One for each person whose description and years are nobody else's."""
    known = Counter((p.what, p.born, p.died) for p in people)
    for p in people:
        if p.died and p.country and known[p.what, p.born, p.died] == 1:
            query = f"{p.what} {p.born} {p.died}"
            yield Question(
                kind="lifetime",
                text=f"Which {p.what} lived from {p.born} to {p.died}?",
                answers=names_of(p.article),
                hops=(Hop(query, p.article.id, (f"{p.born} {p.died}",), "I look for the years."),),
                conclusion=f"It is {p.article.name}.",
                about=frozenset([p.article.id, p.country]),
            )


def years(people: Iterable[Person], works: Iterable[Work]) -> Iterator[Question]:
    """When people were born and died, and when works appeared."""
    for p in people:
        name = p.article.name
        yield _year(p.article, f"was {name} born", name, p.born, f"{name} was born in {p.born}.")
        if p.died:
            yield _year(p.article, f"did {name} die", name, p.died, f"{name} died in {p.died}.")
    for w in works:
        if w.year and w.happened:
            query = f"{w.article.name} {w.noun}"
            asked = f"was {w.prose} {w.happened}"
            yield _year(w.article, asked, query, w.year, f"It was {w.happened} in {w.year}.")


def origins(
    people: Iterable[Person], places: Iterable[Place], countries: Mapping[str, Country]
) -> Iterator[Question]:
    """The countries of places, the nationalities of people."""
    for p in people:
        if p.country:
            name = p.article.name
            yield Question(
                kind="origin",
                text=f"What {'was' if p.died else 'is'} the nationality of {name}?",
                answers=nationality(p, countries),
                hops=(Hop(name, p.article.id, (p.word,), f"I look up {name}."),),
                conclusion=f"{name} {'was' if p.died else 'is'} {p.word}.",
                about=frozenset([p.article.id, p.country]),
            )
    for place in places:
        name, country = place.article.name, countries[place.country]
        yield Question(
            kind="origin",
            text=f"In which country is {in_prose(place.article)}?",
            answers=(*country.answers, *([place.word] if place.word in PARTS.values() else [])),
            hops=(Hop(name, place.article.id, (place.word,), f"I look up {name}."),),
            conclusion=f"{name} is in {country.prose}.",
            about=frozenset([place.article.id, place.country]),
        )


def facts(countries: Iterable[Country]) -> Iterator[Question]:
    """Each fact with one answer, of each country."""
    for country in countries:
        for relation in (*RELATIONS, PEOPLE):
            fact = country.facts.get(relation)
            if fact and fact.answers:
                of = f"the {relation} of {country.prose}"
                people = f"people from {country.prose}"
                asked = f"What are {people} called" if relation == PEOPLE else f"What is {of}"
                yield Question(
                    kind="country",
                    text=f"{asked}?",
                    answers=fact.answers,
                    hops=(fact_hop(country, relation, "I look it up."),),
                    conclusion=fact.sentence,
                    about=frozenset([country.code]),
                )


def makers(works: Iterable[Work]) -> Iterator[Question]:
    """Who made it."""
    for w in works:
        yield Question(
            kind="maker",
            text=f"Who is the {w.maker_is} of {w.prose}?",
            answers=names_of(w.maker),
            hops=(maker_hop(w),),
            conclusion=f"The {w.maker_is} is {w.maker.name}.",
            about=frozenset([w.article.id, w.maker.id]),
        )


def fact_hop(country: Country, relation: str, thought: str) -> Hop:
    """The search for a fact of a country."""
    query = f"{relation} of {country.prose}"
    if relation == PEOPLE:
        query = f"people from {country.prose} are called"
    return Hop(query, country.passage_of(relation), country.facts[relation].answers, thought)


def maker_hop(work: Work) -> Hop:
    """The search for who made a work."""
    query = f"{work.article.name} {work.noun} {work.maker_is}"
    return Hop(query, work.article.id, (work.maker.name,), f"I look up {work.prose}.")


def names_of(article: Article) -> tuple[str, ...]:
    """What an article may be called in an answer."""
    return spellings(*dict.fromkeys((article.name, article.title)))


def nationality(person: Person, countries: Mapping[str, Country]) -> tuple[str, ...]:
    """The answers to where a person is from: the word that the passage has comes first."""
    country, word = countries[person.country], person.word
    adjectives = [each for each in country.adjectives if word not in PARTS and each not in PARTS]
    part = (PARTS[word], "British") if word in PARTS else ()
    return spellings(*dict.fromkeys((word, *part, *adjectives, *country.answers)))


def in_prose(article: Article) -> str:
    """The name inside a sentence, with `the` where the text has it."""
    begins = article.extract.startswith(f"The {article.name} ")
    return f"the {article.name}" if begins else article.name


def _year(article: Article, asked: str, query: str, year: int, conclusion: str) -> Question:
    return Question(
        kind="year",
        text=f"In what year {asked}?",
        answers=(str(year),),
        hops=(Hop(query, article.id, (str(year),), f"I look up {article.name}."),),
        conclusion=conclusion,
        about=frozenset([article.id]),
    )


def _definition(article: Article) -> str:
    """What the first sentence says the article is; empty where that would be no question."""
    first = sentences(article.extract)[0].rstrip(".")
    begin = re.match(rf"(?:The |An? )?{re.escape(article.name)}", first, re.I)
    said = _SAID.match(first, begin.end()) if begin else None
    if not said or article.topic == "People":
        return ""
    what = said["what"]
    if _stems(article.name) & _stems(what) or _UNCLEAR.search(what):
        return ""
    return what if _LEAST <= len(what) <= _MOST else ""


def _stems(text: str) -> set[str]:
    """The beginnings of its longer words."""
    return {word[:5] for word in re.findall(r"\w+", text.lower()) if len(word) > 3}
