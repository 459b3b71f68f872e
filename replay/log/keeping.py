"""Which trajectories a log keeps while its run goes on (`replay.keep`): closed segments lose their
payloads once nothing asks for them, or once the log outgrows its bytes, the oldest first.

What may be asked for is never taken, whatever the bytes: what is not trained and saved, and what an
evaluation that goes on still collects. The records themselves stay. Where these alone outgrow the
bytes, that is said, and the log goes on growing.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replay.log.compaction import compact_segment, is_compacted
from replay.log.records import EVAL_GROUPS
from replay.log.segments import segment_path, segments
from replay.protocol import LogError

SHARE = 0.2  # of a core, at most: the rest of the process goes on
Keep = str | int

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ids:
    """A group of each kind: the first that is not opened yet, or the oldest that is not settled."""

    train: int
    eval: int

    def settles(self, group_id: int) -> bool:
        """True for a group that comes before."""
        return group_id < (self.train if group_id < EVAL_GROUPS else self.eval)


@dataclass(frozen=True)
class Closed:
    """A closed segment, perhaps with payloads: its bytes, and what was next when it closed."""

    number: int
    size: int
    before: Ids


def due(closed: Sequence[Closed], oldest: Ids, keep: Keep, log_bytes: int) -> list[Closed]:
    """Return the segments to compact now, the oldest first; all groups in them are settled."""
    settled = [
        each
        for each in closed
        if each.before.train <= oldest.train and each.before.eval <= oldest.eval
    ]
    if isinstance(keep, str):
        return settled if keep == "committed" else []
    found, over = [], log_bytes - keep
    for each in settled:
        if over <= 0:
            break
        found.append(each)
        over -= each.size
    return found


class Keeping:
    """The closed segments of one log. `locks` gets the descriptor of the file, locked, that takes
    the place of the first one.

    `compact` may run in another thread than all else.
    """

    def __init__(self, path: Path, keep: Keep, upcoming: Ids, locks: list[int]) -> None:
        """`upcoming`: the groups that are next now. Opens no segment: a run has more of them by the
        hour. Raises LogError.
        """
        self._locks = locks
        self._path, self._keep = path, keep
        self._closed: list[Closed] = []
        self._bytes = 0  # of closed segments
        self._saved: list[int] = []  # bytes, not counted yet
        self._failed: list[Closed] = []  # could not be compacted
        self._told = False
        for segment in segments(path) if keep != "all" else ():
            if segment.closed:
                self.note(segment.number, upcoming)

    def note(self, number: int, upcoming: Ids) -> None:
        """Take in a segment that has been closed. Raises LogError."""
        path = segment_path(self._path, number)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise LogError(f"{path}: cannot be read: {error.strerror}") from error
        self._bytes += size
        self._closed.append(Closed(number, size, upcoming))

    def retry(self) -> None:
        """Take those that could not be compacted for new."""
        while self._failed:
            self._closed.append(self._failed.pop())
        self._closed.sort(key=lambda each: each.number)

    def take_due(self, oldest: Ids) -> Closed | None:
        """Take out the segment to compact now, the oldest of those that are due."""
        while self._saved:
            self._bytes -= self._saved.pop()
        chosen = due(self._closed, oldest, self._keep, self._bytes)
        if chosen:
            self._closed.remove(chosen[0])
            return chosen[0]
        over = isinstance(self._keep, int) and self._bytes > self._keep
        if over and not self._closed and not self._failed and not self._told:
            self._told = True
            logger.warning(
                "%s: the records alone take %d bytes, without any trajectory, and grow on: more "
                "than replay.keep = %s",
                self._path,
                self._bytes,
                self._keep,
            )
        return None

    def compact(self, chosen: Closed) -> None:
        """Compact a segment; where it cannot be, it is named, and left as it is until `retry`."""
        try:
            segment = segments(self._path)[chosen.number]
            if is_compacted(segment):  # by a process before this one
                return
            change = compact_segment(segment, chosen.before.settles, self._locks, Pace().rest)
        except (LogError, OSError) as error:
            logger.warning("segment %d is not compacted: %s", chosen.number, error)
            self._failed.append(chosen)
            return
        self._saved.append(change.bytes_before - change.bytes_after)
        logger.info(
            "%s: %d payloads taken away (replay.keep = %s): %d -> %d bytes",
            change.path,
            change.payloads,
            self._keep,
            change.bytes_before,
            change.bytes_after,
        )


class Pace:
    """Rests after each piece of work, so that it takes no more than its share of a core."""

    def __init__(self) -> None:
        self._since_s = time.thread_time()

    def rest(self) -> None:
        """Sleep for as long as the work since the last rest is to cost."""
        worked_s = time.thread_time() - self._since_s
        time.sleep(worked_s * (1 / SHARE - 1))
        self._since_s = time.thread_time()
