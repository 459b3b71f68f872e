"""The process of one tracker: `python -m learner.metrics.child NAME`.

Consumes lines of JSON, an `Opening` and then `Point`s; produces what the tracker makes of them.
Waits for lines, as long as whoever writes them lives; unblocked by their end, after which the
tracker has `deadline_s` before this process is over. It holds threads, connections and files of the
client's, so that nothing of theirs can hold the learner up or take it along.
"""

import importlib
import logging
import math
import signal
import sys
from collections.abc import Callable, Iterator
from typing import BinaryIO

import msgspec

from configs.runtime.process import Exit, begin
from learner.metrics.tracker import Opening, Point, Tracker

OPENERS = {"wandb": "learner.metrics.wandb_run", "trackio": "learner.metrics.trackio_run"}
log = logging.getLogger(__name__)


def main(name: str) -> Exit:
    """Serve the tracker of this name from standard input."""
    begin(f"tracker-{name}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the learner says when it is over
    try:
        serve(name, sys.stdin.buffer, importlib.import_module(OPENERS[name]).open_run)
    except Exception as error:  # noqa: BLE001 - whatever a client may raise
        log.warning("%s is not written: %s: %s", name, type(error).__name__, error)
        return Exit.FAILED
    return Exit.DONE


def serve(name: str, lines: BinaryIO, open_run: Callable[[Opening], Tracker]) -> None:
    """Open the run, hand every point on, close it. Raises what the client raises at its start and
    at its end; in between that is counted, and said once.
    """
    opening = msgspec.json.decode(lines.readline(), type=Opening)
    tracker, failed = open_run(opening), 0
    for point in _points(lines):
        try:
            tracker.write(point.step, point.gauges)
        except Exception as error:  # noqa: BLE001 - whatever a client may raise
            failed += 1
            if failed == 1:
                log.warning("%s did not take step %d: %r", name, point.step, error)
    if failed:
        log.warning("%s did not take %d writes", name, failed)
    signal.alarm(math.ceil(opening.deadline_s))  # ends this process, whatever the client does
    tracker.close()


def _points(lines: BinaryIO) -> Iterator[Point]:
    decoder = msgspec.json.Decoder(Point)
    for line in lines:
        if line.endswith(b"\n"):  # else its writer was killed within it
            yield decoder.decode(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
