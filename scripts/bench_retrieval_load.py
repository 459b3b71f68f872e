"""Who asks in `scripts/bench_retrieval.py`: `python -m scripts.bench_retrieval_load PLAN`.

One process that asks one server from many coroutines, through the clients of
`scripts.bench_retrieval_askers`. Closed: `concurrency` askers, each waiting for its answer;
siblings of a group ask together and go on when all have theirs. Open: each at its time, whatever is
under way, and the latency counts from when it was due. Produces figures of the window and what was
found; waits for the server at most `deadline_s`.
"""

import asyncio
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from configs.process import begin
from retrieval_server.protocol import RetrievalError
from scripts.bench_retrieval_askers import CLIENTS, Asked, Asker, AskFailed, Client, Found

KEPT = 2048  # units whose results are told


class Load(msgspec.Struct, frozen=True):
    """What one process is to ask; times are seconds.

    `queries`: a file of the units, JSON: lists of the queries that are asked together. Units are
    asked for in order, and over again. `clients` share `concurrency`. `rate` 0: closed loop, else
    units a second, their siblings spread over `spread_s`. `pause_s`: between an answer and the
    next question of a closed loop.
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

    @property
    def asked(self) -> Asked:
        """What the clients need to know."""
        return Asked(
            *(self.url, self.concurrency, self.clients, self.top_k, self.cache_queries),
            *(self.single_flight, self.deadline_s),
        )


class Tally:
    """What was answered, when; what was not, and why."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float]] = []  # due at, answered at
        self.errors: Counter[str] = Counter()
        self.found: dict[str, list[Found]] = {}  # unit/sibling → each different result once

    async def ask(self, asker: Asker, unit: int, place: int, query: str, due_s: float) -> None:
        """One query."""
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


async def closed(plan: Load, units: list[list[str]], askers: list[Asker], tally: Tally) -> None:
    """Slots of askers that wait for their answers and ask again, until the window ends."""
    end_s = time.monotonic() + plan.warm_up_s + plan.seconds
    numbers = itertools.count()
    size = len(units[0])

    async def slot(first: int) -> None:
        while (now_s := time.monotonic()) < end_s:
            unit = next(numbers) % len(units)
            together = (
                tally.ask(askers[(first + place) % len(askers)], unit, place, query, now_s)
                for place, query in enumerate(units[unit])
            )
            await asyncio.gather(*together)
            if plan.pause_s:
                await asyncio.sleep(plan.pause_s)

    await asyncio.gather(*(slot(first) for first in range(0, plan.concurrency, size)))


async def opened(plan: Load, units: list[list[str]], askers: list[Asker], tally: Tally) -> None:
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
        asking = tally.ask(askers[turn % len(askers)], unit, place, units[unit][place], due_s)
        task = asyncio.create_task(asking)
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    if under_way:
        _, late = await asyncio.wait(under_way, timeout=plan.deadline_s)
        for task in late:
            tally.errors["Late: no answer within the deadline"] += 1
            task.cancel()


def percentile(values: Sequence[float], fraction: float) -> float:
    """Nearest rank: the least value that at least this fraction does not exceed."""
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]


def figures(
    rows: Sequence[tuple[float, float]], begin_s: float, seconds: float, is_open: bool
) -> dict[str, float | None]:
    """Answers a second within the window, and how long they took: those answered since it began
    (some after its end), in an open loop those due within it. rows: due at, answered at.
    """
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


async def run(plan: Load) -> dict[str, Any]:
    """Ask as planned; the figures."""
    units: list[list[str]] = json.loads(Path(plan.queries).read_text(encoding="utf-8"))
    tally = Tally()
    client: Client
    async with CLIENTS[plan.side](plan.asked) as client:
        begin_s = time.monotonic() + plan.warm_up_s
        await (opened if plan.rate else closed)(plan, units, client.askers, tally)
        counts = client.gauges()
    answered = len(tally.rows)
    calls = counts.get("calls", float(answered + tally.errors.total()))
    return {
        **figures(tally.rows, begin_s, plan.seconds, plan.rate > 0),
        **{name: int(count) for name, count in counts.items()},
        "begin_s": begin_s,
        "answered": answered,
        "errors": tally.errors.total(),
        "error_kinds": dict(tally.errors.most_common(3)),
        "calls_per_query": calls / max(1, answered + tally.errors.total()),
        "found": tally.found,
    }


def main(plan_json: str) -> int:
    """Ask, and write the figures to the plan's file."""
    begin("load", threads=1)
    plan = msgspec.json.decode(plan_json.encode(), type=Load)
    found = asyncio.run(run(plan))
    new = Path(plan.out + ".new")
    new.write_bytes(msgspec.json.encode(found))
    new.replace(plan.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
