"""Compaction: closed segments of an event log without the payloads that nothing asks for again.

A train group's payloads are settled once its step is committed (a resumed learner never goes back
behind a durable checkpoint) or it is dropped; an eval group's once its evaluation is finished or it
is dropped. A closed segment whose every payload is settled is written again with those payloads
empty (`records.Compacted`); all else stays: every record, its order, its other fields. A segment
with one payload that is not settled is left alone, as the newest always is. The new file is on the
disk before it takes the name of the old one, so a crash leaves the one or the other, and doing it
again changes nothing. While a run goes on, its replay does the same as `replay.keep` says
(`replay.log.keeping`).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeGuard

import msgspec

from configs.runtime.files import replacing
from replay.codec import decode_trajectory
from replay.log import records
from replay.log.event_log import read_whole
from replay.log.format import Segment, framed, header, payloads
from replay.log.records import Compacted, Delivered, Record, decoded
from replay.log.segments import clear_drafts, lock, locked, opened, segments, write_all
from replay.protocol import CodecError, LogError

_ENCODER = msgspec.msgpack.Encoder()
_CHUNK_BYTES = 1 << 20
_REST_EVERY = 64  # records


@dataclass(frozen=True)
class Change:
    """One closed segment: its size before and after, the payloads taken away now, and why none."""

    path: Path
    bytes_before: int
    bytes_after: int
    payloads: int
    kept: str = ""


class Settled:
    """A fold over the log: `groups` whose payloads nothing asks for again."""

    def __init__(self) -> None:
        self.groups: set[int] = set()
        self._batches: dict[int, tuple[int, ...]] = {}
        self._evaluating: dict[int, list[int]] = {}  # by the evaluation's step

    def take(self, fact: Record) -> None:
        """Take in one record."""
        match fact:
            case records.GroupOpened(kind="eval"):
                self._evaluating.setdefault(fact.evaluation, []).append(fact.group_id)
            case records.Sampled():
                self._batches[fact.step] = fact.group_ids
            case records.StepsCommitted():
                for step in [step for step in self._batches if step <= fact.step]:
                    self.groups.update(self._batches.pop(step))
            case records.GroupDropped():
                self.groups.add(fact.group_id)
            case records.EvaluationFinished():
                self.groups.update(self._evaluating.pop(fact.result.step, ()))
            case _:
                pass


def compact(path: Path) -> Iterator[Change]:
    """Compact the log at `path`, yielding each closed segment. Raises LogError: also while a
    process writes the log, and where anything of it is not whole.
    """
    fds: list[int] = []  # the first segment, and the file that takes its name: both are locked
    try:
        fds.append(locked(path))
        clear_drafts(path)
        settled = Settled()
        for record in read_whole(path):
            settled.take(record)
        for segment in segments(path):
            if segment.closed:
                yield compact_segment(segment, settled.groups.__contains__, fds)
    except OSError as error:
        raise LogError(f"{path}: cannot be compacted: {error.strerror}") from error
    finally:
        for fd in fds:
            os.close(fd)


def compact_segment(
    segment: Segment,
    settled: Callable[[int], bool],
    fds: list[int],
    rest: Callable[[], None] = lambda: None,
) -> Change:
    """Compact one closed segment, if all groups in it are settled; call `rest` now and then. The
    first segment's new file is locked: its descriptor goes to `fds`. Raises LogError, OSError.
    """
    segment.before = segment.log = None  # as its header says
    size = segment.path.stat().st_size
    whole = [fact.group_id for _, fact in _records(segment, rest) if _has_payload(fact)]
    if needed := sorted(group_id for group_id in set(whole) if not settled(group_id)):
        kept = f"{len(needed)} groups may still be asked for, {needed[0]} first"
        return Change(segment.path, size, size, 0, kept)
    if not whole:
        return Change(segment.path, size, size, 0, "nothing to take away")
    with ExitStack() as closing:
        with replacing(segment.path) as draft:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            closing.callback(os.close, fd)
            if not segment.number:
                lock(draft, fd)
            _rewrite(segment, fd, rest)
            after = os.fstat(fd).st_size
        if not segment.number:
            fds.append(fd)
            closing.pop_all()
    return Change(segment.path, size, after, len(whole))


def is_compacted(segment: Segment) -> bool:
    """True where this segment's deliveries have no payloads: they are taken away together. One that
    is damaged is not: `forage audit` says so, and no start depends on it. Raises OSError.
    """
    segment.before = segment.log = None
    facts = (fact for _, fact in _records(segment) if isinstance(fact, Delivered))
    try:
        return any(fact.compacted is not None for fact in islice(facts, 1))
    except LogError:
        return False


def _rewrite(segment: Segment, fd: int, rest: Callable[[], None]) -> None:
    first = segment.before or 0
    written = bytearray(header(segment.number, first, segment.log or b""))
    for number, (payload, fact) in enumerate(_records(segment, rest), first):
        shorter = _without_payload(segment, fact) if _has_payload(fact) else fact
        written += framed(payload if shorter is fact else _ENCODER.encode(shorter), number)
        if len(written) >= _CHUNK_BYTES:
            write_all(fd, written)
            written.clear()
    write_all(fd, written)


def _records(
    segment: Segment, rest: Callable[[], None] = lambda: None
) -> Iterator[tuple[bytes, Record]]:
    with opened(segment.path) as file:
        for count, (offset, payload) in enumerate(payloads(segment, file)):
            if not count % _REST_EVERY:
                rest()
            yield payload, decoded(segment.path, offset, payload)


def _has_payload(fact: Record) -> TypeGuard[Delivered]:
    return isinstance(fact, Delivered) and fact.compacted is None


def _without_payload(segment: Segment, fact: Delivered) -> Delivered:
    try:
        turns = decode_trajectory(fact.payload).turns
    except CodecError as error:
        raise LogError(
            f"{segment.path}: the payload of sibling {fact.sibling} of group {fact.group_id} "
            f"cannot be decoded: {error}: compact with the program that wrote it"
        ) from error
    versions = sum(int(turn.policy_versions.sum()) for turn in turns)
    left = Compacted(len(fact.payload), versions)
    return msgspec.structs.replace(fact, payload=b"", compacted=left)
