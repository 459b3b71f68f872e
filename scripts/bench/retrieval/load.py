"""The load of `forage bench retrieval`: `python -m scripts.bench.retrieval.load PLAN` (JSON).

One process that asks one server from many coroutines, through our client or those of the baseline:
Search-R1's descendants post with `requests` from threads (verl, SkyRL) or with aiohttp (ASearcher),
one POST a query, over kept connections, with no other try. Closed: askers wait for their answers,
siblings of a group for each other's. Open: each at its time, whatever is under way; the latency
counts from when it was due.
"""

import asyncio
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from configs.runtime.files import write_durably
from configs.runtime.process import begin
from retrieval_server.client import RetrievalClient
from retrieval_server.poster import Poster
from retrieval_server.protocol import Passage, RetrievalError, RetrieveRequest

KEPT = 2048  # units whose results are told
T = TypeVar("T")
Found = list[tuple[str, float]]  # id and score, best first
Asker = Callable[[str], Awaitable[Found]]
Gauges = Callable[[], dict[str, float]]


class LoadPlan(msgspec.Struct, frozen=True):
    """The work of one process; times are seconds. `queries`: a file of the units, JSON: lists of
    the queries that are asked together. Units are asked for in order, and over again. `clients`
    share `concurrency`. `rate` 0: closed loop, else units a second, their siblings spread over
    `spread_s`. `pause_s`: between an answer and the next question of a closed loop.
    """

    side: str
    url: str
    queries: str
    out: str
    concurrency: int = 1
    clients: int = 1
    rate: float = 0.0
    spread_s: float = 0.0
    pause_s: float = 0.0
    top_k: int = 3
    cache_queries: int = 0
    single_flight: bool = True
    warm_up_s: float = 1.0
    seconds: float = 5.0
    deadline_s: float = 30.0


class AskFailed(Exception):
    """No good answer came to a client of the baseline."""


class Client(NamedTuple):
    """Ways to ask, and the counts of the clients."""

    askers: list[Asker]
    gauges: Gauges


class _NoCache:
    """In place of a client's cache: each query is sent, also when it is on its way already."""

    remembered = shared = 0

    async def get(
        self, queries: Sequence[str], top_k: int, ask: Callable[[list[str]], Awaitable[T]]
    ) -> T:
        """Ask for all of the queries."""
        return await ask(list(queries))

    async def close(self) -> None:
        """Do nothing: nothing is kept."""


def _pairs(passages: Sequence[Passage]) -> Found:
    return [(passage.id, passage.score) for passage in passages]


@asynccontextmanager
async def ours(plan: LoadPlan) -> AsyncIterator[Client]:
    """RetrievalClients, each as an actor has one."""
    async with AsyncExitStack() as stack:
        clients = [
            RetrievalClient(plan.url, plan.deadline_s, cache_queries=plan.cache_queries)
            for _ in range(plan.clients)
        ]
        for client in clients:
            await stack.enter_async_context(client)
            if not plan.single_flight:
                client._cache = _NoCache()  # type: ignore[assignment]

        def asker(client: RetrievalClient) -> Asker:
            async def ask(query: str) -> Found:
                [passages] = await client.retrieve([query], plan.top_k)
                return _pairs(passages)

            return ask

        def gauges() -> dict[str, float]:
            told = [client.gauges() for client in clients]
            names = ("requests", "errors", "retried", "calls", "remembered", "shared")
            return {name: sum(each[f"retrieval/{name}"] for each in told) for name in names}

        yield Client([asker(client) for client in clients], gauges)


@asynccontextmanager
async def bare(plan: LoadPlan) -> AsyncIterator[Client]:
    """Our connections alone: a POST a query, no coalescing, no single-flight, no retry."""
    poster = Poster(plan.url)

    async def ask(query: str) -> Found:
        body = msgspec.json.encode(RetrieveRequest([query], plan.top_k, return_scores=True))
        [passages], _ = await poster.post(body, 1, plan.deadline_s)
        return _pairs(passages)

    try:
        yield Client([ask], dict)
    finally:
        await poster.close()


@asynccontextmanager
async def threads(plan: LoadPlan) -> AsyncIterator[Client]:
    """One requests.Session, as many threads and connections as there are askers."""
    import requests

    session = requests.Session()
    session.trust_env = False  # reading the environment for each request would slow it down
    session.mount("http://", requests.adapters.HTTPAdapter(1, plan.concurrency))
    url = plan.url + "/retrieve"

    def post(query: str) -> Found:
        payload: Any = {"queries": [query], "topk": plan.top_k, "return_scores": True}
        try:
            response = session.post(url, json=payload, timeout=plan.deadline_s)
            response.raise_for_status()
            return _found(response.json())
        except requests.RequestException as error:
            raise AskFailed(f"{type(error).__name__}: {error}"[:200]) from error

    with ThreadPoolExecutor(plan.concurrency) as pool, session:

        async def ask(query: str) -> Found:
            return await asyncio.get_running_loop().run_in_executor(pool, post, query)

        yield Client([ask], dict)


@asynccontextmanager
async def aio(plan: LoadPlan) -> AsyncIterator[Client]:
    """One aiohttp.ClientSession with as many connections as there are askers."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=plan.deadline_s)
    connector = aiohttp.TCPConnector(limit=plan.concurrency)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(query: str) -> Found:
            payload = {"queries": [query], "topk": plan.top_k, "return_scores": True}
            try:
                async with session.post(plan.url + "/retrieve", json=payload) as response:
                    response.raise_for_status()
                    return _found(await response.json())
            except (aiohttp.ClientError, TimeoutError) as error:
                raise AskFailed(f"{type(error).__name__}: {error}"[:200]) from error

        yield Client([ask], dict)


def _found(reply: dict[str, list[list[dict[str, dict[str, str]]]]]) -> Found:
    [row] = reply["result"]
    return [(hit["document"]["id"], float(hit["score"])) for hit in row]  # type: ignore[arg-type]


CLIENTS = {"ours": ours, "bare": bare, "requests": threads, "aiohttp": aio}


class Answers:
    """The answers, each with its times, and the errors."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float]] = []  # due at, answered at
        self.errors: Counter[str] = Counter()
        self.found: dict[str, list[Found]] = {}  # unit/sibling → each different result once

    async def ask(self, asker: Asker, unit: int, place: int, query: str, due_s: float) -> None:
        """Ask one query."""
        try:
            found = await asker(query)
        except (RetrievalError, AskFailed) as error:
            self.errors[f"{type(error).__name__}: {error}"[:200]] += 1
            return
        self.rows.append((due_s, time.monotonic()))
        if unit < KEPT:
            seen = self.found.setdefault(f"{unit}/{place}", [])
            if found not in seen:
                seen.append(found)


async def closed(
    plan: LoadPlan, units: list[list[str]], askers: list[Asker], answers: Answers
) -> None:
    """Slots of askers that wait for their answers and ask again, until the window ends."""
    end_s = time.monotonic() + plan.warm_up_s + plan.seconds
    numbers = itertools.count()
    size = len(units[0])

    async def slot(first: int) -> None:
        while (now_s := time.monotonic()) < end_s:
            unit = next(numbers) % len(units)
            together = (
                answers.ask(askers[(first + place) % len(askers)], unit, place, query, now_s)
                for place, query in enumerate(units[unit])
            )
            await asyncio.gather(*together)
            if plan.pause_s:
                await asyncio.sleep(plan.pause_s)

    await asyncio.gather(*(slot(first) for first in range(0, plan.concurrency, size)))


async def opened(
    plan: LoadPlan, units: list[list[str]], askers: list[Asker], answers: Answers
) -> None:
    """Each query at its time, whatever is under way; at last what is still under way."""
    begin_s = time.monotonic()
    size = len(units[0])
    times = sorted(
        (number / plan.rate + plan.spread_s * place / size, number, place)
        for number in range(math.ceil((plan.warm_up_s + plan.seconds) * plan.rate))
        for place in range(size)
    )
    under_way: set[asyncio.Task[None]] = set()
    for turn, (after_s, number, place) in enumerate(times):
        due_s, unit = begin_s + after_s, number % len(units)
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        asking = answers.ask(askers[turn % len(askers)], unit, place, units[unit][place], due_s)
        task = asyncio.create_task(asking)
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    if under_way:
        _, late = await asyncio.wait(under_way, timeout=plan.deadline_s)
        for task in late:
            answers.errors["Late: no answer within the deadline"] += 1
            task.cancel()


def percentile(values: Sequence[float], fraction: float) -> float:
    """Nearest rank: the least value that at least this fraction does not exceed."""
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]


def figures(
    rows: Sequence[tuple[float, float]], begin_s: float, seconds: float, is_open: bool
) -> dict[str, float | None]:
    """Answers a second in the window, and how long they took; rows: due at, answered at."""
    end_s = begin_s + seconds
    within = sum(begin_s <= answered_s < end_s for _, answered_s in rows)
    took_s = [
        answered_s - due_s
        for due_s, answered_s in rows
        if (begin_s <= due_s < end_s if is_open else begin_s <= answered_s)
    ]
    return {
        "qps": within / seconds,
        "p50_s": percentile(took_s, 0.50) if took_s else None,
        "p99_s": percentile(took_s, 0.99) if took_s else None,
        "max_s": max(took_s, default=None),
    }


async def run(plan: LoadPlan) -> dict[str, Any]:
    """Ask as planned; the figures."""
    units: list[list[str]] = json.loads(Path(plan.queries).read_text(encoding="utf-8"))
    answers = Answers()
    client: Client
    async with CLIENTS[plan.side](plan) as client:
        begin_s = time.monotonic() + plan.warm_up_s
        await (opened if plan.rate else closed)(plan, units, client.askers, answers)
        counts = client.gauges()
    answered = len(answers.rows)
    calls = counts.get("calls", float(answered + answers.errors.total()))
    return {
        **figures(answers.rows, begin_s, plan.seconds, plan.rate > 0),
        **{name: int(count) for name, count in counts.items()},
        "begin_s": begin_s,
        "answered": answered,
        "errors": answers.errors.total(),
        "error_kinds": dict(answers.errors.most_common(3)),
        "calls_per_query": calls / max(1, answered + answers.errors.total()),
        "found": answers.found,
    }


if __name__ == "__main__":
    begin("load", threads=1)
    given = msgspec.json.decode(sys.argv[1], type=LoadPlan)
    write_durably(Path(given.out), msgspec.json.encode(asyncio.run(run(given))))
