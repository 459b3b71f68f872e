"""One request for a key, however many callers ask."""

import asyncio

import pytest

from actors.rewards.single_flight import SingleFlight


class Oracle:
    """Answers when it is told to; counts what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.free = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, key: str) -> str:
        self.asked.append(key)
        await self.free.wait()
        if self.error is not None:
            raise self.error
        return key.upper()


async def test_askers_share_a_question_and_later_ones_its_answer() -> None:
    cache, oracle = SingleFlight[str, str](8), Oracle()
    asking = [asyncio.create_task(cache.get("a", oracle)) for _ in range(5)]
    await asyncio.sleep(0)
    oracle.free.set()
    assert await asyncio.gather(*asking) == ["A"] * 5
    assert await cache.get("a", oracle) == "A"
    assert oracle.asked == ["a"] and cache.saved == 5


async def test_an_asker_who_leaves_leaves_the_question_to_the_others() -> None:
    cache, oracle = SingleFlight[str, str](8), Oracle()
    first, second = (asyncio.create_task(cache.get("a", oracle)) for _ in range(2))
    while not oracle.asked:
        await asyncio.sleep(0)
    first.cancel()
    oracle.free.set()
    assert await second == "A" and oracle.asked == ["a"]


async def test_what_was_raised_is_told_to_all_and_remembered_by_nobody() -> None:
    cache, oracle = SingleFlight[str, str](8), Oracle()
    oracle.free.set()
    oracle.error = ValueError("no")
    asking = asyncio.gather(*(cache.get("a", oracle) for _ in range(2)), return_exceptions=True)
    assert [str(error) for error in await asking] == ["no", "no"]
    oracle.error = None
    assert await cache.get("a", oracle) == "A"


async def test_the_value_asked_for_longest_ago_is_forgotten() -> None:
    cache, oracle = SingleFlight[str, str](2), Oracle()
    oracle.free.set()
    for key in "abac":
        await cache.get(key, oracle)
    assert [await cache.get(key, oracle) for key in "ab"] == ["A", "B"]
    assert oracle.asked == ["a", "b", "c", "b"]


async def test_nothing_is_remembered_without_room() -> None:
    cache, oracle = SingleFlight[str, str](0), Oracle()
    oracle.free.set()
    assert [await cache.get("a", oracle) for _ in range(2)] == ["A", "A"]
    assert oracle.asked == ["a", "a"]


async def test_closing_ends_what_is_asked() -> None:
    cache, oracle = SingleFlight[str, str](8), Oracle()
    asking = asyncio.create_task(cache.get("a", oracle))
    while not oracle.asked:
        await asyncio.sleep(0)
    await cache.close()
    with pytest.raises(asyncio.CancelledError):
        await asking
