"""A run's log, followed: each record once, with the place where it lies, as they are written.

A closed segment may be put in another's place by compaction while it is read: then it is read from
its start again, and the records that were told are passed over.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from replay.log.format import FRAME, Damage, Segment, TornRecord, payload_at, pieces
from replay.log.records import Delivered, Record, decoded
from replay.log.segments import opened, segments
from replay.log.tail import payloads_of
from replay.protocol import LogError


@dataclass(frozen=True)
class Placed:
    """A record, its number in the log, and where it lies."""

    record: Record
    number: int
    segment: int
    offset: int


class Follower:
    """Reads on from where it stopped. After damage it tells nothing more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""  # why nothing more is told
        self.torn = ""  # how the last record is cut short: it is being written, or never will be
        self.read = self.size = 0  # bytes
        self._segment = self._offset = self._number = 0
        self._inode = 0
        self._log: bytes | None = None  # what names it in all its segments

    def news(self) -> Iterator[Placed]:
        """Yield the records that were not told before, as far as they are whole."""
        if self.damage:
            return
        try:
            found = segments(self.path)
            if len(found) <= self._segment:
                raise LogError(f"{self.path}: another log stands in its place: it has less to read")
            self.size = sum(each.path.stat().st_size for each in found)
            before = sum(each.path.stat().st_size for each in found[: self._segment])
            for segment in found[self._segment :]:
                self._enter(segment)
                yield from self._of_segment(segment, before)
                before += segment.path.stat().st_size
        except TornRecord as error:
            self.torn = str(error)
        except (LogError, OSError) as error:
            self.damage = str(error)
        else:
            self.torn = ""

    def _enter(self, segment: Segment) -> None:
        inode = segment.path.stat().st_ino
        if segment.number != self._segment or inode != self._inode:
            self._segment, self._inode, self._offset = segment.number, inode, 0

    def _of_segment(self, segment: Segment, before: int) -> Iterator[Placed]:
        segment.before = None if segment.number else 0  # as its header says
        with opened(segment.path) as file:
            begin, due = self._offset, self._number
            segment.log = self._log
            for piece in pieces(segment, file, begin, due):
                self._log = segment.log
                if isinstance(piece, Damage):
                    raise LogError(f"{piece.path}: offset {piece.start}: {piece.cause}")
                offset, payload = piece
                if not begin:  # from the segment's start
                    begin, due = offset, segment.before or 0
                number, due = due, due + 1
                self._offset = offset + FRAME.size + len(payload)
                self.read = before + self._offset
                if number < self._number:
                    continue
                self._number = number + 1
                record = decoded(segment.path, offset, payload)
                yield Placed(record, number, segment.number, offset)


def payload_of(path: Path, number: int, segment: int, offset: int) -> bytes:
    """Return the payload of a delivery, last seen there; empty where it was compacted away. Raises
    LogError.
    """
    there = segments(path)
    if segment < len(there):
        with opened(there[segment].path) as file:
            found = payload_at(file, offset)
            file.seek(offset)
            frame = file.read(FRAME.size)
        if found and FRAME.unpack(frame)[2] == number:
            record = decoded(path, offset, found)
            return record.payload if isinstance(record, Delivered) else b""
    return next((payload for _, payload in payloads_of(path, [number])), b"")  # it was moved
