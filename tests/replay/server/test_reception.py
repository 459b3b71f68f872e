"""Replay answers while it is restored from its log, and whoever lives on waits for it."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from configs.schema import Config, ReplayConfig
from replay.clients.actor import TrajectoryWriter
from replay.clients.launcher import ConfigReader, Observer
from replay.clients.learner import BatchReader
from replay.codec import decode_reply, encode
from replay.log.event_log import FILE_NAME, EventLog
from replay.protocol import (
    Alive,
    Deliver,
    Heartbeat,
    Hello,
    Lease,
    Observe,
    Ready,
    Request,
    Resume,
    Status,
    Wait,
)
from replay.server import held, reception
from replay.server.reception import Reception
from replay.server.server import ReplayServer
from tests.replay.conftest import new_ledger

RESTORING_S = 3.0


class Restoring:
    """A replay that reads its log for a while, and then serves."""

    def __init__(self, folder: Path) -> None:
        settings = {"endpoint": f"ipc://{folder}/replay", "groups_per_step": 1, "group_size": 2}
        replay = msgspec.convert(settings, ReplayConfig)
        self.config = Config(run_dir=str(folder), replay=replay)
        self.reception = Reception(self.config)
        self.reception.open()
        self.log = EventLog.create(folder / FILE_NAME)
        self.server: ReplayServer | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        end_s, done = time.monotonic() + RESTORING_S, 0
        while time.monotonic() < end_s:
            self.reception.look(done := done + 1_000_000, 10**9)
            time.sleep(0.01)
        ledger = new_ledger(self.config)
        with self.log as log:
            self.server = ReplayServer(self.config, ledger, log, self.reception)
            self.server.run()


@pytest.fixture
def replay(tmp_path: Path) -> Iterator[Restoring]:
    found = Restoring(tmp_path)
    yield found
    while found.server is None:
        time.sleep(0.01)
    found.server.stop("test")
    found.server.stop("test")
    found.thread.join(30.0)
    assert not found.thread.is_alive()


@pytest.mark.slow
async def test_whoever_lives_on_waits_while_replay_is_restored(replay: Restoring) -> None:
    """The learner's own deadline is shorter than that takes."""
    endpoint = replay.config.replay.endpoint
    resumed: list[object] = []
    with BatchReader(endpoint, 1, 2.0) as learner, Observer(endpoint) as console:
        waiting = threading.Thread(target=lambda: resumed.append(learner.resume(0)))
        waiting.start()
        status = console.status()
        assert status.restoring and status.phase.startswith("restoring: ")
        assert status.phase.endswith(" of 1,000 MB of the event log are read")
        with ConfigReader(endpoint, None, 5.0) as newcomer:
            assert "group_size: 2" in newcomer.configuration()
        async with TrajectoryWriter(endpoint, Hello("a", "digest"), 0.05, 0.3) as actor:
            await actor.ready(2, 1, 0)
            leases = [await actor.next() for _ in range(2)]
        assert all(isinstance(lease, Lease) for lease in leases)
        waiting.join(30.0)
        assert resumed == [0] and not console.status().restoring


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Reception]:
    """A reception whose looks are the test's."""
    endpoint = f"ipc://{tmp_path}/replay"
    found = Reception(Config(run_dir=str(tmp_path), replay=ReplayConfig(endpoint=endpoint)))
    found.open()
    yield found
    found.close()


def answers(
    looker: Reception, requests: list[Request], looks: int, expected: int = 0
) -> list[object]:
    """What one peer has heard after so many looks; `expected`: how much is waited for."""
    router, come = looker.open(), list[tuple[bytes, list[bytes], str]]()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(router._address.endpoint)
        for request in requests:
            socket.send(encode(request))
        while len(come) < len(requests):  # until the last of them is there
            assert router.poll(30.0)
            come += router.messages()
        arrived = iter(come)
        router.messages = lambda: arrived  # type: ignore[method-assign]
        for look in range(looks):
            looker._looked_s = float("-inf")
            looker.look(look, 100)
        found = []
        while socket.poll(30_000 if len(found) < expected else 200):
            found.append(decode_reply(socket.recv()))
        return found


def test_who_lives_is_answered_behind_more_than_can_be_held(
    alone: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "MOST_HELD", 5)
    said = [Ready("a", 1, 1, 0)] * 20
    asked = [Heartbeat("a", {}), Observe(0, 0), Resume(1, 0), Heartbeat("a", {})]
    found = answers(alone, [*said, *asked], looks=1, expected=4)
    kinds = [type(reply) for reply in found]
    assert kinds[:4] == [Alive, Status, Wait, Alive]
    assert [type(request) for _, request, _ in alone.held] == [*[Ready] * 5, Resume]


def test_a_look_reads_no_more_than_its_share(
    alone: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "MOST_READ", 3)
    assert len(answers(alone, [Heartbeat("a", {})] * 9, looks=2, expected=6)) == 6


def test_who_joins_is_held_once_however_often_it_says_hello(alone: Reception) -> None:
    hello, ready = Hello("a", "digest"), Ready("a", 1, 1, 0)
    answers(alone, [hello, ready, *[hello] * 20], looks=1)
    assert [request for _, request, _ in alone.held] == [hello, ready]


def test_what_is_held_is_bounded_in_bytes(
    alone: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "MOST_HELD_BYTES", 10_000)
    delivered = Deliver("a", 1, 0, bytes(4000))
    asked = [*[delivered] * 5, Ready("a", 1, 1, 0), Resume(1, 0)]
    answers(alone, asked, looks=1)
    kinds = [type(request) for _, request, _ in alone.held]
    assert kinds == [Deliver, Deliver, Ready, Resume]
