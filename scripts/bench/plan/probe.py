"""A probe of the machine's speed beside a measurement: a thread that moves memory now and then."""

import statistics
import threading
import time
from typing import Self

import numpy as np

EVERY_S = 0.5
_NUMBERS = 1 << 20  # 8 MiB, more than a core's own caches hold


class Probe:
    """How long the same work takes the processor, again and again; a share of .005 of a core. What
    the processes beside it do to it, and machines beside this one, they do to each other too.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []  # time since the epoch, seconds of a core
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def median_s(self, begin_s: float = 0.0, end_s: float = float("inf")) -> float:
        """Seconds of a core between these times (since the epoch), or the nearest one's."""
        found = [took for at, took in self.seen if begin_s <= at <= end_s]
        return statistics.median(found or [self.seen[-1][1]])

    def _run(self) -> None:
        numbers, moved = np.random.default_rng(0).random(_NUMBERS), np.empty(_NUMBERS)
        while True:
            begun_s = time.thread_time()
            np.copyto(moved, numbers)
            np.add(moved, numbers, out=moved)
            self.seen.append((time.time(), time.thread_time() - begun_s))
            if self._over.wait(EVERY_S):
                return
