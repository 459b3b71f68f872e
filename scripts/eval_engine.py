"""What an evaluation runs on: one engine, whoever answers searches, and Ctrl-C.

Consumes a configuration for each environment and what is to be asked; produces rows. Waits for the
retrieval server and the engine to start, then for rollouts; unblocked by them, by the death of
either, or by a signal. What is on record stays there, however it ends.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from actors.environments import searches
from actors.errors import EngineUnusable
from actors.prompt import load_tokenizer
from actors.retrieval import open_retrieval
from actors.vllm_policy import VllmPolicy
from configs.process import make_socket_dir, socket_dir
from configs.schema import Config
from scripts.eval_environments import roll_out_in
from scripts.eval_rollouts import NOBODYS_FAULT, RollOut
from scripts.eval_rows import Asked
from scripts.guardian import PID_FILE
from scripts.own_server import ServerFailed, probe, serving

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ENDS_ALL = (*NOBODYS_FAULT, ServerFailed, OSError)
Ask = Callable[[str, RollOut], Awaitable[None]]  # one environment
Watch = Callable[[], Coroutine[Any, Any, NoReturn]]


class Stopped(Exception):
    """The evaluation cannot go on now; its rows are kept, and the same command goes on later."""


class Interrupt:
    """Ctrl-C or SIGTERM cancels the running task, once; `cause` says so, '' before. Use as a
    context manager.
    """

    def __init__(self) -> None:
        self.cause = ""
        self._cancel: Callable[[], object] | None = None

    def __enter__(self) -> Self:
        self._before = [signal.signal(number, self._take) for number in _SIGNALS]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in zip(_SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def cancels_this_task(self) -> None:
        """Have a signal cancel the task that calls."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        again, self.cause = bool(self.cause), signal.Signals(number).name
        if again or self._cancel is None:
            raise KeyboardInterrupt
        self._cancel()


async def run(
    configs: Mapping[str, Config],
    todo: Mapping[str, Sequence[Asked]],
    ask: Ask,
    folder: Path,
    interrupt: Interrupt,
) -> None:
    """Start what is needed, have `ask` go through each environment that has something to do, end
    it. Raises Stopped.
    """
    interrupt.cancels_this_task()
    needed = {name: config for name, config in configs.items() if todo[name]}
    config = next(iter(needed.values()))
    asked = any(map(searches, needed.values()))
    try:
        with ExitStack() as stack:
            stack.enter_context(_place(config.run_dir))
            server = None
            if asked and config.retrieval.has_own_server:
                server = stack.enter_context(serving(config, folder))
            elif asked:
                await _search(config)
            policy = await VllmPolicy.start(config)
            stack.callback(policy.close)
            await policy.set_policy_version(0)
            if server:
                await server.ready()
                await _search(config)
            watches = [policy.watch, *([server.watch] if server else [])]
            await _beside(watches, _each(needed, policy, ask))
    except (EngineUnusable, ServerFailed, *NOBODYS_FAULT) as error:
        raise Stopped(str(error)) from error
    except ExceptionGroup as group:
        if cause := _ending(group):
            raise Stopped(f"{type(cause).__name__}: {cause}") from group
        raise


async def _each(needed: Mapping[str, Config], policy: VllmPolicy, ask: Ask) -> None:
    first = next(iter(needed.values()))
    tokenizer: Any = load_tokenizer(first.model.path, first.model.trust_remote_code)
    async with open_retrieval(first) as retriever:
        for name, config in needed.items():
            await ask(name, roll_out_in(config, policy, retriever, tokenizer))


@contextmanager
def _place(run_dir: str) -> Iterator[None]:
    """Where the engine leaves sockets and files: removed at the end, or, where this process is
    killed, by the next start of the same folder.
    """
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
    """Do the work while the watches, which end with an error or not at all, look on."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(watch()) for watch in watches]
        await work
        for task in tasks:
            task.cancel()


def _ending(group: "ExceptionGroup[Exception]") -> BaseException | None:
    """The first of the errors that end an evaluation; None where the group holds something else."""
    known, unknown = group.split(_ENDS_ALL)
    error: BaseException | None = None if unknown else known
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
