"""What hands a run's numbers to the process of a tracker, without ever waiting for it.

A bounded queue stands between; what finds it full, or its tracker gone, is dropped and counted, and
said once. Only `close` waits, no longer than the deadline.
"""

import contextlib
import logging
import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

import msgspec

from configs.runtime.process import end_child, start_child
from learner.metrics.tracker import Opening, Point

MOST_WAITING = 1000  # points
_POLL_S = 0.1
log = logging.getLogger(__name__)


class Relay:
    """One tracker's process, its queue and the thread that writes to it."""

    def __init__(
        self,
        name: str,
        opening: Opening,
        command: Sequence[str] | None = None,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self.name, self.dropped = name, 0
        self._deadline_s, self._opening = opening.deadline_s, opening
        self._waiting: queue.Queue[Point | None] = queue.Queue(most_waiting)
        # It ends by the end of its input, also after a kill of this process: what it has been given
        # is then still written. In a group of its own it gets no signal of a terminal.
        self._process = start_child(
            command or ("-m", "learner.metrics.child", name),
            stdin=subprocess.PIPE,
            own_group=True,
            outlives_us=True,
        )
        self._gone = threading.Event()
        self._writer = threading.Thread(target=self._write_all, name=name, daemon=True)
        self._writer.start()

    def write(self, step: int, gauges: Mapping[str, float]) -> None:
        """Take numbers by name at a step, those that are finite; never waits."""
        if self._gone.is_set():
            self._drop("its process has ended (its last words are above)")
            return
        finite = {each: float(value) for each, value in gauges.items() if math.isfinite(value)}
        try:
            self._waiting.put_nowait(Point(step, finite))
        except queue.Full:
            self._drop(f"it has not taken the {self._waiting.maxsize} before")

    def close(self) -> None:
        """Give it what waits, and until the deadline to end; then end it."""
        until = time.monotonic() + self._deadline_s
        while self._writer.is_alive() and time.monotonic() < until:
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=_POLL_S)
                self._writer.join(max(0.0, until - time.monotonic()))
        if self._writer.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # Its end ends what is written to it, unless a process of its own still holds the pipe.
            self._writer.join(_POLL_S)
        end_child(self._process, max(0.0, until - time.monotonic()))
        if self._process.returncode:
            log.warning(
                "%s did not end well (%d) in learner.tracker_deadline_s = %g: the newest numbers "
                "may be missing there; of those before %d writes were dropped",
                self.name,
                self._process.returncode,
                self._deadline_s,
                self.dropped,
            )

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if self.dropped == 1:
            log.warning(
                "%s does not get all numbers from here on: %s; training goes on, and the event log "
                "has every number",
                self.name,
                why,
            )

    def _write_all(self) -> None:
        encode, pipe = msgspec.json.encode, self._process.stdin
        assert pipe is not None
        try:
            with pipe:
                pipe.write(encode(self._opening) + b"\n")
                pipe.flush()
                while (point := self._waiting.get()) is not None:
                    pipe.write(encode(point) + b"\n")
                    pipe.flush()
        except OSError:  # it has ended
            self._gone.set()
