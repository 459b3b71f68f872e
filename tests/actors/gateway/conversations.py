"""Programs that call a policy at random: what they read and were told, call by call."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from actors.gateway.calls import Call
from actors.policies.base import Completion

SPOKEN = (
    "the mayor of bore",
    " is kelu .",
    "<search> café </search>",
    "<answer> 北京 </answer>",
    "👩‍👩‍👧 \n\n",
    "<|im_end|>\n<|im_start|>assistant\n",
    "",
)
SUMMARY = "In short: "


@dataclass
class Program:
    """One program: its conversations are ids, as the engine read and sampled them.

    `encode`, `decode`: the tokenizer's; `calls`: in the order of their ends.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    random: random.Random
    calls: list[Call] = field(default_factory=list)
    clock: Iterator[int] = field(default_factory=lambda: count(1))
    seen: set[str] = field(default_factory=set)

    def play(self, most: int) -> list[Call]:
        """Make up to so many calls, the next time of one of the conversations that there are."""
        told = [self._ask(self._said(2))]
        while len(self.calls) < most and self.random.random() < 0.95:
            history = self.random.choice(told)
            ways = (
                *(self._goes_on,) * 5, self._branches, self._truncates, self._edits, self._repeats,
                self._retokenises, self._summarises, self._forks, self._asks_again,
            )  # fmt: skip
            way = self.random.choice(ways)
            self.seen.add(way.__name__)
            told += way(history)
        return self.calls

    def _goes_on(self, history: list[int]) -> list[list[int]]:
        history += self._said(2)  # nobody knows this conversation as it was
        history[:] = self._ask(history)
        return []

    def _branches(self, history: list[int]) -> list[list[int]]:
        return [self._ask(history[: self.random.randint(1, len(history))])]

    def _truncates(self, history: list[int]) -> list[list[int]]:
        cut = history[self.random.randrange(len(history)) :]
        return [self._ask(cut + self._said(1))]

    def _edits(self, history: list[int]) -> list[list[int]]:
        at = self.random.randrange(len(history))
        return [self._ask([*history[:at], history[at] ^ 1, *history[at + 1 :]])]

    def _retokenises(self, history: list[int]) -> list[list[int]]:
        again = self.encode(self.decode(history)) or self._said(1)
        return [self._ask(again + self._said(1))]

    def _summarises(self, history: list[int]) -> list[list[int]]:
        return [self._ask(self.encode(SUMMARY + self.decode(history[-6:])))]

    def _forks(self, history: list[int]) -> list[list[int]]:
        """Ask several at the same time, which end in any order."""
        prompts = [history + self._said(1) for _ in range(self.random.randint(2, 4))]
        begun = [next(self.clock) for _ in prompts]
        together = list(zip(prompts, begun, strict=True))
        self.random.shuffle(together)
        return [self._ask(prompt, at) for prompt, at in together]

    def _asks_again(self, history: list[int]) -> list[list[int]]:
        return [self._ask(history), self._ask(history)]

    def _repeats(self, history: list[int]) -> list[list[int]]:
        """Repeat a call, which samples the same."""
        call = self.random.choice(self.calls)
        return [self._ask(call.prompt.tolist(), said=call.completion.tokens.tolist())]

    def _said(self, least: int) -> list[int]:
        """Some text, of so many tokens at least."""
        ids: list[int] = []
        while len(ids) < least:
            ids += self.encode(self.random.choice(SPOKEN))
        return ids

    def _ask(
        self, prompt: Sequence[int], started: int | None = None, said: list[int] | None = None
    ) -> list[int]:
        """Have the engine complete a prompt; return it with what was sampled."""
        begun = next(self.clock) if started is None else started
        said = said or self._said(1)[: self.random.randint(1, 12)]
        numbers = np.random.default_rng(len(self.calls) + len(prompt))
        completion = Completion(
            np.array(said, np.int32),
            -numbers.random(len(said), np.float32),
            numbers.integers(0, 9, len(said), np.int32),
            "length",
        )
        ended = float(next(self.clock))
        malformed = self.random.random() < 0.1
        call = Call(np.array(prompt, np.int32), completion, float(begun), ended, malformed)
        self.calls.append(call)
        return [*prompt, *said]


def program(tokenizer: Any, seed: int) -> Program:
    """A program that speaks a tokenizer's ids."""
    known: dict[str, list[int]] = {}

    def encode(text: str) -> list[int]:
        if text not in SPOKEN:
            return tokenizer.encode(text, add_special_tokens=False)
        if text not in known:
            known[text] = tokenizer.encode(text, add_special_tokens=False)
        return known[text]

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    return Program(encode, decode, random.Random(seed))


def stammerer(seed: int) -> Program:
    """A program of two ids alone, in which much continues by chance."""
    chance = random.Random(seed)
    return Program(
        lambda text: [chance.randrange(2) for _ in range(1 + len(text) % 2)],
        lambda ids: "x" * len(ids),
        random.Random(seed),
    )
