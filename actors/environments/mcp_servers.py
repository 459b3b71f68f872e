"""MCP servers as tools, by the official SDK: a command that speaks on its standard streams, or a
URL. A server is asked for its tools before a start. All rollouts of a process share one connection,
opened at the first use; state that the server keeps is theirs together.

A server that dies, cannot be reached or answers no use any more fails the uses that meet it, and is
counted; the next use starts or connects to it anew. A tool's own fault leaves the connection as is.
"""

import asyncio
import logging
import shlex
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from actors.environments import mcp_keys
from actors.environments.mcp_keys import Keys
from actors.environments.mcp_launch import Launch
from configs.load import ConfigError

if TYPE_CHECKING:
    from mcp import Client

_CONNECTED_WITHIN_S = 20.0
_READ_WITHIN_S = 300.0  # of a stream that a server holds open
_CLOSED_WITHIN_S = 10.0  # the SDK's own patience with a server's end is 6 s
_LATE_IN_A_ROW = 3  # uses given up, with no answer to any other, until a server counts as stuck
# Of JSON-RPC's errors: as the SDK tells a closed connection; as servers and it tell a lost session.
_CONNECTION_CLOSED = -32000
_SESSION_LOST = (-32600, -32001)
logger = logging.getLogger(__name__)
_servers: "dict[tuple[str, Keys], McpServer]" = {}


class ServerLost(Exception):
    """An MCP server died, or did not answer."""


class ToolRefused(Exception):
    """A tool's fault whose text held a key, without it."""


class Listed(msgspec.Struct, frozen=True):
    """A tool as its server describes it."""

    name: str
    description: str
    schema: dict[str, Any]


class McpServer:
    """One server, `spec`: a command line or a URL, and its keys, which are read anew for each
    connection. `lost` counts its deaths.
    """

    def __init__(self, spec: str, keys: Keys = ()) -> None:
        self.spec, self.lost, self._keys = spec, 0, keys
        self._connection: _Connection | None = None

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its text. Raises ServerLost, MCPError for a call refused, or what
        else is the tool's own fault.
        """
        connection = self._connected()
        client = await self._client(connection)
        began = connection.loop.time()
        try:
            result = await client.call_tool(name, arguments)
        except asyncio.CancelledError as error:
            if connection.stuck(began):
                self._dropped(connection, error)
            raise
        except Exception as error:
            if connection.ended or _ends_connection(error):
                raise self._dropped(connection, error) from error
            connection.answered()
            if (told := connection.without_keys(str(error))) != str(error):
                raise ToolRefused(told) from None
            raise
        connection.answered()
        return connection.without_keys(_text(result))

    def _connected(self) -> "_Connection":
        loop, known = asyncio.get_running_loop(), self._connection
        if known is None or known.loop is not loop or known.ended:
            self._connection = known = _Connection(self.spec, self._keys, loop)
        return known

    async def _client(self, connection: "_Connection") -> "Client":
        try:
            return await connection.client()
        except asyncio.CancelledError as error:
            if not connection.awaited:  # whoever else waits for it may yet see it open
                self._dropped(connection, error)
            raise
        except Exception as error:
            raise self._dropped(connection, error) from error

    def _dropped(self, connection: "_Connection", error: BaseException) -> ServerLost:
        """Let go of a connection, whose death is counted once whoever meets it."""
        if self._connection is connection:
            self._connection, self.lost = None, self.lost + 1
            connection.end()
            told = connection.without_keys(_told(error))
            logger.warning("the MCP server %r is lost: %s", short(self.spec), told)
        return ServerLost(
            f"the server {short(self.spec)!r} is gone ({type(_cause(error)).__name__})"
        )


class _Connection:
    """A connection, held open by a task of its own, which alone may close it."""

    def __init__(self, spec: str, keys: Keys, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self._spec, self._keys = loop, spec, keys
        self._given: dict[str, str] = {}
        self._launch = Launch(spec)
        self._opened: asyncio.Future[Client] = loop.create_future()
        self._closing = asyncio.Event()
        self._open_by = loop.time() + _CONNECTED_WITHIN_S
        self._waiting = self._late = 0
        self._answered_at = loop.time()
        self._task = loop.create_task(self._hold())

    @property
    def ended(self) -> bool:
        """True once it is closed or closing, by whichever side."""
        return self._task.done() or self._closing.is_set()

    @property
    def awaited(self) -> bool:
        """True while somebody waits until it is open."""
        return self._waiting > 0

    async def client(self) -> "Client":
        """Wait until it is open. Raises what it met, or TimeoutError."""
        self._waiting += 1
        try:
            async with asyncio.timeout_at(self._open_by):
                return await asyncio.shield(self._opened)
        finally:
            self._waiting -= 1

    def answered(self) -> None:
        """Note that the server has answered a use, well or badly."""
        self._late, self._answered_at = 0, self.loop.time()

    def without_keys(self, text: str) -> str:
        """Return a text of the server's without the keys that it was given."""
        return mcp_keys.without(text, self._given.values())

    def stuck(self, began: float) -> bool:
        """Note that a use was given up; True where the last ones all were, and none answered."""
        self._late += self._answered_at <= began
        return self._late >= _LATE_IN_A_ROW

    def end(self) -> None:
        """Close it; a server that was not yet open is given up, and one of ours killed at once: the
        SDK would read on from one that hangs, for ever where its own patience is cut short.
        """
        self._closing.set()
        self._launch.kill()
        if not self._opened.done():
            self._task.cancel()

    async def _hold(self) -> None:
        try:
            self._given = mcp_keys.read(self._keys, self._spec)
            async with _client(self._spec, self._launch, self._given) as client:
                self._launch.settle()
                self._opened.set_result(client)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - told to who waits for it
            if not self._opened.done():
                self._opened.set_exception(error)
                self._opened.exception()  # perhaps nobody waits any more
        finally:
            self._launch.close()


def server_of(spec: str, keys: Keys = ()) -> McpServer:
    """Return the process's one McpServer of this name and these keys."""
    return _servers.setdefault((spec, keys), McpServer(spec, keys))


def lost() -> int:
    """Return how often a server of this process was lost."""
    return sum(server.lost for server in _servers.values())


@lru_cache
def listed(spec: str, keys: Keys = ()) -> tuple[Listed, ...]:
    """Ask a server for its tools, in an event loop of its own. Raises ConfigError."""
    given = mcp_keys.read(keys, spec)
    found: list[Listed] = []
    faults: list[BaseException] = []

    def ask() -> None:
        try:
            found.extend(asyncio.run(_listed(spec, given)))
        except BaseException as error:  # noqa: BLE001 - named below
            faults.append(error)

    thread = threading.Thread(target=ask, name="mcp", daemon=True)
    thread.start()
    thread.join(_CONNECTED_WITHIN_S + _CLOSED_WITHIN_S)
    if thread.is_alive() or faults:
        why = _told(faults[0]) if faults else f"no answer within {_CONNECTED_WITHIN_S:g} s"
        raise ConfigError(
            f"environment.mcp = {short(spec)!r}: it does not answer as an MCP server: "
            f"{mcp_keys.without(why, given.values())}: correct the command or URL, see that the "
            "server runs, or give it its keys, environment.mcp_keys"
        )
    if not found:
        raise ConfigError(
            f"environment.mcp = {short(spec)!r}: the server has no tools: leave it out"
        )
    return tuple(found)


async def _listed(spec: str, given: Mapping[str, str]) -> list[Listed]:
    found, cursor, launch = list[Listed](), None, Launch(spec)
    try:
        async with asyncio.timeout(_CONNECTED_WITHIN_S), _client(spec, launch, given) as client:
            while True:
                page = await client.list_tools(cursor=cursor)
                for tool in page.tools:
                    found.append(Listed(tool.name, tool.description or "", tool.input_schema))
                if not (cursor := page.next_cursor):
                    return found
    finally:
        launch.close()


def _client(spec: str, launch: Launch, given: Mapping[str, str]) -> "Client":
    from mcp import Client, StdioServerParameters

    if spec.startswith(("http://", "https://")):
        return Client(_requests(spec, given))
    command, *arguments = launch.command()
    return Client(StdioServerParameters(command=command, args=arguments, env=dict(given)))


@asynccontextmanager
async def _requests(url: str, headers: Mapping[str, str]) -> AsyncIterator[tuple[Any, Any]]:
    """The streams to a URL, each of whose requests has these headers. The SDK follows redirections
    within its origin alone.
    """
    from httpx2 import AsyncClient, Timeout
    from mcp.client.streamable_http import streamable_http_client

    timeout = Timeout(_CONNECTED_WITHIN_S, read=_READ_WITHIN_S)
    async with (
        AsyncClient(headers=headers, timeout=timeout) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


def short(spec: str) -> str:
    """Return the name of a server's program, or of its host: the rest may hold keys."""
    if spec.startswith(("http://", "https://")):
        return urlsplit(spec).hostname or ""
    try:
        return PurePath(shlex.split(spec)[0]).name
    except ValueError:  # a quotation that never ends
        return PurePath(spec.split()[0]).name


def _ends_connection(error: Exception) -> bool:
    """True for an error of the connection, False for one of the tool."""
    from anyio import BrokenResourceError, ClosedResourceError, EndOfStream
    from mcp import MCPError

    if isinstance(error, MCPError):
        session_lost = error.code in _SESSION_LOST and "session" in error.message.lower()
        return error.code == _CONNECTION_CLOSED or session_lost
    return isinstance(error, (OSError, BrokenResourceError, ClosedResourceError, EndOfStream))


def _text(result: Any) -> str:
    """The text of a result; of what is no text, its kind."""
    pieces = [getattr(each, "text", None) or f"({each.type})" for each in result.content]
    if not pieces and result.structured_content is not None:
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(pieces)


def _cause(error: BaseException) -> BaseException:
    """The first cause in a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _told(error: BaseException) -> str:
    return f"{type(_cause(error)).__name__}: {_cause(error)}"
