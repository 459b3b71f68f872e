"""The server on a real socket, with the real ledger and log."""

import socket as socketlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from configs.keys import Addresses, Keys
from configs.schema import Config, ReplayConfig
from replay import protocol as wire
from replay.clients.launcher import Observer
from replay.codec import decode_reply, decode_trajectory, encode, encode_trajectory, sealed
from replay.log.event_log import EventLog, LogFull, read, read_whole
from replay.log.records import ActorLeft, Delivered, LeaseReturned
from replay.protocol import LogError, Observe, ReplayError, ReplayTimeout, Status
from replay.server import server as server_module
from replay.server.server import ReplayServer


class Peer:
    """A bare connection that says exactly what the test says."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(endpoint)

    def say(self, *messages: wire.Request) -> None:
        for message in messages:
            self.socket.send(encode(message))

    def hear(self, wanted: type, seconds: float = 15.0):
        """The next reply of this type; others are passed over."""
        end_s = time.monotonic() + seconds
        while self.socket.poll(max(0, int(1000 * (end_s - time.monotonic())))):
            if isinstance(reply := decode_reply(self.socket.recv()), wanted):
                return reply
        raise AssertionError(f"no {wanted.__name__} within {seconds} s")

    def leases(self, actor_id: str, capacity: int = 2) -> list[wire.Lease]:
        """Say Hello and Ready as `actor_id`; the leases of the first group."""
        self.say(wire.Hello(actor_id, "digest"), wire.Ready(actor_id, capacity, 1, 0))
        return list(self.hear(wire.Leases).leases)

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def connect() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def make(running) -> Peer:
        peers.append(Peer(running.endpoint))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def learner(connect) -> Callable[..., Peer]:
    def make(running) -> Peer:
        peer = connect(running)
        peer.say(wire.Resume(1, 0))
        assert peer.hear(wire.Resumed) == wire.Resumed(0)
        return peer

    return make


def delivery(rollout, lease: wire.Lease, actor_id: str = "actor-0") -> wire.Deliver:
    payload = encode_trajectory(rollout(lease, actor_id))
    return wire.Deliver(actor_id, lease.group_id, lease.sibling, payload)


def test_deliver_acknowledge_sample_batch(serve, connect, learner, rollout) -> None:
    running = serve()
    trainer, actor = learner(running), connect(running)
    leases = actor.leases("actor-0")
    assert [(lease.group_id, lease.sibling) for lease in leases] == [(1, 0), (1, 1)]
    for lease in leases:
        actor.say(delivery(rollout, lease))
        expected = wire.Acknowledged(lease.group_id, lease.sibling, "accepted")
        assert actor.hear(wire.Acknowledged) == expected
    trainer.say(wire.Sample(1, 0))
    batch = trainer.hear(wire.Batch)
    assert (batch.step, batch.group_ids, batch.versions) == (1, (1,), (0,))
    assert [decode_trajectory(p).sibling for p in batch.groups[0]] == [0, 1]


def test_delivery_is_on_record_before_it_is_acknowledged(serve, connect, learner, rollout) -> None:
    class SlowLog(EventLog):
        def sync(self) -> None:
            time.sleep(0.1)
            super().sync()

    running = serve(log_class=SlowLog)
    learner(running)
    actor = connect(running)
    lease = actor.leases("actor-0")[0]
    actor.say(delivery(rollout, lease))
    actor.hear(wire.Acknowledged)
    kept = [r for r in read(running.log_path) if isinstance(r, Delivered)]
    assert [(r.group_id, r.sibling) for r in kept] == [(lease.group_id, lease.sibling)]


def test_what_cannot_be_written_is_not_acknowledged(serve, connect, learner, rollout) -> None:
    class BrokenDisk(EventLog):
        broken = False

        def sync(self) -> None:
            if self.broken:
                raise LogError("events.log: offset 12: cannot write 9 bytes: Input/output error")
            super().sync()

    running = serve(log_class=BrokenDisk)
    learner(running)
    actor = connect(running)
    lease = actor.leases("actor-0")[0]
    BrokenDisk.broken = True
    actor.say(delivery(rollout, lease))
    running.thread.join(15.0)
    assert "Input/output error" in str(running.errors[0])
    with pytest.raises(AssertionError, match="no Acknowledged"):
        actor.hear(wire.Acknowledged, 0.1)


def test_several_answers_that_find_nobody_are_one_loss(serve, connect, learner, rollout) -> None:
    class SlowLog(EventLog):
        slow_s = 0.0

        def sync(self) -> None:
            time.sleep(self.slow_s)
            super().sync()

    running = serve(log_class=SlowLog)
    learner(running)
    actor = connect(running)
    leases = actor.leases("actor-0")
    SlowLog.slow_s = 0.3
    actor.say(*(delivery(rollout, lease) for lease in leases))
    time.sleep(0.1)  # they are on their way to the disk
    actor.say(wire.Heartbeat("actor-0", {}), wire.Heartbeat("actor-0", {}), wire.Goodbye("actor-0"))
    actor.context.destroy(linger=5000)
    time.sleep(0.6)
    SlowLog.slow_s = 0.0
    console = connect(running)
    end_s = time.monotonic() + 15.0
    while not (left := [r for r in read_whole(running.log_path) if isinstance(r, ActorLeft)]):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    console.say(Observe(0, 0))
    assert console.hear(Status).phase and running.thread.is_alive()
    assert [record.cause for record in left] == ["goodbye"]


class FullDisk(EventLog):
    """Has room where `room` says so."""

    room = True

    def sync(self) -> None:
        if not self.room:
            raise LogFull("events.log: offset 12: cannot write 9 bytes: No space left on device")
        super().sync()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> type[FullDisk]:
    monkeypatch.setattr(FullDisk, "room", True)
    return FullDisk


def test_a_full_disk_holds_everybody_up_and_loses_nothing(
    serve, connect, learner, rollout, full_disk
) -> None:
    running = serve(log_class=full_disk)
    trainer, actor, console = learner(running), connect(running), connect(running)
    leases = actor.leases("actor-0")
    actor.say(delivery(rollout, leases[0]))
    actor.hear(wire.Acknowledged)
    full_disk.room = False
    actor.say(delivery(rollout, leases[1]))
    trainer.say(wire.Report(1, 0, {}))
    assert "No space left on device" in trainer.hear(wire.Wait).reason
    for _ in range(3):  # actors are told that replay lives
        actor.say(wire.Heartbeat("actor-0", {}))
        actor.hear(wire.Alive)
    console.say(Observe(0, 0))
    assert "waits for room on the disk" in console.hear(Status).phase
    with pytest.raises(AssertionError, match="no Acknowledged"):
        actor.hear(wire.Acknowledged, 0.3)
    full_disk.room = True
    assert actor.hear(wire.Acknowledged) == wire.Acknowledged(1, 1, "accepted")
    trainer.hear(wire.Done)
    trainer.say(wire.Sample(1, 0))
    assert trainer.hear(wire.Batch).group_ids == (1,)


@pytest.mark.slow
def test_while_the_disk_is_full_no_actor_is_asked_what_got_lost(
    serve, connect, learner, rollout, full_disk
) -> None:
    running = serve(log_class=full_disk, dead_after_s=1.0)
    learner(running)
    actor = connect(running)
    leases = actor.leases("actor-0")
    full_disk.room = False
    actor.say(*(delivery(rollout, lease) for lease in leases))
    story = tuple((lease.group_id, lease.sibling) for lease in leases)
    for _ in range(15):  # for longer than dead_after_s
        actor.say(wire.Heartbeat("actor-0", {}, delivering=story))
        with pytest.raises(AssertionError, match="no Unknown"):
            actor.hear(wire.Unknown, 0.1)
    full_disk.room = True
    actor.hear(wire.Acknowledged)


def test_a_disk_that_stays_full_ends_the_run_by_name(
    serve, connect, learner, rollout, full_disk
) -> None:
    running = serve(log_class=full_disk, disk_deadline_s=0.3)
    learner(running)
    full_disk.room = False
    connect(running).say(wire.Hello("actor-0", "digest"))
    running.thread.join(15.0)
    assert "No space left on device" in str(running.errors[0])


def test_a_signal_ends_the_wait_for_room(serve, learner, full_disk) -> None:
    running = serve(log_class=full_disk)
    trainer = learner(running)
    full_disk.room = False
    trainer.say(wire.Report(1, 0, {}))
    trainer.hear(wire.Wait)
    running.server.stop("SIGTERM")
    running.thread.join(15.0)
    assert "No space left on device" in str(running.errors[0])


def test_duplicate_delivery_is_superseded(serve, connect, learner, rollout) -> None:
    running = serve()
    learner(running)
    actor = connect(running)
    lease = actor.leases("actor-0")[0]
    actor.say(delivery(rollout, lease), delivery(rollout, lease))
    statuses = [actor.hear(wire.Acknowledged).status for _ in range(2)]
    assert statuses == ["accepted", "superseded"]


def test_two_actors_get_groups_of_their_own(serve, connect, learner) -> None:
    running = serve(groups_per_step=2)
    learner(running)
    groups = [
        {lease.group_id for lease in connect(running).leases(name)} for name in ("a-0", "a-1")
    ]
    assert groups == [{1}, {2}]


@pytest.mark.timeout(60)
def test_over_tcp_only_the_run_s_own_keys_are_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fresh_ledger
) -> None:
    with closing(socketlib.socket()) as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    config = Config(run_dir=str(tmp_path), replay=ReplayConfig(endpoint=endpoint))
    log = EventLog.create(tmp_path / "events.log")
    server = ReplayServer(config, fresh_ledger(config), log)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        keys, others = Addresses.of(config).replay.keys, Keys(tmp_path / "others").make()
        with Observer(endpoint, 5.0, keys) as console:
            assert console.status().phase == "waiting for a learner"
        for theirs in (None, others):
            with (
                Observer(endpoint, 0.5, theirs, restart_deadline_s=0.0) as console,
                pytest.raises(ReplayTimeout, match=f"for status from replay at {endpoint}"),
            ):
                console.status()
        assert "does not speak CurveZMQ with our key" in caplog.text
        with Observer(endpoint, 5.0, keys) as console:
            assert console.status().gauges["replay/refused_messages"] == 0.0
    finally:
        server.stop("test")
        server.stop("test")
        thread.join(30.0)
        log.close()
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([sealed(b"\x00garbage")], "Request"),
        ([encode(wire.Alive())], "Alive"),
        ([encode(wire.Goodbye(""))], "actor_id"),
    ],
)
def test_garbage_is_refused_and_counted(serve, connect, frames, words: str) -> None:
    running = serve()
    peer = connect(running)
    peer.socket.send_multipart(frames)
    assert words in peer.hear(wire.Refused).cause
    peer.say(Observe(0, 0))
    assert peer.hear(Status).gauges["replay/refused_messages"] == 1.0


@pytest.mark.parametrize(
    "frames", [[b""], [b"\x00garbage"], [encode(wire.Observe(0, 0))[:-1]], [b"a", b"b"]]
)
def test_bytes_changed_on_the_way_are_counted_and_as_good_as_lost(serve, connect, frames) -> None:
    peer = connect(serve())
    peer.socket.send_multipart(frames)
    peer.hear(wire.Unknown)
    peer.say(wire.Observe(0, 0))
    assert peer.hear(wire.Status).gauges["replay/refused_messages"] == 1.0


def test_broken_trajectory_is_refused_and_not_recorded(serve, connect, learner) -> None:
    running = serve()
    learner(running)
    actor = connect(running)
    lease = actor.leases("actor-0")[0]
    actor.say(wire.Deliver("actor-0", lease.group_id, lease.sibling, b"not a trajectory"))
    assert "Trajectory" in actor.hear(wire.Refused).cause
    assert not any(isinstance(r, Delivered) for r in read(running.log_path))


def test_heartbeat_is_answered(serve, connect) -> None:
    peer = connect(serve())
    peer.say(wire.Hello("actor-0", "digest"), wire.Heartbeat("actor-0", {}))
    peer.hear(wire.Alive)


def test_leases_of_a_silent_actor_go_to_another(serve, connect, learner) -> None:
    running = serve(dead_after_s=0.5, max_staleness=0)
    learner(running)
    silent, other = connect(running), connect(running)
    leases = silent.leases("silent")
    other.say(wire.Hello("other", "digest"), wire.Ready("other", 2, 1, 0))
    taken: set[tuple[int, int]] = set()
    while len(taken) < 2:
        other.say(wire.Heartbeat("other", {}))
        if other.socket.poll(100):
            reply = decode_reply(other.socket.recv())
            if isinstance(reply, wire.Unknown):  # on a busy machine it may seem silent as well
                other.say(wire.Hello("other", "digest"), wire.Ready("other", 2, 1, 0))
            taken |= {(x.group_id, x.sibling) for x in getattr(reply, "leases", ())}
    assert taken == {(lease.group_id, lease.sibling) for lease in leases}
    silent.say(wire.Heartbeat("silent", {}))
    silent.hear(wire.Unknown)


def test_restarted_actor_takes_its_id_back_at_once(serve, connect, learner) -> None:
    running = serve()
    learner(running)
    first = connect(running)
    leases = first.leases("actor-0")
    first.close()
    time.sleep(0.05)  # the kernel tells replay that the socket is closed
    assert connect(running).leases("actor-0") == leases
    causes = [r.cause for r in read(running.log_path) if isinstance(r, LeaseReturned)]
    assert causes == ["actor_lost"] * 2


def test_second_actor_of_one_id_is_refused(serve, connect, learner) -> None:
    running = serve()
    learner(running)
    connect(running).leases("actor-0")
    second = connect(running)
    second.say(wire.Hello("actor-0", "digest"))
    assert "connected already" in second.hear(wire.Refused).cause


def test_waiting_sample_is_answered_once_it_can_be(serve, connect, learner, rollout) -> None:
    running = serve()
    trainer, actor = learner(running), connect(running)
    leases = actor.leases("actor-0")
    trainer.say(wire.Sample(1, 0))
    assert "0 of 1 groups" in trainer.hear(wire.Wait).reason
    assert trainer.hear(wire.Wait)  # said again, so that silence means death
    actor.say(*[delivery(rollout, lease) for lease in leases])
    actor.hear(wire.Acknowledged)
    actor.hear(wire.Acknowledged)
    assert trainer.hear(wire.Batch).step == 1
    time.sleep(0.3)
    assert not trainer.socket.poll(0), "one answer to one question"


def test_what_is_delivered_answers_and_no_tick_is_waited_for(
    serve, connect, learner, rollout, monkeypatch
) -> None:
    monkeypatch.setattr(server_module, "TICK_S", 3600.0)
    running = serve()
    trainer, actor = learner(running), connect(running)
    leases = actor.leases("actor-0")
    trainer.say(wire.Sample(1, 0))
    trainer.hear(wire.Wait)
    actor.say(*[delivery(rollout, lease) for lease in leases])
    assert trainer.hear(wire.Batch).step == 1


def test_dead_learner_s_question_is_forgotten(serve, connect, learner, rollout) -> None:
    running = serve()
    trainer, actor = learner(running), connect(running)
    leases = actor.leases("actor-0")
    trainer.say(wire.Sample(1, 0))
    trainer.hear(wire.Wait)
    trainer.close()
    time.sleep(0.8)  # the next Wait finds nobody
    actor.say(*[delivery(rollout, lease) for lease in leases])
    successor = connect(running)
    successor.say(wire.Resume(2, 0))
    assert successor.hear(wire.Resumed) == wire.Resumed(0)


def test_log_folds_back_to_the_same_ledger(serve, connect, learner, rollout, fresh_ledger) -> None:
    running = serve(groups_per_step=2)
    trainer, actor = learner(running), connect(running)
    leases = actor.leases("actor-0", capacity=4)
    actor.say(*[delivery(rollout, lease) for lease in leases])
    actor.hear(wire.Acknowledged)
    trainer.say(wire.Report(1, 1, {"learner/loss": 0.5}), wire.Evaluate(1, 0))
    trainer.hear(wire.EvalProgress)
    running.end()
    again = fresh_ledger(running.config)
    again.restore(read(running.log_path))
    assert again.gauges() == running.ledger.gauges()
    assert again.stop_cause == running.ledger.stop_cause


def test_stop_reaches_the_actors_and_waits_for_them(serve, connect) -> None:
    running = serve(drain_deadline_s=60.0)
    actor = connect(running)
    actor.say(wire.Hello("actor-0", "digest"), wire.Heartbeat("actor-0", {}))
    actor.hear(wire.Alive)
    running.server.stop("SIGTERM")
    assert actor.hear(wire.Stop) == wire.Stop("SIGTERM")
    running.thread.join(0.5)
    assert running.thread.is_alive()
    actor.say(wire.Goodbye("actor-0"))
    running.thread.join(15.0)
    assert not running.thread.is_alive()


def test_stop_does_not_wait_for_the_dead(serve, connect, learner) -> None:
    running = serve(drain_deadline_s=60.0)
    learner(running)
    actor = connect(running)
    actor.leases("actor-0")
    actor.close()
    time.sleep(0.5)  # the kernel tells replay that the socket is closed
    running.server.stop("SIGTERM")
    running.thread.join(15.0)
    assert not running.thread.is_alive()


def test_endpoint_that_cannot_be_bound_is_named(fresh_ledger, tmp_path) -> None:
    endpoint = f"ipc://{tmp_path}/missing/replay"
    config = Config(replay=ReplayConfig(endpoint=endpoint))
    words = r"replay\.endpoint = .*/missing/replay"
    with EventLog.create(tmp_path / "log") as log, pytest.raises(ReplayError, match=words):
        ReplayServer(config, fresh_ledger(config), log)
