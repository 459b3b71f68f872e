"""What ends an evaluation early: a signal, a dead engine, a retrieval server that cannot serve."""

import asyncio
import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from actors.engine_setup import Scratch
from actors.errors import EngineDead
from configs.load import parse
from configs.process import make_socket_dir, socket_dir
from scripts.eval_engine import Interrupt, Stopped, _beside, _ending, _place, run
from scripts.eval_rollouts import RollOut
from scripts.eval_rows import Asked
from tests.scripts.asking import endpoint, refuse


async def for_ever() -> NoReturn:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def dies() -> NoReturn:
    await asyncio.sleep(0)
    raise EngineDead("the engine's process is gone")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_work_and_says_so(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    async def work() -> None:
        interrupt.cancels_this_task()
        os.kill(os.getpid(), number)
        await for_ever()

    with Interrupt() as interrupt, pytest.raises(asyncio.CancelledError):
        asyncio.run(work())
    assert interrupt.cause == number.name and signal.getsignal(number) is before


def test_a_second_signal_leaves_at_once() -> None:
    async def work() -> None:
        interrupt.cancels_this_task()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with Interrupt() as interrupt, pytest.raises(KeyboardInterrupt):
        asyncio.run(work())


async def test_a_dead_engine_ends_what_waits_for_it() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await _beside([dies, for_ever], for_ever())
    assert isinstance(_ending(raised.value), EngineDead)


async def test_work_that_is_done_ends_the_watches() -> None:
    done = asyncio.Event()

    async def work() -> None:
        done.set()

    await _beside([for_ever], work())
    assert done.is_set()


def test_an_error_of_ours_is_not_taken_for_theirs() -> None:
    mixed = ExceptionGroup("", [EngineDead("gone"), ExceptionGroup("", [TypeError("a bug")])])
    assert _ending(mixed) is None
    assert str(_ending(ExceptionGroup("", [mixed.exceptions[0]]))) == "gone"


async def test_searches_that_are_refused_end_it_before_an_engine_starts(tmp_path: Path) -> None:
    async def ask(name: str, roll_out: RollOut) -> None:
        raise AssertionError

    todo = {"rag": [Asked("rag", "nq", "nq-0", 0)]}
    async with endpoint(refuse(401, "who?")) as other:
        config = parse("", [f"retrieval.url={other.url}", f"run_dir={tmp_path}"], "test")
        with pytest.raises(Stopped, match=r"was refused: .* 401: retrieval\.token_file"):
            await run({"rag": config}, todo, ask, tmp_path, Interrupt())
    assert [body["topk"] for body in other.bodies] == [3]
    assert not socket_dir(str(tmp_path)).exists()


def test_what_a_killed_engine_left_goes_with_the_next_start(tmp_path: Path) -> None:
    run_dir = str(tmp_path)
    left = make_socket_dir(run_dir) / "engine-left"
    left.mkdir()
    with _place(run_dir):
        scratch = Scratch(run_dir)
        with scratch.entered():
            mine = Path(os.environ["TMPDIR"])
        assert mine.parent == socket_dir(run_dir) and not left.exists()
    assert not mine.exists() and not socket_dir(run_dir).exists()
    scratch.remove()
