"""Who waits for whom now: by the records, and by the launcher's last word while it is fresh."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from configs.load import save
from configs.schema import Config, LearnerConfig, ReplayConfig
from replay.log.records import EvaluationOpened, LearnerResumed, Record, Reported, Sampled
from replay.protocol import Status
from scripts.runs.waits_file import Snapshot, WaitsFile
from scripts.view.answers import waiting
from scripts.view.course import Course
from scripts.view.index import Index
from scripts.view.wait_graph import _learner, _lines, _replay
from tests.scripts.conftest import RecordedRun
from tests.scripts.view import conftest

CONFIG = Config(replay=ReplayConfig(groups_per_step=4), learner=LearnerConfig(total_steps=9))
IDLE = {"actor/rollouts_in_flight": 6.0, "actor/capacity": 8.0, "sync/policy_version": 1.0}
FULL = {"actor/rollouts_in_flight": 8.0, "actor/capacity": 8.0, "actor/tokens_per_s": 99.0}


def snapshot(phase: str, ready: float = 0.0, **facts: Any) -> Snapshot:
    given = {"states": {}, "fleet": {}, "actors": 0} | facts
    return Snapshot(at_s=10.0, phase=phase, ready=ready, open=3.0, **given)


def course(*records: Record) -> Course:
    found = Course()
    for record in records:
        found.take(record)
        if isinstance(record, Sampled):
            found.sample(record)
        elif isinstance(record, Reported):
            found.report(record, True)
    return found


BEGUN = LearnerResumed(2.0, 1, 0)
TRAINS = (BEGUN, Sampled(5.0, 1, 1, (), (), {}))
DONE = (*TRAINS, Reported(7.0, 1, 1, {}))


@pytest.mark.parametrize(
    ("records", "phase", "told"),
    [
        ((), "waiting for a learner", ("actors", "the first weights")),
        (TRAINS, "learner trains step 1", ("", "trains step 1 since 5 s")),
        (DONE, "step 2: 1 of 4 groups ready", ("replay", "the batch of step 2 since 3 s: step 2")),
        (DONE, "learner trains step 1", ("", "is done with step 1 since 3 s: it puts out")),
        (DONE, "evaluation of step 1: 3 of 8", ("replay", "the batch of step 2 since 3 s")),
        ((BEGUN, Reported(8.0, 1, 9, {})), "", ("actors", "version 9 to be applied, since 2 s")),
        (DONE, "stopped: interrupted", ("", "stopped: interrupted")),
    ],
)
def test_the_learner(records: tuple[Record, ...], phase: str, told: tuple[str, str]) -> None:
    name, whom, what = _learner(snapshot(phase), course(*records), CONFIG)
    assert (name, whom) == ("learner", told[0]) and what.startswith(told[1])


def test_the_first_evaluation_is_waited_for() -> None:
    found = course(BEGUN, EvaluationOpened(3.0, 0))
    told = _learner(snapshot("evaluation of step 0: 3 of 8 rollouts"), found, CONFIG)
    assert told == ("learner", "actors", "the evaluation of step 0: 3 of 8 rollouts")


def test_replay() -> None:
    assert _replay(snapshot(""), course(), CONFIG)[1] == "learner"
    assert _replay(snapshot("", 3.0), course(*TRAINS), CONFIG)[1] == "actors"
    assert _replay(snapshot("", 4.0), course(*TRAINS), CONFIG)[1] == "learner"


def test_actors_and_who_does_not_work() -> None:
    fleet = {
        "actor-0": IDLE | {"retrieval/in_flight": 2.0},
        "actor-1": FULL | {"actor/queued_requests": 1.0},
        "actor-2": FULL,
        "actor-3": FULL,
    }
    states = {"actor-3": "is stopped", "retrieval_server": "starts since 2 s"}
    found = course(BEGUN, Reported(7.0, 1, 2, {}))
    lines = list(_lines(snapshot("", states=states, fleet=fleet), found, CONFIG))[2:]
    assert lines == [
        ("retrieval_server", "launcher", "starts since 2 s"),
        ("actor-0", "", "6 rollouts, 0 tokens/s"),
        ("actor-0", "learner", "version 2, put out 3 s before: version 1 serves"),
        ("actor-0", "retrieval", "2 calls of rollouts that search"),
        ("actor-0", "replay", "leases: 2 of 8 places are free"),
        ("actor-1", "", "8 rollouts, 99 tokens/s"),
        ("actor-1", "its engine", "room for 1 request"),
        ("actor-2", "", "8 rollouts, 99 tokens/s"),
        ("actor-3", "launcher", "is stopped"),
    ]


def test_they_are_told_of_a_running_run_alone(
    index_of: Callable[..., Index], recorded_run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(CONFIG, recorded_run.path / "config.yaml")
    index = index_of(recorded_run.path)
    assert waiting(index, 0) == {"at": None, "lines": [], "unseen": 0}
    told = Status((), (), {}, {"actor\x1b": FULL}, "step 1: 0 of 4 groups ready", "")
    WaitsFile(recorded_run.path).tell(told, {})
    recorded_run.train(0)
    conftest.read(index)
    found = waiting(index, 0)
    assert [(each["who"], each["whom"]) for each in found["lines"]] == [
        ("learner", ""), ("replay", "actors"), ("actor", ""),
    ]  # fmt: skip
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 60)
    assert waiting(index, 0)["at"] is None
