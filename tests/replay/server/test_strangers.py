"""Strangers without keys hold connections by the hundred: who has a key is served all the same."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.keys import Keys
from configs.runtime import guard
from configs.runtime.guard import Unproved
from replay.clients.launcher import Observer
from tests.replay.conftest import free_port
from tests.replay.server.strangers import (
    GREETING,
    UNFINISHED,
    cpu_seconds,
    crowd,
    limited,
    resident,
)


def ended(connection: socket.socket) -> bool:
    """True where the other side has closed it."""
    connection.setblocking(False)
    try:
        while data := connection.recv(1024):
            assert data  # ZeroMQ's greeting
        return True
    except ConnectionError:
        return True
    except BlockingIOError:
        return False


def test_the_oldest_that_has_said_nothing_goes_first() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = [socket.create_connection(listener.getsockname()) for _ in range(4)]
        theirs = [listener.accept()[0] for _ in ours]
        theirs[0].sendall(bytes(234))  # a greeting and a WELCOME
        waiting = Unproved(2)
        for each in theirs:
            waiting.add(each.fileno())
        assert [ended(each) for each in ours] == [False, True, False, False]
        waiting.discard(theirs[2].fileno())
        waiting.make_room()
        assert [ended(each) for each in ours] == [False, True, False, True]
        for each in (*ours, *theirs):
            each.close()


def test_what_is_said_shows_no_key_and_only_who_has_shown_one_may_say_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        theirs = [listener.accept()[0] for _ in ours]
        waiting = Unproved(8)
        for each in theirs:
            waiting.add(each.fileno())
        theirs[0].sendall(bytes(234))
        theirs[2].sendall(bytes(64))  # a greeting, which is for anybody
        for mine, other, count in zip(ours, theirs, (8000, 600, 8000), strict=True):
            mine.sendall(bytes(count))
            assert len(other.recv(count, socket.MSG_WAITALL)) == count
        waiting.sweep()
        assert [ended(each) for each in ours] == [False, False, True]
        waiting.make_room()
        assert [ended(each) for each in ours] == [False, True, True]
        for each in (*ours, *theirs):
            each.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_crowd_of_strangers_neither_locks_out_nor_spins(tmp_path: Path) -> None:
    questions, endpoint = tmp_path / "q.jsonl", free_port()
    questions.write_text('{"question": "who?", "answers": ["me"]}\n')
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run_dir: {tmp_path}/run\nreplay: {{endpoint: {endpoint!r}}}\n"
        f"questions: {{train: {questions}, eval: {questions}}}\n"
    )
    keys = Keys(tmp_path / "run" / "keys").make()
    with limited(config, 256, tmp_path / "log") as process:
        with Observer(endpoint, 30.0, keys) as console:
            assert console.status().phase == "waiting for a learner"
        before = resident(process.pid)
        with crowd(endpoint, 8, UNFINISHED + bytes(4 << 20)) as heavy:
            wait_until(lambda: all(map(ended, heavy)))
            wait_until(lambda: resident(process.pid) - before < 4 << 20)
        with crowd(endpoint, 400, UNFINISHED + bytes(600)):
            for _ in range(3):
                with Observer(endpoint, 10.0, keys, restart_deadline_s=0.0) as console:
                    assert console.status().phase == "waiting for a learner"
            begun_s, used_s = time.monotonic(), cpu_seconds(process.pid)
            time.sleep(2.0)
            share = (cpu_seconds(process.pid) - used_s) / (time.monotonic() - begun_s)
            assert share < 0.25
        assert process.poll() is None
    assert "refused a connection" in (tmp_path / "log").read_text()


def test_who_does_not_show_a_key_in_time_is_let_go(serve, monkeypatch) -> None:
    monkeypatch.setattr(guard, "HANDSHAKE_S", 0.3)
    running = serve(tcp=True)
    with crowd(running.endpoint, 3) as (silent, slow, wordy):
        slow.sendall(GREETING[:32])
        wordy.sendall(UNFINISHED)
        wait_until(lambda: all(map(ended, (silent, slow, wordy))))


def wait_until(true: Callable[[], bool]) -> None:
    """Wait until strangers are let go."""
    deadline_s = time.monotonic() + 15.0
    while not true():
        assert time.monotonic() < deadline_s, "a stranger is still waited for"
        time.sleep(0.05)
