"""The launcher's clients: whoever knows replay's endpoint alone learns what the run is, and nothing
goes on record.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.keys import Keys
from configs.load import ConfigError, parse
from configs.schema import Config, ReplayConfig
from replay import protocol as wire
from replay.clients.launcher import ConfigReader, Observer
from replay.log.event_log import EventLog, LogFull, read
from replay.log.records import RunStarted
from replay.protocol import Describe, ReplayTimeout
from tests.replay.conftest import free_port, served


def described(endpoint: str, keys: Keys | None = None, deadline_s: float = 30.0) -> Config:
    with ConfigReader(endpoint, keys, deadline_s) as replay:
        return parse(replay.configuration(), (), "test")


def test_the_configuration_is_the_server_s_own_and_nothing_is_recorded(serve) -> None:
    running = serve(max_staleness=7)
    assert described(running.endpoint) == running.config
    assert all(isinstance(fact, RunStarted) for fact in read(running.log_path))
    with Observer(running.endpoint) as console:
        assert console.status().phase == "waiting for a learner"


def test_it_is_told_while_the_log_is_full(serve) -> None:
    class Full(EventLog):
        full = False

        def sync(self) -> None:
            if self.full:
                raise LogFull("no room")
            super().sync()

    running = serve(log_class=Full)
    Full.full = True
    with Observer(running.endpoint) as console:
        while "room" not in console.status().phase:
            time.sleep(0.05)
    assert described(running.endpoint) == running.config
    Full.full = False


def test_an_actor_may_ask_and_work_on(serve) -> None:
    running = serve()
    with ConfigReader(running.endpoint, None, 30.0) as replay:
        replay.configuration()
        assert replay._call(wire.Hello("a", "digest"), wire.Welcome, "welcome") == wire.Welcome()
        assert replay._call(Describe(), wire.Described, "again").config


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Config]:
    """A run served over TCP, with keys of its own."""
    config = Config(run_dir=str(tmp_path / "run"), replay=ReplayConfig(endpoint=free_port()))
    with served(config, tmp_path / "events.log"):
        yield config


def test_over_tcp_a_copy_of_the_keys_is_needed(guarded: Config, tmp_path: Path) -> None:
    endpoint = guarded.replay.endpoint
    assert described(endpoint, Keys(Path(guarded.run_dir) / "keys")) == guarded
    others = Keys(tmp_path / "others").make()
    what = f"for the run's configuration from replay at {endpoint}: no answer"
    with pytest.raises(ReplayTimeout, match=what):
        described(endpoint, others, 0.6)
    with pytest.raises(ConfigError, match=r"copy the keys folder"):
        described(endpoint, Keys(tmp_path / "none"))
