"""The session: what a replay that was started again is told, and in which order; the inbox."""

import asyncio

import pytest

from replay.clients.session import HELLO_AGAIN_S, Inbox, Session
from replay.protocol import (
    Acknowledged,
    Alive,
    Deliver,
    Done,
    Heartbeat,
    Hello,
    Lease,
    Leases,
    Ready,
    Refused,
    RefusedByReplay,
    ReplayTimeout,
    Stop,
)
from replay.trajectory import Question, Sampling

READY = Ready("a", 8, 1, 3)


def delivery(sibling: int) -> Deliver:
    return Deliver("a", 1, sibling, b"")


@pytest.fixture
def known() -> Session:
    """An actor that holds the siblings 0 to 2 of group 1 and serves."""
    session = Session(Hello("a", "digest"))
    session.hello(0.0)
    session.welcomed()
    assert session.ready(READY)
    question, sampling = Question("q", "who?", ("me",), 1), Sampling(1.0, 0)
    leases = (Lease(1, sibling, "train", question, sampling) for sibling in range(3))
    session.hear(Leases(tuple(leases)))
    return session


def test_a_statement_waits_for_the_welcome() -> None:
    session = Session(Hello("a", "digest"))
    session.hello(0.0)
    assert not session.ready(READY)
    assert session.welcomed() == [READY]
    assert session.welcomed() == []


def test_a_hello_tells_what_is_worked_on_and_what_is_under_way(known: Session) -> None:
    known.deliver(delivery(1))
    known.held.discard((1, 2))  # it was given back
    hello = known.unknown(5.0)
    assert hello is not None
    assert (hello.held, hello.delivering) == (((1, 0),), ((1, 1),))
    assert not known.known


def test_each_process_has_a_name_of_its_own(known: Session) -> None:
    again, other = known.hello(1.0), Session(Hello("a", "digest")).hello(1.0)
    assert again.instance == known.hello(2.0).instance != other.instance


def test_a_hello_under_way_is_not_said_twice(known: Session) -> None:
    assert known.unknown(5.0)
    assert known.unknown(5.0 + HELLO_AGAIN_S / 2) is None
    assert known.unknown(5.0 + HELLO_AGAIN_S)


def test_only_what_was_lost_is_delivered_again(known: Session) -> None:
    known.deliver(delivery(0))
    known.deliver(delivery(1))
    known.unknown(5.0)
    known.deliver(delivery(2))  # behind the Hello
    known.hear(Acknowledged(1, 0, "accepted"))  # it was before the Hello, and not lost
    assert known.welcomed() == [delivery(1), READY]


def test_a_lease_given_again_is_held_though_its_first_delivery_is_waited_for(
    known: Session,
) -> None:
    known.deliver(delivery(0))
    known.hear(Acknowledged(1, 0, "dropped"))
    question, sampling = Question("q", "who?", ("me",), 1), Sampling(1.0, 0)
    known.hear(Leases((Lease(1, 0, "train", question, sampling),)))
    known.abandon((1, 0))  # whoever delivered it hears of it last
    assert known.hello(1.0).held == ((1, 0), (1, 1), (1, 2))


def test_what_lies_between_two_hellos_may_be_under_way(known: Session) -> None:
    known.deliver(delivery(0))
    known.unknown(5.0)
    known.deliver(delivery(1))
    assert known.unknown(5.0 + HELLO_AGAIN_S)
    assert known.welcomed() == [delivery(0), READY]


def test_a_heartbeat_tells_how_things_stand(known: Session) -> None:
    known.deliver(delivery(1))
    told = Heartbeat("a", {"x": 1.0}, READY, ((1, 0), (1, 2)), ((1, 1),))
    assert known.heartbeat({"x": 1.0}) == told


def test_a_welcome_that_was_lost_is_asked_for_again() -> None:
    session = Session(Hello("a", "digest"))
    session.hello(5.0)
    assert session.alive(5.0 + HELLO_AGAIN_S / 2) is None
    assert session.alive(5.0 + HELLO_AGAIN_S)
    session.welcomed()
    assert session.alive(10.0) is None


def test_a_lease_that_comes_twice_is_worked_on_once(known: Session) -> None:
    question, sampling = Question("q", "who?", ("me",), 1), Sampling(1.0, 0)
    old, new = (Lease(1, sibling, "train", question, sampling) for sibling in (2, 3))
    assert known.hear(Leases((old, new, new))) == Leases((new,))
    assert known.hear(Leases((new,))) == Leases(())


LEASES = tuple(Lease(1, i, "train", Question("q", "?", ("a",)), Sampling()) for i in range(3))


async def test_leases_come_in_order_then_stop_for_ever() -> None:
    inbox = Inbox()
    inbox.take(Leases(LEASES[:1]))
    assert await inbox.next() == LEASES[0]
    inbox.take(Stop("over"))
    assert [await inbox.next(), await inbox.next()] == [Stop("over")] * 2


async def test_stop_gives_back_what_waits() -> None:
    inbox = Inbox()
    inbox.take(Leases(LEASES))
    assert await inbox.next() == LEASES[0]
    assert inbox.take(Stop("over")) == list(LEASES[1:])
    assert inbox.take(Stop("again")) == []


async def test_acknowledgement_reaches_its_delivery() -> None:
    inbox = Inbox()
    first, second = inbox.expect((1, 0)), inbox.expect((1, 1))
    inbox.take(Acknowledged(1, 1, "superseded"))
    inbox.take(Acknowledged(9, 9, "accepted"))  # nobody waits for it
    inbox.take(Acknowledged(1, 1, "accepted"))  # nor for a second one
    assert await second == "superseded"
    assert not first.done()


async def test_failure_ends_every_wait_and_the_first_one_counts() -> None:
    inbox = Inbox()
    waiting, acknowledgement = asyncio.create_task(inbox.next()), inbox.expect((1, 0))
    await asyncio.sleep(0)
    inbox.fail(ReplayTimeout("silent"))
    inbox.fail(ReplayTimeout("later"))
    for wait in (waiting, acknowledgement, inbox.next()):
        with pytest.raises(ReplayTimeout, match="silent"):
            await wait


async def test_failure_comes_before_leases_that_wait() -> None:
    inbox = Inbox()
    inbox.take(Leases(LEASES))
    inbox.fail(ReplayTimeout("silent"))
    with pytest.raises(ReplayTimeout, match="silent"):
        await inbox.next()


async def test_refusals_and_strange_replies_are_raised() -> None:
    inbox = Inbox()
    assert inbox.take(Alive()) == []
    with pytest.raises(RefusedByReplay, match="not here"):
        inbox.take(Refused("not here"))
    with pytest.raises(RefusedByReplay, match="Done"):
        inbox.take(Done())
