"""The clients that `scripts/bench_retrieval_load.py` asks through: ours, and those of the baseline.

Each is an `async with` that gives `askers`, functions from one query to what was found. Search-R1's
descendants post with `requests` from threads (verl, SkyRL) or with aiohttp (ASearcher): one POST a
query, over kept connections, with a deadline and no other try.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec

from retrieval_server.client import RetrievalClient, _Poster
from retrieval_server.protocol import Passage, RetrieveRequest

T = TypeVar("T")
Found = list[tuple[str, float]]  # id and score, best first
Asker = Callable[[str], Awaitable[Found]]
Gauges = Callable[[], dict[str, float]]


class AskFailed(Exception):
    """No good answer came to a client of the baseline."""


class Asked(NamedTuple):
    """How a load asks; times are seconds. `clients` share `concurrency`."""

    url: str
    concurrency: int
    clients: int
    top_k: int
    cache_queries: int
    single_flight: bool
    deadline_s: float


class Client(NamedTuple):
    """Ways to ask, and what the clients counted."""

    askers: list[Asker]
    gauges: Gauges


class _Apart:
    """In place of a client's QueryCache: each query is sent, also when it is on its way already."""

    remembered = shared = 0

    async def get(
        self, queries: Sequence[str], top_k: int, ask: Callable[[list[str]], Awaitable[T]]
    ) -> T:
        """What is found for the queries."""
        return await ask(list(queries))

    async def close(self) -> None:
        """Nothing is on its way."""


def _pairs(passages: Sequence[Passage]) -> Found:
    return [(passage.id, passage.score) for passage in passages]


@asynccontextmanager
async def ours(asked: Asked) -> AsyncIterator[Client]:
    """RetrievalClients, each as an actor has one."""
    async with AsyncExitStack() as stack:
        clients = [
            RetrievalClient(asked.url, asked.deadline_s, cache_queries=asked.cache_queries)
            for _ in range(asked.clients)
        ]
        for client in clients:
            await stack.enter_async_context(client)
            if not asked.single_flight:
                client._cache = _Apart()  # type: ignore[assignment]

        def asker(client: RetrievalClient) -> Asker:
            async def ask(query: str) -> Found:
                [passages] = await client.retrieve([query], asked.top_k)
                return _pairs(passages)

            return ask

        def gauges() -> dict[str, float]:
            told = [client.gauges() for client in clients]
            names = ("requests", "errors", "retried", "calls", "remembered", "shared")
            return {name: sum(each[f"retrieval/{name}"] for each in told) for name in names}

        yield Client([asker(client) for client in clients], gauges)


@asynccontextmanager
async def bare(asked: Asked) -> AsyncIterator[Client]:
    """Our connections alone: a POST a query, no coalescing, no single-flight, no retry."""
    poster = _Poster(asked.url, "", lambda version: None)

    async def ask(query: str) -> Found:
        body = msgspec.json.encode(RetrieveRequest([query], asked.top_k, return_scores=True))
        [passages] = await poster.post(body, 1, asked.deadline_s)
        return _pairs(passages)

    try:
        yield Client([ask], dict)
    finally:
        await poster.close()


@asynccontextmanager
async def threads(asked: Asked) -> AsyncIterator[Client]:
    """One requests.Session, as many threads and connections as there are askers."""
    import requests

    session = requests.Session()
    session.trust_env = False  # reading the environment for each request would slow it down
    session.mount("http://", requests.adapters.HTTPAdapter(1, asked.concurrency))
    url = asked.url + "/retrieve"

    def post(query: str) -> Found:
        payload: Any = {"queries": [query], "topk": asked.top_k, "return_scores": True}
        try:
            response = session.post(url, json=payload, timeout=asked.deadline_s)
            response.raise_for_status()
            return _found(response.json())
        except requests.RequestException as error:
            raise AskFailed(f"{type(error).__name__}: {error}"[:200]) from error

    with ThreadPoolExecutor(asked.concurrency) as pool, session:

        async def ask(query: str) -> Found:
            return await asyncio.get_running_loop().run_in_executor(pool, post, query)

        yield Client([ask], dict)


@asynccontextmanager
async def aio(asked: Asked) -> AsyncIterator[Client]:
    """One aiohttp.ClientSession with as many connections as there are askers."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=asked.deadline_s)
    connector = aiohttp.TCPConnector(limit=asked.concurrency)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(query: str) -> Found:
            payload = {"queries": [query], "topk": asked.top_k, "return_scores": True}
            try:
                async with session.post(asked.url + "/retrieve", json=payload) as response:
                    response.raise_for_status()
                    return _found(await response.json())
            except (aiohttp.ClientError, TimeoutError) as error:
                raise AskFailed(f"{type(error).__name__}: {error}"[:200]) from error

        yield Client([ask], dict)


def _found(reply: dict[str, list[list[dict[str, dict[str, str]]]]]) -> Found:
    [row] = reply["result"]
    return [(hit["document"]["id"], float(hit["score"])) for hit in row]  # type: ignore[arg-type]


CLIENTS = {"ours": ours, "bare": bare, "requests": threads, "aiohttp": aio}
