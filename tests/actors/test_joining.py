"""Joining a run by hand: what the actor is told, and what it says before any engine starts."""

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import pytest

from actors import joining
from actors.worker import main
from configs.keys import Keys
from configs.load import ConfigError
from configs.schema import Config
from tests.children import ends_with_us
from tests.lived import lived
from tests.replay.conftest import served
from tests.retrieval_server.conftest import serving

Start = Callable[..., Config]
JUDGED = {"weights": {"judge": 1.0}}


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Start]:
    """run(**sections): the configuration of a served run, whose model folder is there."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    def start(tcp: bool = False, **sections: dict[str, Any]) -> Config:
        endpoint = f"tcp://127.0.0.1:{free_port()}" if tcp else f"ipc://{tmp_path}/replay"
        tree = {
            "run_dir": str(tmp_path / "run"),
            "model": {"path": str(model)},
            "replay": {"endpoint": endpoint},
            "weight_sync": {"endpoint": f"ipc://{tmp_path}/sync"},
            "retrieval": {"port": 1, "top_k": 0},
        }
        config = msgspec.convert(tree | sections, Config)
        runs.enter_context(served(config, tmp_path / "events.log"))
        return config

    with ExitStack() as runs:
        yield start


def test_the_run_s_configuration_with_this_host_s_overrides(run: Start, tmp_path: Path) -> None:
    served = run()
    joined = joining.configuration(served.replay.endpoint, "", ["actors.threads=3"])
    assert joined.actors.threads == 3
    assert msgspec.structs.replace(joined, actors=served.actors) == served


def test_over_tcp_with_a_copy_of_the_keys(run: Start, tmp_path: Path) -> None:
    served = run(tcp=True)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("server.key", "actor.key_secret"):  # all that an actor needs
        (tmp_path / "run" / "keys" / name).rename(copy / name)
    joined = joining.configuration(served.replay.endpoint, str(copy), [])
    assert (joined.keys, joined.replay) == (str(copy), served.replay)


@pytest.mark.parametrize(
    ("endpoint", "keys", "overrides", "said"),
    [
        ("somewhere", "", [], "--connect 'somewhere': give replay's endpoint"),
        ("tcp://host", "", [], "--connect 'tcp://host': give replay's endpoint"),
        ("tcp://*:5555", "", [], r"--connect 'tcp://\*:5555': give replay's endpoint"),
        ("ipc://" + "x" * 108, "", [], "give replay's endpoint"),
        ("tcp://127.0.0.1:1", "", [], "--keys is missing: tcp://127.0.0.1:1 lets in"),
        ("tcp://127.0.0.1:1", "/none", [], "--keys '/none': .* copy the keys folder"),
        ("ipc:///tmp/none", "", ["replay.endpoint=ipc://x"], "override of replay.endpoint"),
        ("ipc:///tmp/none", "", ["keys=x"], "override of keys: with --connect, --keys says that"),
    ],
)
def test_each_mistake_is_named(endpoint: str, keys: str, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        joining.configuration(endpoint, keys, overrides)


def test_where_nobody_listens_is_named_at_the_deadline(tmp_path: Path) -> None:
    said, begun_s = r"--connect .* waited ([\d.]+) s .* see that a run listens there", monotonic()
    with lived() as lived_s, pytest.raises(ConfigError, match=said) as raised:
        joining.configuration(f"ipc://{tmp_path}/none", "", [], deadline_s=0.3)
    waited = re.search(said, str(raised.value))
    assert waited and 0.3 <= float(waited[1]) <= monotonic() - begun_s + 0.05  # in tenths
    assert lived_s() < 1.0


def test_another_run_s_keys_are_named_at_the_deadline(run: Start, tmp_path: Path) -> None:
    served, others = run(tcp=True), Keys(tmp_path / "others").make()
    with pytest.raises(ConfigError, match=r"no answer: .* that --keys '.*others' is a copy"):
        joining.configuration(served.replay.endpoint, str(others.folder), [], deadline_s=0.5)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.path=/none"], "model.path = '/none': no model there on this machine: copy"),
        (["actors.thread=1"], "did you mean 'actors.threads'"),
        (["actors.engine.block_siz=16"], "did you mean actors.engine.block_size?"),
        (["weight_sync.endpoint=ipc:///none/sync"], "weight_sync.endpoint = 'ipc:///none/sync'"),
        (
            ["retrieval.top_k=1", "retrieval.recorded=/none"],
            "retrieval.recorded = '/none': .* name the directory of a recorded run",
        ),
        (["weight_sync.endpoint="], "start the run with weight_sync.endpoint=tcp://HOST:PORT"),
        (
            ["retrieval.top_k=1", "retrieval.timeout_s=0.2", "retrieval.url=http://127.0.0.1:1"],
            "retrieval.url = 'http://127.0.0.1:1': a search from this machine failed",
        ),
    ],
)
def test_what_this_host_lacks_is_named(run: Start, overrides: list[str], said: str) -> None:
    endpoint = run().replay.endpoint
    with pytest.raises(ConfigError, match=said):
        joining.configuration(endpoint, "", overrides)


@pytest.mark.parametrize("token", ["sesame-12", "other", ""])
def test_a_search_is_tried_with_the_run_s_token(run: Start, tmp_path: Path, token: str) -> None:
    (tmp_path / "token").write_text(token)
    (tmp_path / "token").chmod(0o600)
    named = [f"retrieval.token_file={tmp_path}/token"] if token else []
    with serving("sesame-12") as url:
        words = ["retrieval.top_k=1", f"retrieval.url={url}", *named]
        if token == "sesame-12":
            assert joining.configuration(run().replay.endpoint, "", words).retrieval.url == (url,)
            return
        with pytest.raises(ConfigError, match=r"refused: .* 401: retrieval\.token_file does not"):
            joining.configuration(run().replay.endpoint, "", words)


def test_a_server_of_another_index_is_not_the_run_s(run: Start) -> None:
    endpoint, words = run().replay.endpoint, ["retrieval.top_k=1", "retrieval.timeout_s=0.5"]
    words.append("retrieval.index_version=f00")
    with serving() as url:
        with pytest.raises(ConfigError, match=r"from 2 of 2 .* this run searches 'f00'"):
            urls = f"retrieval.url=[{url},http://127.0.0.1:1]"
            joining.configuration(endpoint, "", [*words, urls])
        with pytest.raises(ConfigError, match=r"serves index '\w+', the run searches 'f00': name"):
            joining.configuration(endpoint, "", [*words, f"retrieval.url={url}"])


TOLD = {
    "model.trust_remote_code": True,
    "environment.name": "tests.actors.conftest:factory",
    "environment.tools": ["tests.actors.calculator:calculator"],
    "retrieval.url": ["http://203.0.113.9:6"],
    "retrieval.token_file": "/home/me/secret",
    "rewards.judge.key_file": "/home/me/secret",
    "actors.engine": {"compilation_config": {"backend": "mine.run"}},
}


def test_what_replay_tells_decides_no_code_secret_or_address(run: Start, tmp_path: Path) -> None:
    tree: dict[str, Any] = {"retrieval": {"top_k": 0}, "model": {"path": str(tmp_path / "model")}}
    for field, value in TOLD.items():
        *sections, name = field.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    endpoint = run(**tree).replay.endpoint
    with pytest.raises(ConfigError) as raised:
        joining.configuration(endpoint, "", ["actors.engine={}", "retrieval.token_file=/mine"])
    lines = str(raised.value).splitlines()
    own = {"actors.engine", "retrieval.token_file"}
    assert {line.partition(" = ")[0] for line in lines} == TOLD.keys() - own
    assert all(f"the run at {endpoint} says so, not you" in line for line in lines)
    joined = joining.configuration(endpoint, "", ["actors.engine={}"], trusted=True)
    assert joined.model.trust_remote_code and joined.environment.name == TOLD["environment.name"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("endpoint", "tcp://192.0.2.7:5000"), ("snapshot_dir", "/home/me")],
)
def test_nor_where_weights_come_from_or_go(run: Start, field: str, value: str) -> None:
    sync = {"endpoint": "ipc:///tmp/sync"}
    endpoint = run(weight_sync=sync | {field: value}).replay.endpoint
    with pytest.raises(ConfigError, match=f"^weight_sync.{field} = '{value}': the run at ipc:"):
        joining.configuration(endpoint, "", [])
    own = [f"weight_sync.{field}={sync['endpoint'] if field == 'endpoint' else ''}"]
    assert joining.configuration(endpoint, "", own).weight_sync.endpoint == "ipc:///tmp/sync"


@pytest.mark.parametrize(
    ("told", "is_beside"),
    [
        ("tcp://203.0.113.9:5", True),
        ("tcp://203.0.113.8:5", False),
        ("tcp://127.0.0.1:5", False),
        ("ipc:///tmp/sync", False),
    ],
)
def test_the_learner_that_is_told_is_where_replay_is(told: str, is_beside: bool) -> None:
    config = msgspec.convert({"weight_sync": {"endpoint": told}}, Config)
    assert joining._is_beside("tcp://203.0.113.9:4", config) == is_beside


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"weight_sync": {"endpoint": "tcp://127.0.0.1:5"}}, "weight_sync.endpoint = 'tcp://127"),
        ({"weight_sync": {"endpoint": "ipc:///tmp/sync"}}, "weight_sync.endpoint = 'ipc:///tmp/"),
        ({}, "retrieval.host = '127.0.0.1': .* retrieval.url=http://HOST:PORT"),
        (
            {"retrieval": {"url": ["http://203.0.113.9:6", "http://127.0.0.1:6"]}},
            "retrieval.url = .*: the retrieval server at http://127.0.0.1:6 cannot be reached",
        ),
        (
            {"rewards": {"judge": {"url": "http://localhost:9/v1", "model": "m"}} | JUDGED},
            "rewards.judge.url = 'http://localhost:9/v1': .* rewards.judge.url=http://HOST:PORT/v1",
        ),
    ],
)
def test_another_host_s_loopback_is_not_ours(tree: dict[str, Any], said: str) -> None:
    far = {
        "replay": {"endpoint": "tcp://203.0.113.9:4"},  # an address that no machine has
        "weight_sync": {"endpoint": "tcp://203.0.113.9:5"},
        "retrieval": {"port": 6},
    }
    config = msgspec.convert(far | tree, Config)
    problems = [
        *joining._weight_sync(config),
        *joining._retrieval(config),
        *joining._judge(config),
    ]
    with pytest.raises(ConfigError, match=said):
        raise ConfigError("\n".join(problems))


@pytest.mark.parametrize("retrieval", [{"url": ["http://203.0.113.9:6"]}, {"recorded": "runs/a"}])
def test_addresses_that_others_reach_are_taken(retrieval: dict[str, object]) -> None:
    tree = {
        "replay": {"endpoint": "tcp://203.0.113.9:4"},
        "weight_sync": {"endpoint": "tcp://learner.example:5"},
        "retrieval": retrieval,
        "rewards": {"judge": {"url": "https://judge.example/v1", "model": "m"}} | JUDGED,
    }
    config = msgspec.convert(tree, Config)
    problems = joining._weight_sync(config), joining._retrieval(config), joining._judge(config)
    assert [problem for found in problems for problem in found] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name the run: CONFIG, or --connect ENDPOINT"),
        (["run.yaml"], "--actor-id is missing"),
        (["run.yaml", "--connect", "ipc://x"], "each names a run: drop one"),
        (
            ["--connect", "tcp://h:1", "--actor-id", "actor-3"],
            "'actor-3': such names are the launch",
        ),
        (["run.yaml", "--actor-id", "a", "--keys", "k"], "with CONFIG, say keys=k"),
        (["run.yaml", "--actor-id", "a", "--trust"], "--trust is for --connect: a CONFIG that you"),
    ],
)
def test_words_that_do_not_fit_together(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert said in capsys.readouterr().err


def test_the_process_names_itself_and_exits_2(run: Start) -> None:
    words = ["--connect", run().replay.endpoint, "model.path=/none"]
    command = [sys.executable, "-m", "actors.worker", *words]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=ends_with_us()
    )
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert f"{socket.gethostname()}-" in process.stderr
    assert "model.path = '/none': no model there on this machine" in process.stderr
