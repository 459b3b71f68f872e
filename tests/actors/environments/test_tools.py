"""Uses of a user's tools beside one another: none waits for one that hangs; state, limits, ends."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from actors.environments import toolbox
from actors.environments.schema import Arguments
from actors.environments.toolbox import Toolbox, together
from actors.environments.tools import IN_THREADS, Tool, load_tools
from actors.errors import ToolFailed
from configs.environment import EnvironmentConfig
from configs.load import ConfigError
from configs.runtime.process import REPOSITORY
from tests.actors.conftest import make_lease
from tests.actors.typed_tools import Notebook, Slow

TYPED, FAULTY = "tests.actors.typed_tools", "tests.actors.faulty_tools"
HANGING = """
import asyncio
from actors.environments.toolbox import Toolbox
from actors.environments.tools import load_tools
from configs.environment import EnvironmentConfig
(tool,) = load_tools(EnvironmentConfig(tools=("tests.actors.faulty_tools:blocking",)))
box = Toolbox(None, [tool], EnvironmentConfig(tool_deadline_s=0.05))
print(asyncio.run(box.use(tool, {"text": "now"})))
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


def tool_of(function: Callable[..., Any], limit: int = IN_THREADS) -> Tool:
    return Tool("held", "It waits.", Arguments.of(function, "held"), function, limit)


def loaded(*entries: str, **settings: Any) -> tuple[Tool, ...]:
    return load_tools(EnvironmentConfig(tools=entries, **settings))


def box_of(*tools: Tool, **settings: Any) -> Toolbox:
    return Toolbox(make_lease(), tools, EnvironmentConfig(**settings))


@pytest.fixture
def notebook() -> Iterator[dict[str, Tool]]:
    Notebook.closed.clear()
    yield {tool.name: tool for tool in loaded(f"{TYPED}:Notebook")}


async def test_a_use_waits_for_its_turn_outside_its_deadline() -> None:
    held = Held()
    tool, uses = tool_of(held, limit=3), []
    async with asyncio.timeout(60):
        uses = [asyncio.create_task(box_of(tool).use(tool, {"text": "x"})) for _ in range(3)]
        while held.inside < 3:
            await asyncio.sleep(0.001)
        hasty = box_of(tool, tool_deadline_s=0.001)
        late = asyncio.create_task(hasty.use(tool, {"text": "late"}))
        await asyncio.sleep(0.01)  # longer than it may take once it is its turn
        assert not late.done() and held.most == 3
        held.free.set()
        assert await asyncio.gather(*uses) == ["x"] * 3
        late.cancel()


async def test_hanging_uses_of_one_tool_end_no_other_and_are_no_more_than_so_many() -> None:
    held, other = Held(), tool_of(lambda: "kelu")
    tool = tool_of(held, limit=2)
    uses = [box_of(tool, tool_deadline_s=0.05).use(tool, {"text": "x"}) for _ in range(2)]
    assert await asyncio.gather(*uses) == ["held gave nothing within 0.05 s and was given up."] * 2
    told = await box_of(tool).use(tool, {"text": "x"})
    assert told == "held failed: StillRunning: 2 earlier calls, given up, are still running"
    assert await box_of(other).use(other, {}) == "kelu"
    async with asyncio.timeout(60):
        while held.most < 2:  # each has its thread, which may not have begun
            await asyncio.sleep(0.001)
    held.free.set()


async def test_a_use_that_was_given_up_keeps_its_turn_until_its_thread_ends() -> None:
    held = Held()
    tool, hasty = tool_of(held, limit=4), EnvironmentConfig(tool_deadline_s=0.05)
    uses = [Toolbox(make_lease(), (), hasty).use(tool, {"text": "x"}) for _ in range(3)]
    assert all("given up" in said for said in await asyncio.gather(*uses))
    more = [asyncio.create_task(box_of(tool).use(tool, {"text": "y"})) for _ in range(4)]
    async with asyncio.timeout(60):
        while held.inside < 4:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert held.most == 4 and not any(task.done() for task in more)
        held.free.set()
        assert await asyncio.gather(*more) == ["y"] * 4
    assert held.most == 4


async def test_who_waits_for_a_turn_is_told_once_all_are_given_up() -> None:
    held = Held()
    tool = tool_of(held, limit=2)
    uses = [box_of(tool, tool_deadline_s=0.05).use(tool, {"text": "x"}) for _ in range(5)]
    async with asyncio.timeout(60):
        said = await asyncio.gather(*uses)
    assert ["given up." in each for each in said] == [True, True, False, False, False]
    assert all("StillRunning" in each for each in said[2:])
    held.free.set()
    async with asyncio.timeout(60):
        while held.inside:
            await asyncio.sleep(0.001)
        while "StillRunning" in (again := await box_of(tool).use(tool, {"text": "z"})):
            await asyncio.sleep(0.001)
    assert again == "z"


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (f"{FAULTY}:raising", "raising failed: RuntimeError: the secret of now"),
        (f"{FAULTY}:leaving", "leaving failed: SystemExit: 3"),
        (f"{FAULTY}:timing_out", "timing_out failed: TimeoutError: slow disk"),
        (f"{FAULTY}:cancelling", "cancelling failed: CancelledError: "),
        (f"{FAULTY}:endless", "endless gave nothing within 1 s and was given up."),
        (f"{TYPED}:unspeakable", "unspeakable failed: TypeError: Encoding objects of type object"),
    ],
)
async def test_a_fault_is_told_recorded_and_counted(entry: str, told: str) -> None:
    (tool,) = loaded(entry)
    box, before = box_of(tool, tool_deadline_s=1.0), toolbox.gauges()
    assert (await box.use(tool, {"text": "now"})).startswith(told)
    (noted,) = box.noted()["tools"]
    assert noted["tool"] == tool.name and noted["seconds"] >= 0.0
    assert noted["error"].startswith(f"tool {tool.name!r}") and box.noted() == {}
    grown = {name for name, number in toolbox.gauges().items() if number == before[name] + 1}
    assert grown == {"actor/tool_uses", "actor/tool_errors"}


async def test_what_is_noted_of_a_turn_fits_its_record() -> None:
    (tool,) = loaded(f"{FAULTY}:raising")
    box = box_of(tool)
    for _ in range(64):
        await box.use(tool, {"text": "\x01" * 1000})
    noted = box.noted()
    assert len(msgspec.json.encode(noted).decode()) < 65_536
    assert len(noted["tools"]) == 64 and all("error" in each for each in noted["tools"])


async def test_a_fault_fails_the_lease_where_that_is_asked_for() -> None:
    (tool,) = loaded(f"{FAULTY}:raising")
    with pytest.raises(ToolFailed, match=r"RuntimeError: the secret of now \(faulty_tools.py:"):
        await box_of(tool, tool_errors="fail").use(tool, {"text": "now"})


async def test_what_is_no_text_is_told_as_json() -> None:
    number, weather = loaded(f"{FAULTY}:number", f"{TYPED}:weather")
    assert await box_of(number).use(number, {"text": "now"}) == "3"
    arguments = weather.arguments.read({"place": {"city": "bore"}, "days": 2})
    said = await box_of(weather).use(weather, arguments)
    assert said == '{"city":"bore","days":2,"unit":"C"}'


async def test_methods_share_the_state_of_one_rollout(notebook: dict[str, Tool]) -> None:
    assert list(notebook) == ["write", "read", "hang"]
    one, other = box_of(*notebook.values()), box_of(*notebook.values())
    writes = [one.use(notebook["write"], {"text": each}) for each in "abc"]
    said = await asyncio.gather(*writes)
    assert said == [f"{n} of what is the mayor of bore ?" for n in (1, 2, 3)]
    assert await one.use(notebook["read"], {}) == '["a","b","c"]'
    assert await other.use(notebook["read"], {}) == "[]"
    await one.close()
    assert Notebook.closed == [["a", "b", "c"]]


async def test_state_that_a_late_use_may_still_change_is_used_no_more(
    notebook: dict[str, Tool],
) -> None:
    box = box_of(*notebook.values(), tool_deadline_s=0.05)
    assert "given up" in await box.use(notebook["hang"], {})
    told = "read cannot be used any more: an earlier use was given up."
    assert await box.use(notebook["read"], {}) == told


async def test_state_that_cannot_be_made_is_told() -> None:
    (tool,) = loaded(f"{TYPED}:Broken")
    box = box_of(tool)
    assert await box.use(tool, {}) == "look failed: ValueError: no disk"
    await box.close()


async def test_a_close_that_hangs_keeps_no_other_open(notebook: dict[str, Tool]) -> None:
    (hanging,) = loaded(f"{TYPED}:Hanging")
    box = box_of(hanging, *notebook.values())
    assert await box.use(hanging, {}) == "open"
    await box.use(notebook["write"], {"text": "a"})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await box.close()
    assert Notebook.closed == [["a"]]


@pytest.mark.parametrize("closes_first", [True, False])
async def test_state_that_is_made_late_is_closed(closes_first: bool) -> None:
    Slow.free.clear()
    Slow.closed.clear()
    (tool,) = loaded(f"{TYPED}:Slow")
    box = box_of(tool, tool_deadline_s=0.05)
    assert "given up" in await box.use(tool, {})
    if closes_first:
        await box.close()
    Slow.free.set()
    async with asyncio.timeout(60):
        while not (Slow.closed or (not closes_first and box._states[Slow].made)):
            await asyncio.sleep(0.001)
    if not closes_first:
        await box.close()
    assert Slow.closed == [True]


async def test_the_first_error_cancels_the_others() -> None:
    cancelled = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await together(wait(), fail())
    assert cancelled.is_set()


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (f"{TYPED}:Bare", "the class has no public method"),
        (f"{TYPED}:Wanting", r"made from a lease, or from nothing \(missing a required argument"),
        (f"{TYPED}:many", "cannot be given by name"),
    ],
)
def test_what_makes_no_tool_is_refused(entry: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"environment.tools = '{entry}': .*{complaint}"):
        loaded(entry)


def test_a_limit_of_a_tool_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tool_limits = \{'wether': 2\}: .*name one of weather"):
        loaded(f"{TYPED}:weather", tool_limits={"wether": 2})
    (tool,) = loaded(f"{TYPED}:weather", tool_limits={"weather": 2})
    assert tool.limit == 2


def test_a_program_ends_while_a_tool_hangs() -> None:
    made = subprocess.run(
        [sys.executable, "-c", HANGING], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    told = "blocking gave nothing within 0.05 s and was given up.\n"
    assert (made.returncode, made.stdout) == (0, told), made.stderr
