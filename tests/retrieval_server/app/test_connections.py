"""Connections: who holds one and asks nothing locks nobody out, and does not hold it for long."""

import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import uvicorn

from retrieval_server.app.app import Limits, create_app
from retrieval_server.app.connections import LEAST, Connections, guarded, most_connections
from retrieval_server.index.bm25 import BM25Index
from retrieval_server.protocol import Document


@contextmanager
def kept(connections: Connections, token: str = "") -> Iterator[int]:
    """Our server with these connections: its port."""
    limits = Limits(deadline_s=5.0)
    app = create_app([Document("a", "b c")], BM25Index(["b c"]), limits=limits, token=token)
    config = uvicorn.Config(app, http=guarded(connections), log_config=None, ws="none")
    server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(timeout=30)
    assert not thread.is_alive()


def search(port: int, token: str = "none") -> int:
    body, shown = {"queries": ["b"], "topk": 1}, {"Authorization": f"Bearer {token}"}
    url = f"http://127.0.0.1:{port}/retrieve"
    return httpx.post(url, json=body, headers=shown, trust_env=False).status_code


def connect(port: int, sent: bytes = b"") -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port), timeout=20.0)
    one.sendall(sent)
    return one


def ended(one: socket.socket) -> bool:
    """Wait until the server closes it."""
    try:
        while one.recv(1024):
            pass
        return True
    except ConnectionResetError:
        return True


HEAD = b"POST /retrieve HTTP/1.1\r\nHost: x\r\n"
BODY = HEAD + b"Content-Length: 99\r\n\r\n{"
ANSWERED = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", HEAD + b"X-a:", BODY, ANSWERED + HEAD, ANSWERED + BODY])
def test_idle_and_slow_connections_lock_nobody_out(sent: bytes) -> None:
    with kept(Connections(most=8)) as port, ExitStack() as stack:
        slow = [stack.enter_context(connect(port, sent)) for _ in range(40)]
        assert [search(port) for _ in range(3)] == [200] * 3
        assert ended(slow[0]), "the oldest go first"


def test_who_is_answered_before_the_end_of_its_request_locks_nobody_out() -> None:
    with kept(Connections(most=8), token="known") as port, ExitStack() as stack:
        slow = [stack.enter_context(connect(port, BODY)) for _ in range(8)]
        assert [one.recv(12) for one in slow] == [b"HTTP/1.1 401"] * 8
        assert search(port, "known") == 200
        assert ended(slow[0])


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        HEAD + b"X-a: 1",
        BODY,
    ],
)
def test_what_does_not_come_in_in_time_is_closed(sent: bytes) -> None:
    limits = Connections(most=8, headers_s=0.1, body_s=0.1)
    with kept(limits) as port, connect(port, sent) as one:
        begun = time.monotonic()
        assert ended(one) and time.monotonic() - begun < 4.0  # before the search's own deadline


def test_what_begins_no_request_keeps_no_connection() -> None:
    with kept(Connections(most=8, headers_s=0.1)) as port, connect(port, ANSWERED) as one:
        assert one.recv(1024)
        begun = time.monotonic()
        one.sendall(b"\r\n")
        assert ended(one) and time.monotonic() - begun < 4.0  # before uvicorn lets it rest no more


def test_a_kept_connection_may_rest_and_be_used_again() -> None:
    limits = Connections(most=8, headers_s=0.1, body_s=0.1)
    with kept(limits) as port, httpx.Client(trust_env=False) as client:
        for _ in range(2):
            assert client.get(f"http://127.0.0.1:{port}/health").status_code == 200
            time.sleep(0.15)


class Link:
    """A connection that notes that it was closed."""

    dropped = False

    def drop(self) -> None:
        self.dropped = True


async def test_the_peer_with_most_idle_connections_loses_its_oldest() -> None:
    connections = Connections(most=4)
    many, one, new = [Link() for _ in range(3)], Link(), Link()
    connections.opened(one, "a")
    for link in many:
        connections.opened(link, "b")
    connections.works(many[0], "b")  # its request has come in
    connections.opened(new, "c")
    assert [link.dropped for link in (one, *many, new)] == [False, False, True, False, False]
    connections.closed(many[1], "b")
    connections.waits(many[1], "b")  # the end of its last reply comes too late
    connections.opened(Link(), "c")
    assert not one.dropped


def test_the_limit_leaves_descriptors_for_files() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = most_connections()
    raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert LEAST <= most < raised and raised >= soft
