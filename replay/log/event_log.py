"""The event log: append-only files of facts; recovery, resume and audit are each a fold over them.

It is `<run_dir>/events.log` and the segments that follow it (`replay.log.segments`). `append`
collects, `sync` makes everything collected durable at once, and only then may anything be answered
(group commit).

A segment that has grown to `segment_bytes`, or to SEGMENT_RECORDS, is closed by the next `sync`,
which begins another and writes there. All of a closed segment is on the disk before the next one
has a name, so a process that is killed while it writes cuts short a record at the end of the newest
one only; nothing was acknowledged of it, and `EventLog.open` sets it aside in `<segment>.torn`.
Anything else that is not whole is refused: a log is never repaired. Its one writer holds a lock on
it while it lives.
"""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from configs.runtime.files import sync
from replay.log.format import (
    FRAME,
    MAX_RECORD_BYTES,
    Damage,
    Segment,
    TornRecord,
    header,
    new_log_id,
    pieces,
    seal,
)
from replay.log.records import Record, decoded
from replay.log.segments import (
    begin,
    clear_drafts,
    exists,
    lock,
    locked,
    opened,
    segment_path,
    segments,
    write_all,
)
from replay.log.tail import End, Tail, log_end
from replay.protocol import LogError

FILE_NAME = "events.log"
SEGMENT_BYTES = 256 << 20
SEGMENT_RECORDS = 100_000  # that a start may have to fold behind the newest snapshot
TORN_SUFFIX = ".torn"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ENCODER = msgspec.msgpack.Encoder()


class LogFull(LogError):
    """There is no room on the disk, or the quota is used up; there may be again."""


class EventLog:
    """An event log open for appending; `path` is its first segment."""

    def __init__(self, path: Path, fd: int, segment_bytes: int, end: End) -> None:
        """`fd` is the first segment, locked."""
        self.path = path
        self._locked, self._limit = fd, segment_bytes
        self.locks: list[int] = []  # of files that compaction puts in the place of the first
        self._number, self._records = end.segment.number, end.records
        self._before = end.segment.before or 0
        self._log = end.segment.log or new_log_id()
        self._fd = fd
        if self._number:
            self._fd = os.open(segment_path(path, self._number), os.O_WRONLY | os.O_APPEND)
        self._end = os.fstat(self._fd).st_size  # of what is durable
        self._collected = bytearray()
        self._count = 0  # records collected

    @classmethod
    def create(cls, path: Path, segment_bytes: int = SEGMENT_BYTES) -> "EventLog":
        """Start a new log. Raises LogError when the file exists: history is never overwritten."""
        try:
            if exists(path):
                raise FileExistsError
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except FileExistsError as error:
            raise LogError(
                f"{path} already exists: choose another run_dir, or go on with that run: --resume"
            ) from error
        except OSError as error:
            raise LogError(f"{path}: cannot be created: {error.strerror}") from error
        log = cls(path, fd, segment_bytes, End(Segment(path), 0, 0))
        lock(path, fd)
        log._collected += header(number=0, before=0, log=log._log)
        log.sync()
        sync(path.parent)
        return log

    @classmethod
    def open(
        cls,
        path: Path,
        segment_bytes: int = SEGMENT_BYTES,
        read_to_end: Callable[[Path], End] = log_end,
    ) -> "EventLog":
        """Reopen a log to append to it, after its last whole record, which `read_to_end` finds
        while nobody else writes. Raises LogError.
        """
        try:
            fd = locked(path)  # before looking: a writer may be in mid-record
            try:
                end = read_to_end(path)
                clear_drafts(path)
                _set_aside(end.segment.path, end.offset)
                log = cls(path, fd, segment_bytes, end)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise LogError(f"{path}: cannot be appended to: {error.strerror}") from error
        return log

    def append(self, records: Sequence[Record]) -> None:
        """Collect records, in order, for the next `sync`. Raises LogError, and collects none."""
        start = len(self._collected)
        try:
            for number, record in enumerate(records, self._records + self._count):
                self._frame(record, number)
        except LogError:
            del self._collected[start:]
            raise
        self._count += len(records)

    def sync(self) -> None:
        """Return once everything collected is on the disk.

        Raises LogError. Then nothing collected may be acknowledged; LogFull says that it is still
        collected, and that the next call may succeed.
        """
        if not self._collected:
            return
        try:
            if self._end >= self._limit or self._records - self._before >= SEGMENT_RECORDS:
                self._rotate()
            write_all(self._fd, self._collected)
            os.fdatasync(self._fd)
        except OSError as error:
            # What a full disk still took would lie before the next attempt.
            again = error.errno in _FULL and self._cut_back()
            what = f"cannot write {len(self._collected)} bytes: {error.strerror}"
            kind = LogFull if again else LogError
            raise kind(f"{self._newest}: offset {self._end}: {what}") from error
        self._end += len(self._collected)
        self._records += self._count
        self._collected.clear()
        self._count = 0

    def close(self) -> None:
        """Close the files, without what is collected and not synced; closing twice is harmless."""
        for fd in {self._fd, self._locked, *self.locks} - {-1}:
            os.close(fd)
        self._fd = self._locked = -1
        self.locks.clear()

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self._fd >= 0:
                self.sync()
        finally:
            self.close()

    @property
    def segment(self) -> int:
        """The number of the newest segment."""
        return self._number

    @property
    def name(self) -> bytes:
        """The bytes that name this log."""
        return self._log

    @property
    def records(self) -> int:
        """How many records are on the disk."""
        return self._records

    @property
    def _newest(self) -> Path:
        return segment_path(self.path, self._number)

    def _rotate(self) -> None:
        """Close the newest segment, all of which is on the disk, and begin another."""
        fd = begin(self.path, self._number + 1, self._records, self._log)
        if self._fd != self._locked:
            os.close(self._fd)
        self._fd, self._number, self._before = fd, self._number + 1, self._records
        self._end = os.fstat(fd).st_size

    def _frame(self, record: Record, number: int) -> None:
        """Encode it where it will be written from: trajectories are not copied once more."""
        at = len(self._collected)
        self._collected += bytes(FRAME.size)
        _ENCODER.encode_into(record, self._collected, at + FRAME.size)
        size = len(self._collected) - at - FRAME.size
        if size > MAX_RECORD_BYTES:
            what = f"a {type(record).__name__} record of {size} bytes: at most {MAX_RECORD_BYTES}"
            raise LogError(f"{self._newest}: offset {self._end}: {what}")
        seal(self._collected, at, number)

    def _cut_back(self) -> bool:
        try:
            os.ftruncate(self._fd, self._end)
        except OSError:
            return False
        return True


def read(path: Path) -> Iterator[Record]:
    """Yield every record in order. Raises LogError at the first that is not whole."""
    return iter(Tail(path))


def read_past_damage(path: Path) -> Iterator[Record | Damage]:
    """Yield every record that can be read and, in its place, each stretch that cannot. Raises
    LogError for what is no log or lacks a segment, TornRecord at a last record that is cut short.
    """
    records: int | None = 0  # in the segments so far; None: damage leaves it open
    log: bytes | None = None
    for segment in segments(path):
        segment.before, segment.log, found, whole = records, log, 0, True
        with opened(segment.path) as file:
            for piece in pieces(segment, file):
                damaged = isinstance(piece, Damage)
                found, whole = found + (not damaged), whole and not damaged
                yield _understood(segment.path, piece)
        records = segment.before + found if whole and segment.before is not None else None
        log = log or segment.log


def read_whole(path: Path) -> Iterator[Record]:
    """Yield every record but a last one that is cut short. Raises LogError."""
    try:
        yield from read(path)
    except TornRecord:
        return


def refuse_writer(path: Path) -> None:
    """Raise LogError while a process has the log open for appending."""
    segments(path)  # none is missing
    with opened(path) as file:
        lock(path, file.fileno(), shared=True)


def _understood(path: Path, piece: tuple[int, bytes] | Damage) -> Record | Damage:
    if isinstance(piece, Damage):
        return piece
    offset, payload = piece
    try:
        return decoded(path, offset, payload)
    except LogError as error:
        return Damage(path, offset, offset + FRAME.size + len(payload), str(error))


def _set_aside(path: Path, end: int) -> None:
    """Move what lies behind `end` to a file beside the log, durably, before it is cut off. What is
    left is on the disk then, as all of a segment must be before the next one has a name.
    """
    with path.open("r+b") as log:
        log.seek(end)
        if rest := log.read():
            with path.with_name(path.name + TORN_SUFFIX).open("ab") as torn:
                torn.write(rest)
                torn.flush()
                os.fsync(torn.fileno())
            log.truncate(end)
        os.fsync(log.fileno())
