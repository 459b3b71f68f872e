"""MCP servers as tools, by the official SDK: a command that speaks on its standard streams, or a
URL. A server is asked for its tools before a start. All rollouts of a process share one connection,
opened at the first use; state that the server keeps is theirs together.

A server that dies or cannot be reached fails the use that meets it, and is counted; the next use
starts or connects to it anew.
"""

import asyncio
import shlex
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from configs.load import ConfigError

if TYPE_CHECKING:
    from mcp import Client

_CONNECTED_WITHIN_S = 20.0
_CLOSED_WITHIN_S = 10.0  # the SDK's own patience with a server's end is 6 s
_CONNECTION_CLOSED = -32000  # of JSON-RPC's errors, as the SDK tells it
_servers: "dict[str, McpServer]" = {}


class ServerLost(Exception):
    """An MCP server died, or did not answer."""


class Listed(msgspec.Struct, frozen=True):
    """A tool as its server describes it."""

    name: str
    description: str
    schema: dict[str, Any]


class McpServer:
    """One server, `spec`: a command line or a URL. `lost` counts its deaths."""

    def __init__(self, spec: str) -> None:
        self.spec, self.lost = spec, 0
        self._connection: _Connection | None = None

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its text. Raises ServerLost, or MCPError for a call refused."""
        from mcp import MCPError

        connection = self._connected()
        try:
            client = await connection.client()
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code != _CONNECTION_CLOSED:
                raise
            raise self._dropped(connection, error) from error
        except Exception as error:
            raise self._dropped(connection, error) from error
        return _text(result)

    def _connected(self) -> "_Connection":
        loop, known = asyncio.get_running_loop(), self._connection
        if known is None or known.loop is not loop or known.ended:
            self._connection = known = _Connection(self.spec, loop)
        return known

    def _dropped(self, connection: "_Connection", error: BaseException) -> ServerLost:
        """Let go of a connection, whose death is counted once whoever meets it."""
        if self._connection is connection:
            self._connection, self.lost = None, self.lost + 1
            connection.end()
        return ServerLost(f"the server {self.spec!r} is gone ({_told(error)})")


class _Connection:
    """A connection, held open by a task of its own, which alone may close it."""

    def __init__(self, spec: str, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self._spec = loop, spec
        self._opened: asyncio.Future[Client] = loop.create_future()
        self._closing = asyncio.Event()
        self._task = loop.create_task(self._hold())

    @property
    def ended(self) -> bool:
        """True once it is closed, by whichever side."""
        return self._task.done()

    async def client(self) -> "Client":
        """Wait until it is open. Raises what it met, or TimeoutError."""
        async with asyncio.timeout(_CONNECTED_WITHIN_S):
            return await asyncio.shield(self._opened)

    def end(self) -> None:
        """Close it; a server that was not yet open is given up."""
        self._closing.set()
        if not self._opened.done():
            self._task.cancel()

    async def _hold(self) -> None:
        try:
            async with _client(self._spec) as client:
                self._opened.set_result(client)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - told to who waits for it
            if not self._opened.done():
                self._opened.set_exception(error)
                self._opened.exception()  # perhaps nobody waits any more


def server_of(spec: str) -> McpServer:
    """Return the process's one McpServer of this name."""
    return _servers.setdefault(spec, McpServer(spec))


def lost() -> int:
    """Return how often a server of this process was lost."""
    return sum(server.lost for server in _servers.values())


@lru_cache
def listed(spec: str) -> tuple[Listed, ...]:
    """Ask a server for its tools, in an event loop of its own. Raises ConfigError."""
    found: list[Listed] = []
    faults: list[BaseException] = []

    def ask() -> None:
        try:
            found.extend(asyncio.run(_listed(spec)))
        except BaseException as error:  # noqa: BLE001 - named below
            faults.append(error)

    thread = threading.Thread(target=ask, name="mcp", daemon=True)
    thread.start()
    thread.join(_CONNECTED_WITHIN_S + _CLOSED_WITHIN_S)
    if thread.is_alive() or faults:
        why = _told(faults[0]) if faults else f"no answer within {_CONNECTED_WITHIN_S:g} s"
        raise ConfigError(
            f"environment.mcp = {spec!r}: it does not answer as an MCP server: {why}: correct the "
            "command or URL, or see that the server runs"
        )
    if not found:
        raise ConfigError(f"environment.mcp = {spec!r}: the server has no tools: leave it out")
    return tuple(found)


async def _listed(spec: str) -> list[Listed]:
    found, cursor = list[Listed](), None
    async with asyncio.timeout(_CONNECTED_WITHIN_S), _client(spec) as client:
        while True:
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                found.append(Listed(tool.name, tool.description or "", tool.input_schema))
            if not (cursor := page.next_cursor):
                return found


def _client(spec: str) -> "Client":
    from mcp import Client, StdioServerParameters

    if spec.startswith(("http://", "https://")):
        return Client(spec)
    command, *arguments = shlex.split(spec)
    return Client(StdioServerParameters(command=command, args=arguments))


def _text(result: Any) -> str:
    """The text of a result; of what is no text, its kind."""
    pieces = [getattr(each, "text", None) or f"({each.type})" for each in result.content]
    if not pieces and result.structured_content is not None:
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(pieces)


def _told(error: BaseException) -> str:
    """The first cause in a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
