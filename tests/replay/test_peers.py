"""Who is waited for at the end of a run, and what is told again."""

import pytest

from configs.schema import ActorsConfig, Config, LearnerConfig, ReplayConfig
from replay.peers import GRACE_S, QUIET_S, WAIT_AGAIN_S, Peers
from replay.protocol import Done, Finish, Goodbye, Heartbeat, Resume, Sample, Wait
from replay.run_protocol import Observe

CONFIG = Config(
    replay=ReplayConfig(dead_after_s=10.0),
    actors=ActorsConfig(drain_deadline_s=20.0),
    learner=LearnerConfig(step_deadline_s=100.0),
)
ASK = Sample(1, 0)


@pytest.fixture
def peers() -> Peers:
    return Peers(CONFIG)


def test_actor_is_silent_after_its_deadline_and_gone_after_goodbye(peers: Peers) -> None:
    peers.heard(b"a", Heartbeat("a", {}), 0.0)
    peers.heard(b"o", Observe(0, 0), 0.0)
    assert peers.silent(10.0) == []
    assert peers.silent(10.1) == [b"a"]
    peers.heard(b"a", Goodbye("a"), 10.2)
    assert peers.silent(99.0) == []


def test_wait_is_told_at_once_then_when_it_is_news_or_old(peers: Peers) -> None:
    assert peers.answers(b"l", ASK, Wait("x", False), 0.0)
    assert not peers.answers(b"l", ASK, Wait("y", False), 0.1)
    assert peers.answers(b"l", ASK, Wait("x", True), 0.2)
    assert peers.answers(b"l", ASK, Wait("x", True), 0.3 + WAIT_AGAIN_S)
    assert peers.answers(b"l", ASK, Done(), 1.0)
    assert peers.kept == {}


def test_new_question_replaces_the_kept_one(peers: Peers) -> None:
    peers.answers(b"l", ASK, Wait("x", False), 0.0)
    peers.heard(b"l", ASK, 0.1)
    assert peers.answers(b"l", ASK, Wait("x", False), 0.1)


def test_nobody_leaves_a_run_that_goes_on(peers: Peers) -> None:
    assert not peers.may_leave(False, 1e9)


def test_quiet_is_waited_for_unless_signalled(peers: Peers) -> None:
    peers.heard(b"o", Observe(0, 0), 0.0)
    peers.stopping(0.0)
    assert not peers.may_leave(False, QUIET_S)
    assert peers.may_leave(False, QUIET_S + 0.1)
    assert peers.may_leave(True, 0.1)


def test_actors_are_waited_for_until_their_deadline(peers: Peers) -> None:
    peers.heard(b"a", Heartbeat("a", {}), 0.0)
    peers.stopping(0.0)
    peers.stopping(15.0)
    assert not peers.may_leave(True, 20.0 + GRACE_S)
    assert peers.may_leave(True, 20.1 + GRACE_S)


def test_learner_is_waited_for_until_it_finishes(peers: Peers) -> None:
    peers.heard(b"l", Resume(1, 0), 0.0)
    peers.stopping(0.0)
    assert not peers.may_leave(False, 120.0)
    assert peers.may_leave(True, 1.0)
    assert peers.may_leave(False, 126.0)
    peers.heard(b"l", Finish(1), 120.0)
    assert peers.may_leave(False, 122.1)


def test_after_a_restart_who_was_there_is_waited_for() -> None:
    learning = Peers(CONFIG, learning=True)
    learning.stopping(0.0)
    assert not learning.may_leave(False, 60.0)
    assert learning.may_leave(True, 60.0)
    peers = Peers(CONFIG)
    peers.stopping(0.0)
    assert not peers.may_leave(False, 20.0, awaited=True)
    assert peers.may_leave(False, 20.0, awaited=False)
    assert peers.may_leave(True, 20.0, awaited=True)
    assert peers.may_leave(False, 20.1 + GRACE_S, awaited=True)


def test_actors_are_found_by_the_name_they_last_gave(peers: Peers) -> None:
    for peer, name in ((b"1", "a"), (b"2", "b"), (b"3", "a")):
        peers.heard(peer, Heartbeat(name, {}), 0.0)
    assert peers.called("a") == [b"1", b"3"]
    assert peers.called(None) == [b"1", b"2", b"3"]
    peers.heard(b"1", Goodbye("a"), 0.0)
    assert peers.called("a") == [b"3"] and peers.called("c") == []
