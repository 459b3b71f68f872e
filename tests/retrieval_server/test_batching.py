"""Concurrent searches share calls, keep their own results, and see what `run` raises."""

import asyncio

import pytest

from retrieval_server.batching import LONG_CHARS, Batcher
from retrieval_server.protocol import RetrievalOverloaded, RetrievalRefused


class Recorder:
    """A `run` that waits for `release` and answers with (query, rank) pairs."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], int]] = []
        self.release = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, queries: list[str], top_k: int) -> list[list[str]]:
        self.calls.append((queries, top_k))
        await self.release.wait()
        if self.error is not None:
            raise self.error
        return [[f"{query}{rank}" for rank in range(top_k)] for query in queries]


async def test_searches_of_one_turn_share_a_call_and_get_their_own_part() -> None:
    run = Recorder()
    run.release.set()
    async with Batcher(run, max_batch=10) as batcher:
        one, two = await asyncio.gather(batcher.search(["a", "b"], 1), batcher.search(["c"], 2))
    assert run.calls == [(["a", "b", "c"], 2)]
    assert (one, two) == ([["a0"], ["b0"]], [["c0", "c1"]])


async def test_what_gathers_during_a_call_goes_together_after_it() -> None:
    run = Recorder()
    async with Batcher(run, max_batch=10) as batcher, asyncio.TaskGroup() as group:
        for query in "abc":
            group.create_task(batcher.search([query], 1))
            await asyncio.sleep(0.01)
        assert len(run.calls) == 1
        run.release.set()
    assert [queries for queries, _ in run.calls] == [["a"], ["b", "c"]]


async def test_a_batch_is_bounded_but_one_call_may_exceed_it() -> None:
    run = Recorder()
    run.release.set()
    async with Batcher(run, max_batch=2) as batcher:
        await asyncio.gather(
            *(batcher.search(list(queries), 1) for queries in ("a", "b", "c", "defg"))
        )
    assert [queries for queries, _ in run.calls] == [["a", "b"], ["c"], ["d", "e", "f", "g"]]


async def test_a_second_call_starts_beside_the_first_after_the_wait() -> None:
    run = Recorder()
    async with Batcher(run, max_batch=10, max_wait_s=0.01, max_running=2) as batcher:
        searches = [asyncio.create_task(batcher.search(["a"], 1))]
        await asyncio.sleep(0.005)
        searches += [asyncio.create_task(batcher.search([query], 1)) for query in "bc"]
        while len(run.calls) < 2:
            await asyncio.sleep(0.001)
        assert run.calls[1] == (["b", "c"], 1)
        run.release.set()
        assert await asyncio.gather(*searches) == [[["a0"]], [["b0"]], [["c0"]]]


async def test_what_does_not_fit_a_batch_starts_without_waiting_for_its_end() -> None:
    run = Recorder()
    async with Batcher(run, max_batch=3, max_running=9) as batcher:
        searches = [asyncio.create_task(batcher.search(list(q), 1)) for q in ("a", "bcd", "e")]
        async with asyncio.timeout(30):
            while len(run.calls) < 3:
                await asyncio.sleep(0.001)
        assert [queries for queries, _ in run.calls] == [["a"], ["b", "c", "d"], ["e"]]
        run.release.set()
        await asyncio.gather(*searches)


async def test_everybody_in_a_failed_call_gets_its_error_and_the_next_call_works() -> None:
    run = Recorder()
    run.release.set()
    run.error = ZeroDivisionError("broken")
    async with Batcher(run, max_batch=10) as batcher:
        searches = [batcher.search([query], 1) for query in "ab"]
        errors = await asyncio.gather(*searches, return_exceptions=True)
        assert [type(error) for error in errors] == [ZeroDivisionError] * 2
        run.error = None
        assert await batcher.search(["c"], 1) == [["c0"]]


@pytest.mark.parametrize("running", [1, 4])
async def test_one_callers_refused_query_is_not_anothers(running: int) -> None:
    calls: list[list[str]] = []

    async def run(queries: list[str], top_k: int) -> list[list[str]]:
        calls.append(queries)
        if "bad" in queries:
            raise RetrievalRefused("400")
        return [[query] for query in queries]

    async with Batcher(run, max_batch=10, max_running=running) as batcher:
        searches = (batcher.search([query], 1) for query in ("a", "bad", "c"))
        found = await asyncio.gather(*searches, return_exceptions=True)
        assert await batcher.search(["d"], 1) == [["d"]] and batcher.waiting == 0
    assert (found[0], found[2]) == ([["a"]], [["c"]]) and isinstance(found[1], RetrievalRefused)
    assert calls == [["a", "bad", "c"], ["a"], ["bad"], ["c"], ["d"]]


async def test_a_caller_that_leaves_does_not_disturb_the_others() -> None:
    run = Recorder()
    async with Batcher(run, max_batch=10) as batcher:
        stays, leaves = (asyncio.create_task(batcher.search([query], 1)) for query in "ab")
        await asyncio.sleep(0.005)
        leaves.cancel()
        run.release.set()
        assert await stays == [["a0"]]


async def test_leaving_ends_searches_that_are_still_under_way() -> None:
    run = Recorder()
    async with Batcher(run, max_batch=1) as batcher:
        searches = [asyncio.create_task(batcher.search([query], 1)) for query in "ab"]
        await asyncio.sleep(0.005)
    async with asyncio.timeout(30):
        await asyncio.wait(searches)
    assert all(search.cancelled() for search in searches)


async def test_nothing_asked_is_nothing_run() -> None:
    async with Batcher(Recorder(), max_batch=1) as batcher:
        assert await batcher.search([], 3) == []


@pytest.mark.parametrize("top_k", [1, 3])
async def test_results_are_cut_to_each_callers_top_k(top_k: int) -> None:
    run = Recorder()
    run.release.set()
    async with Batcher(run, max_batch=10) as batcher:
        mine, _ = await asyncio.gather(batcher.search(["a"], top_k), batcher.search(["b"], 3))
    assert mine == [[f"a{rank}" for rank in range(top_k)]]


async def test_more_than_may_wait_is_told_so_at_once() -> None:
    run = Recorder()
    async with Batcher(run, max_batch=2, max_waiting=3) as batcher, asyncio.TaskGroup() as group:
        for queries in ("a", "bc", "d"):
            group.create_task(batcher.search(list(queries), 1))
            await asyncio.sleep(0.01)
        assert batcher.waiting == 3
        with pytest.raises(RetrievalOverloaded, match="3 queries are waiting, of at most 3"):
            await batcher.search(["e"], 1)
        run.release.set()
    assert [queries for queries, _ in run.calls] == [["a"], ["b", "c"], ["d"]]
    assert batcher.waiting == 0


async def test_a_long_query_counts_as_several() -> None:
    run = Recorder()
    async with Batcher(run, max_batch=1, max_waiting=4) as batcher, asyncio.TaskGroup() as group:
        for query in ("a", "b" * 3 * LONG_CHARS):
            group.create_task(batcher.search([query], 1))
            await asyncio.sleep(0)
        with pytest.raises(RetrievalOverloaded, match="1 queries are waiting, of at most 4"):
            await batcher.search(["c"], 1)
        run.release.set()
    assert len(run.calls) == 2


async def test_one_call_larger_than_may_wait_goes_alone() -> None:
    run = Recorder()
    run.release.set()
    async with Batcher(run, max_batch=2, max_waiting=1) as batcher:
        assert len(await batcher.search(list("abcd"), 1)) == 4


async def test_nobody_searches_for_one_who_has_given_up() -> None:
    run = Recorder()
    async with Batcher(run, max_batch=10) as batcher, asyncio.TaskGroup() as group:
        group.create_task(batcher.search(["a"], 1))
        await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await batcher.search(["b"], 1)
        group.create_task(batcher.search(["c"], 1))
        await asyncio.sleep(0.01)
        run.release.set()
    assert [queries for queries, _ in run.calls] == [["a"], ["c"]]


async def test_the_backlog_is_reckoned_by_the_last_call() -> None:
    run = Recorder()
    async with Batcher(run, max_batch=1) as batcher, asyncio.TaskGroup() as group:
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        first = group.create_task(batcher.search(["a"], 1))
        await asyncio.sleep(0.02)
        run.release.set()
        await first
        lasted_s = clock() - begun_s
        run.release.clear()
        for query in "bcd":
            group.create_task(batcher.search([query], 1))
        await asyncio.sleep(0.01)
        assert batcher.waiting == 2 and 0.03 < batcher.backlog_s <= 2 * lasted_s
        run.release.set()
