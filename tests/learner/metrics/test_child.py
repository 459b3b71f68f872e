"""The process of a tracker: what it hands on, and what it makes of a client's errors."""

import io
import signal
from collections.abc import Iterator, Mapping

import msgspec
import pytest

from learner.metrics.child import serve
from learner.metrics.tracker import Opening, Point

OPENING = Opening("forage", "run", "1a2b", "/runs/run", {}, 60.0)


class Client:
    """A tracker that refuses odd steps."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, Mapping[str, float]]] = []

    def write(self, step: int, gauges: Mapping[str, float]) -> None:
        if step % 2:
            raise ConnectionError("no route")
        self.taken.append((step, gauges))

    def close(self) -> None:
        self.taken.append((-1, {"seconds": signal.alarm(0)}))


@pytest.fixture(autouse=True)
def no_alarm() -> Iterator[None]:
    yield
    signal.alarm(0)


def lines(*points: Point, end: bytes = b"") -> io.BytesIO:
    return io.BytesIO(b"".join(msgspec.json.encode(e) + b"\n" for e in (OPENING, *points)) + end)


def test_points_are_handed_on_and_the_end_has_a_deadline() -> None:
    client = Client()
    cut = msgspec.json.encode(Point(6, {"x": 3.0}))[:-4]
    serve("mine", lines(Point(2, {"x": 1.0}), Point(4, {"x": 2.0}), end=cut), lambda _: client)
    assert client.taken == [(2, {"x": 1.0}), (4, {"x": 2.0}), (-1, {"seconds": 60})]


def test_what_a_client_refuses_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    serve("mine", lines(*(Point(n, {}) for n in range(6))), lambda _: client)
    assert [step for step, _ in client.taken] == [0, 2, 4, -1]
    assert caplog.messages == [
        "mine did not take step 1: ConnectionError('no route')",
        "mine did not take 3 writes",
    ]
