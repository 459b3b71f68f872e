"""A list of servers: who is asked, who rests, and of which index the passages are."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from retrieval_server.client import RetrievalClient
from retrieval_server.poster import Poster
from retrieval_server.protocol import (
    OtherIndex,
    RetrievalDenied,
    RetrievalError,
    RetrievalOverloaded,
    RetrievalRefused,
    RetrievalTimeout,
    RetrievalUnavailable,
    RetrievalUnreachable,
)
from retrieval_server.servers import FIRST_REST_S, GONE_S, LONGEST_REST_S, Server, Servers
from tests.lived import lived
from tests.retrieval_server.conftest import Faulty, http

Start = Callable[..., Awaitable[Faulty]]
URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3")
# Accepts, says so once a request has come, and never answers.
HANGING = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
connection.recv(1 << 16)
print("asked", flush=True)
connection.recv(1 << 16)
"""


def good(id: str = "5", version: str = "one") -> bytes:
    hit = {"document": {"id": id, "contents": "T\nx"}, "score": 1.5}
    headers = f"x-index-version: {version}\r\n" if version else ""
    return http(200, {"result": [[hit]]}, headers=headers)


def busy(after_s: int) -> bytes:
    return http(503, {"detail": "busy"}, headers=f"retry-after: {after_s}\r\n")


def client_of(*servers: Faulty | str, **settings: Any) -> RetrievalClient:
    urls = [each if isinstance(each, str) else each.url for each in servers]
    return RetrievalClient(urls, **{"look_every_s": 0.05, **settings})


def prefer(client: RetrievalClient, *first: int) -> None:
    """Take these of its servers for near ones, which are asked first, and none for slow."""
    for place, server in enumerate(client._servers.all):
        server.near, server.latency_s = place in first, None


async def found(client: RetrievalClient, times: int = 1) -> list[str]:
    return [(await client.retrieve([f"q{n}"], 1))[0][0].id for n in range(times)]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not true():
            await asyncio.sleep(0.01)


def gauge(client: RetrievalClient, name: str) -> float:
    return client.gauges()[f"retrieval/{name}"]


async def test_a_server_killed_in_mid_post_costs_no_search(faulty: Start) -> None:
    other = await faulty(good())
    words = [sys.executable, "-S", "-c", HANGING]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        url = f"http://127.0.0.1:{child.stdout.readline().strip()}"
        async with client_of(url, other, timeout_s=20.0, retries=0, look_every_s=60.0) as client:
            prefer(client, 0)
            asked = asyncio.create_task(found(client))
            assert await asyncio.to_thread(child.stdout.readline) == "asked\n"
            child.kill()
            with lived() as lived_s:
                assert await asked == ["5"]
            assert lived_s() < 5.0, "within half of the deadline: nobody waited for it"
            told = client.gauges()
    names = ("servers_up", "failovers", "errors", "retried")
    assert [told[f"retrieval/{name}"] for name in names] == [1, 1, 0, 1]


@pytest.mark.parametrize(
    "fault",
    [
        http(500, {"detail": "oops"}),
        http(200, b"<html>"),
        http(200, {"result": []}),
        http(401, {"detail": "who?"}),
        b"",
        busy(60),
    ],
)
async def test_whatever_a_server_does_wrong_the_next_one_answers_at_once(
    faulty: Start, fault: bytes
) -> None:
    bad, well = await faulty(fault), await faulty(good())
    async with client_of(bad, well, retries=0, look_every_s=60.0) as client:
        prefer(client, 0)
        with lived() as lived_s:
            assert await found(client, 5) == ["5"] * 5
        assert lived_s() < 5.0
    assert (len(bad.bodies), len(well.bodies)) == (1, 5), "who failed is left alone for a while"
    assert gauge(client, "failovers") == 1 and gauge(client, "errors") == 0


async def test_silence_leaves_time_for_the_next_one(faulty: Start) -> None:
    silent, well = await faulty(None), await faulty(good())
    async with client_of(silent, well, timeout_s=0.6, retries=0) as client:
        prefer(client, 0)
        assert await found(client) == ["5"]


async def test_a_refused_query_is_asked_nowhere_else(faulty: Start) -> None:
    servers = [await faulty(http(422, {"detail": "topk"})) for _ in range(2)]
    async with client_of(*servers) as client:
        with pytest.raises(RetrievalRefused, match="answered 422"):
            await found(client)
        assert gauge(client, "servers_up") == 2
    assert sum(len(each.bodies) for each in servers) == 1


async def test_who_has_failed_is_tried_by_one_and_then_serves_again(faulty: Start) -> None:
    mended, other = await faulty(http(500, {}), None, good("m")), await faulty(good())
    async with client_of(mended, other, timeout_s=1.0) as client:
        prefer(client, 0)
        assert await found(client) == ["5"]
        first = client._servers.all[0]
        first.rests_until = 0.0
        await until(lambda: first.can_serve(time.monotonic()))
        trial = asyncio.create_task(client.retrieve(["trial"], 1))
        await until(lambda: len(mended.bodies) == 2)
        assert await found(client, 3) == ["5"] * 3, "while one tries it, nobody else does"
        assert (await trial)[0][0].id == "5" and first.failures == 2
        first.rests_until = 0.0
        await until(lambda: first.can_serve(time.monotonic()))
        assert await found(client, 2) == ["m"] * 2
        assert first.failures == 0


async def test_who_does_not_listen_is_not_tried_by_a_search(faulty: Start, free_port: int) -> None:
    other = await faulty(good())
    url = f"http://127.0.0.1:{free_port}"
    async with client_of(url, other, retries=0) as client:
        prefer(client, 0)
        assert await found(client) == ["5"]
        gone = client._servers.all[0]
        for failures in (2, 3):  # looked at, and again after a rest
            gone.rests_until = 0.0
            assert await found(client, 3) == ["5"] * 3
            await until(lambda wanted=failures: gone.failures == wanted)
        assert gauge(client, "failovers") == 1
        back = await faulty(good("back"), port=free_port)
        gone.rests_until = 0.0
        await until(lambda: gone.listens)
        assert await found(client) == ["back"]
    assert back.gets and len(back.bodies) == 1


async def test_requests_under_way_are_shared_out(faulty: Start) -> None:
    servers = [await faulty(None) for _ in range(3)]
    async with client_of(*servers, timeout_s=20.0) as client:
        asked = []
        for number in range(6):
            asked.append(asyncio.create_task(client.retrieve([f"q{number}"], 1)))
            await until(lambda: sum(len(each.bodies) for each in servers) == len(asked))
        assert [len(each.bodies) for each in servers] == [2, 2, 2]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def test_many_clients_do_not_all_begin_with_the_same_server() -> None:
    clients = [Servers(URLS, "", print) for _ in range(64)]
    begun = [servers.all.index(servers.choose()) for servers in clients]
    assert {*begun} == {0, 1, 2}


async def test_a_server_that_drains_is_left_without_an_error(faulty: Start) -> None:
    leaving, staying = await faulty(good("leaving")), await faulty(good("staying"))
    async with client_of(leaving, staying) as client:
        prefer(client, 0)
        assert await found(client) == ["leaving"]
        leaving.got = http(503, {"status": "draining"})
        await until(lambda: gauge(client, "servers_up") == 1)
        assert await found(client, 2) == ["staying"] * 2
        staying.got = leaving.got
        await until(lambda: gauge(client, "servers_up") == 0)
        assert await found(client) == ["leaving"], "where all drain, they serve all the same"
        leaving.got = http(200, {"status": "ready"})
        await until(lambda: gauge(client, "servers_up") == 1)
        assert await found(client) == ["leaving"]
    assert gauge(client, "failovers") == gauge(client, "retried") == 0


async def test_where_none_is_left_each_is_named_with_its_cause(
    faulty: Start, free_port: int
) -> None:
    bad, full = await faulty(http(500, {"detail": "oops"})), await faulty(busy(60))
    urls = (f"http://127.0.0.1:{free_port}", bad.url, full.url)
    async with client_of(*urls, timeout_s=0.5, retries=0) as client:
        with pytest.raises(RetrievalUnavailable) as raised:
            await found(client)
    said = str(raised.value)
    assert said.startswith("no answer from 3 of 3 retrieval servers: ")
    causes = ("/retrieve: ConnectError", "answered 500: ", "answered 503: ")
    assert [cause in part for cause, part in zip(causes, said.split("; "), strict=True)] == [
        True
    ] * 3
    assert all(url in said for url in urls)
    assert type(raised.value) is RetrievalUnavailable, "of the kind that a query may have caused"


@pytest.mark.parametrize("retries", [0, 1])
async def test_retries_bound_what_all_servers_met(faulty: Start, retries: int) -> None:
    servers = [await faulty(http(500, {})) for _ in range(3)]
    async with client_of(*servers, retries=retries, look_every_s=60.0) as client:
        with pytest.raises(RetrievalUnavailable, match="from 3 of 3"):
            await found(client)
    assert sum(len(each.bodies) for each in servers) == 3 + retries
    assert min(len(each.bodies) for each in servers) >= 1


async def test_all_away_is_waited_for(faulty: Start, free_port: int) -> None:
    urls = [f"http://127.0.0.1:{free_port}", "http://127.0.0.1:1"]
    async with client_of(*urls, timeout_s=20.0, retries=0, look_every_s=60.0) as client:
        asked = asyncio.create_task(found(client))
        await until(lambda: gauge(client, "retried") >= 3)
        await faulty(good(), port=free_port)
        assert await asked == ["5"]


async def test_all_busy_are_asked_again_when_the_first_says(faulty: Start) -> None:
    servers = await faulty(busy(60)), await faulty(busy(0), good("second"))
    async with client_of(*servers, timeout_s=20.0, retries=0) as client:
        assert await found(client) == ["second"]
    assert [len(each.bodies) for each in servers] == [1, 2]


async def test_another_index_is_taken_out_and_comes_back_with_the_runs(faulty: Start) -> None:
    changed, other = await faulty(good("a"), good("b", "two")), await faulty(good("c"))
    third = await faulty(good("c"))
    async with client_of(changed, other, third, cache_queries=9) as client:
        prefer(client, 0)
        assert await found(client) == ["a"] and client.index_version == "one"
        changed.got = http(404, b"")
        assert [(await client.retrieve([q], 1))[0][0].id for q in "xyz"] == ["c"] * 3
        assert len(changed.bodies) == 2 and gauge(client, "servers_up") == 2
        assert (await client.retrieve(["q0"], 1))[0][0].id == "a", "what is known is of the run's"
        info = {"index": "bm25", "passages": 1, "default_top_k": 3}
        changed.got = http(200, info | {"index_version": "two"})
        looked = changed.gets
        await until(lambda: changed.gets > looked + 1)
        assert gauge(client, "servers_up") == 2
        changed.script[1] = good("d")
        changed.got = http(200, info | {"index_version": "one"})
        await until(lambda: gauge(client, "servers_up") == 3)
        prefer(client, 0)
        assert (await client.retrieve(["new"], 1))[0][0].id == "d"
    assert gauge(client, "errors") == 0


async def test_an_index_that_all_have_changed_to_is_the_runs(faulty: Start) -> None:
    servers = [await faulty(good("old"), good("new", "two")) for _ in range(2)]
    async with client_of(*servers, cache_queries=9) as client:
        for place in (0, 1):
            prefer(client, place)
            assert (await client.retrieve([f"{place}"], 1))[0][0].id == "old"
        assert await found(client) == ["new"] and client.index_version == "two"
        assert gauge(client, "servers_up") == 2
        assert (await client.retrieve(["0"], 1))[0][0].id == "new", "the old results are forgotten"


async def test_who_is_gone_is_not_judged_by_the_index_it_had(
    faulty: Start, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    gone, other = await faulty(good("a")), await faulty(good("b"), good("c", "two"))
    info = {"index": "bm25", "index_version": "two", "passages": 1, "default_top_k": 3}
    async with client_of(gone, other, timeout_s=20.0, retries=0) as client:
        for place in (0, 1):
            prefer(client, place)
            await found(client)
        dead = client._servers.all[0]
        at, dead.poster._base = dead.poster._base, f"http://127.0.0.1:{free_port}"
        where, dead.poster.url = dead.poster.url, httpx.URL(f"{dead.poster._base}/retrieve")
        other.got = http(200, info)
        prefer(client, 1)
        asked = asyncio.create_task(found(client))
        await until(lambda: client._servers.all[1].is_other and dead.failures > 0)
        looked = other.gets
        await until(lambda: other.gets > looked + 1)
        assert client.index_version == "one", "a server may be started again within a while"
        assert dead.silent_since is not None
        dead.silent_since -= GONE_S
        assert await asked == ["c"]
        assert client.index_version == "two" and gauge(client, "servers_up") == 1
        dead.poster._base, dead.poster.url, dead.rests_until = at, where, 0.0
        await until(lambda: dead.can_serve(time.monotonic()))
        prefer(client, 0)
        assert (await client.retrieve(["new"], 1))[0][0].id == "c"
    said = f"{gone.url}/retrieve serves index 'one', this run searches 'two': start it with the "
    assert [said in each.getMessage() for each in caplog.records][-1]


def test_who_is_away_for_a_moment_is_not_gone() -> None:
    server = Server(Poster(URLS[0]))
    server.failed(RetrievalTimeout("t"), begun=1.0, now=2.0)
    assert not server.is_gone(1e9), "it may be slow"
    server.failed(RetrievalUnreachable("u"), begun=3.0, now=3.0)
    server.failed(RetrievalUnreachable("u"), begun=9.0, now=9.0)
    assert not server.is_gone(3.0 + GONE_S / 2) and server.is_gone(3.0 + GONE_S)
    server.served(begun=10.0)
    assert not server.is_gone(1e9)


async def test_no_result_of_the_index_before_comes_after_one_of_the_next(faulty: Start) -> None:
    server = await faulty(good("old"), good("new", "two"))
    async with client_of(server, cache_queries=9) as client:
        assert await found(client) == await found(client) == ["old"], "it is remembered"
        both = await client.retrieve(["q0", "other"], 1)
        assert [row[0].id for row in both] == ["new", "new"]
        assert await found(client) == ["new"] and client.index_version == "two"
    assert gauge(client, "remembered") == 3


async def test_no_server_of_the_runs_index_is_an_error(faulty: Start) -> None:
    servers = await faulty(good(version="two")), await faulty(good(version=""))
    async with client_of(*servers, index_version="one") as client:
        for _ in range(2):
            with pytest.raises(
                OtherIndex, match=r"from 2 of 2 .*'two', .* searches 'one'.*retrieval.url.*''"
            ):
                await found(client)
    assert [len(each.bodies) for each in servers] == [1, 1]


async def test_one_server_is_neither_watched_nor_held_to_an_index(
    faulty: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = await faulty(good("old"), http(500, {}), good("new", "two"))
    async with client_of(server, index_version="none", look_every_s=0.01) as client:
        assert await found(client, 2) == ["old", "new"]
        assert (client.index_version, gauge(client, "servers_up")) == ("two", 1)
        await asyncio.sleep(0.1)
    assert server.gets == 0 and caplog.records == [] and gauge(client, "failovers") == 0


async def test_own_addresses_are_near(tmp_path: Path) -> None:
    urls = ["http://127.0.0.1:1", "http://203.0.113.9:1", "http://localhost:1", "http://no.invalid"]
    servers = Servers(urls, "", print)
    await servers.open()
    assert [each.near for each in servers.all] == [True, False, True, False]
    await servers.close()


def of(*states: dict[str, Any]) -> Servers:
    servers = Servers(URLS[: len(states)], "", print)
    for server, state in zip(servers.all, states, strict=True):
        for name, value in state.items():
            setattr(server, name, value)
    return servers


AN_ANSWER = {"answered_at": time.monotonic() + 3600.0}  # is never forgotten
FOREVER = {"busy_until": 1e12}
RESTING = {"failures": 1, "rests_until": 1e12}


@pytest.mark.parametrize(
    ("states", "chosen"),
    [
        ([{"turn": b"b"}, {"turn": b"a"}], 1),
        ([{"under_way": 1}, {"under_way": 2}], 0),
        ([{"near": True, "under_way": 1}, {}], 0),
        ([{"near": True, "under_way": 2}, {}], 1),
        ([{"near": True}, {}], 0),
        ([{**AN_ANSWER, "latency_s": 0.3}, {**AN_ANSWER, "latency_s": 0.2}], 1),
        ([{**AN_ANSWER, "latency_s": 0.3}, {**AN_ANSWER, "latency_s": 0.2, "under_way": 1}], 0),
        ([{"near": True, **AN_ANSWER, "latency_s": 0.3}, {**AN_ANSWER, "latency_s": 0.2}], 0),
        ([{"near": True, **AN_ANSWER, "latency_s": 0.5}, {**AN_ANSWER, "latency_s": 0.2}], 1),
        ([{"turn": b"a", "latency_s": 0.04}, {"turn": b"b", "latency_s": 0.01}], 0),
        ([{"turn": b"a", **AN_ANSWER, "latency_s": 0.3}, {"turn": b"b"}, {"turn": b"c"}], 0),
        ([{"latency_s": 0.3}, {**AN_ANSWER, "latency_s": 0.1}], 0),
        ([{"near": True, "drains": True}, {}], 1),
        ([{"near": True, **FOREVER}, {}], 1),
        ([{"near": True, **RESTING}, {}], 1),
        ([{"near": True, "is_other": True}, {}], 1),
        ([{"near": True, "failures": 1, "listens": False}, {}], 1),
        ([{"near": True, "failures": 1}, {}], 0),
        ([{"near": True, "failures": 1, "under_way": 1}, {}], 1),
        ([{"drains": True, "under_way": 9}, RESTING, FOREVER], 0),
        ([RESTING | {"failed_at": 2.0}, RESTING | {"failed_at": 1.0}, FOREVER], 1),
        ([FOREVER, {"busy_until": 1e11}, {"is_other": True}], 1),
        ([{"is_other": True}, {"is_other": True}], None),
    ],
)
def test_who_is_asked(states: list[dict[str, Any]], chosen: int | None) -> None:
    servers = of(*states)
    assert servers.choose() is (None if chosen is None else servers.all[chosen])


def test_a_latency_follows_the_answers() -> None:
    server = Server(Poster(URLS[0]), near=True)
    server.answered(begun=100.0, now=100.4)
    assert server.work_s(100.4, 0.0) == pytest.approx(0.4)
    assert server.work_s(110.4, 0.0) == pytest.approx(0.2), "half of it is forgotten"
    for _ in range(20):
        server.answered(begun=110.0, now=110.1)
    assert server.work_s(110.1, 0.0) == pytest.approx(0.1, rel=0.01)


async def test_the_faster_of_two_servers_is_asked_more(faulty: Start) -> None:
    slow, fast = await faulty(good("slow")), await faulty(good("fast"))
    async with client_of(slow, fast, look_every_s=60.0) as client:
        client._servers.all[0].answered(begun=time.monotonic() - 0.5, now=time.monotonic())
        client._servers.all[1].answered(begun=time.monotonic(), now=time.monotonic())
        assert await found(client, 4) == ["fast"] * 4


def test_rests_double_up_to_a_bound_and_what_failed_together_counts_once() -> None:
    server, now = Server(Poster(URLS[0])), 100.0
    error: RetrievalError = RetrievalUnavailable("x")
    for doubled in range(40):
        server.failed(error, begun=now, now=now + 1)
        server.failed(error, begun=now, now=now + 1)
        longest_s = min(FIRST_REST_S * 2**doubled, LONGEST_REST_S)
        assert server.failures == doubled + 1
        assert longest_s / 2 <= server.rests_until - (now + 1) <= longest_s
        now += 100
    server.served(begun=server.failed_at - 1)
    assert server.failures == 40, "what began before it failed tells nothing"
    server.served(begun=now)
    assert server.can_serve(now) and server.failures == 0


@pytest.mark.parametrize(
    ("met", "kind"),
    [
        ([RetrievalUnreachable("u")], RetrievalUnreachable),
        ([RetrievalTimeout("t"), RetrievalUnreachable("u")], RetrievalTimeout),
        ([RetrievalUnreachable("u"), RetrievalOverloaded("o", 3.0)], RetrievalOverloaded),
        ([RetrievalDenied("d"), OtherIndex("i")], RetrievalDenied),
        ([], OtherIndex),
    ],
)
def test_the_kind_of_the_error_of_all(
    met: Iterable[RetrievalError], kind: type[RetrievalError]
) -> None:
    servers = of({}, {})
    assert type(servers.nobody(dict(zip(servers.all, met)))) is kind  # noqa: B905


def test_of_servers_in_use_alone_is_asked_how_much_to_ask_at_once() -> None:
    servers = Servers(URLS, "", lambda _: None)
    slow, well, _ = servers.all
    slow.poster.batch_queries, well.poster.batch_queries = 1, 16
    assert servers.batch_queries(64) == 1 and servers.batch_queries(0) == 0
    slow.drains = True
    assert servers.batch_queries(64) == 16
    slow.drains = False
    servers._failed(slow, RetrievalOverloaded("busy", 1.0), time.monotonic())
    assert servers.batch_queries(64) == 1
    servers._failed(slow, RetrievalUnreachable("gone"), time.monotonic())
    assert servers.batch_queries(64) == 16
    slow.listens, slow.rests_until = True, 0.0
    assert slow.is_well(time.monotonic()) and servers.batch_queries(64) == 16


@pytest.mark.parametrize("digits", [7, 5000])
async def test_numbers_beyond_all_reason_are_none(faulty: Start, digits: int) -> None:
    headers = f"x-index-version: one\r\nx-batch-queries: {'9' * digits}\r\n"
    hit = {"document": {"id": "5", "contents": "T\nx"}, "score": 1.5}
    busy_for_ever = http(503, {"detail": "busy"}, headers=f"retry-after: {'9' * digits}\r\n")
    server = await faulty(busy_for_ever, http(200, {"result": [[hit]]}, headers=headers))
    async with client_of(server) as client:
        assert await found(client) == ["5"]
        assert client._servers.batch_queries(64) == 64


async def test_a_search_that_waits_behind_refused_ones_says_so(faulty: Start) -> None:
    server = await faulty(busy(0), None)  # and then it hangs
    async with client_of(server, timeout_s=0.5, max_connections=1, retries=0) as client:
        first = asyncio.create_task(client.retrieve(["a"], 1))
        await until(lambda: len(server.bodies) == 2)
        with pytest.raises(RetrievalTimeout, match=r"refused \(.*503.*\): give more servers"):
            client._batcher._window = 1.0
            late = client.retrieve(["b"], 1)
            client._timeout_s = 0.05
            await late
        with pytest.raises(RetrievalTimeout):
            await first
