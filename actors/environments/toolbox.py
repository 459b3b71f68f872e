"""The tools of one rollout: their state, their uses, and what became of each.

By default a tool that raises or takes too long is told to the policy in words; the rollout goes on
(`environment.tool_errors`).
"""

import asyncio
import logging
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

    def __init__(self) -> None:
        self.lock, self.made, self.lost = asyncio.Lock(), None, False


class Toolbox:
    """The tools as one rollout uses them. `close` it at the end."""

    def __init__(self, lease: Lease, tools: Iterable[Tool], settings: EnvironmentConfig) -> None:
        self._lease, self._settings = lease, settings
        self._states = {tool.owner: _State() for tool in tools if tool.owner is not None}
        self._noted: list[dict[str, Any]] = []

    async def use(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        """Return what the tool says, or that it failed. Raises ToolFailed where
        `environment.tool_errors` says so.
        """
        state = self._states[tool.owner] if tool.owner is not None else None
        _counts["uses"] += 1
        async with state.lock if state else nullcontext(), tool.turns:
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
        """Close what was made for this rollout and says how, one after the other. Raises whatever
        one raises, once all had their turn.
        """
        faults: list[BaseException] = []
        for state in self._states.values():
            close = getattr(state.made, "close", None)
            if close is not None:
                try:
                    await Threads("tool", 1).run(close)
                except FAULTS as error:
                    raise_if_cancelled(error)
                    faults.append(error)
        if faults:
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
                state.made = await tool.threads.run(tool.owner, *given)
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
