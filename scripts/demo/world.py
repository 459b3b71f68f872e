"""The demo's made-up world: countries, entities and objects, their facts and questions.

Every name is two consonant-vowel syllables, so a guess is right once in 5,625. country −{capital,
river, king}→ entity −{three relations each}→ object; one passage per fact. Worlds with equal seeds
are equal.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

SYLLABLES = tuple(consonant + vowel for consonant in "bdfghjklmnprstv" for vowel in "aeiou")
RELATIONS = {
    "capital": ("mayor", "market", "tower"),
    "river": ("source", "bridge", "mouth"),
    "king": ("mother", "sword", "horse"),
}


@dataclass(frozen=True)
class Fact:
    """One edge of the world: "`subject` has `relation` `value` ."."""

    relation: str
    subject: str
    value: str

    @property
    def passage(self) -> str:
        """The fact as its one-line passage."""
        return f"{self.subject} has {self.relation} {self.value} ."


@dataclass(frozen=True)
class Chain:
    """A question: the facts that lead to its answer, one per hop, first hop first."""

    facts: tuple[Fact, ...]

    @property
    def hops(self) -> int:
        """The number of searches it takes."""
        return len(self.facts)

    @property
    def topic(self) -> str:
        """ "mayor of the capital of xanu": the question without its frame."""
        return " of the ".join(fact.relation for fact in reversed(self.facts)) + (
            f" of {self.facts[0].subject}"
        )

    @property
    def question(self) -> str:
        """The question as asked."""
        return f"what is the {self.topic} ?"

    @property
    def answer(self) -> str:
        """The one accepted answer."""
        return self.facts[-1].value


@dataclass(frozen=True)
class Country:
    """A country's twelve facts: three of its own, three for each of its entities."""

    own: tuple[Fact, ...]
    beyond: tuple[Chain, ...]  # two hops each

    @property
    def facts(self) -> tuple[Fact, ...]:
        """All twelve facts."""
        return self.own + tuple(chain.facts[1] for chain in self.beyond)

    def chains(self, hops: int) -> list[Chain]:
        """Its questions of one hop (12) or of two (9)."""
        if hops == 1:
            return [Chain((fact,)) for fact in self.facts]
        return list(self.beyond)


@dataclass(frozen=True)
class World:
    """Countries that share no name."""

    countries: tuple[Country, ...]

    @cached_property
    def facts(self) -> tuple[Fact, ...]:
        """Every fact, country by country."""
        return tuple(fact for country in self.countries for fact in country.facts)

    @cached_property
    def index(self) -> "LexicalIndex":
        """The index of the world's passages."""
        return LexicalIndex([fact.passage for fact in self.facts])

    def chains(self, hops: int) -> list[Chain]:
        """Every question of that many hops."""
        return [chain for country in self.countries for chain in country.chains(hops)]


class LexicalIndex:
    """BM25's ranking for equal lengths, each word once; stands in for the retrieval server."""

    def __init__(self, passages: Sequence[str]) -> None:
        self.passages = tuple(passages)
        self._postings: dict[str, set[int]] = defaultdict(set)
        for number, passage in enumerate(self.passages):
            for word in passage.split():
                self._postings[word].add(number)
        for word in [word for word, found in self._postings.items() if len(found) == len(passages)]:
            del self._postings[word]  # "has", ".": they tell no two passages apart

    def retrieve(self, query: str, top_k: int, rng: random.Random) -> list[str]:
        """The best passages in random order; which of equally good ones is left to `rng`."""
        scores: defaultdict[int, float] = defaultdict(float)
        total = len(self.passages)
        for word in query.split():
            found = self._postings.get(word, ())
            for number in found:
                scores[number] += math.log(1 + (total - len(found) + 0.5) / (len(found) + 0.5))
        ranked = sorted(scores, key=lambda number: (-scores[number], rng.random()))[:top_k]
        rng.shuffle(ranked)
        return [self.passages[number] for number in ranked]


def make_world(seed: int, countries: int) -> World:
    """A world of that many countries (13 names each). Raises ValueError when the names run out."""
    rng = random.Random(seed)
    needed, possible = 13 * countries, len(SYLLABLES) ** 2
    if needed > possible:
        raise ValueError(f"{countries!r} countries need {needed} names; there are {possible}")
    names = iter(rng.sample([a + b for a in SYLLABLES for b in SYLLABLES], needed))
    return World(tuple(_country(names) for _ in range(countries)))


def _country(names: Iterator[str]) -> Country:
    subject = next(names)
    own = tuple(Fact(relation, subject, next(names)) for relation in RELATIONS)
    beyond = tuple(
        Chain((fact, Fact(relation, fact.value, next(names))))
        for fact in own
        for relation in RELATIONS[fact.relation]
    )
    return Country(own, beyond)


def split(world: World, held_out: float, seed: int) -> tuple[World, World]:
    """Training and held-out countries: a held-out question names nothing of training's."""
    order = list(world.countries)
    random.Random(seed).shuffle(order)
    count = round(held_out * len(order))
    return World(tuple(order[count:])), World(tuple(order[:count]))


def balanced_chains(world: World, seed: int) -> list[Chain]:
    """As many one-hop as two-hop questions, alternating: any even prefix is half and half."""
    rng = random.Random(seed)
    kinds = [world.chains(1), world.chains(2)]
    for chains in kinds:
        rng.shuffle(chains)
    return [chain for pair in zip(*kinds, strict=False) for chain in pair]


def all_chains(world: World, seed: int) -> list[Chain]:
    """Every question: those of `balanced_chains` first, in their order, then what was left over."""
    balanced = balanced_chains(world, seed)
    rest = {*world.chains(1), *world.chains(2)} - {*balanced}
    return balanced + sorted(rest, key=lambda chain: chain.topic)
