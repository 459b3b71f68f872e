"""Uses of a user's tools beside one another: none waits for one that hangs."""

import asyncio
import subprocess
import sys
import threading

import pytest

from actors.environments import tools
from actors.environments.tools import Tool
from actors.errors import ToolFailed
from configs.runtime.process import REPOSITORY

HANGING = """
import asyncio, threading
from actors.errors import ToolFailed
from actors.environments.tools import Tool
tool = Tool("hang", "It hangs.", "text", lambda text: threading.Event().wait())
try:
    asyncio.run(tool.use("now", 0.05))
except ToolFailed:
    print("given up")
"""


class Held:
    """A plain tool that waits until it is freed; counts who is in it."""

    def __init__(self) -> None:
        self.free, self.inside, self.most = threading.Event(), 0, 0
        self._lock = threading.Lock()

    def __call__(self, text: str) -> str:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        assert self.free.wait(60)
        with self._lock:
            self.inside -= 1
        return text


def tool_of(held: Held) -> Tool:
    return Tool("held", "It waits.", "text", held)


async def test_a_use_waits_for_its_turn_outside_its_deadline() -> None:
    held = Held()
    tool = tool_of(held)
    async with asyncio.timeout(60):
        uses = [asyncio.create_task(tool.use("x", 60.0)) for _ in range(tools.AT_ONCE)]
        while held.inside < tools.AT_ONCE:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(tool.use("late", 0.001))
        await asyncio.sleep(0.01)  # longer than it may take once it is its turn
        assert not late.done() and held.most == tools.AT_ONCE
        held.free.set()
        assert await asyncio.gather(*uses) == ["x"] * tools.AT_ONCE
        late.cancel()


async def test_hanging_uses_of_one_tool_end_no_other_and_are_no_more_than_so_many() -> None:
    held, other = Held(), Tool("other", "It speaks.", "text", str.upper)
    tool = tool_of(held)
    uses = (tool.use("x", 0.05) for _ in range(tools.AT_ONCE))
    late = await asyncio.gather(*uses, return_exceptions=True)
    assert all("took over 0.05 s" in str(each) for each in late), late
    with pytest.raises(ToolFailed, match="StillRunning: 16 earlier calls, given up, are still run"):
        await tool.use("x", 60.0)
    assert await other.use("kelu", 60.0) == "KELU"
    async with asyncio.timeout(60):
        while held.most < tools.AT_ONCE:  # each has its thread, which may not have begun
            await asyncio.sleep(0.001)
    assert held.most == tools.AT_ONCE
    held.free.set()


def test_a_program_ends_while_a_tool_hangs() -> None:
    made = subprocess.run(
        [sys.executable, "-c", HANGING], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (made.returncode, made.stdout) == (0, "given up\n"), made.stderr
