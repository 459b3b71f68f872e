"""The calls of the benchmark: sessions that go on and on with a text, over plain HTTP.

A session asks the demo's question, and goes on from what was said with a made-up observation, turn
after turn. Both servers get the same calls: text prompts, a stop, a seed, log-probs.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from scripts.bench.gateway.serving import Address

TURNS = 3
STOP, SEEN = "</search>", " <information> none </information>"
DEADLINE_S = 300.0
_LIMIT = {"stop": [STOP], "include_stop_str_in_output": True, "temperature": 1.0, "logprobs": 0}


@dataclass
class Window:
    """What came of a window of calls: `whole`: of each session of two turns or more that was looked
    at, whether all of its prompts went on, id for id, from what was read and sampled before.
    """

    tokens: int = 0
    seconds: float = 0.0
    errors: int = 0
    latencies_s: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)


async def window(
    address: Address,
    questions: Sequence[str],
    *,
    at_once: int,
    sessions: int,
    max_tokens: int,
    first: int,
    look: bool = False,
) -> Window:
    """Play so many sessions, `at_once` of them at a time. `look`: at the ids, which costs time."""
    made, numbers = Window(), iter(range(first, first + sessions))
    limit = aiohttp.ClientTimeout(DEADLINE_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=limit, connector=connector) as client:
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for place in range(at_once):
                key = address.keys[place % len(address.keys)]
                asked = {"max_tokens": max_tokens, "return_token_ids": look, "model": "policy"}
                player = _Player(client, address.url, key, asked | _LIMIT, made)
                group.create_task(_play(player, numbers, questions))
        made.seconds = time.perf_counter() - begun
    return made


async def _play(player: "_Player", numbers: Iterator[int], questions: Sequence[str]) -> None:
    for number in numbers:
        await player.session(number, questions[number % len(questions)])


@dataclass
class _Player:
    client: aiohttp.ClientSession
    url: str
    key: str
    asked: dict[str, Any]
    made: Window

    async def session(self, number: int, question: str) -> None:
        """Play one session."""
        text, known, whole = question, list[int](), True
        for turn in itertools.count():
            choice, ids = await self._call(text, number * TURNS + turn)
            if choice is None:
                return
            if ids:
                whole = whole and ids[: len(known)] == known
                known = ids + choice["token_ids"]
            said = choice["text"]
            if turn + 1 == TURNS or not said.endswith(STOP):
                break
            text += said + SEEN
        if self.asked["return_token_ids"] and turn:
            self.made.whole.append(whole)

    async def _call(self, text: str, seed: int) -> tuple[dict[str, Any] | None, list[int]]:
        begun = time.perf_counter()
        body = self.asked | {"prompt": text, "seed": seed}
        headers = {"authorization": f"Bearer {self.key}"}
        async with self.client.post(f"{self.url}/completions", json=body, headers=headers) as reply:
            if reply.status != 200:
                self.made.errors += 1
                return None, []
            found = await reply.json()
        self.made.latencies_s.append(time.perf_counter() - begun)
        self.made.tokens += found["usage"]["completion_tokens"]
        (choice,) = found["choices"]
        return choice, found.get("prompt_token_ids") or choice.get("prompt_token_ids") or []
