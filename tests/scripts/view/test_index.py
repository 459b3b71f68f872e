"""The index has each rollout, gauge, evaluation and event once, and answers selections of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import msgspec
import numpy as np
import pytest

from replay.codec import decode_trajectory
from replay.log.event_log import EventLog, read
from replay.log.records import (
    ActorJoined,
    ActorLeft,
    Delivered,
    EvaluationFinished,
    GroupDropped,
    LearnerResumed,
    Reported,
    RunResumed,
    RunStarted,
    Sampled,
    StepsCommitted,
    Stopped,
)
from replay.protocol import EvalResult, SetResult
from replay.trajectory import Search, StopReason, TokenSequence
from scripts.runs.fleet_log import FleetLog
from scripts.view.answers import overview
from scripts.view.index import Index
from scripts.view.rollouts.wanted import WHICH, Wanted
from tests.scripts.conftest import RecordedRun
from tests.scripts.view import conftest
from tests.scripts.view.conftest import HOSTILE, KEPT, delivery


def numbers(index: Index, **wanted: Any) -> list[int]:
    count, rows = index.rollouts(Wanted(**wanted), 0, 100)
    assert count == len(rows)
    return [row["group_id"] for row in rows]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five rollouts, of which two trained step 7, one was dropped, and one is huge."""
    folder = tmp_path / "run"
    folder.mkdir()
    sets = {"nq\x1b": SetResult(10, 0.5, None, 1.5)}
    result = EvalResult(7, 10, 0.5, None, {"1": 0.5}, {}, 1.5, 7, 7, sets=sets)
    with EventLog.create(folder / "events.log") as log:
        log.append([RunStarted(1.0, 0, "")])
        for number, reward in enumerate((0.0, 0.25, 0.5, None, 1.0), 1):
            log.append(delivery(number, reward=reward, reward_cause="" if reward else "none"))
        log.append([
            Sampled(3.0, 1, 7, (2, 5), (), {"replay/staleness": 1.0}),
            GroupDropped(4.0, 3, "no_signal"),
            Reported(5.0, 1, 7, {"actor/reward": 0.5, "learner/loss": float("nan")}),
            EvaluationFinished(6.0, result),
            StepsCommitted(7.0, 1, 7),
            ActorLeft(8.0, "actor", "died \x1b[31m"),
            Stopped(9.0, "completed"),
        ])  # fmt: skip
        log.sync()
    return folder


def test_rollouts_are_joined_to_what_became_of_them(
    index_of: Callable[..., Index], run: Path
) -> None:
    index = index_of(run)
    _, rows = index.rollouts(Wanted(descending=False), 0, 100)
    told = [(row["group_id"], row["step"], row["staleness"], row["fate"]) for row in rows]
    assert told == [
        (1, None, None, ""),
        (2, 7, 6, "trained"),
        (3, None, None, "dropped: no_signal"),
        (4, None, None, ""),
        (5, 7, 6, "trained"),
    ]
    assert rows[0]["question"] == "question 1" and rows[0]["answer"] == "an answer"
    told_run = index.runs[0]
    assert (told_run.step, told_run.stopped, told_run.first, told_run.last) == (
        7, "completed", 1.0, 9.0,
    )  # fmt: skip
    assert set(told_run.opened) == {1, 4}  # of no other is anything kept


def test_rollouts_are_selected_and_sorted(index_of: Callable[..., Index], run: Path) -> None:
    index = index_of(run)
    assert numbers(index) == [5, 4, 3, 2, 1]
    assert numbers(index, sort="reward") == [5, 3, 2, 1, 4]
    assert numbers(index, sort="reward", descending=False) == [1, 2, 3, 5, 4]
    assert numbers(index, reward=(0.25, 0.5)) == [3, 2] and numbers(index, steps=((7, 7),)) == [
        5,
        2,
    ]
    assert numbers(index, steps=((1, 6), (7, 9)), run=0) == [5, 2]
    assert numbers(index, steps=((8, 8), (7, 7))) == [5, 2]
    assert numbers(index, steps=((1, 6),)) == [] == numbers(index, steps=((1, 6), (8, 9)))
    assert numbers(index, staleness=(6, 6)) == [5, 2] == numbers(index, staleness=(-1e9, 1e9))
    assert numbers(index, staleness=(0, 5)) == [] == numbers(index, searches=(2, 1e9))
    assert numbers(index, searches=(0, 1), reward=(0.25, 0.5)) == [3, 2]
    assert numbers(index, text="QUESTION 4") == [4] and numbers(index, text="%") == []
    assert numbers(index, question="q-2") == [2] == numbers(index, group=2)
    assert numbers(index, kind="eval") == [] == numbers(index, stop="turn_limit")
    assert numbers(index, sort="number; DROP TABLE rollouts") == [5, 4, 3, 2, 1]
    assert index.rollouts(Wanted(), 1, 2)[1][0]["group_id"] == 4


def test_records_of_several_runs_are_told_as_they_came(
    index_of: Callable[..., Index], tmp_path: Path
) -> None:
    """Whichever is named first, and with both at once."""
    runs = [tmp_path / name for name in ("newer", "older")]
    for run, begun in zip(runs, (3.0, 2.0), strict=True):
        run.mkdir()
        with EventLog.create(run / "events.log") as log:
            for number in (1, 2):
                opened, delivered = delivery(number)
                assert isinstance(delivered, Delivered)
                at = begun + 4.0 * (number - 1)
                log.append([opened, msgspec.structs.replace(delivered, now=at)])
            log.sync()
    index = index_of(*runs)

    def order(**wanted: Any) -> list[tuple[int, int]]:
        return [(row["run"], row["group_id"]) for row in index.rollouts(Wanted(**wanted), 0, 9)[1]]

    assert order(descending=False) == [(1, 1), (0, 1), (1, 2), (0, 2)]
    assert order() == [(0, 2), (1, 2), (0, 1), (1, 1)]
    assert order(run=1) == [(1, 2), (1, 1)]


def test_rollouts_are_selected_by_what_went_wrong(
    index_of: Callable[..., Index], run: Path, tmp_path: Path
) -> None:
    (folder := tmp_path / "wrong").mkdir()
    (_, delivered) = delivery(1)
    assert isinstance(delivered, Delivered)
    (only,) = decode_trajectory(delivered.payload).sequences

    def of(*searches: Search, malformed: bool = False) -> tuple[TokenSequence, ...]:
        found = msgspec.structs.replace(only.turns[0], searches=searches, malformed=malformed)
        return (TokenSequence(only.prompt_tokens, (found,)),)

    asked, none = Search("Who ?", ("p",), 0.1, "ok"), Search("who", (), 0.1, "empty")
    with EventLog.create(folder / "events.log") as log:
        log.append(delivery(1, sequences=of(asked, none)))
        log.append(delivery(2, sequences=of(asked, Search("who  ?", ("p",), 0.1, "ok"))))
        log.append(delivery(3, sequences=of(malformed=True)))
        for number, reason in enumerate((StopReason.TURN_LIMIT, StopReason.CONTEXT_LIMIT), 4):
            log.append(delivery(number, stop_reason=reason))
        log.sync()
    index = index_of(folder, run)
    found = {each: numbers(index, run=0, which=each) for each in WHICH}
    assert found == {
        "": [5, 4, 3, 2, 1], "repeated": [2], "empty": [1], "malformed": [3], "limit": [5, 4],
        "dropped": [],
    }  # fmt: skip
    assert numbers(index, run=1, which="dropped") == [3]
    _, rows = index.rollouts(Wanted(run=0, descending=False), 0, 2)
    assert [(row["repeated"], row["empty"]) for row in rows] == [(0, 1), (1, 0)]


def test_gauges_evaluations_and_events_are_kept(index_of: Callable[..., Index], run: Path) -> None:
    index = index_of(run)
    gauges = index.rows("SELECT name, step, value FROM gauges WHERE name NOT LIKE 'view/%'")
    assert gauges == [
        ("actor/reward", 7, 0.5), ("learner/loss", 7, None), ("replay/staleness", 7, 1.0),
    ]  # fmt: skip
    ((step, result),) = index.rows("SELECT step, result FROM evaluations")
    assert step == 7 and json.loads(result)["em_by_set"] == {"nq": 0.5}
    events = index.rows("SELECT kind, step, said FROM events ORDER BY number")
    assert events == [
        ("start", 0, "the run starts"),
        ("group", 7, "group 3 is dropped: no_signal"),
        ("checkpoint", 7, "checkpoint of step 7"),
        ("actor", 7, "actor has left: died [31m"),
        ("stop", 7, "the run stops: completed"),
    ]


def test_a_run_that_goes_on_is_read_on(
    index_of: Callable[..., Index], recorded_run: RecordedRun
) -> None:
    index = index_of(recorded_run.path)
    assert not conftest.read(index) and numbers(index) == []
    for step in range(2):
        recorded_run.train(step)
        assert conftest.read(index) and not conftest.read(index)
    recorded_run.resume(0)
    recorded_run.train(0)  # again
    conftest.read(index)
    log = recorded_run.path / "events.log"
    delivered = [each for each in read(log) if isinstance(each, Delivered)]
    assert index.rollouts(Wanted(), 0, 100)[0] == len(delivered) >= 8


def test_what_strangers_wrote_is_kept_without_what_is_obeyed(
    index_of: Callable[..., Index], hostile_run: Path
) -> None:
    index = index_of(hostile_run)
    _, rows = index.rollouts(Wanted(text="document.title"), 0, 10)
    assert len(rows) == 3
    for name in ("question", "expected", "answer"):
        assert rows[0][name] == KEPT and HOSTILE not in rows[0][name]


def test_what_the_policy_wrote_is_found(
    index_of: Callable[..., Index], hostile_run: Path, bpe_tokenizer: Any, tmp_path: Path
) -> None:
    """In all its turns, as far as it is searched; where no tokenizer can be read, not at all."""
    (_, written) = delivery(9, "Kelu's VORA is \u00e9t\u00e9", bpe_tokenizer)
    assert isinstance(written, Delivered)
    (only,) = decode_trajectory(written.payload).sequences
    said = msgspec.structs.replace(only.turns[0], searches=())
    filler = np.array(bpe_tokenizer.encode("kelu " * 9000, add_special_tokens=False), np.int32)
    long = msgspec.structs.replace(
        said,
        action_tokens=filler,
        behaviour_logprobs=np.zeros(len(filler), np.float32),
        policy_versions=np.zeros(len(filler), np.int32),
    )
    turns = {9: (long, said), 8: (said,) * 2}
    runs = [tmp_path / "known", tmp_path / "unknown"]
    for folder in runs:
        folder.mkdir()
        with EventLog.create(folder / "events.log") as log:
            for number, each in turns.items():
                sequence = TokenSequence(only.prompt_tokens, each)
                log.append(delivery(number, sequences=(sequence,)))
            log.sync()
    shutil.copy(hostile_run / "config.yaml", runs[0])
    index = index_of(*runs)
    assert numbers(index, text="elu's vora is \u00c9T\u00c9", run=0) == [8]
    assert numbers(index, text="kelu kelu", run=0) == [9]
    assert (
        numbers(index, text="elu's vora", run=1) == [] != numbers(index, text="question 9", run=1)
    )


def test_a_megabyte_of_text_is_cut(
    index_of: Callable[..., Index], tmp_path: Path, bpe_tokenizer: Any
) -> None:
    (folder := tmp_path / "long").mkdir()
    with EventLog.create(folder / "events.log") as log:
        log.append(delivery(1, answer="a" * 200_000))
        log.sync()
    index = index_of(folder)
    _, (row,) = index.rollouts(Wanted(), 0, 1)
    assert len(row["answer"]) == 4000


def test_an_index_that_cannot_be_written_is_named(
    index_of: Callable[..., Index], recorded_run: RecordedRun
) -> None:
    index = index_of(recorded_run.path)
    index._base.execute("PRAGMA query_only = ON")
    recorded_run.train(0)
    assert not conftest.read(index)
    (run,) = overview(index)["runs"]
    assert run["trouble"].startswith("the index cannot be written: attempt to write a readonly")
    assert gettempdir() in run["trouble"]
    assert (run["state"], run["damage"]) == ("running", "")  # the log is whole
    index._base.execute("PRAGMA query_only = OFF")
    assert not conftest.read(index)  # what was read in vain is not there
    recorded_run.log.close()
    assert overview(index)["runs"][0]["trouble"] == run["trouble"]


def test_who_asks_does_not_wait_for_who_reads(
    index_of: Callable[..., Index], recorded_run: RecordedRun
) -> None:
    index = index_of(recorded_run.path)
    recorded_run.train(0)
    conftest.read(index)
    told = index.rows("SELECT count(*) FROM rollouts"), index.known()
    with index.still(), index._base:  # as while a batch is taken
        index._base.execute("DELETE FROM rollouts")
        assert (index.rows("SELECT count(*) FROM rollouts"), index.known()) == told
    assert index.rows("SELECT count(*) FROM rollouts") == [(0,)]


def test_numbers_that_no_run_has_are_named(index_of: Callable[..., Index], tmp_path: Path) -> None:
    (folder := tmp_path / "odd").mkdir()
    opened, delivered = delivery(1)
    huge = msgspec.structs.replace(delivered, group_id=1 << 63)  # type: ignore[type-var]
    with EventLog.create(folder / "events.log") as log:
        log.append([opened, huge])
        log.sync()
    index = index_of(folder)
    assert "record 1: OverflowError: Python int too large" in index.runs[0].follower.damage
    assert not conftest.read(index)


def test_weights_that_were_sent_again_are_an_event(
    index_of: Callable[..., Index], tmp_path: Path
) -> None:
    (folder := tmp_path / "refits").mkdir()
    told = ((1, 0.0), (2, 1.0), (3, 1.0), (4, 3.0))
    with EventLog.create(folder / "events.log") as log:
        log.append([Reported(1.0 + step, 1, step, {"sync/refits": n}) for step, n in told])
        log.append([LearnerResumed(6.0, 2, 4), Reported(7.0, 2, 5, {"sync/refits": 1.0})])
        log.sync()
    index = index_of(folder)
    refits = index.rows("SELECT at, said FROM events WHERE kind = 'refit' ORDER BY at")
    assert [at for at, _ in refits] == [3.0, 5.0, 7.0]
    assert "(3 times since the learner began)" in refits[1][1] and "once" in refits[2][1]


def test_an_actor_that_comes_back_is_a_restart(
    index_of: Callable[..., Index], tmp_path: Path
) -> None:
    (folder := tmp_path / "back").mkdir()
    joined = ActorJoined(1.0, "actor-1", "digest")
    with EventLog.create(folder / "events.log") as log:
        log.append([joined, ActorLeft(2.0, "actor-1", "died"), joined])
        log.append([ActorLeft(3.0, "actor-1", "the run ends"), RunResumed(4.0, ""), joined])
        log.sync()
    kinds = [kind for (kind,) in index_of(folder).rows("SELECT kind FROM events ORDER BY rowid")]
    assert kinds == ["actor", "actor", "restart", "actor", "restart", "actor"]


def test_restarts_of_retrieval_are_those_that_the_launcher_wrote(
    index_of: Callable[..., Index], run: Path
) -> None:
    fleet = FleetLog(run)
    fleet.write("started", "retrieval_server", 1.0, pid=1)
    fleet.write("restarting", "actor-0", 2.0, cause="died", pause_s=1.0)
    fleet.write("restarting", "retrieval_server", 5.5, cause="died\x1b", pause_s=1.0)
    fleet.write("restarting", "retrieval_server", 1e11, cause="in 3,000 years", pause_s=1.0)
    index = index_of(run)
    told = "SELECT at, step, said FROM events WHERE kind = 'restart' ORDER BY at"
    assert index.rows(told) == [(5.5, 7, "retrieval_server is started again: died")]
    assert not conftest.read(index)
    fleet.write("restarting", "retrieval_server-1", 0.5, cause="gone", pause_s=1.0)
    assert conftest.read(index)
    assert index.rows(told)[0] == (0.5, 0, "retrieval_server-1 is started again: gone")


def test_what_all_rollouts_and_gauges_have_is_known_without_a_look_at_them(
    index_of: Callable[..., Index], run: Path
) -> None:
    index = index_of(run)
    gauges, stops = index.known()
    in_table = index.rows("SELECT DISTINCT name FROM gauges ORDER BY name")
    assert [(name,) for name in gauges] == in_table and "replay/staleness" in gauges
    assert [(stop,) for stop in stops] == index.rows("SELECT DISTINCT stop FROM rollouts")
    events = "SELECT 1 FROM events WHERE run = 0 AND kind != 'group' ORDER BY number DESC LIMIT 9"
    plan = " ".join(row[-1] for row in index.rows(f"EXPLAIN QUERY PLAN {events}"))
    assert "by_place" in plan and "TEMP B-TREE" not in plan
