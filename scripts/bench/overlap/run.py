"""One cell of `forage bench overlap`: one loop, one latency, so many rollouts in flight.

Rollouts are driven by the actors' own runner, loop, environment and retrieval client; only replay
is stood in for. A cell has a deadline; a rollout that fails ends it with CellFailed.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import quantiles
from typing import Any, NamedTuple

import msgspec
import psutil  # type: ignore[import-untyped]

from actors.environments.base import Retriever
from actors.errors import ActorError
from actors.policies.vllm import VllmPolicy
from actors.prompt import Prompter
from actors.rewards.scorer import Rewards
from actors.rollout import rollout
from actors.runner import MeteredPolicy, Runner, VerifiedVersions
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Question, Trajectory
from retrieval_server.client import RetrievalClient
from scripts.bench.harness import BenchError
from scripts.bench.overlap.loops import Lessor, LockStep, Loop, RolloutFailed, Seats, leases
from scripts.bench.overlap.server import Latency

DEADLINE_S = 240.0


class CellFailed(BenchError):
    """A cell could not be measured; the message names it and says why."""


class Cell(msgspec.Struct, frozen=True):
    """A cell to measure; `rollouts` are in flight, or in a batch."""

    loop: Loop
    latency: Latency
    rollouts: int


class Timing(msgspec.Struct, frozen=True):
    """The least seconds before and in the window; `turnovers`: of all rollouts, before it."""

    warm_up_s: float
    seconds: float
    turnovers: int = 1


class _Mark(NamedTuple):
    at_s: float
    tokens: int
    rollouts: int
    filled_s: float
    gauges: dict[str, float]
    cpu_s: dict[str, float]


class Bench:
    """An engine and a server to measure cells with."""

    def __init__(
        self,
        config: Config,
        policy: VllmPolicy,
        prompter: Prompter,
        questions: tuple[Question, ...],
        server: tuple[str, int],
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """`server`: base URL and process id; `deadline_s` of a cell. The engine must say that it
        serves version 0.
        """
        self._deadline_s = deadline_s
        self._config, self._policy, self._prompter = config, policy, prompter
        self._questions, (self._url, self._pid) = questions, server
        logging.getLogger("actors.runner").setLevel(logging.ERROR)  # it names all that it ends

    async def measure(self, cell: Cell, timing: Timing, first: int) -> dict[str, Any]:
        """A cell's figures; with equal `first` of equal questions and seeds. Raises CellFailed."""
        await self._policy.pause()  # with it go the caches that an earlier cell has filled
        await self._policy.resume()
        asked = self._config.retrieval
        client = RetrievalClient(
            f"{self._url}/{cell.latency.path}",
            asked.timeout_s,
            asked.retries,
            asked.max_connections,
            cache_queries=asked.cache_queries,
        )
        try:
            async with asyncio.timeout(self._deadline_s), client:
                return await self._observe(cell, timing, first, client)
        except TimeoutError as error:
            raise CellFailed(f"{cell}: nothing measured within {self._deadline_s:g} s") from error
        except ExceptionGroup as group:
            ours, others = group.split((RolloutFailed, ActorError))
            if ours is None or others is not None:
                raise
            raise CellFailed(f"{cell}: {_first(ours)}") from group

    async def _observe(
        self, cell: Cell, timing: Timing, first: int, client: RetrievalClient
    ) -> dict[str, Any]:
        following = leases(self._questions, self._config.seed, first)
        lessor = Lessor(following, cell.rollouts, cell.loop != "continuous")
        seats = Seats(self._policy, self._config.actors.max_num_seqs)
        meter = MeteredPolicy(seats)

        def mark() -> _Mark:
            cpu_s = self._cpu_s()
            return _Mark(
                at_s=time.monotonic(),
                tokens=meter.tokens,
                rollouts=len(lessor.done),
                filled_s=seats.filled_s(),
                gauges=client.gauges(),
                cpu_s=cpu_s,
            )

        play = partial(
            rollout,
            prompter=self._prompter,
            rewards=Rewards.open(self._config),
            config=self._config,
            actor_id="bench",
        )
        runner = make_runner(cell, play, lessor, meter, client, self._config)
        async with asyncio.TaskGroup() as group:
            group.create_task(runner.run())
            turnovers = timing.turnovers if cell.loop == "continuous" else 1
            await lessor.settled(timing.warm_up_s, turnovers * cell.rollouts)
            begin = mark()
            await lessor.settled(timing.seconds)
            end = mark()
            runner.stop("measured")
        return figures(begin, end, lessor.done)

    def _cpu_s(self) -> dict[str, float]:
        own = psutil.Process()
        used = {"actor": _cpu_s(own), "server": _cpu_s(psutil.Process(self._pid))}
        engine = [each for each in own.children(recursive=True) if each.pid != self._pid]
        return used | {"engine": sum(map(_cpu_s, engine))}


def make_runner(
    cell: Cell,
    play: Callable[..., Awaitable[Trajectory]],
    lessor: Lessor,
    meter: MeteredPolicy,
    retriever: Retriever,
    config: Config,
) -> Runner:
    """The actors' runner over this cell's loop; `play(lease, policy=, retriever=)` is a rollout."""
    step = LockStep(meter, retriever, cell.rollouts)

    async def freely(lease: Lease, retriever: Retriever) -> Trajectory:
        return await play(lease, policy=meter, retriever=retriever)

    async def in_step(lease: Lease, _: Retriever) -> Trajectory:
        try:
            return await play(lease, policy=step, retriever=step)
        finally:
            step.left()

    serving = asyncio.Event()
    serving.set()
    versions = VerifiedVersions(serving)
    versions.add(0, 0)  # the starting weights, which the engine says that it serves
    roll = in_step if cell.loop == "lockstep" else freely
    return Runner(
        roll, retriever=retriever, writer=lessor, versions=versions, meter=meter, config=config
    )


def figures(begin: _Mark, end: _Mark, done: list[Trajectory]) -> dict[str, Any]:
    """The figures between two moments; waits are those of rollouts that ended in between."""
    seconds = end.at_s - begin.at_s
    ended = done[begin.rollouts : end.rollouts]
    waits = [s.seconds for t in ended for turn in t.turns for s in turn.searches]
    cuts = quantiles(waits, n=100, method="inclusive") if len(waits) > 1 else [0.0] * 99
    did = {name: value - begin.gauges[name] for name, value in end.gauges.items()}
    return {
        "tokens_per_s": (end.tokens - begin.tokens) / seconds,
        "seconds": seconds,
        "seats_filled": (end.filled_s - begin.filled_s) / seconds,
        "rollouts": len(ended),
        "searches": len(waits),
        "turns": sum(len(t.turns) for t in ended),
        "waited_p50_s": cuts[49],
        "waited_p99_s": cuts[98],
        "generate_s": sum(t.timings["generate_s"] for t in ended) / max(1, len(ended)),
        "total_s": sum(t.timings["total_s"] for t in ended) / max(1, len(ended)),
        "posts": did["retrieval/calls"],
        "shared": did["retrieval/shared"],
        "retried": did["retrieval/retried"],
        "cpu": {name: (end.cpu_s[name] - used) / seconds for name, used in begin.cpu_s.items()},
    }


def _first(error: Exception) -> Exception:
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
