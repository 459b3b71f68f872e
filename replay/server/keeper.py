"""What keeps a start short and the log small, beside the requests: a snapshot of the ledger when
the log begins another segment, and compaction of closed segments as `replay.keep` says.

An image is made between two requests, once all that it holds is on the disk; another thread writes
it, and compacts. Where it cannot, the next start reads more of the log, or the log stays larger.
"""

import logging
import threading
from collections.abc import Callable

from configs.runtime.process import return_freed_blocks
from replay.ledger.ledger import Ledger
from replay.log.event_log import EventLog
from replay.log.keeping import Ids, Keep, Keeping
from replay.log.snapshots import Snapshot, write_snapshot

CLOSE_DEADLINE_S = 30.0

logger = logging.getLogger(__name__)


class Keeper:
    """The snapshots and the compaction of one log."""

    def __init__(self, ledger: Ledger, log: EventLog, keep: Keep = "all") -> None:
        """A log with a history gets a snapshot at the first look. Raises LogError."""
        self._ledger, self._log = ledger, log
        self._segment = log.segment  # the newest that is known
        self._kept = log.segment if not log.records else -1  # the segment of the newest snapshot
        self._records = 0  # that it follows
        self._committed = -1
        self._more = False  # segments may be due that were not taken yet
        self._work = threading.Thread()
        self._keeping: Keeping | None = None
        if keep != "all":
            self._keeping = Keeping(log.path, keep, self._upcoming, log.locks)

    def look(self) -> None:
        """Begin what is due; all that was decided must be durable. Raises LogError."""
        state, segment = self._ledger.state, self._log.segment
        moved = segment != self._segment or state.committed != self._committed
        if self._keeping:
            for closed in range(self._segment, segment):
                self._keeping.note(closed, self._upcoming)
        self._segment = segment
        if self._work.is_alive():
            return
        if segment != self._kept:
            self._begin(self._snapshot())
        elif self._keeping and (moved or self._more):
            self._compact_one(self._keeping, moved)

    def _compact_one(self, keeping: Keeping, moved: bool) -> None:
        """Begin with one segment alone: a snapshot that comes due waits for no more."""
        state = self._ledger.state
        self._committed = state.committed
        if moved:
            keeping.retry()
        chosen = keeping.take_due(Ids(*state.oldest_unsettled))
        self._more = chosen is not None
        if chosen:
            self._begin(lambda: keeping.compact(chosen))

    def wait(self) -> None:
        """Wait for what is under way."""
        if self._work.ident:
            self._work.join(CLOSE_DEADLINE_S)

    def close(self) -> None:
        """Write a last snapshot, from which the run goes on without reading anything."""
        self.wait()
        if self._log.records != self._records and not self._work.is_alive():
            self._begin(self._snapshot())
            self.wait()

    @property
    def _upcoming(self) -> Ids:
        ids = self._ledger.state.next_group_id
        return Ids(ids["train"], ids["eval"])

    def _begin(self, work: Callable[[], None]) -> None:
        def run() -> None:
            work()
            return_freed_blocks()  # each piece of work takes and leaves a megabyte or more

        self._work = threading.Thread(target=run, daemon=True)
        self._work.start()

    def _snapshot(self) -> Callable[[], None]:
        log, number = self._log, self._log.segment
        self._kept, self._records = number, log.records
        snapshot = Snapshot(log.name, log.records, self._ledger.image)

        def write() -> None:
            try:
                write_snapshot(log.path, number, snapshot)
            except OSError as error:
                why = "no snapshot could be written: the next start reads more of it"
                logger.warning("%s: %s: %s", log.path, why, error.strerror)

        return write
