"""The restoration of a ledger from its log: the newest snapshot that can be used, then what was
recorded since, in one pass.

A snapshot that is cut short, changed, or newer than its log is passed over, by name: the one before
it is read, or the whole log. What cannot be is refused: a snapshot of another log, a segment that
is missing under one.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from replay.ledger.image import BadImage, decoded
from replay.ledger.ledger import Ledger
from replay.log.format import TornRecord
from replay.log.records import Record, RunResumed, Stopped
from replay.log.segments import segment_path, segments
from replay.log.snapshots import BadSnapshot, read_snapshot, snapshots
from replay.log.tail import End, Tail, log_id, payloads_of
from replay.protocol import LogError

WATCH_EVERY = 200  # records
Watch = Callable[[int, int], None]  # told of bytes read, and of how many


def restore(
    ledger: Ledger,
    path: Path,
    passed_over: Callable[[Path, str], None],
    watch: Watch = lambda done, total: None,
    *,
    payloads: bool = True,
) -> End:
    """Fold the log at `path` into a new ledger; return where it ends, whole. `passed_over` is told
    of each snapshot that cannot be used, and why. Without `payloads` those from before the snapshot
    stay in the log: for who only asks how a run stands. Raises LogError.
    """
    blank = ledger.image
    for number, place in snapshots(path):
        try:
            tail = _from_snapshot(ledger, path, number, place)
            return _fold(ledger, tail, path, watch, place, payloads)
        except BadSnapshot as error:
            passed_over(place, str(error))
            ledger.begin(blank)
    return _fold(ledger, Tail(path), path, watch)


def stop_cause(path: Path) -> str:
    """Return the cause of the stop on record, '' where there is none, from the newest snapshot and
    what was recorded since. Raises LogError.
    """
    cause, after = "", 0
    for _, place in snapshots(path):
        with suppress(BadSnapshot, BadImage):
            found = read_snapshot(place)
            cause, after = decoded(found.body).stop_cause, found.records
            break
    with suppress(TornRecord):
        for record in Tail(path, after):
            if isinstance(record, RunResumed | Stopped):
                cause = record.cause if isinstance(record, Stopped) else ""
    return cause


def _from_snapshot(ledger: Ledger, path: Path, number: int, place: Path) -> Tail:
    """Begin with a snapshot; return what was recorded since."""
    snapshot = read_snapshot(place)
    if number > segments(path)[-1].number:
        raise LogError(
            f"{segment_path(path, number)}: this segment of the event log is missing, but "
            f"{place.name} is there: put it back"
        )
    if snapshot.log != log_id(path):
        raise LogError(
            f"{place}: a snapshot of another log: remove it, or put back the log that goes with it"
        )
    try:
        ledger.begin(snapshot.body)
    except BadImage as error:
        raise BadSnapshot(f"{place}: {error}") from error
    except LogError as error:
        raise LogError(f"{place}: {error}") from error
    if (known := ledger.state.facts) != snapshot.records:
        raise BadSnapshot(f"{place}: it follows {snapshot.records} records, and knows {known}")
    return Tail(path, snapshot.records)


def _fold(
    ledger: Ledger,
    tail: Tail,
    path: Path,
    watch: Watch,
    place: Path | None = None,
    payloads: bool = True,
) -> End:
    after = ledger.state.facts

    def facts() -> Iterator[Record]:
        with suppress(TornRecord):
            for count, record in enumerate(tail):
                if not count % WATCH_EVERY:
                    watch(*tail.progress)
                yield record
        if tail.end.records < after:
            raise BadSnapshot(
                f"{place}: newer than the log: it follows {after} records, and there are "
                f"{tail.end.records}"
            )

    def fetch(numbers: Collection[int]) -> Iterator[tuple[int, bytes]]:
        for count, found in enumerate(payloads_of(path, numbers)):
            if not count % WATCH_EVERY:
                watch(*tail.progress)
            yield found

    ledger.restore(facts(), fetch if payloads else None)
    return tail.end
