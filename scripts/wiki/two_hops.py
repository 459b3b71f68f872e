"""Questions that take two passages: the first says what to look for in the second. Pure.

origin_fact   What is the currency of the country that Gustave Eiffel was from?
maker_year    In what year was the author of the novel Dracula born?
maker_origin  What was the nationality of the director of the film Psycho?
older         Who was born first, Gustave Eiffel or Bram Stoker?
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

from scripts.wiki.articles import Article
from scripts.wiki.countries import RELATIONS, Country
from scripts.wiki.one_hop import fact_hop, in_prose, maker_hop, names_of, nationality
from scripts.wiki.questions import Hop, Question
from scripts.wiki.readings import Person, Place, Work

_PAIRS = 6  # of each person, with others of about the same time
_MODERN = 1500  # whoever was born before was from no country of today
_APART = 60  # years between births, at most


def origin_facts(
    people: Iterable[Person], places: Iterable[Place], countries: Mapping[str, Country]
) -> Iterator[Question]:
    """Each fact of the country where a place is, or somebody is from."""
    for p in people:
        if p.country in countries and p.born >= _MODERN:
            name, be = p.article.name, "was" if p.died else "is"
            where, found = f"that {name} {be} from", f"{name} {be} {p.word}."
            yield from _facts(p.article, p.word, where, found, countries[p.country])
    for place in places:
        country = countries[place.country]
        found = f"{place.article.name} is in {country.prose}."
        where = f"where {in_prose(place.article)} is"
        yield from _facts(place.article, place.word, where, found, country)


def maker_years(works: Iterable[Work], people: Mapping[str, Person]) -> Iterator[Question]:
    """When the maker of a work was born or died."""
    for w in works:
        if p := people.get(w.maker.id):
            who, name = f"the {w.maker_is} of {w.prose}", p.article.name
            events = [(f"was {who} born", "was born", p.born), (f"did {who} die", "died", p.died)]
            for asked, happened, year in events:
                if year:
                    yield Question(
                        kind="maker_year",
                        text=f"In what year {asked}?",
                        answers=(str(year),),
                        hops=(maker_hop(w), _maker(w, p, (str(year),))),
                        conclusion=f"{name} {happened} in {year}.",
                        about=frozenset([w.article.id, w.maker.id]),
                    )


def maker_origins(
    works: Iterable[Work], people: Mapping[str, Person], countries: Mapping[str, Country]
) -> Iterator[Question]:
    """Where the maker of a work is from."""
    for w in works:
        p = people.get(w.maker.id)
        if p and p.country in countries:
            be = "was" if p.died else "is"
            yield Question(
                kind="maker_origin",
                text=f"What {be} the nationality of the {w.maker_is} of {w.prose}?",
                answers=nationality(p, countries),
                hops=(maker_hop(w), _maker(w, p, (p.word,))),
                conclusion=f"{p.article.name} {be} {p.word}.",
                about=frozenset([w.article.id, w.maker.id, p.country]),
            )


def comparisons(people: Sequence[Person], seed: int) -> Iterator[Question]:
    """Which of two people was born first; each is as often named first."""
    rng = random.Random(f"older:{seed}")
    for p in people:
        near = [q for q in people if 0 < q.born - p.born <= _APART]
        for q in rng.sample(near, min(_PAIRS, len(near))):
            one, other = (p, q) if rng.random() < 0.5 else (q, p)
            yield Question(
                kind="older",
                text=f"Who was born first, {one.article.name} or {other.article.name}?",
                answers=names_of(p.article),
                hops=(
                    _life(one, f"I look up {one.article.name} first."),
                    _life(other, f"{one.article.name} was born in {one.born}."),
                ),
                conclusion=(
                    f"{other.article.name} was born in {other.born}, so "
                    f"{p.article.name} was born first."
                ),
                about=frozenset([p.article.id, q.article.id]),
            )


def _facts(
    article: Article, word: str, where: str, found: str, country: Country
) -> Iterator[Question]:
    first = Hop(article.name, article.id, (word,), f"I look up {article.name}.")
    for relation in RELATIONS:
        fact = country.facts.get(relation)
        given = f"{article.title} {article.description}"
        if fact and fact.answers and not any(each in given for each in fact.answers):
            yield Question(
                kind="origin_fact",
                text=f"What is the {relation} of the country {where}?",
                answers=fact.answers,
                hops=(first, fact_hop(country, relation, found)),
                conclusion=fact.sentence,
                about=frozenset([article.id, country.code]),
            )


def _maker(work: Work, person: Person, finds: tuple[str, ...]) -> Hop:
    name = person.article.name
    return Hop(name, person.article.id, finds, f"The {work.maker_is} is {name}.")


def _life(person: Person, thought: str) -> Hop:
    return Hop(person.article.name, person.article.id, (str(person.born),), thought)
