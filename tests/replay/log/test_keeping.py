"""Compaction while a run goes on: as `replay.keep` says, and never what may be asked for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from configs.load import ConfigError, load
from replay.log import compaction, keeping
from replay.log.compaction import is_compacted
from replay.log.event_log import EventLog, read
from replay.log.keeping import Closed, Ids, due
from replay.log.records import Delivered
from replay.log.segments import opened, segments
from replay.protocol import Committed, LogError
from replay.server.keeper import Keeper
from tests.replay.log.run import Run

CLOSED = [Closed(n, 100, Ids(10 * n + 10, 10**12 + n)) for n in range(4)]


@pytest.mark.parametrize(
    ("keep", "oldest", "log_bytes", "chosen"),
    [
        ("all", Ids(99, 10**13), 400, []),
        ("committed", Ids(99, 10**13), 400, [0, 1, 2, 3]),
        ("committed", Ids(29, 10**13), 400, [0, 1]),
        ("committed", Ids(30, 10**13), 400, [0, 1, 2]),
        ("committed", Ids(99, 10**12 + 1), 400, [0, 1]),
        (400, Ids(99, 10**13), 400, []),
        (250, Ids(99, 10**13), 400, [0, 1]),
        (250, Ids(15, 10**13), 400, [0]),
    ],
)
def test_what_goes_is_settled_and_the_oldest_first(
    keep: str | int, oldest: Ids, log_bytes: int, chosen: list[int]
) -> None:
    assert [each.number for each in due(CLOSED, oldest, keep, log_bytes)] == chosen


@pytest.fixture
def run(tmp_path: Path, fresh_ledger: Callable, rollout: Callable) -> Run:
    return Run(tmp_path / "events.log", fresh_ledger, rollout)


def look(run: Run, keeper: Keeper) -> None:
    """What a server does after each sync, until nothing is left to do."""
    for _ in range(12):
        keeper.look()
        keeper.wait()


def with_payloads(path: Path) -> set[int]:
    return {fact.group_id for fact in read(path) if isinstance(fact, Delivered) and fact.payload}


def test_a_run_that_goes_on_loses_what_is_trained_and_saved(run: Run) -> None:
    keeper = Keeper(run.ledger, run.log, "committed")
    for step in range(1, 9):
        run.train(step)
        look(run, keeper)
    assert with_payloads(run.path) >= set(range(1, 9)), "nothing is saved yet"
    run.send(Committed(1, 5))
    look(run, keeper)
    assert not with_payloads(run.path) & {1, 2, 3} and with_payloads(run.path) >= {6, 7, 8}
    with pytest.raises(LogError, match="another process writes it"):
        EventLog.open(run.path)  # the file that took the first one's place is locked too
    run.train(9, 10)
    run.send(Committed(1, 10))
    look(run, keeper)
    keeper.close()
    run.log.close()
    assert with_payloads(run.path) <= {8, 9, 10}
    run.resumed(10)


def test_a_snapshot_does_not_wait_for_more_than_one_segment(run: Run) -> None:
    run.train(*range(1, 9))
    run.send(Committed(1, 8))
    keeper = Keeper(run.ledger, run.log, "committed")  # as after a restart: all are due at once
    keeper.look()
    keeper.wait()  # the snapshot of the start
    left = len(with_payloads(run.path))
    keeper.look()
    keeper.wait()
    assert 0 < len(with_payloads(run.path)) < left
    look(run, keeper)
    assert with_payloads(run.path) <= {7, 8}
    keeper.close()
    run.log.close()


def test_what_could_not_be_compacted_is_tried_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Keeper(run.ledger, run.log, "committed")
    run.train(*range(1, 6))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(keeping, "compact_segment", full)
        run.send(Committed(1, 5))
        look(run, keeper)
    assert {1, 2, 3} <= with_payloads(run.path)
    run.train(6)
    run.send(Committed(1, 6))
    look(run, keeper)
    assert not with_payloads(run.path) & {1, 2, 3}
    keeper.close()
    run.log.close()


def test_a_damaged_segment_counts_as_one_that_is_whole(run: Run) -> None:
    run.train(*range(1, 6))
    first = segments(run.path)[0]
    data = bytearray(first.path.read_bytes())
    data[60] ^= 1  # in its first record
    first.path.write_bytes(data)
    assert not is_compacted(first)
    run.log.close()


def test_a_start_opens_no_segment_and_finds_what_was_compacted_before(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.train(*range(1, 5))
    run.send(Committed(1, 4))
    before = Keeper(run.ledger, run.log, "committed")
    look(run, before)
    left = with_payloads(run.path)
    seen: list[Path] = []
    monkeypatch.setattr(compaction, "opened", lambda path: seen.append(path) or opened(path))
    keeper = Keeper(run.ledger, run.log, "committed")
    assert seen == []
    look(run, keeper)
    closed = [each.path for each in segments(run.path) if each.closed]
    assert set(seen) <= set(closed) and with_payloads(run.path) == left
    run.log.close()


def test_a_segment_that_is_gone_is_named(run: Run) -> None:
    keeper = Keeper(run.ledger, run.log, "committed")
    run.train(1, 2, 3)
    gone = segments(run.path)[1].path
    gone.unlink()
    with pytest.raises(LogError, match=rf"{gone}: cannot be read: No such file"):
        keeper.look()
    run.log.close()


def test_only_as_much_goes_as_the_bytes_ask_for(run: Run) -> None:
    run.train(*range(1, 9))
    run.send(Committed(1, 8))
    size = sum(each.path.stat().st_size for each in segments(run.path) if each.closed)
    keeper = Keeper(run.ledger, run.log, size - 1)  # as after a restart
    look(run, keeper)
    left = sum(each.path.stat().st_size for each in segments(run.path) if each.closed)
    assert left < size and with_payloads(run.path) >= set(range(3, 9))
    keeper.close()
    run.log.close()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("4GB", "write 4000000000"),
        ("some", "'all', 'committed', or a number of bytes"),
        (
            "1000",
            "which loses its trajectories as a whole: choose one of 'all', 'committed', or",
        ),
    ],
)
def test_another_value_is_refused_with_what_may_be(tmp_path: Path, value: str, words: str) -> None:
    (tmp_path / "run.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"replay\.keep = ") as raised:
        load(tmp_path / "run.yaml", [f"replay.keep={value}"])
    assert words in str(raised.value)
    assert load(tmp_path / "run.yaml", ["replay.keep=2000000"]).replay.keep == 2_000_000
    assert load(tmp_path / "run.yaml", ["replay.keep=committed"]).replay.keep == "committed"
