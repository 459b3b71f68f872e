"""Snapshots of what a log comes to: `<segment>.snapshot` beside each of the newest two segments.

A snapshot takes the place of the fold of all records before it, so that a start reads the newest
one and what was recorded since. Bytes: magic `FORAGESS`, u32 format version, 16 bytes that name the
log, u64 count of the records that it follows, 32 bytes sha256 of all that and of the body, body
(`replay.ledger.image`). It is written under another name, forced to the disk and only then named;
the records that it follows are on the disk before. One that cannot be used is set aside in
`….snapshot.aside`, and the one before it, or the whole log, is read instead.
"""

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from configs.runtime.files import replacing
from replay.log.format import LOG_ID_BYTES
from replay.log.segments import numbers, segment_path, write_all
from replay.protocol import LogError

SUFFIX, ASIDE_SUFFIX = ".snapshot", ".aside"
KEPT = 2  # one more than is needed: the newest may be bad
_MAGIC, _VERSION = b"FORAGESS", 1
_HEAD = struct.Struct(f"<8sI{LOG_ID_BYTES}sQ")
_DIGEST_BYTES = hashlib.sha256().digest_size


class BadSnapshot(LogError):
    """A snapshot that cannot be used: cut short, changed, of another format, newer than its log."""


@dataclass(frozen=True)
class Snapshot:
    """What `records` records of the log that these bytes name come to."""

    log: bytes
    records: int
    body: bytes


def snapshot_path(path: Path, number: int) -> Path:
    """Return where the snapshot of the log at `path` lies that was made in segment `number`."""
    segment = segment_path(path, number)
    return segment.with_name(segment.name + SUFFIX)


def snapshots(path: Path) -> Iterator[tuple[int, Path]]:
    """Yield number and path of each snapshot of the log at `path`, the newest first."""
    for number in sorted(numbers(path, SUFFIX), reverse=True):
        yield number, snapshot_path(path, number)


def write_snapshot(path: Path, number: int, snapshot: Snapshot) -> None:
    """Write it beside segment `number` of the log at `path`; older ones go. Raises OSError."""
    head = _HEAD.pack(_MAGIC, _VERSION, snapshot.log, snapshot.records)
    digest = hashlib.sha256(head + snapshot.body).digest()
    with replacing(snapshot_path(path, number)) as draft:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            write_all(fd, head + digest + snapshot.body)
        finally:
            os.close(fd)
    for _, older in list(snapshots(path))[KEPT:]:
        older.unlink(missing_ok=True)


def read_snapshot(place: Path) -> Snapshot:
    """Read and verify one. Raises BadSnapshot."""
    try:
        data = place.read_bytes()
    except OSError as error:
        raise BadSnapshot(f"{place}: cannot be read: {error.strerror}") from error
    head, digest = data[: _HEAD.size], data[_HEAD.size :][:_DIGEST_BYTES]
    body = data[_HEAD.size + _DIGEST_BYTES :]
    if hashlib.sha256(head + body).digest() != digest:
        raise BadSnapshot(f"{place}: its digest does not agree")
    magic, version, log, records = _HEAD.unpack(head)
    if (magic, version) != (_MAGIC, _VERSION):
        raise BadSnapshot(f"{place}: not a snapshot of format version {_VERSION}")
    return Snapshot(log, records, body)


def set_aside(place: Path) -> Path:
    """Give a snapshot a name under which nobody looks for one; return it. Raises LogError."""
    try:
        return place.rename(place.with_name(place.name + ASIDE_SUFFIX))
    except OSError as error:
        raise LogError(f"{place}: cannot be set aside: {error.strerror}: remove it") from error
