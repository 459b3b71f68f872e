"""The event log: one append-only file of facts; recovery, resume and audit are each a fold over it.

Consumes records from the server; produces `<run_dir>/events.log`. `append` collects, `sync` makes
everything collected durable at once, and only then may anything be answered (group commit). Waits
for nothing but the disk.

A process that is killed while it writes leaves a last record that is cut short; nothing was
acknowledged of it, so `EventLog.open` sets it aside in `events.log.torn`. Anything else that is not
whole is refused: a log is never repaired. Its one writer holds a lock on it while it lives.
"""

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from configs.files import sync
from replay.log_format import (
    FORMAT_VERSION,
    FRAME,
    HEADER,
    MAGIC,
    MAX_RECORD_BYTES,
    Damage,
    TornRecord,
    payloads,
    pieces,
    seal,
)
from replay.protocol import LogError
from replay.records import Record

FILE_NAME = "events.log"
TORN_SUFFIX = ".torn"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class LogFull(LogError):
    """There is no room on the disk, or the quota is used up; there may be again."""


class EventLog:
    """An event log open for appending."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._end = os.fstat(fd).st_size  # of what is durable
        self._collected = bytearray()

    @classmethod
    def create(cls, path: Path) -> "EventLog":
        """Start a new log. Raises LogError when the file exists: history is never overwritten."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except FileExistsError as error:
            raise LogError(
                f"{path} already exists: choose another run_dir, or go on with that run: --resume"
            ) from error
        except OSError as error:
            raise LogError(f"{path}: cannot be created: {error.strerror}") from error
        log = cls(path, fd)
        _lock(path, fd, fcntl.LOCK_EX)
        log._collected += HEADER.pack(MAGIC, FORMAT_VERSION)
        log.sync()
        sync(path.parent)
        return log

    @classmethod
    def open(cls, path: Path) -> "EventLog":
        """Reopen a log to append to it, after its last whole record. Raises LogError."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND)
            try:
                _lock(path, fd, fcntl.LOCK_EX)  # before looking: a writer may be in mid-record
                _set_aside(path, whole_bytes(path))
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise LogError(f"{path}: cannot be appended to: {error.strerror}") from error
        return cls(path, fd)

    def append(self, records: Sequence[Record]) -> None:
        """Collect records, in order, for the next `sync`. Raises LogError, and collects none."""
        start = len(self._collected)
        try:
            for record in records:
                self._frame(record)
        except LogError:
            del self._collected[start:]
            raise

    def sync(self) -> None:
        """Return once everything collected is on the disk.

        Raises LogError. Then nothing collected may be acknowledged; LogFull says that it is still
        collected, and that the next call may succeed.
        """
        if not self._collected:
            return
        try:
            self._write(self._collected)
            os.fdatasync(self._fd)
        except OSError as error:
            # What a full disk still took would lie before the next attempt.
            again = error.errno in _FULL and self._cut_back()
            raise (LogFull if again else LogError)(
                f"{self.path}: offset {self._end}: cannot write {len(self._collected)} bytes: "
                f"{error.strerror}"
            ) from error
        self._end += len(self._collected)
        self._collected.clear()

    def close(self) -> None:
        """Close the file, without what is collected and not synced; closing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self._fd >= 0:
                self.sync()
        finally:
            self.close()

    def _frame(self, record: Record) -> None:
        """Encode it where it will be written from: trajectories are not copied once more."""
        at = len(self._collected)
        self._collected += bytes(FRAME.size)
        _ENCODER.encode_into(record, self._collected, at + FRAME.size)
        size = len(self._collected) - at - FRAME.size
        if size > MAX_RECORD_BYTES:
            raise LogError(
                f"{self.path}: offset {self._end}: a {type(record).__name__} record of "
                f"{size} bytes: at most {MAX_RECORD_BYTES}"
            )
        seal(self._collected, at)

    def _write(self, data: bytearray) -> None:
        with memoryview(data) as view:
            done = 0
            while done < len(view):
                done += os.write(self._fd, view[done:])

    def _cut_back(self) -> bool:
        try:
            os.ftruncate(self._fd, self._end)
        except OSError:
            return False
        return True


def read(path: Path) -> Iterator[Record]:
    """Yield every record in order. Raises LogError at the first that is not whole."""
    with _opened(path) as file:
        for offset, payload in payloads(path, file):
            yield _decoded(path, offset, payload)


def read_past_damage(path: Path) -> Iterator[Record | Damage]:
    """Yield every record that can be read and, in its place, each stretch that cannot. Raises
    LogError for what is no log, TornRecord at a last record that is cut short.
    """
    with _opened(path) as file:
        for found in pieces(path, file):
            if isinstance(found, Damage):
                yield found
                continue
            offset, payload = found
            try:
                yield _decoded(path, offset, payload)
            except LogError as error:
                yield Damage(offset, offset + FRAME.size + len(payload), str(error))


def _decoded(path: Path, offset: int, payload: bytes) -> Record:
    try:
        return _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LogError(f"{path}: offset {offset}: {error}") from error


def read_whole(path: Path) -> Iterator[Record]:
    """Yield every record but a last one that is cut short. Raises LogError."""
    try:
        yield from read(path)
    except TornRecord:
        return


def refuse_writer(path: Path) -> None:
    """Raise LogError while a process has the log open for appending."""
    with _opened(path) as file:
        _lock(path, file.fileno(), fcntl.LOCK_SH)


def whole_bytes(path: Path) -> int:
    """Where the last whole record ends. Raises LogError when what follows was not cut short."""
    end = HEADER.size
    try:
        with _opened(path) as file:
            for offset, payload in payloads(path, file):
                end = offset + FRAME.size + len(payload)
    except TornRecord:
        return end
    return end


def _lock(path: Path, fd: int, kind: int) -> None:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LogError(f"{path}: another replay process writes it: end it first") from error
    except OSError as error:
        raise LogError(
            f"{path}: cannot be locked: {error.strerror}: choose a run_dir on another file system"
        ) from error


def _set_aside(path: Path, end: int) -> None:
    """Move what lies behind `end` to a file beside the log, durably, before it is cut off."""
    with path.open("r+b") as log:
        log.seek(end)
        if not (rest := log.read()):
            return
        with path.with_name(path.name + TORN_SUFFIX).open("ab") as torn:
            torn.write(rest)
            torn.flush()
            os.fsync(torn.fileno())
        log.truncate(end)
        os.fsync(log.fileno())


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from error
