"""Compaction takes settled payloads out of closed segments, and nothing else from anywhere."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from replay.ledger.events import Event
from replay.log.compaction import compact
from replay.log.event_log import EventLog, read
from replay.log.records import Delivered, EvaluationFinished, StepsCommitted
from replay.log.segments import segment_path, segments
from replay.protocol import (
    Batch,
    Committed,
    Evaluate,
    LogError,
    Ready,
    Sample,
)
from tests.replay.crash import killed_everywhere
from tests.replay.log.run import SETTINGS, Run


@pytest.fixture
def run(tmp_path: Path, fresh_ledger: Callable, rollout: Callable) -> Run:
    return Run(tmp_path / "events.log", fresh_ledger, rollout)


def whole(path: Path) -> set[int]:
    """Groups with a payload in the log."""
    return {fact.group_id for fact in read(path) if isinstance(fact, Delivered) and fact.payload}


def without_payloads(path: Path) -> list[object]:
    return [
        msgspec.structs.replace(fact, payload=b"", compacted=None)
        if isinstance(fact, Delivered)
        else fact
        for fact in read(path)
    ]


def test_what_is_committed_goes_and_all_else_stays(run: Run) -> None:
    run.train(*range(1, 9))
    run.send(Committed(1, 5))
    run.train(9)
    run.log.close()
    before = without_payloads(run.path)
    sizes = {fact.group_id: len(fact.payload) for fact in read(run.path) if is_delivered(fact)}
    changes = list(compact(run.path))
    assert sum(change.payloads for change in changes) >= 4
    assert without_payloads(run.path) == before
    assert whole(run.path) >= {6, 7, 8, 9} and len(whole(run.path)) < 9
    for fact in filter(is_delivered, read(run.path)):
        if fact.compacted:
            assert fact.group_id <= 5 and fact.compacted.payload_bytes == sizes[fact.group_id]
            assert fact.compacted.version_sum == 3 * (fact.group_id - 1)
    kept = [change for change in changes if change.kept]
    assert all(change.bytes_before == change.bytes_after for change in kept) and kept
    assert all(change.bytes_before > change.bytes_after for change in changes if not change.kept)
    assert "may still be asked for" in kept[0].kept


def is_delivered(fact: object) -> bool:
    return isinstance(fact, Delivered)


def test_a_resumed_learner_is_served_every_batch_after_the_newest_checkpoint(run: Run) -> None:
    run.train(*range(1, 9))
    run.send(Committed(1, 5))
    given = {step: run.ledger.state.batches[step].group_ids for step in (6, 7, 8)}
    run.log.close()
    list(compact(run.path))
    ledger = run.resumed(5)
    for step, group_ids in given.items():
        batch = ledger.apply(Event("peer", Sample(2, step - 1)), 3.0).replies[0][1]
        assert isinstance(batch, Batch) and batch.group_ids == group_ids
        assert all(payload for group in batch.groups for payload in group)


def test_compacting_again_changes_nothing_and_later_commits_allow_more(run: Run) -> None:
    run.train(*range(1, 7))
    run.send(Committed(1, 3))
    run.log.close()
    list(compact(run.path))
    once = {s.path: s.path.read_bytes() for s in segments(run.path)}
    assert not any(change.payloads for change in compact(run.path))
    assert once == {s.path: s.path.read_bytes() for s in segments(run.path)}
    with EventLog.open(run.path, 1500) as log:
        log.append([StepsCommitted(5.0, 1, 6)])
    assert any(change.payloads for change in compact(run.path))
    newest = segments(run.path)[-1].path.read_bytes()
    assert newest.startswith(once[segments(run.path)[-1].path]), "the newest is left alone"


def test_an_evaluation_is_kept_until_it_is_finished(run: Run) -> None:
    run.send(Evaluate(1, 0))
    run.send(Ready("actor-0", 8, 1, 0))
    evals = [lease for lease in run.leases if lease.kind == "eval"]
    run.leases = [lease for lease in run.leases if lease.kind == "train"]
    run.deliver(evals[0])
    run.train(1, 2, 3, 4)
    run.send(Committed(1, 4))
    run.log.close()
    first = segments(run.path)[0].path
    kept = {change.path: change.kept for change in compact(run.path)}
    assert f"{evals[0].group_id} first" in kept[first] and evals[0].group_id in whole(run.path)
    run.log = EventLog.open(run.path, 1500)
    run.deliver(evals[1])
    run.log.close()
    assert any(isinstance(fact, EvaluationFinished) for fact in read(run.path))
    assert {change.path: change.payloads for change in compact(run.path)}[first] > 0
    run.resumed(4)


def test_a_log_that_is_written_is_left_alone(run: Run) -> None:
    run.train(1, 2, 3)
    with pytest.raises(LogError, match="another process writes it"):
        list(compact(run.path))


def test_while_it_compacts_nobody_writes(run: Run) -> None:
    run.train(*range(1, 6))
    run.send(Committed(1, 5))
    run.log.close()
    changes = compact(run.path)
    assert next(changes).payloads and segments(run.path)[0].path == run.path
    with pytest.raises(LogError, match="another process writes it"):
        EventLog.open(run.path)
    list(changes)
    EventLog.open(run.path).close()


def test_a_log_that_is_not_whole_is_left_alone(run: Run) -> None:
    run.train(*range(1, 6))
    run.send(Committed(1, 5))
    run.log.close()
    second = segment_path(run.path, 1)
    data = bytearray(second.read_bytes())
    data[-1] ^= 1
    second.write_bytes(data)
    first = run.path.read_bytes()
    with pytest.raises(LogError, match=r"events\.log\.000001: offset"):
        list(compact(run.path))
    assert run.path.read_bytes() == first


def test_a_payload_that_is_missed_is_named_when_replay_starts(run: Run) -> None:
    run.train(1, 2, 3, 4)
    run.send(Committed(1, 4))
    run.log.close()
    list(compact(run.path))
    facts = [fact for fact in read(run.path) if not isinstance(fact, StepsCommitted)]
    with pytest.raises(LogError, match="payloads of group 1 were compacted away, but no step"):
        run.new_ledger(SETTINGS).restore(facts)


@pytest.mark.slow
def test_a_kill_at_any_system_call_leaves_a_whole_log(run: Run) -> None:
    run.train(*range(1, 6))
    run.send(Committed(1, 5))
    run.log.close()
    before = without_payloads(run.path)
    original = {s.path: s.path.read_bytes() for s in segments(run.path)}
    kills = 0
    for _ in killed_everywhere(lambda: list(compact(run.path)) and None):
        kills += 1
        assert without_payloads(run.path) == before
        EventLog.open(run.path).close()
        assert not list(run.path.parent.glob("*.draft"))
        list(compact(run.path))
        assert without_payloads(run.path) == before and whole(run.path) <= {5}
        for path, data in original.items():
            path.write_bytes(data)
    assert kills > 20 and without_payloads(run.path) == before
    assert not any(change.payloads for change in compact(run.path)), "the last child finished"
