"""Strangers without keys hold connections by the hundred: who has a key is served all the same."""

import socket
import time
from pathlib import Path

import pytest

from configs import guard
from configs.guard import Unproved
from configs.keys import Keys
from replay.clients.launcher import Observer
from tests.replay.conftest import free_port
from tests.replay.server.strangers import cpu_seconds, crowd, limited


def ended(connection: socket.socket) -> bool:
    """True where the other side has closed it."""
    connection.setblocking(False)
    try:
        while data := connection.recv(256):
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
        ours[0].sendall(bytes(600))
        theirs[0].recv(600)
        waiting = Unproved(2)
        for each in theirs:
            waiting.add(each.fileno())
        assert [ended(each) for each in ours] == [False, True, False, False]
        waiting.discard(theirs[2].fileno())
        waiting.make_room()
        assert [ended(each) for each in ours] == [False, True, False, True]
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
        with crowd(endpoint, 400):
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
    with crowd(running.endpoint, 2) as (silent, slow):
        slow.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(16))  # half a greeting
        deadline_s = time.monotonic() + 15.0
        while not (ended(silent) and ended(slow)):
            assert time.monotonic() < deadline_s, "a stranger is still waited for"
            time.sleep(0.05)
