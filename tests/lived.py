"""Time as a test's own process lives it: bounds that hold on any machine."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TICK_S = 0.01


@contextmanager
def lived() -> Iterator[Callable[[], float]]:
    """`lived_s()`: seconds since, counted in short sleeps. Where the machine is slow, or stops this
    process, they are fewer than a clock's; they are never more.
    """
    ticks, over = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not over.is_set():
            time.sleep(TICK_S)
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield lambda: ticks * TICK_S
    finally:
        over.set()
        thread.join()
