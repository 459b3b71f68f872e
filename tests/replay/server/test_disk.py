"""The requests that wait for the disk: bounded, the most urgent first, none out of its order."""

import pytest

from replay.log.event_log import LogFull
from replay.protocol import Deliver, Observe, Ready, Request, Sample
from replay.server import disk
from replay.server.disk import Disk


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(disk, "_MOST_HELD", 6)
    monkeypatch.setattr(disk, "MOST_TAKEN", 4)
    return Disk(600.0)


def ready(number: int) -> Ready:
    return Ready("a", number, 1, 0)


def taken(waiting: Disk) -> list[Request]:
    return [request for _, request in waiting.requests(first=())]


def test_a_turn_takes_its_share_and_leaves_the_rest_in_order(waiting: Disk) -> None:
    for number in range(10):
        waiting.receive(b"a", ready(number))
    waiting.receive(b"console", Observe(0, 0))
    assert waiting.behind and waiting.more
    assert taken(waiting) == [Observe(0, 0), *map(ready, range(3))]
    waiting.receive(b"a", ready(10))
    assert [*taken(waiting), *taken(waiting)] == [ready(number) for number in range(3, 11)]
    assert not waiting.behind and not waiting.more


def test_while_it_is_full_more_of_actors_is_lost_and_nobody_else_is(waiting: Disk) -> None:
    waiting.missing(LogFull("full"), 0.0)
    for number in range(9):
        waiting.receive(b"a", ready(number))
    waiting.receive(b"a", Deliver("a", 1, 0, b"payload"))
    waiting.receive(b"learner", Sample(1, 0))
    waiting.receive(b"console", Observe(0, 0))
    assert waiting.behind and not waiting.more
    assert taken(waiting) == [Observe(0, 0)] and taken(waiting) == []
    waiting.found()
    assert [*taken(waiting), *taken(waiting)] == [*map(ready, range(6)), Sample(1, 0)]
