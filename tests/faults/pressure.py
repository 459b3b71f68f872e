"""What a run has to bear from outside without a process of it being killed: `with Pressure(on)`.

- overload: bursts of closed-loop askers, who ask for several times what the retrieval server
  searches within their deadline;
- slow-loris: connections to it that send a head, or a body, byte by byte for ever;
- strangers: connections without this run's keys to the ports of replay and of weight sync.

All of it from one thread. Whoever is not let go in time, or is answered who should not be, counts
as a fault.
"""

import asyncio
import contextlib
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import zmq

from configs.runtime.guard import HANDSHAKE_S
from retrieval_server.app.connections import HEADERS_S
from retrieval_server.poster import Poster
from retrieval_server.protocol import RetrievalError, RetrievalOverloaded
from tests.replay.server.strangers import GREETING, UNFINISHED

BURST_S, BURST_EVERY_S = 10.0, 60.0
DEADLINE_S = 0.5  # of an overloading search
FACTOR = 4.0  # of what is searched in that time is asked for at once
QUERIES = 128  # in a request
ASKERS = 4, 64  # at least, and at most
AGAIN_S = 0.2  # until who was refused asks again
PROBE_S = 10.0
LORISES, STRANGERS = 12, 4  # of each kind at a time, at each port
DRIP_S = 0.5  # between two bytes
PATIENCE_S = 15.0  # beyond the time in which a connection is to be closed
PAUSE_S = 0.5  # before the next connection
FOREIGN_S = 3.0  # that a ZeroMQ socket with other keys is there
JOIN_S = 30.0


@dataclass(frozen=True)
class Target:
    """Where a run may be reached: its retrieval server, what that asks for, within what time it
    ends bodies; and the ports where keys are needed, by name.
    """

    retrieval: tuple[str, int]
    token: str
    body_s: float
    queries: Sequence[str]
    doors: Mapping[str, tuple[str, int]]


class Pressure:
    """Counts what came of it: `overload/…`, `loris/…`, `strangers/…`."""

    def __init__(self, on: Target) -> None:
        self._on = on
        self.counts: Counter[str] = Counter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._press()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End all of it. Raises RuntimeError where it had ended by itself."""
        ended = not self._thread.is_alive()
        self._over.set()
        self._thread.join(JOIN_S)
        if ended:
            raise RuntimeError("the attacks had ended by an error")

    async def _press(self) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in self._attacks()]
            while not self._over.is_set() and not any(task.done() for task in tasks):
                await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()

    def _attacks(self) -> Iterator[Coroutine[Any, Any, None]]:
        host, port = self._on.retrieval
        shown = f"authorization: Bearer {self._on.token}\r\n" if self._on.token else ""
        head = f"POST /retrieve HTTP/1.1\r\nhost: {host}\r\n{shown}content-length: 1000000\r\n\r\n"
        for _ in range(LORISES):
            yield self._connect("loris/head", (host, port), b"GET / HTTP/1.1\r\nx: ", HEADERS_S)
            yield self._connect("loris/body", (host, port), head.encode(), self._on.body_s)
        for name, door in self._on.doors.items():
            for said in (b"", os.urandom(64), GREETING, UNFINISHED + bytes(600)):
                for _ in range(STRANGERS):
                    yield self._connect(f"strangers/{name}", door, said, HANDSHAKE_S, drips=False)
            yield self._foreign_keys(f"strangers/{name}", door)
        yield self._overload()

    async def _connect(
        self, name: str, to: tuple[str, int], said: bytes, limit_s: float, drips: bool = True
    ) -> None:
        """Connect again and again, say this, and then nothing or a byte at a time, until let go."""
        while True:
            try:
                reader, writer = await asyncio.open_connection(*to)
            except OSError:  # nobody listens now
                self.counts[f"{name}/nobody there"] += 1
                await asyncio.sleep(PAUSE_S)
                continue
            self.counts[f"{name}/opened"] += 1
            dripping = asyncio.create_task(_say(writer, said, drips))
            try:
                async with asyncio.timeout(limit_s + PATIENCE_S):
                    with contextlib.suppress(ConnectionError):
                        await reader.read()
                self.counts[f"{name}/let go"] += 1
            except TimeoutError:
                self.counts[f"{name}/held"] += 1
            finally:
                dripping.cancel()
                writer.transport.abort()
            await asyncio.sleep(PAUSE_S)

    async def _foreign_keys(self, name: str, door: tuple[str, int]) -> None:
        """Speak ZeroMQ with keys that are not this run's, or without any."""
        with zmq.Context() as context:
            while True:
                for has_keys in (True, False):
                    self.counts[f"{name}/foreign keys"] += 1
                    with context.socket(zmq.DEALER) as socket:
                        socket.linger, socket.reconnect_ivl = 0, 500
                        if has_keys:
                            public, secret = zmq.curve_keypair()
                            socket.curve_serverkey = zmq.curve_keypair()[0]
                            socket.curve_publickey, socket.curve_secretkey = public, secret
                        socket.connect("tcp://{}:{}".format(*door))
                        with contextlib.suppress(zmq.Again):
                            socket.send(b"let me in", zmq.DONTWAIT)
                        await asyncio.sleep(FOREIGN_S)
                        if socket.poll(0):
                            self.counts[f"{name}/answered"] += 1

    async def _overload(self) -> None:
        """A burst each `BURST_EVERY_S`, as large as the server's measured speed asks for."""
        host, port = self._on.retrieval
        asking = list(self._on.queries)
        queries = (asking * math.ceil(QUERIES / len(asking)))[:QUERIES]
        body = json.dumps({"queries": queries, "topk": 3, "return_scores": True}).encode()
        while True:
            begun_s = time.monotonic()
            poster = Poster(f"http://{host}:{port}", self._on.token)
            with contextlib.suppress(RetrievalError):
                await self._burst(poster, body)
            await poster.close()
            await asyncio.sleep(max(PAUSE_S, begun_s + BURST_EVERY_S - time.monotonic()))

    async def _burst(self, poster: Poster, body: bytes) -> None:
        """As many askers as that takes. Raises RetrievalError where there is no answer at all."""
        begun_s = time.monotonic()
        await poster.post(body, QUERIES, PROBE_S)
        askers = askers_for(QUERIES / (time.monotonic() - begun_s))
        self.counts["overload/bursts"] += 1
        end_s = time.monotonic() + BURST_S
        await asyncio.gather(*(self._ask(poster, body, end_s) for _ in range(askers)))

    async def _ask(self, poster: Poster, body: bytes, end_s: float) -> None:
        """One asker, who waits for an answer before it asks again."""
        while time.monotonic() < end_s:
            self.counts["overload/asked"] += 1
            try:
                await poster.post(body, QUERIES, DEADLINE_S)
                self.counts["overload/answered"] += 1
            except RetrievalOverloaded:
                self.counts["overload/refused"] += 1
                await asyncio.sleep(AGAIN_S)
            except RetrievalError:
                self.counts["overload/without an answer"] += 1
                await asyncio.sleep(AGAIN_S)


def askers_for(rate: float) -> int:
    """How many askers overload a server that searches so many queries a second."""
    fewest, most = ASKERS
    return min(most, max(fewest, math.ceil(FACTOR * rate * DEADLINE_S / QUERIES)))


async def _say(writer: asyncio.StreamWriter, said: bytes, drips: bool) -> None:
    """All of it at once, or all of it and then a byte at a time."""
    with contextlib.suppress(ConnectionError):
        writer.write(said)
        await writer.drain()
        while drips:
            await asyncio.sleep(DRIP_S)
            writer.write(b"a")
            await writer.drain()
