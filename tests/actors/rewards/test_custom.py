"""A user's own reward: every way to write one, and every way in which it can fail."""

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.errors import Unscorable
from actors.rewards.custom import UserReward
from actors.rewards.transcript import Stream, Transcript
from actors.user_code import load_entry_point
from configs.load import ConfigError
from configs.runtime.process import REPOSITORY
from replay.trajectory import Question, StopReason
from retrieval_server.protocol import Passage

TRANSCRIPT = Transcript(
    question=Question("q-7", "who?", ("kelu",)),
    answer="kelu",
    stop_reason=StopReason.ANSWERED,
    sequences=(
        Stream(prompt="who?", texts=("<answer>kelu</answer>",), observations=("",), turns=()),
    ),
    passages=(),
)


def scored(function: Callable[[Transcript], Any], timeout_s: float = 30.0) -> float:
    return asyncio.run(UserReward("mine:reward", function, timeout_s).of(TRANSCRIPT))


def fault_of(function: Callable[[Transcript], Any], timeout_s: float = 30.0) -> str:
    with pytest.raises(Unscorable) as raised:
        scored(function, timeout_s)
    assert raised.value.whose == "custom"
    assert "mine:reward" in str(raised.value) and "'q-7'" in str(raised.value)
    return str(raised.value)


async def _half(transcript: Transcript) -> float:
    await asyncio.sleep(0)
    return len(transcript.texts) / 2


class _Caller:
    async def __call__(self, transcript: Transcript) -> float:
        return 0.25


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (lambda t: len(t.texts), 1.0),
        (lambda t: t.answer in t.question.answers, 1.0),
        (lambda t: np.float32(0.5), 0.5),
        (lambda t: np.bool_(True), 1.0),
        (lambda t: -3, -3.0),
        (_half, 0.5),
        (lambda t: _half(t), 0.5),
        (_Caller(), 0.25),
    ],
)
def test_a_number_is_taken_from_a_plain_and_from_an_async_function(
    function: Callable[[Transcript], Any], value: float
) -> None:
    assert scored(function) == value


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        None,
        "1.0",
        [1.0],
        10**400,
        np.ones(1),
        1j,
        np.ma.masked,
        SimpleNamespace(shape=()),
    ],
)
def test_what_is_no_finite_number_is_unscorable(value: object) -> None:
    assert "no finite number" in fault_of(lambda t: value)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("k"),
        TimeoutError("slow disk"),
        SystemExit(3),
        RuntimeError(""),
        asyncio.CancelledError("of a task of its own"),
    ],
)
def test_what_it_raises_is_named(error: BaseException) -> None:
    def plain(transcript: Transcript) -> float:
        raise error

    async def running(transcript: Transcript) -> float:
        raise error

    expected = f"raised {type(error).__name__}: {error}"
    assert expected in fault_of(plain) and expected in fault_of(running)


def test_an_iterator_that_ends_is_an_error_like_any_other() -> None:
    assert "StopIteration" in fault_of(lambda t: next(iter(())))


def test_one_that_never_returns_is_given_up() -> None:
    async def for_ever(transcript: Transcript) -> float:
        await asyncio.Event().wait()
        return 1.0

    hung = threading.Event()
    assert "took over 0.05 s" in fault_of(for_ever, 0.05)
    assert "took over 0.05 s" in fault_of(lambda t: hung.wait(), 0.05)
    hung.set()


async def test_beside_one_that_hangs_every_rollout_is_unscorable_at_once() -> None:
    free = threading.Event()
    reward = UserReward("mine:reward", lambda t: free.wait(60), 0.05)
    with pytest.raises(Unscorable, match=r"took over 0\.05 s"):
        await reward.of(TRANSCRIPT)
    faults = await asyncio.gather(
        *(reward.of(TRANSCRIPT) for _ in range(3)), return_exceptions=True
    )
    assert all("an earlier call is still running" in str(fault) for fault in faults), faults
    free.set()
    while True:  # it ends at last, and rollouts are scored again
        with suppress(Unscorable):
            assert await reward.of(TRANSCRIPT) == 1.0
            break
        await asyncio.sleep(0.001)


async def test_the_wait_for_a_turn_has_an_end() -> None:
    calls: list[Transcript] = []
    reward = UserReward("mine:reward", calls.append, 0.05)
    async with reward._turns:  # as of a call that is under way
        with pytest.raises(Unscorable, match=r"had no turn within 0\.05 s"):
            await reward.of(TRANSCRIPT)
    assert not calls


async def test_a_rollout_that_is_cancelled_is_not_the_functions_fault() -> None:
    async def for_ever(transcript: Transcript) -> float:
        begun.set()
        await asyncio.Event().wait()
        return 1.0

    begun = asyncio.Event()
    task = asyncio.create_task(UserReward("mine:reward", for_ever, 60.0).of(TRANSCRIPT))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_plain_one_holds_nobody_else_up_and_is_called_one_at_a_time() -> None:
    free, running, most = threading.Event(), [0], [0]

    def slow(transcript: Transcript) -> float:
        running[0] += 1
        most[0] = max(most[0], running[0])
        assert free.wait(60)
        running[0] -= 1
        return 1.0

    reward = UserReward("mine:reward", slow, 60.0)
    asked = asyncio.gather(*(reward.of(TRANSCRIPT) for _ in range(3)))
    while not running[0]:
        await asyncio.sleep(0.001)
    for _ in range(100):  # whoever may begin has begun
        await asyncio.sleep(0)
    free.set()  # by the loop, which goes on
    assert await asked == [1.0] * 3 and most == [1]


async def test_as_many_run_at_once_as_are_allowed() -> None:
    free, running = threading.Event(), list[int]()

    def slow(transcript: Transcript) -> float:
        running.append(1)
        assert free.wait(60)
        return 1.0

    reward = UserReward("mine:reward", slow, 60.0, at_once=2)
    asked = asyncio.gather(*(reward.of(TRANSCRIPT) for _ in range(3)))
    async with asyncio.timeout(60):
        while len(running) < 2:
            await asyncio.sleep(0.001)
    for _ in range(100):  # whoever may begin has begun
        await asyncio.sleep(0)
    assert len(running) == 2
    free.set()
    assert await asked == [1.0] * 3


def test_an_entry_point_is_found_by_its_name() -> None:
    found = load_entry_point("rewards.custom", "tests.actors.judges:brevity")
    assert found(TRANSCRIPT) == 0.2


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no_such_module:reward", "No module named 'no_such_module'"),
        ("tests.actors.judges:no_such", "no_such"),
        ("tests.actors.judges:NOT_CALLABLE", "cannot be called"),
    ],
)
def test_one_that_is_not_there_is_refused(value: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_entry_point("rewards.custom", value)
    assert f"rewards.custom = {value!r}" in str(raised.value) and words in str(raised.value)


REMEDY = (
    "put PYTHONPATH=$PWD before the command in the folder that holds mine, or install it in this "
    "environment: each process of a run imports it"
)


@pytest.mark.parametrize(
    ("value", "text", "words"),
    [
        ("mine:f", None, f"No module named 'mine': {REMEDY}"),
        ("mine.games:f", None, f"No module named 'mine': {REMEDY}"),
        ("mine:f", "import not_here", "named 'not_here': install what it imports in this environ"),
        ("mine:f", "1 / 0", "ZeroDivisionError: division by zero (mine.py:1): correct it"),
        ("mine:f", "def f(", "(mine.py, line 1): correct it"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test's
    with pytest.raises(ConfigError) as raised:
        load_entry_point("rewards.custom", value)
    assert str(raised.value).startswith(f"rewards.custom = {value!r}: ")
    assert words in str(raised.value)


def test_the_manuals_example_works_as_it_stands() -> None:
    manual = REPOSITORY / "docs" / "rewards.md"
    code = manual.read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)  # the user's own file
    passages = (Passage("1", "Bore\nIts mayor is Kelu.", 1.0),)
    found = msgspec.structs.replace(TRANSCRIPT, passages=passages)
    assert scored(names["cited"]) == 0.0 and scored(lambda t: names["cited"](found)) == 1.0
