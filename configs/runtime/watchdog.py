"""Named phases with deadlines: a process that stalls logs its phase and ends.

A thread watches, so a stall inside native code is caught too; it cannot be unwound, hence the hard
exit, which every peer sees at once.
"""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from configs.runtime.process import Exit

log = logging.getLogger(__name__)


def die(message: str) -> None:
    """Log the stall and where every thread stands, then end the process as `Exit.CONSEQUENCE`."""
    log.critical(message)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(Exit.CONSEQUENCE)


@contextmanager
def phase(
    name: str, deadline_s: float, on_stall: Callable[[str], None] = die, who: str = "the learner"
) -> Iterator[None]:
    """Run a phase and log its seconds; past its deadline, `on_stall` is called on a thread."""
    message = f"{who} has been in phase {name!r} for more than {deadline_s:g} s"
    timer = threading.Timer(deadline_s, on_stall, (message,))
    timer.daemon = True
    timer.start()
    begun = time.perf_counter()
    try:
        yield
    finally:
        timer.cancel()
        log.debug("%s took %.2f s", name, time.perf_counter() - begun)
