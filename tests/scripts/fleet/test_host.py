"""A process that drains, and the time that its node has left."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configs.runtime.process import announce_waiting
from configs.runtime.signals import MAKE_WAY
from scripts.fleet import host
from scripts.fleet.host import NOTICE_MARGIN_S, Host, time_to_drain

# Ends by the first of these; the others it hears, and stays.
DRAINS = """
import signal, sys
ends = [int(word) for word in sys.argv[1:]]
heard = {signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, heard)
print("up", flush=True)
while (number := signal.sigwait(heard)) not in ends:
    print(number.name, flush=True)
"""
Draining = Callable[..., Host]


@pytest.fixture
def draining(tmp_path: Path) -> Iterator[Draining]:
    """draining(*signals): a host whose process ends well by one of these."""
    started: list[Host] = []

    def start(*ends: int) -> Host:
        words = ["-c", DRAINS, *map(str, map(int, ends))]
        made = Host(words, {}, str(tmp_path / "log"), str(tmp_path / "ready"))
        started.append(made)
        made.start()
        end = time.monotonic() + 20.0
        while "up" not in (tmp_path / "log").read_text():
            assert time.monotonic() < end, "it is not up"
            time.sleep(0.01)
        return made

    yield start
    for each in started:
        each.kill(signal.SIGKILL)
        each._thread.join(10)


def test_a_process_that_drains_in_time_is_left_alone(draining: Draining, tmp_path: Path) -> None:
    made = draining(signal.SIGTERM)
    made.drain(60.0)
    assert made.wait() == 0 and (tmp_path / "log").read_text() == "up\n"


def test_one_that_is_late_is_told_so(draining: Draining, tmp_path: Path) -> None:
    made = draining(MAKE_WAY)
    made.drain(0.1)
    assert made.wait() == 0 and (tmp_path / "log").read_text() == "up\nSIGTERM\n"


def test_one_that_does_not_heed_it_is_killed(
    draining: Draining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "NOTICE_MARGIN_S", 0.1)
    made = draining()
    made.drain(0.1)
    assert made.wait() == -signal.SIGKILL
    assert (tmp_path / "log").read_text() == "up\nSIGTERM\nSIGUSR1\n"


def test_a_notice_leaves_what_comes_before_its_last_seconds() -> None:
    assert time_to_drain(0.0, 1000.0) is None, "its end is not known"
    assert time_to_drain(1060.0, 1000.0) == 60.0 - NOTICE_MARGIN_S
    assert time_to_drain(1001.0, 1000.0) == time_to_drain(900.0, 1000.0) == 0.0


def test_who_waits_for_others_says_so_until_it_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Host(["-c", "pass"], {}, str(tmp_path / "log"), str(tmp_path / "ready"))
    monkeypatch.setenv("FORAGE_READY", str(tmp_path / "ready"))
    announce_waiting()
    assert made.awaits_others() and made.ready_at() is None
    made.start()
    assert not made.awaits_others() and made.wait() == 0
