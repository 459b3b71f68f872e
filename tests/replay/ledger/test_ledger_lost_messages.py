"""Lost messages: what a heartbeat tells of them, and how replay and the actor agree again."""

from typing import Any

import pytest

from replay.log.records import LeaseReturned
from replay.protocol import Heartbeat, Hello, Ready, Shutdown, Stop, Unknown, Welcome

BOTH = ((1, 0), (1, 1))
READY = Ready("a", 2, 1, 0)


@pytest.fixture
def s(scene: Any) -> Any:
    """An actor that was leased the two siblings of a group, and has room for no more."""
    s = scene(groups_per_step=1, max_staleness=0, dead_after_s=10.0)
    s.learner()
    s.actor("a", 2)
    return s


def beat(s: Any, **story: object) -> object:
    """Half a second later, the actor says how things stand."""
    s.now += 0.5
    return s.send("a", Heartbeat("a", {}, READY, **story))


def causes(s: Any) -> list[str]:
    return [fact.cause for fact in s.log if isinstance(fact, LeaseReturned)]


def test_an_actor_that_tells_what_is_on_record_is_left_alone(s: Any) -> None:
    assert {beat(s, held=BOTH) for _ in range(50)} == {None}


def test_leases_that_never_came_are_leased_again(s: Any) -> None:
    answers = [beat(s) for _ in range(21)]
    assert answers == [None] * 20 + [Unknown()]
    assert causes(s) == []
    assert s.send("a", Hello("a", "digest")) == Welcome()
    assert causes(s) == ["not_held"] * 2 and not s.ledger.state.failures.counts
    s.leased.clear()
    s.send("a", READY)
    assert [(x.group_id, x.sibling) for x in s.leased["a"]] == list(BOTH)
    assert {beat(s, held=BOTH) for _ in range(50)} == {None}


def test_a_lease_on_its_way_is_none_that_is_lost(s: Any) -> None:
    for _ in range(5):
        assert {beat(s) for _ in range(15)} == {None}
        assert beat(s, held=BOTH) is None


def test_what_is_still_delivered_is_asked_for_again(s: Any) -> None:
    story = {"held": BOTH[1:], "delivering": BOTH[:1]}
    assert [beat(s, **story) for _ in range(21)][-1] == Unknown()
    s.send("a", Hello("a", "digest", **story))
    assert causes(s) == []


def test_an_acknowledgement_that_never_came_is_asked_for_again(s: Any) -> None:
    s.deliver_all("a")
    assert [beat(s, delivering=BOTH) for _ in range(21)][-1] == Unknown()


def test_one_that_is_doubted_is_given_nothing_until_its_hello(s: Any) -> None:
    for _ in range(21):
        beat(s)
    s.send("a", Ready("a", 8, 1, 0))
    assert beat(s) == Unknown() and beat(s, held=BOTH) == Unknown()
    s.leased.clear()
    s.tick(1.0)
    assert not s.leased


def test_a_statement_that_was_lost_comes_with_the_next_heartbeat(scene: Any) -> None:
    s = scene()
    s.learner()
    s.send("a", Hello("a", "digest"))
    assert not s.leased
    beat(s)
    assert s.leased["a"]


def test_a_hello_that_comes_twice_takes_nothing_away_for_long(s: Any) -> None:
    s.send("a", Hello("a", "digest", BOTH))
    s.deliver_all("a")
    s.sample(0)
    assert not s.leased["a"]
    s.send("a", Heartbeat("a", {}, Ready("a", 2, 1, 1)))
    assert len(s.leased["a"]) == 2


def test_a_stop_that_was_lost_is_said_again(s: Any) -> None:
    s.send("launcher", Shutdown("enough"))
    assert beat(s, held=BOTH) == beat(s, held=BOTH) == Stop("enough")
