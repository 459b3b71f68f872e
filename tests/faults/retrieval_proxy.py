"""A retrieval server that fails as servers do: an HTTP proxy before a real one.

`python -m tests.faults.retrieval_proxy --upstream URL [--port P] [--rate 0.2] [--seed 0]`, and
`retrieval.url` is what it prints. It gives the answers of the server behind it, but to some
searches (`POST /retrieve`), by rate and seed, one of FAULTS; every text it makes up holds MARKER.
`GET /faults` counts them. It waits 30 s for the server, and ends on SIGINT or SIGTERM.
"""

import argparse
import asyncio
import json
import logging
import random
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import httpx

MARKER = "fault-made-on-purpose"
FAULTS = {
    "no_answer": "the connection stays open, and nothing comes",
    "error_500": "500 with an error's text",
    "error_503": "503 with an error's text",
    "busy_503": "503 with Retry-After: 1",
    "too_few_bytes": "less than the declared length, then the connection is closed",
    "too_many_bytes": "more than the declared length",
    "wrong_count": "one result more than there were queries",
    "not_json": "200 and a page of text",
    "no_result": "200 and an error's text as JSON",
    "empty": "200 and nothing",
    "slow": "the good answer, late",
    "restart": "every connection is closed, and for a second nobody listens",
}
UPSTREAM_S = 30.0
MAX_BODY_BYTES = 64 << 20
_PASSED_ON = ("content-type", "authorization", "accept")
_PASSED_BACK = ("content-type", "x-index-version", "retry-after", "www-authenticate", "allow")

logger = logging.getLogger("retrieval_proxy")


@dataclass(frozen=True)
class Manner:
    """The rate of failures, their order, and the longest that slow answers and restarts take."""

    rate: float = 0.2
    seed: int = 0
    slow_s: float = 1.0
    away_s: float = 1.0
    faults: tuple[str, ...] = tuple(FAULTS)

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"rate = {self.rate!r}: give the share of searches, from 0 to 1")


class Dealer:
    """The draw of faults: by chance, but each kind as often as any other."""

    def __init__(self, manner: Manner) -> None:
        self.calls = 0
        self.dealt: Counter[str] = Counter()
        self._manner, self._random = manner, random.Random(manner.seed)
        self._deck: list[str] = []

    def deal(self) -> str:
        """A fault's name, or "" for none."""
        self.calls += 1
        if self._random.random() >= self._manner.rate:
            return ""
        if not self._deck:
            self._deck = self._random.sample(self._manner.faults, len(self._manner.faults))
        fault = self._deck.pop()
        self.dealt[fault] += 1
        return fault

    def slowness_s(self) -> float:
        """Seconds by which a slow answer is late."""
        return self._random.uniform(0.2, 1.0) * self._manner.slow_s


@dataclass(frozen=True)
class Request:
    """One request as it came; names of headers are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class FaultyRetrieval:
    """An async context manager that listens on `host`:`port` (0: any free one; then `port`)."""

    def __init__(self, upstream: str, manner: Manner, host: str = "127.0.0.1", port: int = 0):
        """`upstream`: the base URL of a server, or that of its `/retrieve`."""
        self.dealer, self.host, self.port = Dealer(manner), host, port
        self._manner = manner
        self._upstream = upstream.rstrip("/").removesuffix("/retrieve")
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._restarting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._client = httpx.AsyncClient(trust_env=False, timeout=UPSTREAM_S)
        await self._listen()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._restarting:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        self._hang_up()
        await asyncio.gather(*self._open, return_exceptions=True)
        await self._client.aclose()

    @property
    def url(self) -> str:
        """The base URL on which it listens."""
        return f"http://{self.host}:{self.port}"

    def counts(self) -> dict[str, object]:
        """The answer to `GET /faults`."""
        dealt = self.dealer.dealt
        manner = {"rate": self._manner.rate, "seed": self._manner.seed}
        return {"calls": self.dealer.calls, "faulty": dealt.total(), "faults": dict(dealt)} | manner

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def _hang_up(self) -> None:
        self._server.close()
        for task, writer in self._open.items():
            writer.transport.abort()
            task.cancel()

    async def _restart(self) -> None:
        self._hang_up()
        await asyncio.sleep(self._manner.away_s)
        await self._listen()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        try:
            while (request := await _read(reader)) and await self._answer(request, reader, writer):
                await writer.drain()
        except (asyncio.CancelledError, asyncio.LimitOverrunError, OSError, ValueError) as error:
            logger.debug("a connection ends: %r", error)  # whoever cancels hangs up
        finally:
            del self._open[task]
            writer.close()

    async def _answer(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer in one way or another; True where the connection stays open."""
        if request.path == "/faults":
            writer.write(_reply(200, json.dumps(self.counts()).encode()))
            return True
        search = request.method == "POST" and request.path == "/retrieve"
        fault = self.dealer.deal() if search else ""
        if fault == "no_answer":
            await reader.read()  # until the client gives up
            return False
        if fault == "restart":
            if self._restarting is None or self._restarting.done():
                self._restarting = asyncio.create_task(self._restart())
            return False
        writer.write(await self._reply(request, fault))
        return fault != "too_few_bytes"

    async def _reply(self, request: Request, fault: str) -> bytes:
        if fault in _MADE_UP:
            return _MADE_UP[fault]
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        url = self._upstream + request.path
        try:
            got = await self._client.request(
                request.method, url, content=request.body, headers=headers
            )
        except httpx.RequestError as error:
            return _reply(502, f"{MARKER}: nothing behind it: {error!r}".encode())
        if fault == "slow":
            await asyncio.sleep(self.dealer.slowness_s())
        body, length = got.content, None
        if fault == "wrong_count" and got.status_code == 200:
            body = _with_one_more(body)
        elif fault == "too_few_bytes":
            length = len(body) + 1000
        elif fault == "too_many_bytes":
            body, length = body + MARKER.encode(), len(body) // 2
        back = {name: got.headers[name] for name in _PASSED_BACK if name in got.headers}
        return _reply(got.status_code, body, back, length)


async def _read(reader: asyncio.StreamReader) -> Request | None:
    """The next request; None at the connection's end. Raises ValueError for what is none."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip().split("\r\n")
        method, path, _ = first.split(" ")
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        length = int(headers.get("content-length", "0"))
        if length > MAX_BODY_BYTES or "transfer-encoding" in headers:
            raise ValueError(f"a body of {length} bytes, or in chunks")
        return Request(method, path, headers, await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        return None


def _reply(
    status: int, body: bytes, headers: dict[str, str] | None = None, length: int | None = None
) -> bytes:
    """A raw reply; `length` is declared instead of the true one."""
    declared = len(body) if length is None else length
    told = {"content-length": str(declared), "content-type": "application/json"} | (headers or {})
    lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    return f"HTTP/1.1 {status} -\r\n{lines}\r\n".encode("latin-1") + body


_TEXT = json.dumps({"detail": f"{MARKER}: an error"}).encode()
_MADE_UP = {
    "error_500": _reply(500, _TEXT),
    "error_503": _reply(503, _TEXT),
    "busy_503": _reply(503, _TEXT, {"retry-after": "1"}),
    "not_json": _reply(200, f"<html>{MARKER}</html>".encode()),
    "no_result": _reply(200, _TEXT),
    "empty": _reply(200, b""),
}


def _with_one_more(body: bytes) -> bytes:
    reply = json.loads(body)
    document = {"id": MARKER, "contents": f"{MARKER}\n{MARKER}"}
    reply["result"].insert(0, [{"document": document, "score": 1.0}])
    return json.dumps(reply).encode()


async def serve(upstream: str, manner: Manner, host: str, port: int) -> None:
    """Serve until a signal, then print the counts."""
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    async with FaultyRetrieval(upstream, manner, host, port) as proxy:
        print(f"{proxy.url} passes searches on to {upstream}", flush=True)
        await over.wait()
        print(json.dumps(proxy.counts()), flush=True)


def manner_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of how faulty retrieval is to be."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rate", type=float, default=Manner.rate, help="of searches that meet a fault")
    add("--seed", type=int, default=Manner.seed)
    add("--slow-s", type=float, default=Manner.slow_s, help="how late a slow answer is at most")
    add("--away-s", type=float, default=Manner.away_s, help="how long a restart takes")
    return parser


def manner_of(
    parser: argparse.ArgumentParser, words: Sequence[str] | None
) -> tuple[argparse.Namespace, Manner]:
    """Return what is given. Exits where it makes no sense."""
    given = parser.parse_args(words)
    try:
        return given, Manner(given.rate, given.seed, given.slow_s, given.away_s)
    except ValueError as error:
        parser.error(str(error))


def main(words: Sequence[str] | None = None) -> int:
    """Serve until a signal; exit code 2 where that cannot be."""
    parser = manner_parser(__doc__)
    add = parser.add_argument
    add("--upstream", required=True, help="base URL of the real server")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0: any free one")
    given, manner = manner_of(parser, words)
    try:
        asyncio.run(serve(given.upstream, manner, given.host, given.port))
    except OSError as error:
        print(f"retrieval_proxy: {error}; give another --host or --port", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
