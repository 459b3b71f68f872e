"""A user's own tools, which the policy may use beside search: functions from text to text.

Plain functions run in threads, so many at once; a use waits for its turn outside its deadline. A
tool that raises, takes too long or gives no text is its owner's fault: the lease fails by that
name, and nothing of it enters a trajectory.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from actors.errors import ToolFailed
from actors.user_code import FAULTS, Threads, load_entry_point, raise_if_cancelled, raised_at
from configs.load import ConfigError

RESERVED = ("search", "answer", "think", "information", "tool_call", "tool_response")
AT_ONCE = 16  # uses of plain tools; and how many of one tool may hang


@dataclass(frozen=True)
class Tool:
    """A function and its description for the policy; its tag, or its call's name, is `name`."""

    name: str
    description: str
    parameter: str
    function: Callable[[str], str | Awaitable[str]]
    threads: Threads = field(default_factory=lambda: Threads("tool", AT_ONCE), compare=False)

    @property
    def schema(self) -> dict[str, Any]:
        """The schema that a chat template is given."""
        argument = {self.parameter: {"type": "string"}}
        parameters = {"type": "object", "properties": argument, "required": [self.parameter]}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    async def use(self, text: str, deadline_s: float) -> str:
        """Call the tool with `text` and return its text. Raises ToolFailed."""
        is_async = inspect.iscoroutinefunction(self.function)
        async with nullcontext() if is_async else _turns(asyncio.get_running_loop()):
            said = await self._within(deadline_s, self.threads.run(self.function, text))
        if not isinstance(said, str):
            raise ToolFailed(f"tool {self.name!r} gave {said!r}, which is no text")
        return said.encode(errors="replace").decode()  # a lone surrogate is no text

    async def _within(self, deadline_s: float, use: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                return await use
        except FAULTS as error:
            raise_if_cancelled(error)
            at = raised_at(getattr(self.function, "__module__", ""), error)
            what = f"tool {self.name!r}: {type(error).__name__}: {error}{at}"
            if isinstance(error, TimeoutError) and deadline.expired():
                what = (
                    f"tool {self.name!r} took over {deadline_s:g} s (environment.tool_deadline_s)"
                )
            raise ToolFailed(what) from error


@lru_cache(1)  # a process has one event loop at a time
def _turns(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    return asyncio.Semaphore(AT_ONCE)


@lru_cache
def load_tools(entries: tuple[str, ...]) -> tuple[Tool, ...]:
    """Load the tools that `environment.tools` names. Raises ConfigError, naming the entry."""
    tools: list[Tool] = []
    for entry in entries:
        tool = _load(entry)
        if tool.name in RESERVED or any(tool.name == other.name for other in tools):
            raise ConfigError(
                f"environment.tools = {entry!r}: its name {tool.name!r} is taken (by "
                f"{', '.join(RESERVED)} or another tool): rename the function"
            )
        tools.append(tool)
    return tuple(tools)


def _load(entry: str) -> Tool:
    function = load_entry_point("environment.tools", entry)
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise ConfigError(f"environment.tools = {entry!r}: its name {name!r} makes no tag")
    if not (description := inspect.getdoc(function)):
        raise ConfigError(
            f"environment.tools = {entry!r}: it has no docstring, which is what the policy is told"
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
        inspect.signature(function).bind("")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"environment.tools = {entry!r}: it must take one text ({error})"
        ) from error
    return Tool(name, " ".join(description.split()), parameters[0].name, function)
