"""What a record may not decide is refused field by field, until its user says so."""

from typing import Any

import pytest

from configs import trust
from configs.load import FIELDS, ConfigError, parse
from configs.retrieval import RetrievalConfig
from configs.schema import Config

HARMFUL = {
    "model.trust_remote_code": "true",
    "model.path": "some/model",
    "questions.train": "some/data:config@train",
    "environment.name": "mine:factory",
    "environment.tools": "[python]",
    "environment.visit.private": "true",
    "environment.mcp": "['python server.py']",
    "environment.program.command": "[python, agent.py]",
    "environment.program.variables": "[AWS_SECRET_ACCESS_KEY]",
    "retrieval.url": "http://127.0.0.1:8000",
    "retrieval.host": "192.0.2.7",
    "retrieval.token_file": "/home/me/token",
    "retrieval.live.url": "https://192.0.2.7/search",
    "retrieval.live.key_file": "/home/me/key",
    "retrieval.live.record": "/home/me/file",
    "retrieval.live.price_usd": "0.001",
    "retrieval.live.budget_usd": "1000",
    "actors.engine": "{compilation_config: {backend: mine.run}}",
    "rewards.custom": "mine:reward",
    "replay.endpoint": "ipc:///home/me/file",
    "weight_sync.endpoint": "tcp://192.0.2.7:5000",
    "weight_sync.snapshot_dir": "/home/me",
    "learner.rendezvous": "tcp://192.0.2.7:5000",
    "cluster.address": "auto",
    "keys": "/home/me/keys",
}
HARMLESS = {
    "environment.name": "tool_call",
    "retrieval.host": "::1",
    "actors.engine": "{block_size: 32, kv_cache_dtype: fp8, enable_chunked_prefill: false}",
    "model.path": "/home/me/some/model",
    "questions.train": "tests/conftest.py",
}


def config_of(**fields: str) -> Config:
    words = [f"{name}={value}" for name, value in fields.items()]
    own = ["rewards.weights.custom=1"] if "rewards.custom" in fields else []
    return parse("", [*words, *own], "a record")


def refused(config: Config, **asked: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        trust.require(config, source="RUN/config.yaml", trust=False, **asked)
    return str(raised.value).splitlines()


@pytest.mark.parametrize("field", HARMFUL)
def test_each_field_is_refused_by_name_value_and_remedy(field: str) -> None:
    config = config_of(**{field: HARMFUL[field]})
    (line,) = refused(config)
    assert line.startswith(f"{field} = ") and "RUN/config.yaml says so" in line
    assert f"add --trust to take all that it says, or give it yourself, {field}=VALUE" in line
    trust.require(config, source="", trust=True)
    trust.require(config, source="", trust=False, given=trust.given([f"{field}=x"]))


def test_keys_of_mcp_servers_are_refused_beside_the_servers() -> None:
    config = config_of(
        **{
            "environment.mcp": "['python server.py']",
            "environment.mcp_keys": "[{server: python server.py, variable: HOME}]",
        }
    )
    lines = refused(config, given=["environment.mcp"])
    assert len(lines) == 1 and lines[0].startswith("environment.mcp_keys = [{'server': 'python")


@pytest.mark.parametrize("field", HARMLESS)
def test_values_that_harm_nobody_need_no_word(field: str) -> None:
    trust.require(config_of(**{field: HARMLESS[field]}), source="", trust=False)


@pytest.mark.parametrize(
    ("urls", "shown"),
    [("http://a:1", "'http://a:1'"), ("[http://a:1,http://b:2]", "['http://a:1', 'http://b:2']")],
)
def test_a_list_of_servers_is_shown_as_it_is_written(urls: str, shown: str) -> None:
    (line,) = refused(config_of(**{"retrieval.url": urls}))
    assert line.startswith(f"retrieval.url = {shown}: ")


def test_defaults_need_no_word() -> None:
    trust.require(Config(), source="", trust=False)


def test_all_fields_are_listed_in_one_message() -> None:
    lines = refused(config_of(**HARMFUL))
    assert {line.partition(" = ")[0] for line in lines} == {*HARMFUL} - {"retrieval.host"}


def test_a_command_is_refused_what_it_reads_alone() -> None:
    config = config_of(**HARMFUL)
    (line,) = refused(config, of=trust.LEARNING, settable=False)
    assert line.startswith("model.trust_remote_code = True") and "give it yourself" not in line
    asked = {line.split()[0].partition(".")[0] for line in refused(config, of=trust.ASKING)}
    assert asked == {"model", "environment", "retrieval"}


def test_one_argument_of_an_engine_says_nothing_of_the_others() -> None:
    config = config_of(**{"actors.engine": HARMFUL["actors.engine"]})
    assert refused(config, given=trust.given(["actors.engine.block_size=16"]))
    assert trust.given(["actors.engine={}", "retrieval={url: x, top_k: 2}"]) == {
        "actors.engine", "retrieval.url", "retrieval.top_k",
    }  # fmt: skip


def test_what_a_record_says_cannot_move_the_terminal() -> None:
    retrieval = RetrievalConfig(token_file="a\x1b[2J\u202e" + "b" * 999)
    (line,) = refused(Config(retrieval=retrieval))
    assert line.isprintable() and len(line) < 500


def test_every_field_of_the_kinds_that_do_harm_is_marked() -> None:
    """A new field whose name says what it is has a mark."""
    suspicious = ("_file", ".url", "endpoint", "trust", "address", "keys", "_dir", "custom", "host")
    ends = {"run_dir", "rewards.weights.custom"}  # decided by where it lies; a number
    named = {field for field in FIELDS if field.endswith(suspicious)} - ends
    assert named and named <= {*trust.FIELDS} | {"model.trust_remote_code"}


def test_the_variable_of_a_key_is_refused_from_a_record() -> None:
    """It cannot stand beside a file, so it is no row of the table above."""
    (line,) = refused(config_of(**{"retrieval.live.key_variable": "AWS_SECRET"}))
    assert line.startswith("retrieval.live.key_variable = 'AWS_SECRET': ")


@pytest.mark.parametrize("point", ["mine:answer", "/home/me/agent.py:answer"])
def test_a_program_s_entry_point_is_refused_from_a_record(point: str) -> None:
    """It cannot stand beside a command, so it is no row of the table above."""
    fields = {"environment.name": "program", "environment.program.entry_point": point}
    (line,) = refused(config_of(**fields), of=trust.ASKING)
    assert line.startswith(f"environment.program.entry_point = {point!r}: ")
    assert "it runs code" in line
