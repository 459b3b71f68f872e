"""Every search on record: who made it, when its rollout was delivered, and what it brought."""

from pathlib import Path

import pytest

from configs.retrieval import RetrievalConfig
from configs.schema import Config
from replay.log.event_log import FILE_NAME, EventLog
from replay.log.history import Searched, SearchLog
from replay.log.records import LeaseReturned, Stopped
from replay.protocol import LogError
from replay.trajectory import Question, Search
from tests.replay.conftest import record_searches

CONFIG = Config(retrieval=RetrievalConfig(corpus="c.jsonl", top_k=2))
FOUND, NONE = Search("who?", ("p1", "p0"), 0.25, "ok"), Search("what?", (), 0.5, "empty")
ROLLOUTS = (
    Searched(3.5, "actor-1", "train", Question("q-1", "one?", ("1",), 2), 7, 1, 5, ((FOUND,), ())),
    Searched(4.5, "actor-0", "train", Question("q-1", "one?", ("1",), 2), 7, 0, 5, ((), (NONE,))),
    Searched(9.0, "actor-0", "eval", Question("e-1", "two?", ()), 10**12, 0, 5, ((),)),
)


def test_what_was_recorded_is_read(tmp_path: Path) -> None:
    log = SearchLog(record_searches(tmp_path, CONFIG, *ROLLOUTS))
    assert tuple(log.rollouts()) == ROLLOUTS and log.compacted == 0
    assert log.config == CONFIG


def test_what_failed_rollouts_searched_for_is_read_apart(tmp_path: Path) -> None:
    run = record_searches(tmp_path, CONFIG, *ROLLOUTS)
    lost = LeaseReturned(10.0, "actor-0", 8, 1, "RetrievalTimeout: slow", (FOUND,))
    with EventLog.open(run / FILE_NAME) as log:
        log.append([lost])
    assert list(SearchLog(run).failed()) == [lost]
    assert tuple(SearchLog(run).rollouts()) == ROLLOUTS


def test_a_last_record_cut_short_is_left_out(tmp_path: Path) -> None:
    path = record_searches(tmp_path, CONFIG, *ROLLOUTS) / FILE_NAME
    path.write_bytes(path.read_bytes()[:-3])
    assert tuple(SearchLog(tmp_path).rollouts()) == ROLLOUTS[:2]


def test_a_log_that_does_not_begin_with_its_run_is_refused(tmp_path: Path) -> None:
    with EventLog.create(tmp_path / FILE_NAME) as log:
        log.append([Stopped(1.0, "x")])
    with pytest.raises(LogError, match="no RunStarted record"):
        _ = SearchLog(tmp_path).config
    with pytest.raises(LogError, match="cannot be read: No such file"):
        list(SearchLog(tmp_path / "none").rollouts())
