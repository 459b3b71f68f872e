"""The environment's section refuses what could not be meant."""

import json

import pytest

from configs.load import ConfigError, dump, parse


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "environment.name=rga",
            ["'rga'", "search_r1, tool_call, no_search, rag, pro", "package.mod"],
        ),
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


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            [],
            ["environment.name = 'program'", "no program is named", "environment.program.command"],
        ),
        (["command=[a]", "entry_point=b:c"], ["program.entry_point = 'b:c'", "leave one of them"]),
        (["entry_point=agent.py"], ["program.entry_point = 'agent.py'", "FILE.py:function"]),
        (["entry_point=a b:c"], ["program.entry_point = 'a b:c'", "package.module:function"]),
        (["command=['']"], ["environment.program.command = ''", "name a program"]),
        (
            ["command=[a]", "variables=[OPENAI_API_KEY]"],
            ["variables = 'OPENAI_API_KEY'", "none of"],
        ),
        (["command=[a]", "variables=['A=b']"], ["variables = 'A=b'", "name a variable"]),
        (["command=[a]", "deadline_s=0"], ["environment.program.deadline_s", "0"]),
        (["command=[a]", "failures=drop"], ["environment.program.failures", "'fail', 'score'"]),
    ],
)
def test_each_fault_of_a_program_is_named(overrides: list[str], words: list[str]) -> None:
    given = [f"environment.program.{each}" for each in overrides]
    with pytest.raises(ConfigError) as raised:
        parse("", ["environment.name=program", *given], "here")
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("point", ["my_agent:answer", "my.agents:Search.run", "/a b/agent.py:run"])
def test_a_program_may_be_a_function_of_a_module_or_a_file(point: str) -> None:
    given = ["environment.name=program", f"environment.program.entry_point={point}"]
    assert parse("", given, "here").environment.program.entry_point == point


def test_a_program_has_a_retrieval_server_where_there_is_something_to_search() -> None:
    given = ["environment.name=program", "environment.program.command=[agent]"]
    assert not parse("", given, "here").starts_retrieval_server
    assert parse("", [*given, "retrieval.corpus=c.jsonl"], "here").starts_retrieval_server


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


@pytest.mark.parametrize(
    "url",
    [
        "https://mcp.example/mcp/?apiKey=se-cret",
        "https://mcp.example/mcp#se-cret",
        "https://user:se-cret@mcp.example/mcp",
        "http://se-cret@127.0.0.1:8000/mcp",
    ],
)
def test_a_url_that_may_hold_a_key_is_refused_unseen(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(json.dumps({"environment": {"mcp": [url]}}), [], "here")
    said = str(raised.value)
    assert "would be recorded" in said and "the key by environment.mcp_keys" in said
    assert "se-cret" not in said


@pytest.mark.parametrize("url", ["HTTPS://h/?k=se-cret", " https://h/?k=se-cret"])
def test_a_url_that_is_spelt_otherwise_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigError, match="in small letters") as refused:
        parse(json.dumps({"environment": {"mcp": [url]}}), [], "here")
    assert "se-cret" not in str(refused.value)


@pytest.mark.parametrize("url", ["https://", "https://h:99999/se-cret", "http://[se-cret/mcp"])
def test_a_url_that_is_no_address_is_refused_unseen(url: str) -> None:
    with pytest.raises(ConfigError, match="a URL is no address") as raised:
        parse(json.dumps({"environment": {"mcp": [url]}}), [], "here")
    assert "se-cret" not in str(raised.value)


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
