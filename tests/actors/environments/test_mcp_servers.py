"""Real MCP servers as tools, over standard streams and HTTP: uses, faults, deaths."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.environments import mcp_servers, toolbox
from actors.environments.mcp_servers import McpServer, ServerLost
from actors.environments.toolbox import Toolbox
from actors.environments.tools import Tool, load_tools
from configs.environment import EnvironmentConfig, McpKey
from configs.load import ConfigError
from configs.runtime.process import REPOSITORY
from tests.actors.conftest import make_lease

KEY = "0123456789-a-key-abcdef"
SERVER = REPOSITORY / "tests" / "actors" / "mcp_server.py"
mcp = pytest.importorskip("mcp")


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
        await ended(connection)


@pytest.fixture
def port(unused_tcp_port_factory: Any) -> Any:
    started = list[subprocess.Popen[bytes]]()

    def start(port: int, kind: str = "http", *more: str) -> int:
        while started:  # one at a time holds the port
            end(started.pop())
        command = [sys.executable, str(SERVER), kind, str(port), *more]
        started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        return port

    def end(process: "subprocess.Popen[bytes]") -> None:
        process.kill()
        process.wait()

    yield start
    for process in started:
        end(process)


@pytest.fixture
async def inside(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[McpServer]:
    """A server in this process, by the SDK's own transport for one."""
    served = mcp.server.mcpserver.MCPServer("inside")
    wrong = served.tool()(wrong_result)
    served._tool_manager.get_tool(wrong.__name__).fn_metadata.output_schema["required"] = ["other"]
    served.tool()(echo)
    served.tool()(hang)
    monkeypatch.setattr(mcp_servers, "_client", lambda *given: mcp.Client(served))
    server = McpServer("/opt/bin/inside --key=secret")
    yield server
    if server._connection is not None:
        await ended(server._connection)


def wrong_result() -> str:
    """It breaks its own output schema."""
    return "anything"


def echo(text: str) -> str:
    """It repeats."""
    return text


async def hang() -> str:
    """It hangs."""
    await asyncio.sleep(3600)
    return ""


async def ended(connection: Any) -> None:
    connection.end()
    async with asyncio.timeout(30):
        await asyncio.wait({connection._task})


async def late(server: McpServer, tool: str = "hang") -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await server.call(tool, {})


async def listening(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                return writer.close()
            except OSError:
                await asyncio.sleep(0.05)


@pytest.mark.slow
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


@pytest.mark.slow
async def test_a_server_that_dies_is_told_counted_and_started_again(spec: str) -> None:
    served, before = Served(spec), toolbox.gauges()["actor/tool_servers_lost"]
    pid = await served.use("pid")
    said = await asyncio.gather(served.use("hang"), served.use("die"))
    name = Path(sys.executable).name
    told = f"failed: ServerLost: the server '{name}' is gone (MCPError)"
    assert all(told in each for each in said), said
    assert toolbox.gauges()["actor/tool_servers_lost"] == before + 1
    assert (await served.use("pid")).isdigit() and await served.use("pid") != pid


async def test_three_late_uses_in_a_row_end_the_connection(inside: McpServer) -> None:
    assert await inside.call("echo", {"text": "a"}) == "a"
    first = inside._connection
    await asyncio.gather(late(inside), late(inside))
    assert await inside.call("echo", {"text": "b"}) == "b"
    await asyncio.gather(late(inside), late(inside))
    assert inside._connection is first and inside.lost == 0
    await late(inside)
    assert inside._connection is None and inside.lost == 1
    assert await inside.call("echo", {"text": "c"}) == "c"


async def test_a_tools_own_fault_keeps_the_connection(inside: McpServer) -> None:
    other = asyncio.create_task(inside.call("hang", {}))
    with pytest.raises(RuntimeError, match="Invalid structured content returned by tool wrong"):
        await inside.call("wrong_result", {})
    assert await inside.call("echo", {"text": "a"}) == "a"
    assert inside.lost == 0 and not other.done()
    other.cancel()
    await asyncio.wait({other})


async def test_a_server_that_never_opens_is_dropped_by_the_last_who_waits() -> None:
    accepted = list[asyncio.StreamWriter]()
    silent = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    server = McpServer(f"http://user:secret@127.0.0.1:{port}/mcp?key=secret")
    patient = asyncio.create_task(late_to_open(server, 1.0))
    await late_to_open(server, 0.2)
    connection = server._connection
    assert connection is not None and server.lost == 0
    await patient
    assert server._connection is None and server.lost == 1 and connection.ended
    await ended(connection)
    silent.close()
    for writer in accepted:
        writer.close()


async def late_to_open(server: McpServer, seconds: float) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await server.call("hang", {})


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("http://user:secret@127.0.0.1:9/mcp?key=secret", "127.0.0.1"),
        ("/nowhere/kelu --key=secret", "kelu"),
        (f"{sys.executable} -c pass --key=secret", Path(sys.executable).name),
    ],
)
async def test_a_lost_server_is_told_by_its_program_or_host_alone(spec: str, name: str) -> None:
    server = McpServer(spec)
    with pytest.raises(ServerLost) as raised:
        await server.call("add", {})
    kind = type(mcp_servers._cause(raised.value.__cause__ or raised.value)).__name__
    assert str(raised.value) == f"the server {name!r} is gone ({kind})" and server.lost == 1


@pytest.mark.parametrize(
    ("code", "message", "ends"),
    [
        (-32000, "Connection closed", True),
        (-32600, "Session terminated", True),
        (-32001, "Session not found", True),
        (-32001, "Request 'tools/call' timed out", False),
        (-32602, "Unknown tool: session", False),
    ],
)
def test_errors_of_the_connection_are_told_from_a_tools(
    code: int, message: str, ends: bool
) -> None:
    assert mcp_servers._ends_connection(mcp.MCPError(code, message)) is ends


@pytest.mark.slow
async def test_a_use_that_hangs_ends_no_other_and_three_end_all(spec: str) -> None:
    patient, served = Served(spec), Served(spec, tool_deadline_s=5.0)
    pid = await patient.use("pid")
    first = mcp_servers.server_of(spec)._connection
    assert await served.use("hang") == "hang gave nothing within 5 s and was given up."
    assert await served.use("add", a=1) == "2"
    said = await asyncio.gather(patient.use("hang"), *(served.use("hang") for _ in range(3)))
    assert "failed: ServerLost" in said[0] and "given up" in said[3]
    assert await patient.use("pid") != pid
    await ended(first)


@pytest.mark.slow
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


@pytest.mark.slow
async def test_a_server_that_has_forgotten_the_session_is_connected_to_anew(
    port: Any, unused_tcp_port: int
) -> None:
    await listening(port(unused_tcp_port, "sessions"))
    served = Served(f"http://127.0.0.1:{unused_tcp_port}/mcp")
    assert await served.use("add", a=2, b=3) == "5"
    await listening(port(unused_tcp_port, "sessions"))
    assert "failed: ServerLost: the server '127.0.0.1' is gone" in await served.use("add", a=2)
    assert await served.use("add", a=2, b=3) == "5"


@pytest.mark.slow
async def test_a_command_gets_the_variables_that_are_named_and_no_other(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("A_KEY", "ANOTHER_KEY"):
        monkeypatch.setenv(name, KEY)
    key = McpKey(server=spec, variable="A_KEY")
    served = Served(spec, mcp_keys=(key,))
    assert await served.use("told", of="A_KEY") == "A_KEY: (a key)"
    assert await served.use("told", of="ANOTHER_KEY") == "ANOTHER_KEY: nothing"
    await ended(mcp_servers.server_of(spec, (key,))._connection)


@pytest.mark.slow
async def test_a_url_gets_its_headers_and_their_key_is_shown_nowhere(
    port: Any, unused_tcp_port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    spec, file = f"http://127.0.0.1:{unused_tcp_port}/mcp", tmp_path / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    await listening(port(unused_tcp_port, "guarded", KEY))
    with pytest.raises(ConfigError, match=r"or give it its keys, environment\.mcp_keys"):
        Served(spec)
    key = McpKey(server=spec, header="Authorization", scheme="Bearer", file=str(file))
    served = Served(spec, mcp_keys=(key,))
    said = [await served.use(tool, of="authorization") for tool in ("told", "blab")]
    assert said[0] == "authorization: Bearer (a key)" and "Bearer (a key)" in said[1]
    file.unlink()
    lost = [await served.use("die")]
    await listening(port(unused_tcp_port, "guarded", KEY))
    lost += [await served.use("told", of="authorization")]
    assert "failed: ServerLost" in lost[0] and "is gone (ConfigError)" in lost[1]
    assert "No such file or directory: write the server's key into it" in caplog.text
    assert KEY not in f"{said} {lost} {caplog.text} {served.box.noted()}"


USER = """
import asyncio, sys
from actors.environments.mcp_servers import McpServer
async def main():
    server = McpServer(sys.argv[1])
    print(await server.call("pid", {}), flush=True)
    await server.call("hang", {})
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
def test_a_stuck_server_ends_with_a_process_that_is_killed() -> None:
    command = [sys.executable, "-c", USER, f"{sys.executable} {SERVER} stdio"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        server = int(user.stdout.readline())
        time.sleep(0.5)  # it begins to hang
        user.send_signal(signal.SIGKILL)
    ends = time.monotonic() + 30
    while _runs(server):
        if time.monotonic() > ends:
            os.kill(server, signal.SIGKILL)
            pytest.fail("it has outlived its user")
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at as Linux shows them")
def test_a_stuck_server_that_was_just_dropped_holds_up_no_event_loop() -> None:
    server, pids = McpServer(f"{sys.executable} {SERVER} stdio"), list[int]()

    async def use() -> None:
        pids.append(int(await server.call("pid", {})))
        await asyncio.gather(*(late(server, "freeze") for _ in range(3)))
        await asyncio.sleep(0.3)

    thread = threading.Thread(target=lambda: asyncio.run(use()), daemon=True)
    thread.start()
    thread.join(30)
    held_up, outlived = thread.is_alive(), _runs(pids[0])
    if outlived:
        os.kill(pids[0], signal.SIGKILL)
    assert not held_up and not outlived and server.lost == 1


def _runs(pid: int) -> bool:
    """False also for a zombie that nobody has reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("/nowhere/kelu --key 'se-cret", "does not answer as an MCP server: ValueError"),
        ("/nowhere/kelu --key se-cret", "does not answer as an MCP server: FileNotFoundError"),
        (f"{sys.executable} -c pass", "does not answer as an MCP server"),
        ("http://127.0.0.1:9/mcp", "does not answer as an MCP server"),
    ],
)
def test_a_server_that_does_not_answer_is_refused_by_name(spec: str, complaint: str) -> None:
    name = mcp_servers.short(spec)
    with pytest.raises(ConfigError, match=f"environment.mcp = '{name}': .*{complaint}") as raised:
        load_tools(EnvironmentConfig(mcp=(spec,)))
    assert "se-cret" not in str(raised.value)
