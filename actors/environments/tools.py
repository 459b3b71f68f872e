"""A user's own tools, which the policy may use beside search: typed functions, and classes whose
public methods are tools that share one rollout's state; and the tools of MCP servers.

All are loaded and checked before a start. Plain functions run in threads.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from actors.environments import python_process
from actors.environments.mcp_servers import listed, server_of, short
from actors.environments.python_process import runner
from actors.environments.schema import Arguments
from actors.environments.visit import visitor
from actors.user_code import Threads, load_entry_point
from configs.environment import EnvironmentConfig
from configs.load import ConfigError

RESERVED = ("search", "answer", "think", "information", "tool_call", "tool_response")
IN_THREADS = 16  # uses of one plain tool at once; and how many of them may hang
AT_ONCE = 64  # of one async tool
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}")


@dataclass(frozen=True, eq=False)
class Tool:
    """A function and its description for the policy; its tag, or its call's name, is `name`.

    `owner`: the class whose method the function is; each rollout makes its own instance, from its
    lease where `owner` takes one.
    """

    name: str
    description: str
    arguments: Arguments
    function: Callable[..., Any]
    limit: int
    owner: type | None = None
    threads: Threads = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "threads", Threads("tool", self.limit))

    @property
    def schema(self) -> dict[str, Any]:
        """The schema that a chat template is given."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.arguments.schema,
        }
        return {"type": "function", "function": function}


def load_tools(settings: EnvironmentConfig) -> tuple[Tool, ...]:
    """Load the tools of `environment.tools` and `environment.mcp`, once. Raises ConfigError, naming
    the entry.
    """
    return _loaded(msgspec.json.encode(settings))


@lru_cache
def _loaded(encoded: bytes) -> tuple[Tool, ...]:
    settings = msgspec.json.decode(encoded, type=EnvironmentConfig)
    tools: list[Tool] = []
    named = [("tools", entry, _load(entry, settings)) for entry in settings.tools]
    named += [("mcp", short(spec), _of_server(spec, settings)) for spec in settings.mcp]
    for key, told, found in named:
        for tool in found:
            if tool.name in RESERVED or any(tool.name == other.name for other in tools):
                theirs = " in the server, or put one before it that renames" if key == "mcp" else ""
                raise ConfigError(
                    f"environment.{key} = {told!r}: its name {tool.name!r} is taken (by "
                    f"{', '.join(RESERVED)} or another tool): rename it{theirs}"
                )
            tools.append(tool)
    names = [tool.name for tool in tools]
    for name, limit in settings.tool_limits.items():
        if name not in names:
            raise ConfigError(
                f"environment.tool_limits = {{{name!r}: {limit}}}: there is no such tool: name one "
                f"of {', '.join(names) or 'environment.tools'}"
            )
    return tuple(tools)


def _load(entry: str, settings: EnvironmentConfig) -> Iterator[Tool]:
    limits = settings.tool_limits
    if entry == "visit":
        yield _tool(entry, visitor(settings.visit), limits)
        return
    if entry == "python":
        yield _tool(entry, runner(settings.python), {entry: python_process.LIMIT, **limits})
        return
    found = load_entry_point("environment.tools", entry)
    if not inspect.isclass(found):
        yield _tool(entry, found, limits)
        return
    methods = _methods(found)
    if not methods:
        raise ConfigError(
            f"environment.tools = {entry!r}: the class has no public method, which a tool is"
        )
    try:
        takes_lease(found)
    except TypeError as error:
        raise ConfigError(
            f"environment.tools = {entry!r}: it must be made from a lease, or from nothing "
            f"({error})"
        ) from error
    for method in methods:
        yield _tool(entry, method, limits, found)


def _of_server(spec: str, settings: EnvironmentConfig) -> Iterator[Tool]:
    """The tools of an MCP server, which checks arguments itself."""
    limits, keys = settings.tool_limits, settings.mcp_keys
    server = server_of(spec, keys)
    for each in listed(spec, keys):
        if not _NAME.fullmatch(each.name):
            raise ConfigError(
                f"environment.mcp = {short(spec)!r}: its tool {each.name!r} makes no tag"
            )
        description = " ".join(each.description.split())

        async def call(_name: str = each.name, /, **arguments: Any) -> str:
            return await server.call(_name, arguments)

        arguments, limit = Arguments(each.schema), limits.get(each.name, AT_ONCE)
        yield Tool(each.name, description, arguments, call, limit)


def takes_lease(owner: type) -> bool:
    """True where a class is made from a lease, False where from nothing. Raises TypeError where
    from neither.
    """
    signature = inspect.signature(owner)
    try:
        signature.bind(None)
        return True
    except TypeError:
        signature.bind()
        return False


def _methods(owner: type) -> list[Callable[..., Any]]:
    """The public methods in their order in the text, those of a base class first; not `close`."""
    found: dict[str, Callable[..., Any]] = {}
    for kind in reversed(owner.__mro__):
        named = {name: each for name, each in vars(kind).items() if inspect.isfunction(each)}
        found |= {name: each for name, each in named.items() if not name.startswith("_")}
    return [each for name, each in found.items() if name != "close"]


def _tool(
    entry: str,
    function: Callable[..., Any],
    limits: Mapping[str, int],
    owner: type | None = None,
) -> Tool:
    name = getattr(function, "__name__", "")
    named = f"environment.tools = {entry!r}" + (f": its method {name!r}" if owner else "")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{named}: its name {name!r} makes no tag")
    if not (description := inspect.getdoc(function)):
        raise ConfigError(f"{named}: it has no docstring, which is what the policy is told")
    at_once = AT_ONCE if inspect.iscoroutinefunction(function) else IN_THREADS
    return Tool(
        name,
        " ".join(description.split()),
        Arguments.of(function, named, is_method=owner is not None),
        function,
        limits.get(name, at_once),
        owner,
    )
