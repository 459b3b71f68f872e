"""The tools of one rollout: their state, their uses, and what became of each.

By default a tool that raises or takes too long is told to the policy in words; the rollout goes on
(`environment.tool_errors`).
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import msgspec

from actors.environments.mcp_servers import lost
from actors.environments.tools import Tool, takes_lease
from actors.errors import ToolFailed, recordable
from actors.user_code import FAULTS, Threads, raise_if_cancelled, raised_at
from configs import prompts
from configs.environment import EnvironmentConfig
from replay.protocol import Lease

logger = logging.getLogger(__name__)
_CANCELLED_WITHIN_S = 5.0
_NOTED_BYTES = 60_000  # of a turn: its record holds little more
_counts: Counter[str] = Counter()


def gauges() -> dict[str, float]:
    """Return how many uses of tools there were in this process, how many failed, and how often an
    MCP server was lost.
    """
    counts = {"uses": _counts["uses"], "errors": _counts["errors"], "servers_lost": lost()}
    return {f"actor/tool_{name}": float(count) for name, count in counts.items()}


class _State:
    """An instance of a class of tools; used by one call at a time. `lost`: a use of it took too
    long, and may go on in its thread.
    """

    def __init__(self, close_deadline_s: float) -> None:
        self.lock, self.made, self.lost = asyncio.Lock(), None, False
        self._close_deadline_s = close_deadline_s  # of one that is made late
        self._guard, self._closed = threading.Lock(), False

    def make(self, owner: type, *given: Any) -> Any:
        """Make the instance, in a thread; close it there where its rollout has ended meanwhile."""
        made = owner(*given)
        with self._guard:
            self.made, late = made, self._closed
        if late and (close := getattr(made, "close", None)) is not None:
            try:
                closing = Threads("tool", 1).run(close)
                asyncio.run(asyncio.wait_for(closing, self._close_deadline_s))
            except FAULTS as error:
                logger.warning("%s, made late: its close failed: %r", owner.__name__, error)
        return made

    async def close(self) -> BaseException | None:
        """Close the instance. Return the fault of its code."""
        with self._guard:
            made, self._closed = self.made, True
        if (close := getattr(made, "close", None)) is None:
            return None
        try:
            await Threads("tool", 1).run(close)
        except FAULTS as error:
            raise_if_cancelled(error)
            return error
        return None


class Toolbox:
    """The tools as one rollout uses them. `close` it at the end."""

    def __init__(self, lease: Lease, tools: Iterable[Tool], settings: EnvironmentConfig) -> None:
        self._lease, self._settings = lease, settings
        owners = {tool.owner for tool in tools if tool.owner is not None}
        self._states = {owner: _State(settings.close_deadline_s) for owner in owners}
        self._noted: list[dict[str, Any]] = []

    async def use(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        """Return what the tool says, or that it failed. Raises ToolFailed where
        `environment.tool_errors` says so.
        """
        state = self._states[tool.owner] if tool.owner is not None else None
        _counts["uses"] += 1
        async with state.lock if state else nullcontext(), tool.threads.turns:
            started = time.perf_counter()
            said, fault = await self._said(tool, state, arguments)
        note = {"tool": tool.name, "seconds": round(time.perf_counter() - started, 6)}
        self._noted.append(note | ({"error": fault} if fault else {}))
        if fault:
            _counts["errors"] += 1
            logger.info("%s", fault)
        return said

    def noted(self) -> dict[str, Any]:
        """Return what is to be on record of the uses since the last call: of a turn."""
        noted, self._noted = self._noted, []
        if len(msgspec.json.encode(noted)) > _NOTED_BYTES:
            noted = [note | ({"error": ""} if "error" in note else {}) for note in noted]
        return {"tools": noted} if noted else {}

    async def close(self) -> None:
        """Close what was made for this rollout and says how, all at once: none waits for one that
        hangs. Raises ToolFailed of the first that fails, once all have ended.
        """
        ended = await asyncio.gather(*(state.close() for state in self._states.values()))
        if faults := [each for each in ended if each is not None]:
            raise ToolFailed(f"close: {type(faults[0]).__name__}: {faults[0]}") from faults[0]

    async def _said(
        self, tool: Tool, state: _State | None, arguments: Mapping[str, Any]
    ) -> tuple[str, str]:
        """What the policy is told, and the fault of the tool; '' where there is none."""
        limit_s = self._settings.tool_deadline_s
        if state is not None and state.lost:
            return prompts.TOOL_LOST.format(name=tool.name), f"tool {tool.name!r}: lost its state"
        try:
            async with asyncio.timeout(limit_s) as deadline:
                return _text(await self._called(tool, state, arguments)), ""
        except FAULTS as error:
            raise_if_cancelled(error)
            if isinstance(error, TimeoutError) and deadline.expired():
                if state is not None:
                    state.lost = True
                told = prompts.TOOL_LATE.format(name=tool.name, seconds=f"{limit_s:g}")
                what = f"took over {limit_s:g} s (environment.tool_deadline_s)"
                fault = f"tool {tool.name!r} {what}"
            else:
                what = f"{type(error).__name__}: {error}"
                told = prompts.TOOL_FAILED.format(name=tool.name, error=recordable(what))
                at = raised_at(getattr(tool.function, "__module__", ""), error)
                fault = f"tool {tool.name!r}: {what}{at}"
            if self._settings.tool_errors == "fail":
                raise ToolFailed(fault) from error
            return told, recordable(fault)

    async def _called(self, tool: Tool, state: _State | None, arguments: Mapping[str, Any]) -> Any:
        function: Callable[..., Any] = tool.function
        if state is not None and tool.owner is not None:
            if state.made is None:
                given = (self._lease,) if takes_lease(tool.owner) else ()
                await tool.threads.call(state.make, tool.owner, *given)
            function = getattr(state.made, tool.function.__name__)
        return await tool.threads.run(function, **arguments)


async def together(*work: Awaitable[Any]) -> list[Any]:
    """Return the results of all, in order. The first error cancels the others, and is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_CANCELLED_WITHIN_S)
        raise


def _text(value: Any) -> str:
    """Return a tool's result as text: JSON of what is none. Raises TypeError."""
    if not isinstance(value, str):
        value = "" if value is None else msgspec.json.encode(value).decode()
    text: str = value
    return text.encode(errors="replace").decode()  # a lone surrogate is no text
