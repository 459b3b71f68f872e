"""The inbox: what an actor has received and not taken yet."""

import asyncio

import pytest

from replay.clients.session import Inbox
from replay.protocol import (
    Acknowledged,
    Alive,
    Done,
    Lease,
    Leases,
    Refused,
    RefusedByReplay,
    ReplayTimeout,
    Stop,
)
from replay.trajectory import Question, Sampling

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
