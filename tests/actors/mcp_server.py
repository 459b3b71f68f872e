"""An MCP server: `python mcp_server.py stdio`, or `http PORT`, or `sessions PORT`: of the time when
a server kept sessions, or `guarded PORT KEY`: it wants a key.
"""

import os
import signal
import sys
import time
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("arithmetic")
shown = dict[str, str](os.environ)  # to the server: by the environment, or in a request's headers


@server.tool()
def add(a: int, b: int = 1) -> str:
    """It adds two numbers."""
    return str(a + b)


@server.tool()
def pid() -> str:
    """It tells the server's process."""
    return str(os.getpid())


@server.tool()
def die() -> str:
    """It ends the server."""
    os._exit(1)


@server.tool()
def fail() -> str:
    """It fails."""
    raise ValueError("no such number")


@server.tool()
def hang() -> str:
    """It hangs."""
    time.sleep(3600)
    return ""


@server.tool()
def freeze() -> str:
    """It stops the server, which reads no more and heeds no SIGTERM."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return ""


@server.tool()
def told(of: str) -> str:
    """It says again what it was told."""
    return f"{of}: {shown.get(of, 'nothing')}"


@server.tool()
def blab(of: str) -> str:
    """It fails, and says what it was told."""
    raise ToolError(f"{of}: {shown.get(of, 'nothing')}")


def guarded(key: str) -> Any:
    """Make the server's application, which wants a key."""
    app = server.streamable_http_app(host="127.0.0.1")

    async def served(scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope.get("headers", ())}
        shown.update(headers)
        if scope["type"] == "http" and headers.get("authorization") != f"Bearer {key}":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await app(scope, receive, send)

    return served


def with_sessions() -> Any:
    """Make the server's application, which refuses the newer protocol's first request."""
    app = server.streamable_http_app(host="127.0.0.1")

    async def served(scope: Any, receive: Any, send: Any) -> None:
        if (b"mcp-method", b"server/discover") in scope.get("headers", ()):
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await app(scope, receive, send)

    return served


if __name__ == "__main__":
    if sys.argv[1] == "sessions":
        uvicorn.run(with_sessions(), host="127.0.0.1", port=int(sys.argv[2]))
    elif sys.argv[1] == "guarded":
        uvicorn.run(guarded(sys.argv[3]), host="127.0.0.1", port=int(sys.argv[2]))
    elif sys.argv[1] == "http":
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run(transport="stdio")
