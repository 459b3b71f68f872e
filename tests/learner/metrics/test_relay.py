"""What stands between the learner and a tracker that hangs, ends or is slow."""

import json
import logging
import time
from pathlib import Path

import pytest

from learner.metrics.relay import Relay
from learner.metrics.tracker import Opening

COPY = "import shutil, sys; shutil.copyfileobj(sys.stdin.buffer, open(sys.argv[1], 'wb'))"
# Its own child, in a session of its own, keeps the pipe open that nobody reads.
HANG = (
    "import subprocess, time; subprocess.Popen(['sleep', '8'], start_new_session=True); "
    "time.sleep(600)"
)


def opening(deadline_s: float) -> Opening:
    return Opening("forage", "run", "1a2b", "/runs/run", {"seed": 7}, deadline_s)


def test_every_point_arrives_in_order_behind_the_opening(tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    relay = Relay("copy", opening(20.0), ("-c", COPY, str(copied)))
    for step in (1, 2, 1):
        relay.write(step, {"learner/loss": step / 2, "nan": float("nan"), "inf": float("inf")})
    relay.close()
    first, *points = map(json.loads, copied.read_text().splitlines())
    assert first["id"] == "1a2b" and first["config"] == {"seed": 7}
    assert points == [{"step": n, "gauges": {"learner/loss": n / 2}} for n in (1, 2, 1)]
    assert relay.dropped == 0


def test_one_that_hangs_holds_nobody_up_and_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    relay = Relay("stuck", opening(0.5), ("-c", HANG), most_waiting=3)
    begun = time.monotonic()
    for step in range(200):
        relay.write(step, {f"gauge/{n}": 1.0 for n in range(300)})  # beyond what a pipe holds
    assert time.monotonic() - begun < 2.0
    assert 0 < relay.dropped < 200
    with caplog.at_level(logging.WARNING):
        relay.close()
    assert time.monotonic() - begun < 5.0
    assert "stuck did not end well (-9) in learner.tracker_deadline_s = 0.5" in caplog.text


def test_what_is_dropped_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    relay = Relay("gone", opening(10.0), ("-c", "raise SystemExit(3)"))
    until = time.monotonic() + 20.0
    while not relay.dropped and time.monotonic() < until:
        relay.write(1, {"x": 1.0})
        time.sleep(0.01)
    for _ in range(9):
        relay.write(2, {"x": 1.0})
    assert relay.dropped == 10
    assert caplog.text.count("gone does not get all numbers from here on: its process has") == 1
    relay.close()
    assert "gone did not end well (3)" in caplog.text
