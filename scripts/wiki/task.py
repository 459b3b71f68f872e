"""Corpus, questions and demonstrations of the wiki task, from articles and countries."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.runtime.files import write_json
from retrieval_server.protocol import Document
from scripts.command.terminal import status
from scripts.wiki import names, one_hop, readings, two_hops
from scripts.wiki.articles import Article
from scripts.wiki.countries import Country
from scripts.wiki.demonstrations import demonstrations
from scripts.wiki.packages import WikiError
from scripts.wiki.questions import KINDS, Question, stands
from scripts.wiki.reach import Searcher, audit, ranks
from scripts.wiki.readings import Person, Place, Work
from scripts.wiki.split import TRAIN, Entities, Sides, split

DEFINITION_WORDS = 7  # at least: shorter ones fit several articles
Row = dict[str, Any]


@dataclass(frozen=True)
class World:
    """What is known: articles and countries, and what could be read of them. `plain`: the articles
    whose names are nobody else's.
    """

    articles: Sequence[Article]
    countries: Sequence[Country]
    plain: Sequence[Article]
    people: Sequence[Person]
    places: Sequence[Place]
    works: Sequence[Work]
    entities: Entities

    @property
    def passages(self) -> dict[str, str]:
        """The contents of all passages, by id."""
        found = {article.id: article.contents for article in self.articles}
        return found | {id: said for country in self.countries for id, said in country.passages}


def read_world(articles: Sequence[Article], countries: Sequence[Country]) -> World:
    """Read people, places and works, leaving out those whose name another article has too."""
    nations = names.of_countries(countries)
    facts = {country.code: country for country in countries if country.facts}
    counts = Counter(article.name for article in articles)
    plain = [article for article in articles if counts[article.name] == 1]
    titles = {article.title: article for article in plain}
    works = [work for each in plain if (work := readings.work(each, titles))]
    return World(
        articles=articles,
        countries=countries,
        plain=plain,
        people=[_with_facts(p, facts) for each in plain if (p := readings.person(each, nations))],
        places=[place for each in plain if (place := readings.place(each, nations, facts))],
        works=works,
        entities=Entities(
            countries=readings.countries_of(articles, nations),
            makers={work.article.id: work.maker.id for work in works},
            titles=names.of_articles(articles),
            nations=nations,
        ),
    )


def ask(world: World, seed: int) -> list[Question]:
    """Every question whose facts stand in the corpus."""
    people, places, works = world.people, world.places, world.works
    countries = {country.code: country for country in world.countries if country.facts}
    by_article = {person.article.id: person for person in people}
    made = [
        *one_hop.definitions(world.plain),
        *one_hop.lifetimes(people),
        *one_hop.years(people, works),
        *one_hop.origins(people, places, countries),
        *one_hop.facts(countries.values()),
        *one_hop.makers(works),
        *two_hops.origin_facts(people, places, countries),
        *two_hops.maker_years(works, by_article),
        *two_hops.maker_origins(works, by_article, countries),
        *two_hops.comparisons(people, seed),
    ]
    passages = world.passages
    unique = {question.id: question for question in made}
    return [question for question in unique.values() if stands(question, passages)]


def write_corpus(path: Path, world: World) -> None:
    """A passage a line, in a fixed order."""
    _write(path, ({"id": id, "contents": said} for id, said in world.passages.items()))


def write_task(folder: Path, world: World, searcher: Searcher, seed: int) -> None:
    """Questions, what is known of each, demonstrations and the audit. Raises WikiError."""
    with status("making questions"):
        questions = [each for each in ask(world, seed) if not _is_short(each)]
    defined = [each.hops[0].query for each in questions if each.kind == "definition"]
    found = searcher.search(defined, "looking for what fits two articles")
    with status("dividing the questions"):
        plain = [each for each in questions if _is_plain(each, found)]
        sides = split(plain, world.entities, seed)
    if not all(sides.values()):
        raise WikiError(
            f"seed {seed} leaves a side without questions: take another "
            "(--seed; make: SEED; bench: --seeds)"
        )
    everything = [question for side in sides.values() for question in side]
    queries = [hop.query for question in everything for hop in question.hops]
    queries += [question.text for question in everything]
    found |= searcher.search(queries, "searching for every question")
    with status("writing questions and demonstrations"):
        for side, each in sides.items():
            _write(folder / f"{side}.jsonl", map(_question, each))
        _write(folder / "kinds.jsonl", _kinds(sides))
        _write(folder / "demonstrations.jsonl", demonstrations(sides[TRAIN], found, seed))
        audits = {side: audit(each, found) for side, each in sides.items()}
        write_json(folder / "audit.json", audits)


def _with_facts(person: Person, facts: dict[str, Country]) -> Person:
    known = person.country in facts
    return person if known else dataclasses.replace(person, country="", word="")


def _is_short(question: Question) -> bool:
    short = len(question.hops[0].query.split()) < DEFINITION_WORDS
    return question.kind == "definition" and short


def _is_plain(question: Question, found: dict[str, list[Document]]) -> bool:
    """True where no other article fits a definition better."""
    return question.kind != "definition" or ranks(question, found) == [1]


def _question(question: Question) -> Row:
    return {
        "id": question.id,
        "question": question.text,
        "answers": list(question.answers),
        "hops": KINDS[question.kind],
    }


def _kinds(sides: Sides) -> Iterable[Row]:
    return (
        {"id": q.id, "split": side, "kind": q.kind, "hops": KINDS[q.kind], "support": q.support}
        for side, questions in sides.items()
        for q in questions
    )


def _write(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
