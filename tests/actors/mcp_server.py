"""An MCP server: `python mcp_server.py stdio`, or `http PORT`."""

import os
import sys
import time

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


if __name__ == "__main__":
    if sys.argv[1] == "http":
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run(transport="stdio")
