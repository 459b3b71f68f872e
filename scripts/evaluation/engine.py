"""The engines of an evaluation: vLLM, a source of passages, and the rollouts made with them.

Every rollout is made, tried again, or given up by a named cause, within
`actors.rollout_deadline_s`. Causes that are no question's fault (a dead engine, retrieval denied or
out of reach) end the evaluation: no question fails by them. Rows that are written stay, however it
ends.
"""

import asyncio
import hashlib
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from actors.environments.registry import searches
from actors.errors import ActorError, EngineDead, EngineUnusable
from actors.gateway.rolling import rolling
from actors.policies.vllm import VllmPolicy
from actors.prompt import Prompter, load_tokenizer
from actors.retrieval import open_retrieval
from actors.rewards.scorer import Rewards
from configs.rewards import RewardsConfig
from configs.runtime.process import PID_FILE, make_socket_dir, socket_dir
from configs.runtime.signals import Interrupt
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Question, Sampling, Trajectory
from retrieval_server import protocol
from scripts.command.terminal import logged_cause
from scripts.evaluation.rows import FINAL, Asked, Row, Rows, failed_row, row_of
from scripts.setup import gpu_memory
from scripts.setup.retrieval import ServerFailed, probe, serving

log = logging.getLogger(__name__)
LOG = "engine.log"
ATTEMPTS = 3
IN_A_ROW = 10
POLL_S = 0.02  # between looks at the interrupt: rollouts of a small model are quick
RollOut = Callable[[Lease], Awaitable[Trajectory]]
Ask = Callable[[str, Sequence[RollOut]], Awaitable[None]]  # one environment, by engine
Watch = Callable[[], Coroutine[Any, Any, NoReturn]]


class Stopped(ActorError):
    """The evaluation cannot go on now; its rows are kept, and the same command goes on later."""


class SearchesFail(ActorError):
    """One rollout after another fails by its searches: the source of passages is at fault."""


NOBODYS_FAULT = (EngineDead, protocol.RetrievalUnreachable, protocol.RetrievalDenied, SearchesFail)
_ENDS_ALL = (*NOBODYS_FAULT, ServerFailed, OSError)


async def unless(interrupt: Interrupt, work: Coroutine[Any, Any, None]) -> None:
    """Do the work; cancel it once the interrupt has a cause, and raise CancelledError."""
    task = asyncio.create_task(work)
    while not task.done() and not interrupt.cause:
        await asyncio.wait([task], timeout=POLL_S)
    if not task.done():
        task.cancel()
    await task


def group_of(set_name: str, question_id: str) -> int:
    """The group id that seeds a question's rollouts: 48 bits of its name, and of nothing else."""
    name = f"{set_name}\n{question_id}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest())


def spread(roll_outs: Sequence[RollOut]) -> RollOut:
    """Roll each lease out, all its turns, on the engine that has the fewest under way."""
    under_way = [0] * len(roll_outs)

    async def roll_out(lease: Lease) -> Trajectory:
        least = min(range(len(under_way)), key=under_way.__getitem__)
        under_way[least] += 1
        try:
            return await roll_outs[least](lease)
        finally:
            under_way[least] -= 1

    return roll_out


class Evaluation:
    """Rollouts under one environment, each added to the rows; `questions`: by (set, id)."""

    def __init__(
        self,
        roll_out: RollOut,
        questions: Mapping[tuple[str, str], Question],
        rows: Rows,
        sampling: Sampling,
        *,
        in_flight: int,
        deadline_s: float,
    ) -> None:
        self._roll_out, self._questions, self._rows = roll_out, questions, rows
        self._sampling, self._in_flight, self._deadline_s = sampling, in_flight, deadline_s
        self._failing = 0  # rollouts in a row, by their searches

    async def run(self, asked: Sequence[Asked], report: Callable[[Row], None]) -> None:
        """Make these rollouts, begun in the order given; call `report` with each row. Raises an
        ExceptionGroup of NOBODYS_FAULT, or of OSError where a row cannot be written, and
        SearchesFail.
        """
        waiting = iter(asked)
        async with asyncio.TaskGroup() as group:
            for _ in range(self._in_flight):
                group.create_task(self._work(waiting, report))
        environments = {each.environment for each in asked}
        rows = (row for row in self._rows.by_rollout.values() if row.environment in environments)
        if self._failing and all(row.failure for row in rows):
            raise SearchesFail("every rollout failed, the last ones by their searches")

    async def _work(self, waiting: Iterator[Asked], report: Callable[[Row], None]) -> None:
        for asked in waiting:
            row, error = await self._row(asked)
            self._rows.add(row)
            report(row)
            self._check(row, error)

    def _check(self, row: Row, error: Exception | None) -> None:
        by_search = isinstance(error, protocol.RetrievalError) and not isinstance(
            error, protocol.BadQuery
        )
        self._failing = self._failing + 1 if by_search else 0
        if self._failing >= IN_A_ROW:
            raise SearchesFail(
                f"{IN_A_ROW} rollouts in a row failed by their searches, the last by {row.failure}"
            ) from error

    async def _row(self, asked: Asked) -> tuple[Row, Exception | None]:
        question = self._questions[asked.set, asked.id]
        group_id = group_of(asked.set, asked.id)
        lease = Lease(group_id, asked.sample, "eval", question, self._sampling)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with asyncio.timeout(self._deadline_s):
                    rollout = await self._roll_out(lease)
                return row_of(asked, question, rollout, attempt), None
            except NOBODYS_FAULT:
                raise
            except TimeoutError as error:
                lease = msgspec.structs.replace(lease, attempt=attempt)
                failure = f"TimeoutError: over {self._deadline_s:g} s (actors.rollout_deadline_s)"
                cause: Exception = error
            except (ActorError, protocol.RetrievalError) as error:
                failure, cause = f"{type(error).__name__}: {error}", error
            if failure.startswith(FINAL):
                break
        return failed_row(asked, question, failure, attempt), cause


async def run(
    configs: Mapping[str, Config],
    todo: Mapping[str, Sequence[Asked]],
    ask: Ask,
    folder: Path,
    interrupt: Interrupt,
    engines: int = 1,
) -> None:
    """Start engines and source of passages, `ask` each environment that has something to do, end
    them. `engines`: 0 for as many as this machine's GPUs hold. Raises Stopped, and CancelledError
    after an interrupt.
    """
    try:
        await unless(interrupt, _run(configs, todo, ask, folder, engines))
    except (EngineUnusable, ServerFailed, *NOBODYS_FAULT) as error:
        raise Stopped(_told(error, folder)) from error
    except ExceptionGroup as group:
        if cause := _ending(group):
            raise Stopped(f"{type(cause).__name__}: {_told(cause, folder)}") from group
        raise


def _told(error: BaseException, folder: Path) -> str:
    """The message of an error; of an engine's, with the cause that its process has logged."""
    if not isinstance(error, (EngineUnusable, EngineDead)):
        return str(error)
    return f"{error}{logged_cause(folder / LOG)}"


async def _run(
    configs: Mapping[str, Config],
    todo: Mapping[str, Sequence[Asked]],
    ask: Ask,
    folder: Path,
    engines: int,
) -> None:
    needed = {name: config for name, config in configs.items() if todo[name]}
    config = next(iter(needed.values()))
    asked = any(map(searches, needed.values()))
    with ExitStack() as stack:
        stack.enter_context(_scratch(config.run_dir))
        server = None
        if asked and config.retrieval.has_own_server:
            server = stack.enter_context(serving(config, folder))
        elif asked:
            await _search(config)
        policies = await _start(config, engines, stack)
        if server:
            await server.ready()
            await _search(config)
        watches: list[Watch] = [policy.watch for policy in policies]
        await _beside([*watches, server.watch] if server else watches, _each(needed, policies, ask))


async def _start(config: Config, engines: int, stack: ExitStack) -> list[VllmPolicy]:
    """Start one engine after the other, the first of which must; as many as are asked for, else as
    the GPUs hold and others leave free. Raises EngineUnusable.
    """
    policies: list[VllmPolicy] = []
    while len(policies) < (engines or most_engines(config)):
        try:
            policy = await VllmPolicy.start(config)
        except EngineUnusable as error:
            if engines or not policies:
                raise
            log.warning("%d engines, for no further one starts: %s", len(policies), error)
            break
        stack.callback(policy.close)
        await policy.set_policy_version(0)
        policies.append(policy)
    return policies


def most_engines(config: Config) -> int:
    """How many engines this machine's GPUs hold, each on its own; on a CPU one."""
    return max(1, len(gpu_memory.totals()) // config.actors.tensor_parallel)


async def _each(needed: Mapping[str, Config], policies: Sequence[VllmPolicy], ask: Ask) -> None:
    first = next(iter(needed.values()))
    tokenizer: Any = load_tokenizer(first.model.path, first.model.trust_remote_code)
    async with open_retrieval(first) as retriever:
        for name, config in needed.items():
            prompter = Prompter(tokenizer, config.questions, config.actors)
            async with AsyncExitStack() as stack:
                each = []
                for policy in policies:
                    opened = rolling(
                        config,
                        policy=policy,
                        prompter=prompter,
                        rewards=Rewards(RewardsConfig()),  # evaluations are scored by exact match
                        actor_id="evaluation",
                    )
                    made = await stack.enter_async_context(opened)
                    each.append(partial(made.roll, retriever=retriever))
                await ask(name, each)


@contextmanager
def _scratch(run_dir: str) -> Iterator[None]:
    """The engine's sockets and files, removed at the end, or at the next start after a kill."""
    shutil.rmtree(socket_dir(run_dir), ignore_errors=True)
    directory = make_socket_dir(run_dir)
    (directory / PID_FILE).write_text(str(os.getpid()))  # whoever cleans up sees that it is in use
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _search(config: Config) -> None:
    """Search once: where a rollout's first search would fail, there is nothing to evaluate."""
    if not config.retrieval.recorded:
        await probe(config, config.retrieval.timeout_s, config.retrieval.retries)


async def _beside(watches: Sequence[Watch], work: Awaitable[None]) -> None:
    """Do the work beside watches, which end with an error or not at all."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(watch()) for watch in watches]
        await work
        for task in tasks:
            task.cancel()


def _ending(group: "ExceptionGroup[Exception]") -> BaseException | None:
    """The first of the errors that end an evaluation; None where the group holds another kind."""
    known, unknown = group.split(_ENDS_ALL)
    error: BaseException | None = None if unknown else known
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
