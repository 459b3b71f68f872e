"""Closed-loop askers of `forage bench retrieval`: `python -m scripts.bench.retrieval.askers PLAN`.

Each asks, waits for passages or an error, and asks anew at once, through our client as an actor
has it. What is counted is what came within a window; the askers ask before it and after it too.
"""

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from configs.runtime.files import write_durably
from configs.runtime.process import begin
from retrieval_server.client import RetrievalClient
from retrieval_server.protocol import RetrievalError
from scripts.bench.retrieval.load import percentile

TOP_K = 3


class AskersPlan(msgspec.Struct, frozen=True):
    """The work of one process; times are seconds. `queries`: a file of queries, JSON, asked for in
    order and over again, `together` in one request. `clients` share the askers. `deadline_s`: of a
    search, from the question to the passages.
    """

    url: str
    queries: str
    out: str
    askers: int
    together: int = 1
    clients: int = 4
    deadline_s: float = 3.0
    warm_up_s: float = 3.0
    seconds: float = 6.0


class Tally:
    """The ends of searches: when, how long each took, and how many queries were answered."""

    def __init__(self) -> None:
        self.answered: list[tuple[float, float, int]] = []
        self.failed: list[tuple[float, str]] = []

    def figures(self, begin_s: float, seconds: float) -> dict[str, Any]:
        """Of what ended in the window."""
        end_s = begin_s + seconds
        within = [each for each in self.answered if begin_s <= each[0] < end_s]
        failed = Counter(kind for at_s, kind in self.failed if begin_s <= at_s < end_s)
        took_s = [took for _, took, _ in within]
        return {
            "qps": sum(queries for _, _, queries in within) / seconds,
            "p50_s": percentile(took_s, 0.50) if took_s else None,
            "p99_s": percentile(took_s, 0.99) if took_s else None,
            "answered": len(within),
            "failed": failed.total(),
            "failures": dict(failed),
        }


async def ask(
    plan: AskersPlan, client: RetrievalClient, queries: "itertools.cycle[str]", tally: Tally
) -> None:
    """One asker, until it is cancelled."""
    while True:
        wanted = list(itertools.islice(queries, plan.together))
        begun = time.monotonic()
        try:
            await client.retrieve(wanted, TOP_K)
        except RetrievalError as error:
            tally.failed.append((time.monotonic(), type(error).__name__))
        else:
            now = time.monotonic()
            tally.answered.append((now, now - begun, len(wanted)))


async def run(plan: AskersPlan) -> dict[str, Any]:
    """Ask as planned; the figures."""
    queries = itertools.cycle(json.loads(Path(plan.queries).read_text(encoding="utf-8")))
    tally = Tally()
    async with AsyncExitStack() as stack:
        clients = [RetrievalClient(plan.url, plan.deadline_s) for _ in range(plan.clients)]
        for client in clients:
            await stack.enter_async_context(client)
        begin_s = time.monotonic() + plan.warm_up_s
        asking = [
            asyncio.create_task(ask(plan, clients[number % plan.clients], queries, tally))
            for number in range(plan.askers)
        ]
        await asyncio.sleep(plan.warm_up_s + plan.seconds)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        counts = [client.gauges() for client in clients]
    retried = sum(each["retrieval/retried"] for each in counts)
    return {**tally.figures(begin_s, plan.seconds), "retried": retried, "begin_s": begin_s}


if __name__ == "__main__":
    begin("askers", threads=1)
    given = msgspec.json.decode(sys.argv[1], type=AskersPlan)
    write_durably(Path(given.out), msgspec.json.encode(asyncio.run(run(given))))
