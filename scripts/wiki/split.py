"""Training, validation and held-out questions that share no entity. Pure.

A held-out question names and needs no country and no article that a training question names or
needs. An article is on its countries' side, or, without one, on that of its hash; a question whose
countries and articles are on both sides is dropped. Validation asks about training's countries, but
about other articles. Articles that many questions name (Europe) belong to nobody, and nothing is
asked about them.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from actors.answers import normalize_answer
from scripts.wiki.names import Names
from scripts.wiki.questions import KINDS, Question

TRAIN, VALIDATION, EVAL = "train", "validation", "eval"
HELD_OUT, VALIDATED = 0.2, 0.08  # shares of what is asked about
LARGEST = 0.3  # of the held-out share: the most that one country takes of it
COMMON = 12  # questions that name an article in passing: from then on it belongs to nobody
SAME_ANSWER = 0.03  # of a kind's questions, at most
_MOST = {  # questions of each kind: most need a country's fact by way of somebody or some place
    TRAIN: {
        "definition": 300, "lifetime": 300, "year": 400, "origin": 400, "country": 400,
        "maker": 100, "origin_fact": 4000, "maker_year": 200, "maker_origin": 100, "older": 300,
    },
    VALIDATION: dict.fromkeys(KINDS, 15) | {"origin_fact": 150},
    EVAL: dict.fromkeys(KINDS, 50) | {"origin_fact": 420},
}  # fmt: skip
Sides = dict[str, list[Question]]


@dataclass(frozen=True)
class Entities:
    """What a split goes by. `countries` of each article, by its id; `makers` of works; `titles` and
    `nations`: the names in texts.
    """

    countries: Mapping[str, set[str]]
    makers: Mapping[str, str]
    titles: Names
    nations: Names


def split(questions: Sequence[Question], entities: Entities, seed: int) -> Sides:
    """The questions of each side, of each kind at most as many as are wanted."""
    articles = {q.id: q.about & entities.countries.keys() for q in questions}
    said = {q.id: f"{q.text} {q.answers[0]}" for q in questions}
    named = {q.id: entities.titles.keys(said[q.id]) - articles[q.id] for q in questions}
    counts = Counter(id for names in named.values() for id in names)
    common = {id for id, count in counts.items() if count > COMMON}
    asked = [q for q in questions if not q.about & common]
    nations = {q.id: q.about - articles[q.id] | _nations(q, entities) for q in asked}
    division = _Division(entities, _held_out(nations, seed), seed)
    sides: Sides = {TRAIN: [], VALIDATION: [], EVAL: []}
    for q in asked:
        side = division.side(q, articles[q.id], named[q.id] - common, nations[q.id])
        if side:
            sides[side].append(q)
    return {side: _chosen(each, side, seed) for side, each in sides.items()}


@dataclass(frozen=True)
class _Division:
    """Who is on which side."""

    entities: Entities
    held_out: set[str]
    seed: int

    def side(
        self,
        question: Question,
        articles: AbstractSet[str],
        named: AbstractSet[str],
        nations: AbstractSet[str],
    ) -> str:
        """The side of a question, by all that it is about and names; empty for none."""
        of_articles = {self._side_of(id) for id in articles}
        others = {self._side_of(id) for id in named}
        held = {side == EVAL for side in of_articles | others}
        held |= {code in self.held_out for code in nations}
        if len(held) != 1 or "" in of_articles | others:
            return ""
        if held == {True}:
            return EVAL
        if not of_articles:
            return VALIDATION if self._share(question.id) < VALIDATED else TRAIN
        return of_articles.pop() if len(of_articles) == 1 else ""

    def _side_of(self, id: str) -> str:
        """A work goes with its maker."""
        maker = self.entities.makers.get(id, id)
        nations = self.entities.countries[id] | self.entities.countries[maker]
        share = self._share(maker)
        if nations:
            held = {code in self.held_out for code in nations}
            if True in held:
                return EVAL if held == {True} else ""
        elif share < HELD_OUT:
            return EVAL
        return VALIDATION if share > 1 - VALIDATED else TRAIN

    def _share(self, text: str) -> float:
        """A number from 0 to 1 that is always this text's."""
        digest = hashlib.blake2b(f"{self.seed}:{text}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64


def _nations(question: Question, entities: Entities) -> set[str]:
    """The countries that question and answer name. One word is a language and not its country."""
    answer = question.answers[0]
    return entities.nations.keys(f"{question.text} {answer if ' ' in answer else ''}")


def _held_out(nations: Mapping[str, AbstractSet[str]], seed: int) -> set[str]:
    """Countries that together take their share of what is asked, none of them most of it."""
    counts = Counter(code for codes in nations.values() for code in codes)
    room = HELD_OUT * counts.total()
    largest = LARGEST * room
    chosen: set[str] = set()
    for code in random.Random(f"countries:{seed}").sample(sorted(counts), len(counts)):
        if counts[code] <= min(room, largest):
            chosen.add(code)
            room -= counts[code]
    return chosen


def _chosen(questions: Sequence[Question], side: str, seed: int) -> list[Question]:
    """As many of each kind as are wanted, spread evenly: any beginning is a fair sample."""
    rng = random.Random(f"{side}:{seed}")
    placed: list[tuple[float, Question]] = []
    for kind in KINDS:
        found = [q for q in questions if q.kind == kind]
        rng.shuffle(found)
        kept = _varied(found, _MOST[side][kind])
        placed += [((n + rng.random()) / len(kept), q) for n, q in enumerate(kept)]
    return [q for _, q in sorted(placed, key=lambda each: each[0])]


def _varied(questions: Sequence[Question], most: int) -> list[Question]:
    """The first `most`, leaving out what would make one answer too frequent."""
    limit = max(3, round(SAME_ANSWER * min(most, len(questions))))
    seen: Counter[str] = Counter()
    kept: list[Question] = []
    for q in questions:
        answer = normalize_answer(q.answers[0])
        if len(kept) < most and seen[answer] < limit:
            seen[answer] += 1
            kept.append(q)
    return kept
