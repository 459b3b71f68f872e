"""Concurrent searches share calls, keep their own results, and see what `run` raises."""

import asyncio
import time

import pytest

from retrieval_server.batching import Batcher
from retrieval_server.protocol import RetrievalOverloaded, RetrievalRefused


class Recorder:
    """A `run` that waits for `release` and answers with (query, rank) pairs."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], int]] = []
        self.release = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, queries: list[str], top_k: int, _: float) -> list[list[str]]:
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

    async def run(queries: list[str], top_k: int, deadline: float) -> list[list[str]]:
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


async def test_the_oldest_go_first_but_late_ones_last_and_of_these_the_newest() -> None:
    run = Recorder()
    async with Batcher(run, max_batch=1) as batcher, asyncio.TaskGroup() as group:
        group.create_task(batcher.search(["first"], 1))
        await asyncio.sleep(0.01)
        now = time.monotonic()
        for query, left_s in (("a", 0.1), ("b", 60.0), ("c", 0.1), ("d", 60.0)):
            group.create_task(batcher.search([query], 1, now + left_s))
        await asyncio.sleep(0.06)  # more than half of their time, for two
        run.release.set()
    assert [queries for queries, _ in run.calls] == [["first"], ["b"], ["d"], ["c"], ["a"]]
    assert batcher.waiting == 0


async def test_nothing_is_left_of_late_ones_who_have_gone() -> None:
    run = Recorder()
    async with Batcher(run, max_batch=1) as batcher, asyncio.TaskGroup() as group:
        group.create_task(batcher.search(["first"], 1))
        await asyncio.sleep(0.01)
        for query in "abc":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await batcher.search([query], 1, time.monotonic() + 0.02)
        run.release.set()
    assert len(run.calls) == 1 and batcher.waiting == 0


async def test_who_meets_an_overload_asks_later_and_in_smaller_batches() -> None:
    calls: list[list[str]] = []

    async def run(queries: list[str], top_k: int, deadline: float) -> list[list[str]]:
        calls.append(queries)
        if len(queries) > 2:
            batcher.max_batch = 2
            raise RetrievalOverloaded("busy", 0.05)
        return [[query] for query in queries]

    async with Batcher(run, max_batch=9) as batcher:
        begun = time.monotonic()
        found = await asyncio.gather(*(batcher.search([q], 1, begun + 60.0) for q in "abc"))
        assert time.monotonic() - begun > 0.05
    assert found == [[["a"]], [["b"]], [["c"]]]
    assert calls == [["a", "b", "c"], ["a", "b"], ["c"]]


async def test_who_has_not_that_much_time_meets_the_overload() -> None:
    run = Recorder()
    run.error = RetrievalOverloaded("busy", 60.0)
    run.release.set()
    async with Batcher(run, max_batch=9) as batcher:
        soon = time.monotonic() + 1.0
        asked = [batcher.search(["a"], 1, soon), batcher.search(["b"], 1, soon + 120.0)]
        tasks = [asyncio.ensure_future(each) for each in asked]
        with pytest.raises(RetrievalOverloaded, match="busy"):
            await tasks[0]
        assert not tasks[1].done()
    async with asyncio.timeout(30):
        await asyncio.wait(tasks)
    assert tasks[1].cancelled(), "nothing waits when the batcher is closed"
