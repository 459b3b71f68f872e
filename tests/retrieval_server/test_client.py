"""The client against our own server and against a small faulty one."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from retrieval_server.client import RetrievalClient
from retrieval_server.protocol import (
    MAX_QUERY_CHARS,
    BadQuery,
    BadReply,
    RetrievalDenied,
    RetrievalError,
    RetrievalOverloaded,
    RetrievalRefused,
    RetrievalTimeout,
    RetrievalUnavailable,
    RetrievalUnreachable,
)
from tests.lived import lived

Start = Callable[..., Awaitable[Any]]
GOOD = {"result": [[{"document": {"id": 5, "contents": "T\nx"}, "score": 1.5, "extra": 0}]]}


async def test_passages_of_our_server(server_url: str) -> None:
    async with RetrievalClient(server_url) as client:
        rows = await client.retrieve(["mayor of miro", "zzz"], 2)
    assert [[passage.id for passage in row] for row in rows] == [["p3", "p0"], []]
    best = rows[0][0]
    assert (best.title, best.text) == ("mayor of miro", "the mayor of miro is tapo .")
    assert best.score > rows[0][1].score > 0


@pytest.mark.parametrize("suffix", ["", "/", "/retrieve", "/retrieve/"])
async def test_the_url_may_name_the_endpoint(server_url: str, suffix: str) -> None:
    async with RetrievalClient(server_url + suffix) as client:
        assert (await client.retrieve(["kelu"], 1))[0][0].id == "p0"


async def test_many_at_once_each_get_their_own(server_url: str) -> None:
    async with RetrievalClient(server_url, max_connections=3) as client:
        names = ["kelu", "tapo", "capital", "river"] * 50
        under_way = asyncio.gather(*(client.retrieve([name], 1) for name in names))
        await asyncio.sleep(0)
        assert client.gauges()["retrieval/in_flight"] == 200
        rows = await under_way
    assert client.gauges()["retrieval/in_flight"] == 0
    assert [row[0][0].id for row in rows] == ["p0", "p3", "p1", "p2"] * 50
    gauges = client.gauges()
    assert gauges["retrieval/requests"] == 200
    assert gauges["retrieval/errors"] == gauges["retrieval/retried"] == 0
    assert 0 < gauges["retrieval/latency_p50_s"] <= gauges["retrieval/latency_p99_s"]


async def test_the_body_is_search_r1s(faulty: Start, reply: Callable[..., bytes]) -> None:
    server = await faulty(reply(200, GOOD))
    async with RetrievalClient(server.url) as client:
        [[passage]] = await client.retrieve(["who?"], 3)
    assert server.bodies == [{"queries": ["who?"], "topk": 3, "return_scores": True}]
    assert (passage.id, passage.contents, passage.score) == ("5", "T\nx", 1.5)


@pytest.mark.parametrize(
    "fault",
    [
        (500, {"detail": "oops"}),
        (503, b""),
        (429, b""),
        (200, b"<html>"),
        (200, b"\xff\xfe"),
        (200, {"result": []}),
        (200, {"result": [[], []]}),
        (200, {"result": [[{"document": "text", "score": 1}]]}),
        (200, {"error": "an error as a reply"}),
        (200, b'{"result": [[{"document": {"id": "a", "contents": "b"}, "score": NaN}]]}'),
        (200, b'{"result": ' + b"[" * 100_000),
        (200, {"result": []}, 5),  # more than declared
        (200, GOOD, 100_000),  # cut off: fewer bytes than declared, then the deadline
    ],
)
async def test_a_fault_is_retried(
    faulty: Start, reply: Callable[..., bytes], fault: tuple[object, ...]
) -> None:
    server = await faulty(reply(*fault), reply(200, GOOD))
    async with RetrievalClient(server.url, timeout_s=3.0) as client:
        assert (await client.retrieve(["q"], 1))[0][0].id == "5"
    assert client.gauges()["retrieval/retried"] == 1
    assert client.gauges()["retrieval/errors"] == 0


async def test_a_dropped_connection_is_retried(faulty: Start, reply: Callable[..., bytes]) -> None:
    server = await faulty(b"", b"garbage\r\n\r\n", reply(200, GOOD))
    async with RetrievalClient(server.url) as client:
        assert (await client.retrieve(["q"], 1))[0][0].id == "5"
    assert len(server.bodies) == 3


@pytest.mark.parametrize("bad", [(500, b"late"), (200, b""), (200, b"{"), (200, {"result": []})])
async def test_what_follows_a_bad_reply_answers_no_other_request(
    faulty: Start, reply: Callable[..., bytes], bad: tuple[int, object]
) -> None:
    stale = {"result": [[{"document": {"id": "stale", "contents": "x"}, "score": 1.0}]]}
    server = await faulty(reply(*bad) + reply(200, stale), reply(200, GOOD))
    async with RetrievalClient(server.url, retries=1) as client:
        assert [(await client.retrieve([q], 1))[0][0].id for q in ("a", "b")] == ["5", "5"]
    assert (server.connections, len(server.bodies)) == (2, 3)


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ((500, {"detail": "oops"}), RetrievalUnavailable, "answered 500: .*oops"),
        ((200, b"<html>"), BadReply, "<html>"),
        ((200, {"result": []}), BadReply, "0 results for 1 queries"),
    ],
)
async def test_a_lasting_fault_is_raised_after_the_retries(
    faulty: Start,
    reply: Callable[..., bytes],
    fault: tuple[object, ...],
    error: type[RetrievalError],
    said: str,
) -> None:
    server = await faulty(reply(*fault))
    async with RetrievalClient(server.url, retries=2) as client:
        with pytest.raises(error, match=said):
            await client.retrieve(["q"], 1)
    gauges = client.gauges()
    assert len(server.bodies) == 3
    assert (gauges["retrieval/errors"], gauges["retrieval/retried"]) == (1, 2)
    assert gauges["retrieval/latency_p50_s"] == 0


async def test_silence_is_a_timeout_within_the_deadline(faulty: Start) -> None:
    server = await faulty(None)
    async with RetrievalClient(server.url, timeout_s=1.0, retries=3) as client:
        with lived() as lived_s, pytest.raises(RetrievalTimeout, match="answer within"):
            await client.retrieve(["q"], 1)
        assert lived_s() < 1.5
    assert 1 <= len(server.bodies) <= 4
    # No connection is used twice; what remains for the last one may be too short for its request.
    assert 0 <= server.connections - len(server.bodies) <= 1


async def test_silence_is_retried_while_there_is_time(
    faulty: Start, reply: Callable[..., bytes]
) -> None:
    server = await faulty(None, reply(200, GOOD))
    async with RetrievalClient(server.url, timeout_s=3.0, retries=1) as client:
        assert (await client.retrieve(["q"], 1))[0][0].id == "5"
    assert (len(server.bodies), server.connections) == (2, 2)


async def test_who_waits_for_a_connection_waits_no_longer_than_anybody(faulty: Start) -> None:
    server = await faulty(None)  # never answers
    async with RetrievalClient(server.url, 60.0, 0, max_connections=1) as client:
        first = asyncio.create_task(client.retrieve(["a"], 1))
        while not server.bodies:
            await asyncio.sleep(0.01)
        client._timeout_s = 0.1  # of whom comes now
        with pytest.raises(RetrievalTimeout, match=r"within 0\.1 s, 1 queries are waiting"):
            await client.retrieve(["b"], 1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_what_is_no_text_is_refused_alone(server_url: str) -> None:
    async with RetrievalClient(server_url) as client:
        both = (client.retrieve(["kelu"], 1), client.retrieve(["\ud800"], 1))
        found, refused = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(refused, BadQuery) and "is no text" in str(refused)
    assert not isinstance(found, BaseException) and found[0][0].id == "p0"


async def test_nobody_listening_is_unreachable_at_the_deadline(free_port: int) -> None:
    url, said = f"http://127.0.0.1:{free_port}", "/retrieve: ConnectError"
    async with RetrievalClient(url, timeout_s=1.0, retries=1) as client:
        with lived() as lived_s, pytest.raises(RetrievalUnreachable, match=url + said):
            await client.retrieve(["q"], 1)
        assert lived_s() < 1.5
    assert client.gauges()["retrieval/retried"] > 1  # until the next pause would pass the deadline


async def until_retried(client: RetrievalClient, times: int, asked: asyncio.Task[Any]) -> None:
    while client.gauges()["retrieval/retried"] < times:
        assert not asked.done()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("retries", [0, 1])
async def test_a_server_that_is_started_again_is_waited_for(
    faulty: Start, reply: Callable[..., bytes], free_port: int, retries: int
) -> None:
    url = f"http://127.0.0.1:{free_port}"
    async with RetrievalClient(url, timeout_s=30.0, retries=retries) as client:
        asked = asyncio.create_task(client.retrieve(["q"], 1))
        await until_retried(client, 3, asked)
        server = await faulty(reply(200, GOOD), port=free_port)
        assert (await asked)[0][0].id == "5"
    assert len(server.bodies) == 1
    assert client.gauges()["retrieval/errors"] == 0


async def test_being_away_uses_up_no_retry(
    faulty: Start, reply: Callable[..., bytes], free_port: int
) -> None:
    async with RetrievalClient(f"http://127.0.0.1:{free_port}", 30.0, retries=1) as client:
        asked = asyncio.create_task(client.retrieve(["q"], 1))
        await until_retried(client, 2, asked)
        server = await faulty(reply(503, b""), reply(200, GOOD), port=free_port)
        assert (await asked)[0][0].id == "5"
    assert len(server.bodies) == 2


async def test_a_refusal_is_never_retried(faulty: Start, reply: Callable[..., bytes]) -> None:
    server = await faulty(reply(422, {"detail": "topk"}))
    async with RetrievalClient(server.url, retries=3) as client:
        with pytest.raises(RetrievalRefused, match=r"answered 422: .*topk") as refused:
            await client.retrieve(["q"], 1)
    assert refused.type is RetrievalRefused  # another query may be answered
    assert len(server.bodies) == 1
    assert client.gauges()["retrieval/errors"] == 1


@pytest.mark.parametrize("status", [401, 403, 404, 405])
async def test_who_is_denied_whatever_is_asked_is_told_what_to_look_at(
    faulty: Start, reply: Callable[..., bytes], status: int
) -> None:
    server = await faulty(reply(status, {"detail": "no"}))
    async with RetrievalClient(server.url, retries=3) as client:
        with pytest.raises(RetrievalDenied, match=rf"answered {status}: .*token_file.*no"):
            await client.retrieve(["q"], 1)
    assert len(server.bodies) == 1


async def test_an_endless_query_is_refused_before_it_is_sent(faulty: Start) -> None:
    server = await faulty(None)
    async with RetrievalClient(server.url) as client:
        with pytest.raises(BadQuery, match=f"at most {MAX_QUERY_CHARS}"):
            await client.retrieve(["ok", "x" * (MAX_QUERY_CHARS + 1)], 1)
    assert server.bodies == []


async def test_connections_are_kept(faulty: Start, reply: Callable[..., bytes]) -> None:
    server = await faulty(reply(200, GOOD))
    async with RetrievalClient(server.url) as client:
        for _ in range(5):
            await client.retrieve(["q"], 1)
    assert (server.connections, len(server.bodies)) == (1, 5)


async def test_more_passages_than_asked_for_are_cut(
    faulty: Start, reply: Callable[..., bytes]
) -> None:
    server = await faulty(reply(200, {"result": [GOOD["result"][0] * 4]}))
    async with RetrievalClient(server.url) as client:
        assert [len(row) for row in await client.retrieve(["q"], 3)] == [3]


async def test_a_caller_cancelled_leaves_the_client_working(
    faulty: Start, reply: Callable[..., bytes]
) -> None:
    server = await faulty(None, reply(200, GOOD))
    async with RetrievalClient(server.url, timeout_s=2.0) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.retrieve(["q"], 1)
        assert (await client.retrieve(["q"], 1))[0][0].id == "5"


async def test_no_query_asks_nothing_and_top_k_must_be_positive(server_url: str) -> None:
    async with RetrievalClient(server_url) as client:
        assert await client.retrieve([], 3) == []
        with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
            await client.retrieve(["q"], 0)


def test_a_url_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match=r"http://"):
        RetrievalClient("127.0.0.1:8000")


async def test_a_server_that_is_overloaded_is_asked_again_when_it_says(
    faulty: Start, reply: Callable[..., bytes]
) -> None:
    """However often: it is the deadline that counts, not the retries."""
    busy = reply(503, {"detail": "busy"}, headers="retry-after: 0\r\n")
    server = await faulty(busy, busy, busy, reply(200, GOOD))
    async with RetrievalClient(server.url, retries=1) as client:
        assert (await client.retrieve(["who?"], 1))[0][0].id == "5"
    assert client.gauges()["retrieval/retried"] == 3
    server = await faulty(reply(503, {"detail": "busy"}, headers="retry-after: 60\r\n"))
    async with RetrievalClient(server.url, timeout_s=20.0, retries=1) as client:
        with pytest.raises(RetrievalOverloaded, match="busy"):
            await client.retrieve(["who?"], 1)
    assert len(server.bodies) == 1, "its time to come again lies beyond the deadline"


async def test_a_request_tells_how_long_its_client_waits(
    faulty: Start, reply: Callable[..., bytes]
) -> None:
    server = await faulty(reply(500, b""), reply(200, GOOD))
    async with RetrievalClient(server.url, timeout_s=8.0, retries=1) as client:
        await client.retrieve(["q"], 1)
    told = [float(head.split("x-deadline-s: ")[1].split("\r\n")[0]) for head in server.heads]
    assert 3.5 < told[0] <= 4.0, "half of it, for there is another try"
    assert 7.0 < told[1] < 8.0, "the rest"


async def test_a_request_holds_no_more_than_the_server_asks_for(
    faulty: Start, reply: Callable[..., bytes]
) -> None:
    rows = [{"result": GOOD["result"] * size} for size in (1, 2, 2)]
    wish = "x-batch-queries: 2\r\n"
    server = await faulty(*(reply(200, each, headers=wish) for each in rows))
    async with RetrievalClient(server.url, max_connections=1) as client:
        await client.retrieve(["a"], 1)
        await asyncio.gather(*(client.retrieve([query], 1) for query in "bcde"))
    assert [body["queries"] for body in server.bodies] == [["a"], ["b", "c"], ["d", "e"]]


async def test_an_overloaded_server_is_sent_less_and_asked_again_to_the_tenth_of_a_second(
    faulty: Start, reply: Callable[..., bytes]
) -> None:
    """Retry-After tells whole seconds only."""
    wish = "x-batch-queries: 1\r\n"
    after = "retry-after: 1\r\nx-retry-after-s: 0.100\r\n"
    server = await faulty(
        reply(503, {"detail": "busy"}, headers=after + wish), reply(200, GOOD, headers=wish)
    )
    async with RetrievalClient(server.url, timeout_s=20.0) as client:
        begun_s = time.monotonic()
        with lived() as lived_s:
            await asyncio.gather(*(client.retrieve([query], 1) for query in "abc"))
        assert time.monotonic() - begun_s >= 0.1 and lived_s() < 1.0
    assert [len(body["queries"]) for body in server.bodies] == [3, 1, 1, 1]  # type: ignore[arg-type]
    assert client.gauges()["retrieval/errors"] == 0
