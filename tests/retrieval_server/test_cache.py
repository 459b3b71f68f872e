"""A question is asked once, however many want to know, and its answer is kept for a while."""

import asyncio
from typing import Any

import pytest

from retrieval_server.cache import QueryCache
from retrieval_server.client import RetrievalClient
from retrieval_server.protocol import Passage, RetrievalRefused, RetrievalTimeout


class Asked:
    """The queries asked; answers when released."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.release = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, queries: list[str]) -> list[list[Passage]]:
        self.calls.append(queries)
        await self.release.wait()
        if self.error is not None:
            raise self.error
        return [[Passage(query, query, 1.0)] for query in queries]


def ids(rows: list[list[Passage]]) -> list[str]:
    return [row[0].id for row in rows]


async def test_the_same_query_at_once_is_asked_once() -> None:
    ask, memory = Asked(), QueryCache(0)
    both = [asyncio.create_task(memory.get(q, 3, ask)) for q in (["a", "b", "a"], ["b", "c"])]
    await asyncio.sleep(0)
    ask.release.set()
    assert [ids(await each) for each in both] == [["a", "b", "a"], ["b", "c"]]
    assert ask.calls == [["a", "b"], ["c"]]
    assert (memory.shared, memory.remembered) == (2, 0)
    await memory.get(["a"], 3, ask)
    assert ask.calls[-1] == ["a"], "nothing is kept where nothing may be"


async def test_what_is_known_is_not_asked_again_until_it_is_too_much() -> None:
    ask, memory = Asked(), QueryCache(2)
    memory.of_version("one")
    ask.release.set()
    for query in ("a", "b", "a", "c", "a", "b"):
        assert ids(await memory.get([query], 3, ask)) == [query]
    assert ask.calls == [["a"], ["b"], ["c"], ["b"]]
    await memory.get(["b"], 4, ask)
    assert ask.calls[-1] == ["b"], "another top_k is another question"


async def test_long_passages_are_forgotten_before_they_fill_the_memory() -> None:
    ask, memory = Asked(), QueryCache(100, chars=10)
    memory.of_version("one")
    ask.release.set()
    for query in ("aaaa", "bbbb", "aaaa", "cccc", "bbbb", "d" * 11, "cccc"):
        await memory.get([query], 3, ask)
    assert [each for (each,) in ask.calls] == ["aaaa", "bbbb", "cccc", "bbbb", "d" * 11, "cccc"]


async def test_another_index_makes_it_forget() -> None:
    ask, memory = Asked(), QueryCache(8)
    ask.release.set()
    memory.of_version("one")
    await memory.get(["a"], 3, ask)
    memory.of_version("one")
    await memory.get(["a"], 3, ask)
    assert len(ask.calls) == 1
    memory.of_version("two")
    await memory.get(["a"], 3, ask)
    assert len(ask.calls) == 2


async def test_what_was_asked_of_the_index_before_is_not_kept() -> None:
    ask, memory = Asked(), QueryCache(8)
    memory.of_version("one")
    waiting = asyncio.create_task(memory.get(["a"], 3, ask))
    while not ask.calls:
        await asyncio.sleep(0)
    memory.of_version("two")
    ask.release.set()
    assert ids(await waiting) == ["a"]
    await memory.get(["a"], 3, ask)
    assert len(ask.calls) == 2


async def test_an_error_is_not_kept_and_who_joined_late_asks_once_himself() -> None:
    ask, memory = Asked(), QueryCache(8)
    ask.error = RetrievalTimeout("too late")
    ask.release.set()
    found = await asyncio.gather(
        *(memory.get(["a"], 3, ask) for _ in range(3)), return_exceptions=True
    )
    assert [str(each) for each in found] == ["too late"] * 3 and len(ask.calls) == 2
    ask.error = None
    assert ids(await memory.get(["a"], 3, ask)) == ["a"]


async def test_a_refusal_is_everybodys_at_once() -> None:
    ask, memory = Asked(), QueryCache(8)
    ask.error = RetrievalRefused("no")
    ask.release.set()
    both = (memory.get(["a"], 3, ask), memory.get(["a"], 3, ask))
    assert len(await asyncio.gather(*both, return_exceptions=True)) == 2 and len(ask.calls) == 1


async def test_nothing_is_remembered_of_a_server_that_tells_no_version() -> None:
    ask, memory = Asked(), QueryCache(8)
    ask.release.set()
    for _ in range(2):
        assert ids(await memory.get(["a"], 3, ask)) == ["a"]
    assert ask.calls == [["a"], ["a"]]


async def test_who_asked_first_may_leave() -> None:
    ask, memory = Asked(), QueryCache(8)
    first = asyncio.create_task(memory.get(["a"], 3, ask))
    await asyncio.sleep(0)
    second = asyncio.create_task(memory.get(["a"], 3, ask))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    ask.release.set()
    assert ids(await second) == ["a"] and len(ask.calls) == 1


@pytest.mark.parametrize("turns", [1, 5])
async def test_closing_abandons_what_is_on_its_way(turns: int) -> None:
    ask, memory = Asked(), QueryCache(8)
    waiting = asyncio.create_task(memory.get(["a"], 3, ask))
    for _ in range(turns):
        await asyncio.sleep(0)
    await memory.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_client_of_our_server_asks_once(server_url: str, serve: Any) -> None:
    async with RetrievalClient(server_url, cache_queries=10) as client:
        rows = await asyncio.gather(*(client.retrieve(["kelu"], 1) for _ in range(8)))
        again = await client.retrieve(["kelu"], 1)
    assert {row[0].id for [row] in [*rows, again]} == {"p0"}
    gauges = client.gauges()
    assert gauges["retrieval/requests"] == 9 and gauges["retrieval/calls"] == 1
    assert (gauges["retrieval/shared"], gauges["retrieval/remembered"]) == (7, 1)
