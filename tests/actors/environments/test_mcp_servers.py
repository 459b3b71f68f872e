"""Real MCP servers as tools, over standard streams and HTTP: uses, faults, deaths."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from actors.environments import mcp_servers, toolbox
from actors.environments.toolbox import Toolbox
from actors.environments.tools import Tool, load_tools
from configs.environment import EnvironmentConfig
from configs.load import ConfigError
from configs.runtime.process import REPOSITORY
from tests.actors.conftest import make_lease

SERVER = REPOSITORY / "tests" / "actors" / "mcp_server.py"
pytest.importorskip("mcp")


class Served:
    """The tools of a server, as one rollout uses them."""

    def __init__(self, spec: str, **settings: Any) -> None:
        self.settings = EnvironmentConfig(mcp=(spec,), **settings)
        self.tools = {tool.name: tool for tool in load_tools(self.settings)}
        self.box = Toolbox(make_lease(), self.tools.values(), self.settings)

    async def use(self, name: str, **arguments: Any) -> str:
        async with asyncio.timeout(60):
            return await self.box.use(self.tools[name], arguments)


@pytest.fixture
async def spec() -> AsyncIterator[str]:
    """The command line of a server, whose process is gone at the end."""
    command = f"{sys.executable} {SERVER} stdio"
    yield command
    connection = mcp_servers.server_of(command)._connection
    if connection is not None and connection.loop is asyncio.get_running_loop():
        connection.end()
        async with asyncio.timeout(30):
            await asyncio.wait({connection._task})


@pytest.fixture
def port(unused_tcp_port_factory: Any) -> Any:
    started = list[subprocess.Popen[bytes]]()

    def start(port: int) -> int:
        command = [sys.executable, str(SERVER), "http", str(port)]
        started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        return port

    yield start
    for process in started:
        process.kill()
        process.wait()


async def listening(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                return writer.close()
            except OSError:
                await asyncio.sleep(0.05)


async def test_a_servers_tools_are_used_and_its_refusals_are_text(spec: str) -> None:
    served = Served(spec, tool_limits={"pid": 1})
    add: Tool = served.tools["add"]
    assert add.description == "It adds two numbers." and served.tools["pid"].limit == 1
    assert add.schema["function"]["parameters"]["required"] == ["a"]
    assert await served.use("add", a=2, b=3) == "5" and await served.use("add", a=2) == "3"
    assert "valid integer" in await served.use("add", a="x")
    assert await served.use("fail") == "Error executing tool fail"
    many = await asyncio.gather(*(served.use("add", a=number) for number in range(9)))
    assert many == [str(number + 1) for number in range(9)]


async def test_a_server_that_dies_is_told_counted_and_started_again(spec: str) -> None:
    served, before = Served(spec), toolbox.gauges()["actor/tool_servers_lost"]
    pid = await served.use("pid")
    said = await asyncio.gather(served.use("hang"), served.use("die"))
    assert all("failed: ServerLost: the server" in each for each in said), said
    assert toolbox.gauges()["actor/tool_servers_lost"] == before + 1
    assert (await served.use("pid")).isdigit() and await served.use("pid") != pid


async def test_a_use_that_hangs_ends_no_other(spec: str) -> None:
    served = Served(spec, tool_deadline_s=5.0)
    assert await served.use("add", a=1) == "2"
    assert await served.use("hang") == "hang gave nothing within 5 s and was given up."
    assert await served.use("add", a=1) == "2"


async def test_a_server_behind_a_url_is_used_lost_and_found_again(
    port: Any, unused_tcp_port: int
) -> None:
    await listening(port(unused_tcp_port))
    served = Served(f"http://127.0.0.1:{unused_tcp_port}/mcp")
    assert await served.use("add", a=2, b=3) == "5"
    assert "failed: ServerLost" in await served.use("die")
    assert "failed: ServerLost" in await served.use("add", a=2)
    await listening(port(unused_tcp_port))
    assert await served.use("add", a=2, b=3) == "5"


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("/nowhere/kelu", "does not answer as an MCP server: FileNotFoundError"),
        (f"{sys.executable} -c pass", "does not answer as an MCP server"),
        ("http://127.0.0.1:9/mcp", "does not answer as an MCP server"),
    ],
)
def test_a_server_that_does_not_answer_is_refused_by_name(spec: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"environment.mcp = .*{complaint}"):
        load_tools(EnvironmentConfig(mcp=(spec,)))
