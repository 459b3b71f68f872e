"""A stop ends a wait at once and computation at its end; a stalled phase is named."""

import os
import signal
import threading

import pytest

from configs.runtime.signals import Interrupt, StopRequested, StopSwitch, on_stop
from configs.runtime.watchdog import phase


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_is_called_back_instead_of_dying(number: signal.Signals) -> None:
    causes: list[str] = []
    with Interrupt():  # puts the handlers back that were there before
        on_stop(causes.append)
        for _ in range(2):
            os.kill(os.getpid(), number)
    assert causes == [number.name] * 2


def test_a_command_s_first_signal_raises_unless_it_is_polled() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
    with Interrupt(polled=True) as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.cause == "SIGTERM"


def test_a_wait_ends_at_once() -> None:
    stop = StopSwitch()
    with pytest.raises(StopRequested, match="SIGTERM"), stop.interruptible():
        stop("SIGTERM")
        raise AssertionError("the wait went on")


def test_computation_goes_on_until_the_next_wait() -> None:
    stop = StopSwitch()
    stop("SIGTERM")
    stop("SIGINT")
    with pytest.raises(StopRequested, match="SIGTERM"), stop.interruptible():
        raise AssertionError("the wait began")


def test_a_second_signal_does_not_disturb_the_end() -> None:
    stop = StopSwitch()
    with pytest.raises(StopRequested), stop.interruptible():
        try:
            stop("SIGTERM")
        finally:
            stop("SIGTERM")


def test_a_phase_past_its_deadline_is_named() -> None:
    stalled, messages = threading.Event(), []

    def note(message: str) -> None:
        messages.append(message)
        stalled.set()

    with phase("update of step 3", 0.02, note):
        assert stalled.wait(5)
    assert messages == ["the learner has been in phase 'update of step 3' for more than 0.02 s"]


def test_a_phase_within_its_deadline_is_left_alone() -> None:
    messages: list[str] = []
    before = set(threading.enumerate())
    with phase("quick", 60.0, messages.append):
        begun = set(threading.enumerate()) - before
    (watch,) = (each for each in begun if isinstance(each, threading.Timer))
    watch.join(30.0)
    assert not watch.is_alive() and messages == []
