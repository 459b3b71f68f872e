"""A proxy with the faults of networks: `python -m tests.faults.tcp_proxy FROM TO`.

Of each connection to FROM it makes one to TO (`tcp://HOST:PORT` or `ipc://PATH`), and forwards both
ways, CurveZMQ untouched. `--fault delay=0.2` holds each chunk up, `corrupt=0.01`
flips a byte of a chunk with that probability, `cut=5` closes all connections every 5 s,
`half_open=5` forwards nothing for 5 s of every 10, and closes nothing. In tests `faults` is set
from any thread, and `cut()` called. It ends on SIGINT, SIGTERM or `close`, which leaves nothing
open.
"""

import argparse
import asyncio
import contextlib
import logging
import random
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

CHUNK_BYTES = 1 << 16
CONNECT_S = 5.0
LOOK_S = 0.01  # how soon a half-open connection notices that it is whole again

logger = logging.getLogger(__name__)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Faults:
    """The faults of each chunk: seconds of delay, probability of a flipped byte, nothing passes."""

    delay_s: float = 0.0
    corrupt: float = 0.0
    half_open: bool = False


class ChaosProxy:
    """An async context manager; `listen` is where, `flipped` and `cuts` count."""

    def __init__(self, listen: str, target: str, faults: Faults | None = None, seed: int = 0):
        """Raises ValueError for what is neither tcp:// nor ipc://."""
        self.faults = faults or Faults()
        self.flipped = self.cuts = 0
        self.listen = listen
        self._listen, self._target = _address(listen), _address(target)
        self._random = random.Random(seed)
        self._open: set[asyncio.StreamWriter] = set()
        self._links: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        address = self._listen
        if isinstance(address, str):
            self._server = await asyncio.start_unix_server(self._serve, address)
        else:
            self._server = await asyncio.start_server(self._serve, *address)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Listen no more and close every connection."""
        self._server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    def cut(self) -> None:
        """Close every connection, without a word. From any thread."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        self.cuts += 1
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        self._open.add(writer)
        try:
            await self._link((reader, writer))
        except (asyncio.CancelledError, OSError, TimeoutError) as error:
            logger.debug("a connection ends: %r", error)  # whoever cancels closes the proxy
        finally:
            self._links.discard(link)
            self._open.discard(writer)
            writer.transport.abort()

    async def _link(self, client: Streams) -> None:
        async with asyncio.timeout(CONNECT_S):
            target = await _connect(self._target)
        self._open.add(target[1])
        try:
            await _first(self._pump(client[0], target[1]), self._pump(target[0], client[1]))
        finally:
            self._open.discard(target[1])
            target[1].transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while chunk := await source.read(CHUNK_BYTES):
            if self.faults.delay_s:
                await asyncio.sleep(self.faults.delay_s)
            while self.faults.half_open:
                await asyncio.sleep(LOOK_S)
            sink.write(self._changed(chunk))
            await sink.drain()

    def _changed(self, chunk: bytes) -> bytes:
        if self._random.random() >= self.faults.corrupt:
            return chunk
        self.flipped += 1
        data = bytearray(chunk)
        data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(data)


async def _first(*works: Coroutine[None, None, None]) -> None:
    """Run until one ends; the others end with it. Raises what it raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _connect(address: str | tuple[str, int]) -> Streams:
    if isinstance(address, str):
        return await asyncio.open_unix_connection(address)
    return await asyncio.open_connection(*address)


def _address(endpoint: str) -> str | tuple[str, int]:
    """A path, or host and port. Raises ValueError."""
    parts = urlsplit(endpoint)
    if parts.scheme == "ipc":
        return endpoint.removeprefix("ipc://")
    if parts.scheme == "tcp" and parts.hostname and parts.port:
        return parts.hostname, parts.port
    raise ValueError(f"{endpoint!r} is neither tcp://HOST:PORT nor ipc://PATH")


async def _misbehave(proxy: ChaosProxy, cut_s: float, half_open_s: float) -> None:
    """Cut every `cut_s`, or forward nothing for `half_open_s` out of twice that; for ever."""
    sound = proxy.faults
    while True:
        await asyncio.sleep(cut_s or half_open_s or 3600.0)
        if cut_s:
            proxy.cut()
        if half_open_s:
            proxy.faults = Faults(sound.delay_s, sound.corrupt, half_open=True)
            await asyncio.sleep(half_open_s)
            proxy.faults = sound


async def _run(arguments: argparse.Namespace) -> None:
    chosen = dict.fromkeys(("delay", "corrupt", "cut", "half_open"), 0.0) | dict(arguments.fault)
    faults = Faults(chosen["delay"], chosen["corrupt"])
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    async with ChaosProxy(arguments.listen, arguments.target, faults, arguments.seed) as proxy:
        work = asyncio.create_task(_misbehave(proxy, chosen["cut"], chosen["half_open"]))
        await over.wait()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


def fault(text: str) -> tuple[str, float]:
    """`delay=0.2` → (name, number). Raises ValueError."""
    name, _, number = text.partition("=")
    return name.replace("-", "_"), float(number)


def between(description: str | None) -> argparse.Namespace:
    """Read from where to where, and with which faults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("listen")
    parser.add_argument("target")
    parser.add_argument("--fault", type=fault, action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Serve until a signal."""
    asyncio.run(_run(between(__doc__)))


if __name__ == "__main__":
    main()
