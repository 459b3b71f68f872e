"""The environment's section refuses what could not be meant."""

import json

import pytest

from configs.load import ConfigError, dump, parse


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("environment.name=rga", ["'rga'", "search_r1, tool_call, no_search, rag", "package.mod"]),
        (
            "environment.tools=[calculator]",
            ["environment.tools", "'calculator'", "package.module:"],
        ),
        ("environment.budget_template=left", ["environment.budget_template", "{searches}"]),
        ("environment.force_template=now", ["environment.force_template", "end with <answer>"]),
        ("environment.queries_per_turn=0", ["environment.queries_per_turn", "0"]),
        ("environment.queries_per_turn=65", ["environment.queries_per_turn", "65", "64"]),
        ("environment.tell_budgets=true", ["did you mean 'environment.tell_budget'"]),
    ],
)
def test_each_fault_is_named(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        parse("", [override], "here")
    assert all(word in str(raised.value) for word in words)


def test_a_programs_time_is_not_above_its_uses() -> None:
    short = "environment.tool_deadline_s=10"
    with pytest.raises(
        ConfigError, match=r"python\.wall_s = 20 .*environment\.tool_deadline_s = 10"
    ):
        parse("", ["environment.tools=[python]", short], "here")
    assert parse("", [short], "here").environment.python.wall_s == 20.0


def test_ones_own_are_named_as_entry_points() -> None:
    overrides = ["environment.name=my.games:Guess.easy", "environment.tools=[my_tools:calc]"]
    settings = parse("", overrides, "here").environment
    assert (settings.name, settings.tools) == ("my.games:Guess.easy", ("my_tools:calc",))


URL, COMMAND = "https://192.0.2.7/mcp", "python server.py"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ({"server": "other", "variable": "KEY"}, ["'other'", "names no such server"]),
        ({"server": COMMAND}, [COMMAND, "name one, variable: NAME"]),
        ({"server": COMMAND, "variable": "KEY", "file": "/key"}, ["and nothing else"]),
        ({"server": COMMAND, "variable": "se-cret"}, ["never the key itself"]),
        ({"server": URL, "variable": "KEY"}, ["header: Authorization"]),
        ({"server": URL, "header": "X: se-cret", "variable": "KEY"}, ["header: Authorization"]),
        ({"server": URL, "header": "Mcp-Session-Id", "variable": "KEY"}, ["the protocol's own"]),
        ({"server": URL, "header": "X-Key"}, ["'X-Key'", "file: FILE or variable: NAME"]),
        ({"server": URL, "header": "X", "variable": "K", "file": "/k"}, ["name one"]),
        ({"server": URL, "header": "X-Key", "file": "se-cret"}, ["absolute", "never the key"]),
        ({"server": URL, "key": "se-cret"}, ["mcp_keys[0]: object contains unknown field `key`"]),
        ({"server": "http://192.0.2.7/mcp", "header": "X", "variable": "K"}, ["https:// address"]),
    ],
)
def test_each_fault_of_a_servers_key_is_named(key: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(written(key), [], "here")
    said = str(raised.value)
    assert all(word in said for word in [*words, "environment.mcp_keys"]), said
    assert "se-cret" not in said


def test_a_servers_keys_are_kept_by_name_alone() -> None:
    local = {"server": "http://127.0.0.1:8000/mcp", "header": "X-Key", "file": "/home/me/key"}
    of_command = {"server": COMMAND, "variable": "KEY"}
    config = parse(written(local, of_command), [], "here")
    assert parse(dump(config), [], "here") == config
    with pytest.raises(ConfigError, match="'KEY' is given twice: keep one"):
        parse(written(of_command, of_command), [], "here")


def written(*keys: dict[str, str]) -> str:
    servers = [URL, COMMAND, "http://127.0.0.1:8000/mcp", "http://192.0.2.7/mcp"]
    return json.dumps({"environment": {"mcp": servers, "mcp_keys": keys}})
