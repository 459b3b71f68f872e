"""The retrieval server of `forage bench overlap`, with latency put before it.

`python -m scripts.bench.overlap.server PASSAGES FD SEED`: the real application over the real index
(of a corpus, or a folder of `forage index`), on the listening socket that it inherits as FD. A
search's path says how late it is to be answered (`POST /0.2-2/retrieve`: p50 and p99 in seconds).
Each query has a delay of its own, drawn by SEED and its words, so that it is the same whoever asks
and whenever; a POST is passed on when the longest is over. The server ends with its starter.
"""

import asyncio
import json
import math
import random
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec

from configs.retrieval import RetrievalConfig
from configs.runtime.process import begin, end_child, start_child

END_S = 10.0
_BACKLOG = 1024
_KEEP_ALIVE_S = 75  # longer than the client's
_P99 = NormalDist().inv_cdf(0.99)  # standard deviations above the median


class Latency(msgspec.Struct, frozen=True):
    """The time for which a query's answer is withheld: a log-normal of this median and p99. Equal
    ones are a constant. Raises ValueError unless 0 ≤ p50_s ≤ p99_s, and 0 only for both.
    """

    p50_s: float
    p99_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.p50_s <= self.p99_s or (self.p99_s and not self.p50_s):
            raise ValueError(f"p50_s, p99_s = {self.p50_s!r}, {self.p99_s!r}: 0 < p50 ≤ p99, or 0")

    @property
    def path(self) -> str:
        """The end of the server's base URL for this latency."""
        return "-".join(f"{each:.9f}".rstrip("0").rstrip(".") for each in (self.p50_s, self.p99_s))

    @classmethod
    def of(cls, path: str) -> "Latency":
        """The latency of that path. Raises ValueError."""
        p50_s, p99_s = (float(part) for part in path.split("-"))
        return cls(p50_s, p99_s)

    def draw(self, chance: random.Random) -> float:
        """Seconds of one query's delay."""
        if self.p50_s == self.p99_s:
            return self.p50_s
        return self.p50_s * math.exp(math.log(self.p99_s / self.p50_s) / _P99 * chance.gauss(0, 1))


def chance(seed: int, query: str) -> random.Random:
    """The chance of this query's delay."""
    return random.Random(f"{seed} {query}")


class Late:
    """An ASGI application that holds another one's searches back."""

    def __init__(
        self,
        application: Any,
        seed: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._application, self._seed, self._sleep = application, seed, sleep

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Read a search whole, wait, pass it on; everything else goes through."""
        first, _, rest = scope.get("path", "").lstrip("/").partition("/")
        if rest != "retrieve":
            await self._application(scope, receive, send)
            return
        parts = [await receive()]
        while parts[-1].get("more_body"):
            parts.append(await receive())
        queries = json.loads(b"".join(part["body"] for part in parts))["queries"]
        latency = Latency.of(first)
        if seconds := max(latency.draw(chance(self._seed, query)) for query in queries):
            await self._sleep(seconds)

        async def replay() -> Any:
            return parts.pop(0) if parts else await receive()

        await self._application(scope | {"path": "/retrieve"}, replay, send)


@contextmanager
def serving(passages: Path, seed: int) -> Iterator[tuple[str, int]]:
    """A server over a corpus or an index, its base URL and process id; it may still be indexing."""
    with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listener:
        port, number = listener.getsockname()[1], listener.fileno()
        words = ["-m", "scripts.bench.overlap.server", str(passages), str(number), str(seed)]
        # A session of its own: Ctrl-C is its starter's affair.
        process = start_child(words, own_session=True, passed_files=[number])
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        end_child(process, END_S)


def main(words: list[str]) -> None:
    """Serve until told to stop."""
    begin("bench_overlap_server", threads=1)
    import uvicorn

    from retrieval_server.app.app import create_app
    from retrieval_server.index.open_index import open_index

    passages, number, seed = words
    is_index = Path(passages).is_dir()
    asked = RetrievalConfig(index=passages) if is_index else RetrievalConfig(corpus=passages)
    documents, index = open_index(asked)
    late = Late(create_app(documents, index, asked.top_k), int(seed))
    server = uvicorn.Server(
        uvicorn.Config(
            late,
            access_log=False,
            log_config=None,
            log_level="warning",
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
    )
    with socket.socket(fileno=int(number)) as listener:
        server.run(sockets=[listener])


if __name__ == "__main__":
    main(sys.argv[1:])
