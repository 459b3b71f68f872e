"""Connections: who is lost, who is waited for at the end of a run, and what is told again."""

import pytest

from configs.schema import ActorsConfig, Config, LearnerConfig, ReplayConfig
from replay.codec import decode_reply
from replay.protocol import (
    Done,
    Finish,
    Goodbye,
    Heartbeat,
    Observe,
    Refused,
    Reply,
    Resume,
    Sample,
    Wait,
)
from replay.server.connections import GRACE_S, QUIET_S, WAIT_AGAIN_S, Connections

CONFIG = Config(
    replay=ReplayConfig(dead_after_s=10.0),
    actors=ActorsConfig(drain_deadline_s=20.0),
    learner=LearnerConfig(step_deadline_s=100.0),
)
ASK = Sample(1, 0)


class FakeRouter:
    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Reply]] = []
        self.dead: set[bytes] = set()

    def send(self, peer: bytes, payload: bytes) -> str:
        if peer in self.dead:
            return "no route"
        self.sent.append((peer, decode_reply(payload)))
        return ""


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def connections(router: FakeRouter) -> Connections:
    return Connections(CONFIG, router)


def test_actor_is_silent_after_its_deadline_until_goodbye(connections: Connections) -> None:
    connections.heard(b"a", Heartbeat("a", {}), 0.0)
    connections.heard(b"o", Observe(0, 0), 0.0)
    assert connections.silent(10.0) == []
    assert connections.silent(10.1) == [b"a"]
    connections.heard(b"a", Goodbye("a"), 10.2)
    assert connections.silent(99.0) == []


def test_wait_is_told_at_once_then_when_it_is_news_or_old(
    connections: Connections, router: FakeRouter
) -> None:
    def told(reply: Reply, now_s: float) -> bool:
        before = len(router.sent)
        connections.answer(b"l", ASK, reply, now_s)
        connections.flush()
        return len(router.sent) > before

    assert told(Wait("x", False), 0.0)
    assert not told(Wait("y", False), 0.1)
    assert told(Wait("x", True), 0.2)
    assert told(Wait("x", True), 0.3 + WAIT_AGAIN_S)
    assert told(Done(), 1.0)
    assert connections.kept == {}


def test_new_question_replaces_the_kept_one(connections: Connections, router: FakeRouter) -> None:
    connections.answer(b"l", ASK, Wait("x", False), 0.0)
    connections.heard(b"l", ASK, 0.1)
    connections.answer(b"l", ASK, Wait("x", False), 0.1)
    assert router.sent == [(b"l", Wait("x", False))] * 2


def test_only_promises_are_held_back(connections: Connections, router: FakeRouter) -> None:
    connections.answer(b"l", ASK, Done(), 0.0)
    connections.answer(b"l", ASK, Refused("no"), 0.0)
    assert router.sent == [(b"l", Refused("no"))]
    assert connections.gauges()["replay/refused_messages"] == 1.0
    assert connections.unanswered({b"x"}) == {b"l", b"x"}
    connections.flush()
    assert router.sent[1:] == [(b"l", Done())] and not connections.unanswered(())


def test_a_dead_connection_is_lost_once(connections: Connections, router: FakeRouter) -> None:
    connections.heard(b"a", Heartbeat("a", {}), 0.0)
    router.dead.add(b"a")
    with connections.parting(b"a"):
        connections.send(b"a", Done())
    assert not connections.lost
    connections.send(b"a", Done())
    connections.send(b"a", Done())
    assert (
        list(connections.lost) == [b"a"]
        and connections.gauges()["replay/unroutable_replies"] == 2.0
    )
    assert connections.forget(b"a") and not connections.forget(b"a")


def test_nobody_leaves_a_run_that_goes_on(connections: Connections) -> None:
    assert not connections.may_leave(False, 1e9)


def test_quiet_is_waited_for_unless_signalled(connections: Connections) -> None:
    connections.heard(b"o", Observe(0, 0), 0.0)
    connections.stopping(0.0)
    assert not connections.may_leave(False, QUIET_S)
    assert connections.may_leave(False, QUIET_S + 0.1)
    assert connections.may_leave(True, 0.1)


def test_actors_are_waited_for_until_their_deadline(connections: Connections) -> None:
    connections.heard(b"a", Heartbeat("a", {}), 0.0)
    connections.stopping(0.0)
    connections.stopping(15.0)
    assert not connections.may_leave(True, 20.0 + GRACE_S)
    assert connections.may_leave(True, 20.1 + GRACE_S)


def test_learner_is_waited_for_until_it_finishes(connections: Connections) -> None:
    connections.heard(b"l", Resume(1, 0), 0.0)
    connections.stopping(0.0)
    assert not connections.may_leave(False, 120.0)
    assert connections.may_leave(True, 1.0)
    assert connections.may_leave(False, 126.0)
    connections.heard(b"l", Finish(1), 120.0)
    assert connections.may_leave(False, 122.1)


def test_after_a_restart_who_was_there_is_waited_for() -> None:
    learning = Connections(CONFIG, FakeRouter(), learning=True)
    learning.stopping(0.0)
    assert not learning.may_leave(False, 60.0)
    assert learning.may_leave(True, 60.0)
    connections = Connections(CONFIG, FakeRouter())
    connections.stopping(0.0)
    assert not connections.may_leave(False, 20.0, awaited=True)
    assert connections.may_leave(False, 20.0, awaited=False)
    assert connections.may_leave(True, 20.0, awaited=True)
    assert connections.may_leave(False, 20.1 + GRACE_S, awaited=True)


def test_actors_are_spoken_to_by_the_name_they_last_gave(
    connections: Connections, router: FakeRouter
) -> None:
    def spoken_to(name: str | None) -> list[bytes]:
        router.sent.clear()
        connections.probe(name)
        return [peer for peer, _ in router.sent]

    for peer, name in ((b"1", "a"), (b"2", "b"), (b"3", "a")):
        connections.heard(peer, Heartbeat(name, {}), 0.0)
    assert spoken_to("a") == [b"1", b"3"]
    assert spoken_to(None) == [b"1", b"2", b"3"]
    connections.heard(b"1", Goodbye("a"), 0.0)
    assert spoken_to("a") == [b"3"] and spoken_to("c") == []
