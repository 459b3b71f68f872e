"""The requests that wait for the disk: bounded, the most urgent first, none out of its order."""

import pytest

from replay.log.event_log import LogFull
from replay.protocol import Deliver, Hello, Observe, Ready, Request, Sample
from replay.server import disk, held
from replay.server.disk import Disk


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(held, "MOST_HELD", 6)
    monkeypatch.setattr(disk, "MOST_TAKEN", 4)
    return Disk(600.0)


def ready(number: int) -> Ready:
    return Ready("a", number, 1, 0)


def taken(waiting: Disk) -> list[Request]:
    return [request for _, request in waiting.requests(first=())]


def test_a_turn_takes_its_share_and_leaves_the_rest_in_order(waiting: Disk) -> None:
    for number in range(10):
        waiting.receive(b"a", ready(number), 100)
    waiting.receive(b"console", Observe(0, 0), 100)
    assert waiting.behind and waiting.more
    assert taken(waiting) == [Observe(0, 0), *map(ready, range(3))]
    waiting.receive(b"a", ready(10), 100)
    assert [*taken(waiting), *taken(waiting)] == [ready(number) for number in range(3, 11)]
    assert not waiting.behind and not waiting.more


def test_while_it_is_full_more_of_actors_is_lost_and_nobody_else_is(waiting: Disk) -> None:
    waiting.missing(LogFull("full"), 0.0)
    for number in range(9):
        waiting.receive(b"a", ready(number), 100)
    waiting.receive(b"a", Deliver("a", 1, 0, b"payload"), 100)
    waiting.receive(b"learner", Sample(1, 0), 100)
    waiting.receive(b"console", Observe(0, 0), 100)
    assert waiting.behind and not waiting.more
    assert taken(waiting) == [Observe(0, 0)] and taken(waiting) == []
    waiting.found()
    assert [*taken(waiting), *taken(waiting)] == [*map(ready, range(6)), Sample(1, 0)]


def test_what_is_held_is_bounded_in_bytes_as_well(
    waiting: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "MOST_HELD_BYTES", 1000)
    waiting.missing(LogFull("full"), 0.0)
    for number in range(3):
        waiting.receive(b"a", Deliver("a", 1, number, b"payload"), 450)
    waiting.receive(b"a", ready(1), 100)
    waiting.receive(b"b", Deliver("b", 1, 3, b"payload"), 450)
    waiting.found()
    expected = [Deliver("a", 1, 0, b"payload"), Deliver("a", 1, 1, b"payload"), ready(1)]
    assert taken(waiting) == expected
    waiting.missing(LogFull("full"), 1.0)
    waiting.receive(b"a", ready(2), 1000)  # there is room again
    assert waiting.requests_of(b"a") == [ready(2)]
    waiting.receive(b"a", ready(3), 1000)
    assert waiting.requests_of(b"a") == [ready(3)]


def test_of_a_peer_s_hellos_the_first_is_held(waiting: Disk) -> None:
    waiting.missing(LogFull("full"), 0.0)
    first, again = Hello("a", "digest"), Hello("a", "digest", held=((1, 0),))
    for request in first, ready(1), again:
        waiting.receive(b"a", request, 100)
    waiting.receive(b"b", again, 100)
    waiting.found()
    assert taken(waiting) == [first, ready(1), again]
    waiting.missing(LogFull("full"), 1.0)
    waiting.receive(b"a", again, 100)
    assert waiting.requests_of(b"a") == [again]
