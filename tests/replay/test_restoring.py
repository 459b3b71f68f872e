"""A start from a snapshot and what follows it: the state that a fold of the whole log gives."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from replay.ledger.ledger import Ledger
from replay.log import tail
from replay.log.compaction import compact
from replay.log.event_log import EventLog, read
from replay.log.segments import opened, segment_path, segments
from replay.log.snapshots import Snapshot, read_snapshot, snapshots, write_snapshot
from replay.log.tail import Tail
from replay.protocol import Committed, LogError
from replay.questions import Questions
from replay.restoring import restore
from replay.server.keeper import Keeper
from tests.replay.crash import killed_everywhere
from tests.replay.ledger.machine import state_of
from tests.replay.log.run import SETTINGS, Run


@pytest.fixture
def run(tmp_path: Path, fresh_ledger: Callable, rollout: Callable) -> Run:
    """Nine steps, of which five are committed, and snapshots after steps 4 and 7."""
    found = Run(tmp_path / "events.log", fresh_ledger, rollout)
    found.train(1, 2, 3, 4)
    save(found)
    found.train(5, 6, 7)
    found.send(Committed(1, 5))
    save(found)
    found.train(8, 9)
    found.log.close()
    assert len(list(snapshots(found.path))) == 2
    return found


def save(run: Run) -> None:
    found = Snapshot(run.log.name, run.log.records, run.ledger.image)
    write_snapshot(run.path, run.log.segment, found)


def restored(run: Run) -> tuple[Ledger, list[str]]:
    """A new ledger from what is there, and why snapshots were passed over."""
    causes: list[str] = []
    ledger = run.new_ledger(SETTINGS)
    end = restore(ledger, run.path, lambda _, why: causes.append(why))
    assert end.records == ledger.state.facts
    return ledger, causes


def is_whole(run: Run, ledger: Ledger) -> bool:
    """True where the ledger is what the whole log gives, payloads included."""
    whole = run.new_ledger(SETTINGS)
    whole.restore(read(run.path))
    return state_of(ledger.state) == state_of(whole.state) and ledger.latest == whole.latest


def places(run: Run) -> tuple[Path, Path]:
    newest, before = (place for _, place in snapshots(run.path))
    return newest, before


def test_a_snapshot_and_the_tail_are_the_whole_log(run: Run) -> None:
    ledger, causes = restored(run)
    assert causes == [] and is_whole(run, ledger)
    assert all(group.payloads for group in ledger.state.sampled.values())


def test_nothing_before_a_snapshot_is_read_but_payloads_that_may_be_asked_for(run: Run) -> None:
    first = segments(run.path)[0].path
    first.write_bytes(first.read_bytes()[:-1] + b"?")  # of committed groups
    ledger, causes = restored(run)
    assert causes == [] and sorted(ledger.state.batches) == [6, 7, 8, 9]
    with pytest.raises(LogError, match="offset"):
        list(read(run.path))


@pytest.mark.parametrize("spoil", [
    lambda data: data[:-1], lambda data: b"", lambda data: data[:20],
    lambda data: data[:90] + bytes([data[90] ^ 1]) + data[91:],
    lambda data: b"?" + data[1:],
])  # fmt: skip
def test_a_snapshot_that_is_cut_short_or_changed_is_passed_over(
    run: Run, spoil: Callable[[bytes], bytes]
) -> None:
    newest, before = places(run)
    newest.write_bytes(spoil(newest.read_bytes()))
    ledger, (cause,) = restored(run)
    assert cause.startswith(str(newest)) and is_whole(run, ledger)
    before.write_bytes(spoil(before.read_bytes()))
    ledger, causes = restored(run)
    assert len(causes) == 2 and is_whole(run, ledger)


def test_an_image_of_another_program_is_passed_over(run: Run) -> None:
    number, _ = next(snapshots(run.path))
    kept = read_snapshot(places(run)[0])
    write_snapshot(run.path, number, Snapshot(kept.log, kept.records, b"\x80"))
    ledger, (cause,) = restored(run)
    assert "no image of a ledger of this program" in cause and is_whole(run, ledger)


def test_a_snapshot_that_is_newer_than_the_log_is_passed_over(run: Run) -> None:
    number, newest = next(snapshots(run.path))
    ledger, _ = restored(run)
    newest.unlink()
    records = ledger.state.facts = ledger.state.facts + 1
    write_snapshot(run.path, number, Snapshot(run.log.name, records, ledger.image))
    ledger, (cause,) = restored(run)
    assert cause.startswith(f"{newest}: newer than the log: it follows {records} records, and ")
    assert cause.endswith(f"there are {records - 1}") and is_whole(run, ledger)


def test_a_snapshot_that_miscounts_is_passed_over(run: Run) -> None:
    number, newest = next(snapshots(run.path))
    kept = read_snapshot(newest)
    write_snapshot(run.path, number, Snapshot(kept.log, kept.records - 1, kept.body))
    ledger, (cause,) = restored(run)
    words = f"it follows {kept.records - 1} records, and knows {kept.records}"
    assert cause == f"{newest}: {words}" and is_whole(run, ledger)


def test_a_snapshot_of_another_log_is_refused(run: Run) -> None:
    newest, _ = places(run)
    kept = read_snapshot(newest)
    number, _ = next(snapshots(run.path))
    write_snapshot(run.path, number, Snapshot(bytes(16), kept.records, kept.body))
    with pytest.raises(LogError, match=f"{newest}: a snapshot of another log: remove it"):
        restored(run)


def test_a_segment_that_is_missing_under_a_snapshot_is_refused(run: Run) -> None:
    number, newest = next(snapshots(run.path))
    for segment in segments(run.path)[number:]:
        segment.path.unlink()
    words = f"{segment_path(run.path, number)}: this segment of the event log is missing, but "
    with pytest.raises(LogError, match=f"{words}{newest.name} is there: put it back"):
        restored(run)


def test_other_questions_are_refused(run: Run) -> None:
    ledger = run.new_ledger(SETTINGS)
    others = Questions(ledger.state.questions._questions, seed=8)
    ledger.state.questions = others
    with pytest.raises(LogError, match=r"\.snapshot: the log is of other .* or another seed"):
        restore(ledger, run.path, lambda _, why: None)


def test_a_payload_that_was_compacted_after_a_snapshot_is_not_missed(run: Run) -> None:
    with EventLog.open(run.path, 1500) as log:
        run.log = log
        run.send(Committed(1, 9))
        run.train(10)
    assert sum(change.payloads for change in compact(run.path)) > 8
    ledger, causes = restored(run)
    assert causes == [] and is_whole(run, ledger)


@pytest.mark.slow
def test_a_kill_at_any_system_call_while_one_is_written_loses_nothing(
    run: Run, tmp_path: Path
) -> None:
    with EventLog.open(run.path, 1500) as log:
        run.log = log
        run.train(10)
        found = Snapshot(log.name, log.records, run.ledger.image)
        number = log.segment
    shutil.copytree(tmp_path, kept := tmp_path.with_name("kept"))
    kills = 0
    for _ in killed_everywhere(lambda: write_snapshot(run.path, number, found)):
        kills += 1
        ledger, causes = restored(run)
        assert causes == [] and is_whole(run, ledger)
        EventLog.open(run.path, 1500).close()
        assert not list(tmp_path.glob("*.draft"))
        shutil.rmtree(tmp_path)
        shutil.copytree(kept, tmp_path)
    assert kills > 5 and len(list(snapshots(run.path))) == 2
    assert read_snapshot(places(run)[0]) == found, "the last child finished"


def test_each_segment_has_a_snapshot_and_the_last_one_nothing_behind_it(run: Run) -> None:
    with EventLog.open(run.path, 1500) as log:
        run.log = log
        keeper = Keeper(run.ledger, log)
        for step in range(10, 14):
            run.train(step)
            keeper.look()
            keeper.wait()
            assert next(snapshots(run.path))[0] == log.segment
        keeper.close()
    newest = read_snapshot(places(run)[0])
    assert newest.records == log.records and list(Tail(run.path, newest.records)) == []
    ledger, causes = restored(run)
    assert causes == [] and is_whole(run, ledger)


def test_who_asks_how_a_run_stands_reads_nothing_from_before_the_snapshot(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = restored(run)
    seen: list[str] = []
    monkeypatch.setattr(tail, "opened", lambda path: seen.append(path.name) or opened(path))
    ledger = run.new_ledger(SETTINGS)
    restore(ledger, run.path, lambda *_: None, payloads=False)
    numbered = [segment_path(run.path, n).name for n, _ in snapshots(run.path)]
    assert seen and all(name >= numbered[0] for name in seen)
    standing = ("facts", "committed", "last_sampled", "stop_cause", "recorded")
    assert all(getattr(ledger.state, n) == getattr(whole.state, n) for n in standing)
