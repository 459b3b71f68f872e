"""The books of logs that a real ledger wrote close; each fault that is put in is named."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replay.log.compaction import Settled, compact_segment
from replay.log.event_log import FILE_NAME, read
from replay.log.format import FRAME, framed, header
from replay.log.records import (
    Delivered,
    GroupDropped,
    GroupOpened,
    LearnerResumed,
    Leased,
    LeaseReturned,
    Record,
    ReplayRestarted,
    Resampled,
    RunResumed,
    RunStarted,
    Sampled,
    StepsCommitted,
    Stopped,
)
from replay.log.segments import segments
from replay.protocol import Ready
from scripts import cli
from scripts.runs.books import Audit
from scripts.runs.record import frames
from scripts.runs.record.frames import LogReader
from tests.scripts.conftest import RecordedRun


def folded(run: RecordedRun, *more: Record) -> Audit:
    run.append(*more)
    found = Audit()
    found.fold(run.path / FILE_NAME)
    return found


def test_a_resumed_run_closes(make_recorded_run: Callable[..., RecordedRun]) -> None:
    run = make_recorded_run(drop_no_signal=True)
    run.evaluate(0)
    run.deliver_all(reward=1.0)  # the evaluation, and two train groups without signal
    for step in range(2):
        run.train(step)
    run.resume(step=1)
    run.sample(1)
    found = folded(run)
    assert found.faults == []
    summary = found.summary()
    assert summary["steps"] == 2 and summary["steps_committed"] == 1
    groups = summary["train_groups"]
    assert (groups["committed"], groups["sampled"], groups["dropped: no_signal"]) == (2, 2, 2)
    assert groups["opened"] == 6 + groups["unfinished"]
    assert summary["eval_groups"] == {"opened": 2, "answered": 2, "unfinished": 0}
    leases = summary["leases"]
    assert leases["given"] == leases["delivered"] == 16 and leases["held"] == 0


def test_a_launch_ends_the_leases_of_the_one_before(recorded_run: RecordedRun) -> None:
    recorded_run.train(0)
    recorded_run.send("actor", Ready("actor", 100, 1, 1))
    held = folded(recorded_run).summary()["leases"]["held"]
    found = folded(recorded_run, RunResumed(5.0, last(recorded_run, RunStarted).config))
    assert found.faults == [] and found.summary()["leases"]["held"] == 0
    assert found.leases["ended with their processes"] == held > 0


def test_a_restart_of_replay_ends_nothing(recorded_run: RecordedRun) -> None:
    recorded_run.train(0)
    recorded_run.send("actor", Ready("actor", 100, 1, 1))
    held = folded(recorded_run).summary()["leases"]["held"]
    recorded_run.append(ReplayRestarted(5.0))
    recorded_run.train(1)
    found = folded(recorded_run)
    assert found.faults == [] and held > 0
    assert found.summary()["replay_restarts"] == 1
    assert found.leases["ended with their processes"] == 0
    assert found.summary()["steps"] == 2


@pytest.fixture
def trained(recorded_run: RecordedRun) -> RecordedRun:
    """A run of two steps, the first one committed."""
    recorded_run.train(0)
    recorded_run.train(1)
    recorded_run.append(StepsCommitted(2.0, 1, 1))
    return recorded_run


def last(run: RecordedRun, kind: type) -> Any:
    return [record for record in read(run.path / FILE_NAME) if isinstance(record, kind)][-1]


@pytest.mark.parametrize(
    ("put_in", "words"),
    [
        (lambda run: last(run, Delivered), "sibling 1 of group 4 was taken twice"),
        (lambda run: last(run, Delivered), "although its group is trained at step 2"),
        (lambda _: Sampled(3.0, 1, 3, (1,), (), {}), "group 1 was trained at step 3, but it is tr"),
        (lambda _: Sampled(3.0, 1, 2, (), (), {}), "step 2 was put together twice"),
        (lambda _: Sampled(3.0, 1, 5, (), (), {}), "steps are missing between"),
        (lambda _: Sampled(3.0, 1, 3, (9,), (), {}), "it is none to train"),
        (lambda _: Sampled(3.0, 0, 3, (), (), {}), "given to incarnation 0, not to 1"),
        (lambda _: GroupDropped(3.0, 3, "no_signal"), "group 3 was dropped although it is trained"),
        (lambda _: Resampled(3.0, 1, 1), "step 1 was trained again although it is committed"),
        (lambda _: Resampled(3.0, 1, 9), "step 9 was served again, but never put together"),
        (lambda _: StepsCommitted(3.0, 1, 0), "step 0 was committed after step 1"),
        (lambda _: LearnerResumed(3.0, 1, 2), "incarnation 1 resumed after 1"),
        (lambda _: LearnerResumed(3.0, 2, 0), "a learner went back to step 0"),
        (lambda run: last(run, GroupOpened), "was opened twice"),
        (lambda _: Leased(3.0, "actor", 70, (0,), (0,)), "sibling 0 of group 70 was leased before"),
        (lambda _: LeaseReturned(3.0, "actor", 1, 0, "lost"), "who had no lease"),
    ],
)
def test_each_fault_is_named(
    trained: RecordedRun, put_in: Callable[[RecordedRun], Record], words: str
) -> None:
    assert folded(trained).faults == []
    faults = folded(trained, put_in(trained)).faults
    assert any(words in fault for fault in faults), faults


def test_leases_that_the_token_audit_gave_back_are_counted(recorded_run: RecordedRun) -> None:
    held = recorded_run.leases[:2]
    causes = ("TokenMismatch: turn 1: stop", "RetrievalTimeout: late")
    returned = [
        LeaseReturned(3.0, "actor", lease.group_id, lease.sibling, cause)
        for lease, cause in zip(held, causes, strict=True)
    ]
    found = folded(recorded_run, *returned)
    assert found.faults == [] and found.summary()["token_mismatches"] == 1


def test_what_stands_when_the_run_has_stopped_is_a_fault(trained: RecordedRun) -> None:
    trained.send("actor", Ready("actor", 100, 1, 2))
    faults = folded(trained, Stopped(3.0, "completed")).faults
    assert len(faults) == 1 and "the run has stopped, but 2 groups still stand: [5, 6]" in faults[0]


def test_a_group_that_is_too_old_or_not_whole_is_named(
    make_recorded_run: Callable[..., RecordedRun],
) -> None:
    run = make_recorded_run()
    run.deliver_all(0)
    found = folded(run, Sampled(3.0, 1, 1, (1,), (), {}), Sampled(3.0, 1, 2, (2,), (), {}))
    assert found.faults[-1].endswith("group 2 was 1 steps old at step 2: more than 0")
    other = make_recorded_run()
    faults = folded(other, Sampled(3.0, 1, 1, (1,), (), {})).faults
    assert faults[-1].endswith("group 1 was trained at step 1 without [0, 1]")


def test_damage_is_a_fault_and_the_rest_is_read(trained: RecordedRun) -> None:
    log = trained.path / FILE_NAME
    data = bytearray(log.read_bytes())
    at = data.rfind(b"StepsCommitted")
    data[at] ^= 1
    log.write_bytes(data)
    found = folded(trained, Stopped(3.0, "x"))
    assert any("bytes cannot be read: the record's checksum" in fault for fault in found.faults)
    assert found.stop_cause == "x" and found.summary()["steps"] == 2


def test_a_record_taken_out_is_a_fault_and_the_rest_is_read(trained: RecordedRun) -> None:
    log = trained.path / FILE_NAME
    data = log.read_bytes()
    at = data.rfind(b"StepsCommitted") - len(b"\x84\xa4type\xae") - FRAME.size
    end = at + FRAME.size + FRAME.unpack_from(data, at)[0]
    log.write_bytes(data[:at] + data[end:])
    number = FRAME.unpack_from(data, at)[2]
    found = folded(trained, Stopped(3.0, "x"))
    assert f"{log}: offset {at}: record {number} is missing" in found.faults
    assert found.stop_cause == "x" and found.summary()["steps"] == 2


def test_the_command(trained: RecordedRun, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "audit.json"
    assert cli.main(["audit", str(trained.path), "--json", str(file)]) == 0
    assert "the books close" in capsys.readouterr().out
    assert json.loads(file.read_text())["books_close"] is True
    with (trained.path / FILE_NAME).open("ab") as log:
        log.write(b"cut")
    assert cli.main(["audit", str(trained.path)]) == 0
    assert "cut short" in capsys.readouterr().out
    assert cli.main(["audit", str(tmp_path)]) == 2
    assert "no config.yaml or events.log there" in capsys.readouterr().err
    other = trained.path / FILE_NAME
    other.write_bytes(other.read_bytes()[:-3])
    trained.append(Sampled(3.0, 1, 2, (), (), {}))
    assert cli.main(["audit", str(trained.path)]) == 1
    assert "step 2 was put together twice" in capsys.readouterr().out


def test_causes_are_shown_as_they_are(trained: RecordedRun, capsys: Any) -> None:
    cause = "[/x]\x1b[2J\u202e"
    trained.append(GroupDropped(3.0, 1, cause), GroupDropped(3.0, 1, cause))
    assert cli.main(["audit", str(trained.path)]) == 1
    said = capsys.readouterr().out
    assert "dropped: [/x][2J" in said and "\x1b" not in said


def compact_all(run: RecordedRun) -> None:
    """As the replay of a run that goes on compacts what is settled."""
    settled = Settled()
    for record in read(run.path / FILE_NAME):
        settled.take(record)
    for segment in segments(run.path / FILE_NAME):
        if segment.closed:
            compact_segment(segment, settled.groups.__contains__, run.log.locks)


def test_a_run_that_is_compacted_and_goes_on_meanwhile_closes(
    make_recorded_run: Callable[..., RecordedRun],
) -> None:
    run = make_recorded_run(segment_bytes=2000)
    run.train(0)
    run.train(1)
    books, reader, rounds = Audit(), LogReader(run.path / FILE_NAME), 1
    for _ in books.folding(reader):
        if rounds < 5:  # and as often the log has grown, and is compacted up to there
            rounds += 1
            run.train(rounds)
            run.append(StepsCommitted(2.0, 1, rounds))
            compact_all(run)
    assert books.faults == [] and not books.torn
    assert books.steps.count == 6 and books.committed == 5
    assert books.payloads["compacted away"] and books.payloads["decoded"]


def test_a_record_is_read_whole_that_was_being_written(trained: RecordedRun) -> None:
    log = trained.path / FILE_NAME
    whole = log.read_bytes()
    end = whole.rfind(b"StepsCommitted")
    log.write_bytes(whole[:end])
    books = Audit()
    for count, _ in enumerate(books.folding(LogReader(log))):
        if not count:
            log.write_bytes(whole)
    assert books.faults == [] and not books.torn and books.committed == 1


def test_what_only_looks_like_records_is_read_once(tmp_path: Path) -> None:
    false = (10 << 20).to_bytes(4, "little") + bytes(12) + b"\x82\xa4type"
    record = framed(b"\x81\xa4type\xa1x", 7)
    log = tmp_path / FILE_NAME
    log.write_bytes(header(0, 0, bytes(16)) + false * 2000 + record)
    os.truncate(log, 11 << 20)
    read_bytes = 0

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            nonlocal read_bytes
            found = super().readinto(buffer) or 0
            read_bytes += found
            return found

    def opened(path: Path) -> Any:
        return io.BufferedReader(Counted(path), 1 << 20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "opened", opened)
        pieces = list(frames.LogReader(log))
    assert frames.Frame(7, record[FRAME.size :]) in pieces
    assert read_bytes < 200 << 20


def test_damage_behind_damage_lists_the_folder_no_more_often(tmp_path: Path) -> None:
    log, listed = tmp_path / FILE_NAME, list[Path]()
    damage = bytes(7) + b"\x01"  # nothing that a frame could be, nor only zeros
    records = (damage + framed(b"\x81\xa4type\xa1x", n) for n in range(1, 200))
    log.write_bytes(header(0, 0, bytes(16)) + b"".join(records) + damage)

    def listing(path: Path) -> list[Path]:
        listed.append(path)
        return [path]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "segment_files", listing)
        pieces = list(frames.LogReader(log))
    gaps = [piece for piece in pieces if isinstance(piece, frames.Gap)]
    assert len(gaps) >= 200 and len(pieces) - len(gaps) == 199
    assert len(listed) < 9
