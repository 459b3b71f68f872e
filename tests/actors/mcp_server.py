"""An MCP server: `python mcp_server.py stdio`, or `http PORT`, or `sessions PORT`: of the time when
a server kept sessions.
"""

import os
import signal
import sys
import time
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer

server = MCPServer("arithmetic")


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
    elif sys.argv[1] == "http":
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run(transport="stdio")
