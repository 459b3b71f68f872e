"""Keys of MCP servers: where they are read, what is refused, what is taken out of texts."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from actors.environments import mcp_keys
from configs.environment import EnvironmentConfig, McpKey
from configs.fleet import ClusterConfig
from configs.load import ConfigError
from configs.schema import Config

URL, KEY = "https://192.0.2.7/mcp", "0123456789-a-key"


def header(name: str = "X-Key", **fields: str) -> McpKey:
    return McpKey(server=URL, header=name, **fields)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    return path


def test_each_server_is_given_its_own(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", f" {KEY}2\n")
    keys = (
        header(file=str(file)),
        header("Authorization", variable="A_KEY", scheme="Bearer"),
        McpKey(server="python server.py", variable="A_KEY"),
    )
    assert mcp_keys.read(keys, URL) == {"X-Key": KEY, "Authorization": f"Bearer {KEY}2"}
    assert mcp_keys.read(keys, "python server.py") == {"A_KEY": f"{KEY}2"}
    assert mcp_keys.read(keys, "another") == {}


def test_keys_that_cannot_be_read_are_named_and_not_shown(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", f"{KEY}\nInjected: header")
    file.chmod(0o640)
    for key, complaint in (
        (header(file=str(file)), f"mode 0640 lets others read it: chmod 600 {file}"),
        (header(file="/nowhere/key"), "No such file or directory: write the server's key into it"),
        (header(variable="A_KEY"), "variable = 'A_KEY': what it holds makes no header"),
        (header(variable="NO_KEY"), "no such variable is set here: .* file: FILE"),
        (McpKey(server="python server.py", variable="NO_KEY"), "export it where .* is started$"),
    ):
        with pytest.raises(ConfigError, match=complaint) as raised:
            mcp_keys.read((key,), key.server)
        assert KEY not in str(raised.value)


def test_keys_are_taken_out_of_what_a_server_says() -> None:
    values = [f"Bearer {KEY}", "short"]
    assert mcp_keys.without(f"{KEY}, short: {KEY}2", values) == "(a key), short: (a key)2"


def test_a_clusters_keys_are_in_files(file: Path) -> None:
    there = ClusterConfig(address="auto")
    for key, refused in ((header(file=str(file)), False), (header(variable="A_KEY"), True)):
        settings = EnvironmentConfig(mcp=(URL,), mcp_keys=(key,))
        mcp_keys.require_found(Config(environment=settings))
        with pytest.raises(ConfigError, match="Ray's: name") if refused else nullcontext():
            mcp_keys.require_found(Config(environment=settings, cluster=there))
