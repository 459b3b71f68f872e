"""The rollouts of a run: how many tokens their turns have, and how late their searches are.

A workload is a set of shapes that rollouts are drawn from, either made of a few means or taken from
what real rollouts looked like.
"""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

from configs.load import ConfigError

SHAPES = 1000  # that a workload of means draws its rollouts from
_P99 = NormalDist().inv_cdf(0.99)  # standard deviations above the median


class Turn(NamedTuple):
    """Tokens sampled, tokens read after them, and whether they come of a search. Siblings whose
    turns have one `query`, other than 0, ask the same and are answered together. `shared`: tokens
    of the context before it that a sibling's begins with too, in whole blocks of the cache.
    `prompt`, other than 0: it begins another sequence of its rollout, with a prompt of so many
    tokens, of which an earlier one began with the `known` first, in whole blocks.
    """

    action: int
    observation: int = 0
    searches: bool = False
    query: int = 0
    shared: int = 0
    prompt: int = 0
    known: int = 0


class Shape(NamedTuple):
    """A rollout: its first prompt's tokens and its turns, sequence after sequence."""

    prompt: int
    turns: tuple[Turn, ...]

    @property
    def sampled(self) -> int:
        """Tokens that the policy samples."""
        return sum(turn.action for turn in self.turns)

    @property
    def tokens(self) -> int:
        """Tokens of all its sequences, as the learner reads them."""
        return self.prompt + sum(
            turn.prompt + turn.action + turn.observation for turn in self.turns
        )

    @property
    def searches(self) -> int:
        """Turns that end in a search."""
        return sum(turn.searches for turn in self.turns)


@dataclass(frozen=True)
class Latency:
    """Seconds of a search: log-normal with this median and p99; equal ones are a constant. Raises
    ConfigError unless 0 ≤ p50_s ≤ p99_s, and 0 only for both.
    """

    p50_s: float
    p99_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.p50_s <= self.p99_s or (self.p99_s and not self.p50_s):
            raise ConfigError(
                f"--latency {self.p50_s:g} {self.p99_s:g}: the median and the p99 of a search's "
                "seconds, 0 < median ≤ p99, or 0 for both"
            )

    @property
    def spread(self) -> float:
        """The standard deviation of its logarithm."""
        return math.log(self.p99_s / self.p50_s) / _P99 if self.p50_s else 0.0

    @property
    def mean_s(self) -> float:
        """Its mean."""
        return self.p50_s * math.exp(self.spread**2 / 2)

    def draws(self, chance: random.Random) -> Iterator[float]:
        """Yield seconds without end."""
        p50_s, spread = self.p50_s, self.spread
        while True:
            yield p50_s * math.exp(spread * chance.gauss(0.0, 1.0)) if spread else p50_s


@dataclass(frozen=True)
class Workload:
    """The shapes of rollouts, each as likely, the latency of their searches, and the share of
    groups that are dropped because their rewards are all alike. `siblings`: the shapes lie question
    by question, so many of each, and a group's are those of one; 0: they are all alike likely.
    `beside_s`: what a search takes beside its latency, in client and server.
    """

    shapes: tuple[Shape, ...]
    latency: Latency = field(default_factory=lambda: Latency(0.0, 0.0))
    no_signal: float = 0.0
    siblings: int = 0
    beside_s: float = 0.0

    def group(self, size: int, chance: random.Random) -> list[Shape]:
        """Draw the shapes of a group."""
        of_question = self.siblings or len(self.shapes)
        first = int(chance.random() * (len(self.shapes) // of_question)) * of_question
        begun = int(chance.random() * of_question)
        return [self.shapes[first + (begun + n) % of_question] for n in range(size)]

    @cached_property
    def sampled_tokens(self) -> float:
        """Tokens that a rollout samples, on average."""
        return sum(shape.sampled for shape in self.shapes) / len(self.shapes)

    @cached_property
    def tokens(self) -> float:
        """Tokens of a rollout's whole context, on average."""
        return sum(shape.tokens for shape in self.shapes) / len(self.shapes)

    def taken_in(self, block: int) -> float:
        """Tokens that an engine takes in for a rollout, on average, where it finds what it took in
        before, in whole blocks.
        """
        by_others = 1.0 - 1.0 / max(1, self.siblings)
        total = 0.0
        for shape in self.shapes:
            context, own = shape.prompt, 0
            for turn in shape.turns:
                if turn.prompt:
                    context, own = turn.prompt, turn.known
                total += context - max(own, turn.shared * by_others)
                own = context = context + turn.action
                own = own // block * block
                context += turn.observation
        return total / len(self.shapes)

    @cached_property
    def searches(self) -> float:
        """Searches of a rollout, on average."""
        return sum(shape.searches for shape in self.shapes) / len(self.shapes)

    @cached_property
    def turns(self) -> float:
        """Turns of a rollout, on average."""
        return sum(len(shape.turns) for shape in self.shapes) / len(self.shapes)

    @cached_property
    def held_tokens(self) -> float:
        """Tokens of the context while a rollout generates, on average over its sampled tokens."""
        return sum(map(_held, self.shapes)) / len(self.shapes) / self.sampled_tokens


def _held(shape: Shape) -> float:
    context, held = shape.prompt, 0.0
    for turn in shape.turns:
        context = turn.prompt or context
        held += turn.action * (context + turn.action / 2)
        context += turn.action + turn.observation
    return held


@dataclass(frozen=True)
class Means:
    """A workload by its means: a rollout's searches (Poisson, at most `most_searches`), tokens of
    a completion (geometric, at most `most_action`), of what a search shows, of the prompt, which
    siblings share in whole blocks of `block` tokens.
    """

    prompt: int
    searches: float
    most_searches: int
    action: float
    most_action: int
    observation: int
    longest: int
    block: int = 1

    def shapes(self, seed: int, count: int = SHAPES) -> tuple[Shape, ...]:
        """Draw so many rollouts. A context ends at `longest` tokens, as a rollout does."""
        chance = random.Random(f"shapes {seed}")
        return tuple(self._shape(chance) for _ in range(count))

    def _shape(self, chance: random.Random) -> Shape:
        turns, room = list[Turn](), self.longest - self.prompt
        shared = self.prompt // self.block * self.block
        for left in range(_poisson(chance, self.searches, self.most_searches), -1, -1):
            action = min(_geometric(chance, self.action), self.most_action, max(room, 1))
            room -= action
            if not left or room <= self.observation:
                return Shape(self.prompt, (*turns, Turn(action, shared=shared)))
            room -= self.observation
            turns.append(Turn(action, self.observation, searches=True, shared=shared))
        raise AssertionError("the last turn returns")


def _poisson(chance: random.Random, mean: float, most: int) -> int:
    product, count, floor = chance.random(), 0, math.exp(-mean)
    while product > floor and count < most:
        product, count = product * chance.random(), count + 1
    return count


def _geometric(chance: random.Random, mean: float) -> int:
    if mean <= 1.0:
        return 1
    return 1 + int(math.log(1.0 - chance.random()) / math.log(1.0 - 1.0 / mean))


def alike(prompt: int, turns: Iterable[Turn], latency_s: float = 0.0) -> Workload:
    """A workload whose rollouts are all the same."""
    return Workload((Shape(prompt, tuple(turns)),), Latency(latency_s, latency_s))
