"""The server's queue: who is let in, what is searched together, and for whom nothing is."""

import asyncio
import math
import time

import pytest

from retrieval_server.app.queue import LONG_CHARS, SearchQueue
from retrieval_server.protocol import RetrievalOverloaded


class Index:
    """A `run` that takes `each_s` a query, or waits for `release`; answers (query, rank) pairs."""

    def __init__(self, each_s: float = 0.0) -> None:
        self.calls: list[list[str]] = []
        self.each_s = each_s
        self.release = asyncio.Event()
        self.release.set()
        self.error: Exception | None = None

    async def __call__(self, queries: list[str], top_k: int) -> list[list[str]]:
        self.calls.append(queries)
        await self.release.wait()
        await asyncio.sleep(self.each_s * len(queries))
        if self.error is not None:
            raise self.error
        return [[f"{query}{rank}" for rank in range(top_k)] for query in queries]


def queue(index: Index, deadline_s: float = 60.0, most: int = 1000) -> SearchQueue[str]:
    return SearchQueue(index, max_batch=10, max_waiting=most, deadline_s=deadline_s)


def ask(one: SearchQueue[str], queries: str, left_s: float = 60.0, top_k: int = 1):  # type: ignore[no-untyped-def]
    return one.search(list(queries), top_k, time.monotonic() + left_s)


async def measured(one: SearchQueue[str], index: Index) -> None:
    """Have its pace known; the first batch is not counted."""
    for _ in range(3):
        await ask(one, "xy")
    index.calls.clear()


async def test_what_comes_together_goes_together_and_everybody_gets_the_own_part() -> None:
    index = Index()
    async with queue(index) as one:
        await measured(one, index)
        found = await asyncio.gather(ask(one, "ab"), ask(one, "c", top_k=2), ask(one, ""))
    assert found == [[["a0"], ["b0"]], [["c0", "c1"]], []]
    assert index.calls == [["a", "b", "c"]]


async def test_a_large_search_is_searched_in_parts_and_in_order() -> None:
    index = Index()
    async with queue(index) as one:
        await measured(one, index)
        large, small = ask(one, "abcdefghijklmnopqrstuvwxy"), ask(one, "z")
        assert one.waiting == 26
        assert await large == [[f"{c}0"] for c in "abcdefghijklmnopqrstuvwxy"]
        assert await small == [["z0"]] and one.waiting == 0
    assert ["".join(call) for call in index.calls] == ["abcdefghij", "klmnopqrst", "uvwxyz"]


async def test_batches_are_bounded_by_time() -> None:
    index = Index(each_s=0.1)
    async with queue(index, deadline_s=3.0) as one:
        await measured(one, index)
        assert 2 <= one.batch_queries <= 4 == one.offered + 4 - one.batch_queries
        await asyncio.gather(*(ask(one, query) for query in "abcdefgh"))
    assert max(map(len, index.calls)) <= 4


async def test_who_would_be_late_is_refused_at_once() -> None:
    index = Index(each_s=0.01)
    async with queue(index) as one:
        await measured(one, index)
        waiting = [ask(one, "abcdefgh") for _ in range(3)]
        begun = time.monotonic()
        with pytest.raises(
            RetrievalOverloaded, match=r"24 queries are waiting, 0\.\d+ s, and "
        ) as no:
            ask(one, "i", left_s=0.1)
        assert 0.05 < no.value.retry_after_s < 1.0 and time.monotonic() - begun < 0.05
        last = ask(one, "j", left_s=10.0)
        assert len(await asyncio.gather(*waiting, last)) == 4
    assert not any("i" in call for call in index.calls)


async def test_who_comes_to_an_idle_queue_is_let_in() -> None:
    index = Index(each_s=0.01)
    async with queue(index) as one:
        await measured(one, index)
        assert await ask(one, "a", left_s=1e-6) == [["a0"]]


async def test_nobody_searches_for_one_who_has_gone() -> None:
    index = Index()
    async with queue(index) as one:
        await measured(one, index)
        index.release.clear()
        first = ask(one, "a")
        await asyncio.sleep(0)
        gone, stays = ask(one, "b" * 25), ask(one, "c")
        gone.cancel()
        await asyncio.sleep(0.01)
        assert one.waiting == 1
        index.release.set()
        assert (await first, await stays) == ([["a0"]], [["c0"]])
    assert index.calls == [["a"], ["c"]]


async def test_nobody_searches_for_the_rest_of_one_who_leaves_meanwhile() -> None:
    index = Index()
    async with queue(index) as one:
        await measured(one, index)
        index.release.clear()
        gone = ask(one, "a" * 40)
        await asyncio.sleep(0.01)
        gone.cancel()
        stays = ask(one, "b")
        index.release.set()
        assert await stays == [["b0"]] and one.waiting == 0
    assert index.calls == [["a"] * 10, ["b"]]


async def test_who_can_be_answered_in_time_no_more_is_refused_unsearched() -> None:
    index = Index(each_s=0.005)
    async with queue(index) as one:
        await measured(one, index)
        index.release.clear()
        first = ask(one, "a" * 10)
        await asyncio.sleep(0.01)
        late, later = ask(one, "b" * 5, left_s=1.0), ask(one, "c")
        await asyncio.sleep(0.99)  # the index is slower than it was
        index.release.set()
        await first
        with pytest.raises(RetrievalOverloaded, match="too late"):
            await late
        assert await later == [["c0"]]
    assert ["b"] * 5 not in index.calls


async def test_an_index_that_was_slow_is_tried_again() -> None:
    """Who comes alone is let in, whatever is expected: so it is seen that it has become fast."""
    index = Index(each_s=0.2)
    async with queue(index, deadline_s=0.1) as one:
        await ask(one, "a")
        await ask(one, "a")
        index.each_s = 0.0
        alone = ask(one, "b", left_s=0.1)
        with pytest.raises(RetrievalOverloaded):
            ask(one, "c", left_s=0.1)
        assert await alone == [["b0"]]
        for _ in range(40):
            await ask(one, "a", left_s=0.1)
        asked = [ask(one, query, left_s=0.1) for query in "bc"]
        assert await asyncio.gather(*asked) == [[["b0"]], [["c0"]]]


async def test_more_than_may_wait_is_told_so_at_once() -> None:
    index = Index()
    async with queue(index, most=3) as one:
        index.release.clear()
        first = ask(one, "a")
        await asyncio.sleep(0)
        waiting = [ask(one, "bc"), ask(one, "d")]
        with pytest.raises(RetrievalOverloaded, match="3 queries are waiting, of at most 3"):
            ask(one, "e")
        index.release.set()
        await asyncio.gather(first, *waiting)
        assert one.waiting == 0


async def test_a_long_query_counts_as_several() -> None:
    index = Index()
    async with queue(index, most=4) as one:
        index.release.clear()
        first = ask(one, "a")
        await asyncio.sleep(0)
        long = one.search(["b" * 3 * LONG_CHARS], 1, math.inf)
        with pytest.raises(RetrievalOverloaded, match="1 queries are waiting, of at most 4"):
            ask(one, "c")
        index.release.set()
        await asyncio.gather(first, long)
    assert len(index.calls) == 2


async def test_one_request_larger_than_may_wait_is_let_in_alone() -> None:
    index = Index()
    async with queue(index, most=1) as one:
        assert len(await ask(one, "abcd")) == 4


async def test_everybody_in_a_failed_batch_gets_its_error_and_the_next_one_works() -> None:
    index = Index()
    async with queue(index) as one:
        await measured(one, index)
        index.error = ZeroDivisionError("broken")
        asked = [ask(one, "a" * 12), ask(one, "b")]
        errors = await asyncio.gather(*asked[:1], return_exceptions=True)
        assert isinstance(errors[0], ZeroDivisionError)
        index.error = None
        assert await asked[1] == [["b0"]] and one.waiting == 0
    assert ["".join(call) for call in index.calls] == ["a" * 10, "b"]


async def test_leaving_ends_searches_that_are_still_under_way() -> None:
    index = Index()
    async with queue(index) as one:
        index.release.clear()
        asked = [ask(one, query) for query in "ab"]
        await asyncio.sleep(0.01)
        late = ask(one, "c")
    async with asyncio.timeout(30):
        await asyncio.wait([*asked, late])
    assert all(each.cancelled() for each in [*asked, late])
