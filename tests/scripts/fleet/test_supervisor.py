"""How a run is ended early: who is told, and in which order."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.fleet import FleetConfig
from configs.runtime.process import Exit
from configs.schema import Config, LearnerConfig
from replay.protocol import EvalResult, ReplayTimeout, Status, StepReport
from scripts.fleet.console import Console
from scripts.fleet.resume import Progress
from scripts.fleet.supervisor import RunFailed, Supervisor
from scripts.runs.waits_file import read_snapshot
from scripts.runs.waits_log import SamplesSince
from scripts.setup import preflight

CAUSE = "interrupted by SIGINT"
Gauges = dict[str, dict[str, float]]


class Member:
    """A process that ends when it is signalled."""

    seat = SimpleNamespace(gone="", leaving="", node_id="")
    exit_code, pid, started_at, ready_at = 0, 1, 0.0, lambda _: 1.0

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def signal(self, number: int) -> None:
        self.told.append(self.name)


class Fleet:
    """Whoever is signalled ends well; to be asked for long means that the launcher hangs."""

    def __init__(self, told: list[str], polls: int = 12) -> None:
        names = ("retrieval_server", "replay", "learner", "learner-1", "actor-0", "actor-1")
        self.members, self.told, self.polls = {n: Member(n, told) for n in names}, told, polls

    def news(self) -> list[str]:
        return []

    def evicted(self, waiting: list[str]) -> dict[str, str]:
        return {}

    def displaced(self) -> str:
        return ""

    def dead(self) -> dict[str, int]:
        self.polls -= 1
        assert self.polls > 0, f"the learner goes on; told: {self.told}"
        return {name: 0 for name in self.members if name in self.told}


class Replay:
    """Reports one step, then the person presses Ctrl-C."""

    def __init__(self, told: list[str], stop: Any, status: Status, silent: bool = False) -> None:
        self.told, self.stop, self.answer, self.silent = told, stop, status, silent

    def status(self, after_step: int, after_evaluation: int) -> Status:
        self.stop.cause = "SIGINT"
        return self.answer

    def shutdown(self, cause: str) -> None:
        self.told.append(cause)
        if self.silent:
            raise ReplayTimeout("no answer")


@pytest.fixture
def interrupt(tmp_path: Path) -> Callable[..., list[str]]:
    """interrupt(steps, fleet) → who was told, in order, once the learner has ended."""

    def run(steps: tuple[StepReport, ...], fleet: Gauges, silent: bool = False) -> list[str]:
        told: list[str] = []
        stop = SimpleNamespace(cause="")
        config = Config(run_dir=str(tmp_path), learner=LearnerConfig(total_steps=9))
        members = Fleet(told)
        parts = (config, members, Console(), stop, Progress(), lambda name: [name])
        status = Status(steps, (), {}, fleet, phase="", stop_cause="")
        assert Supervisor(*parts).watch(Replay(told, stop, status, silent)) == CAUSE
        assert read_snapshot(tmp_path) is None  # there is nobody left to wait
        assert SamplesSince(tmp_path).news()[-1].actor == ""
        return told

    return run


STEP = (StepReport(6, {}),)
SERVING = {"actor-0": {"actor/tokens_per_s": 1.0}, "actor-1": {"actor/tokens_per_s": 1.0}}


def test_ctrl_c_lets_actors_drain_and_ends_the_learner_s_wait(
    interrupt: Callable[..., list[str]],
) -> None:
    assert interrupt(STEP, SERVING) == [CAUSE, "learner"]


def test_engines_that_still_start_are_told_while_recorded_batches_are_trained(
    interrupt: Callable[..., list[str]],
) -> None:
    fleet = {"actor-0": SERVING["actor-0"]}
    assert interrupt(STEP, fleet) == ["actor-1", CAUSE, "learner"]


@pytest.mark.parametrize("silent", [False, True])
def test_before_training_everybody_is_told(
    interrupt: Callable[..., list[str]], silent: bool
) -> None:
    assert sorted(interrupt((), SERVING, silent)) == ["actor-0", "actor-1", CAUSE, "learner"]


def test_the_end_does_not_wait_for_a_replay_that_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers once it has read its log; a learner that needs it until then is told meanwhile."""
    told = list[str]()
    supervisor, stop = supervised(tmp_path, Fleet(told)), SimpleNamespace(cause="")
    monkeypatch.setattr(supervisor._console, "remind", lambda _: None)
    supervisor._stop = stop
    supervisor._show(Status(STEP, (), {}, SERVING, "", ""))
    restored = Status((), (), {}, SERVING, "", "")
    replay = Replay(told, stop, restored)
    supervisor._show(Status((), (), {}, {}, "restoring: 1", "", restoring=True))
    stop.cause = "SIGINT"
    for _ in range(2):
        supervisor._end_early(replay)  # type: ignore[arg-type]
    assert told == ["actor-0", "actor-1", "learner"]
    supervisor._show(restored)
    supervisor._end_early(replay)  # type: ignore[arg-type]
    assert told[3:] == [CAUSE]


def test_how_the_run_stands_is_told_beside_its_log(tmp_path: Path) -> None:
    supervisor = supervised(tmp_path, Fleet([]))
    supervisor._show(Status(STEP, (), {}, SERVING, "learner trains step 7", ""))
    found = read_snapshot(tmp_path)
    assert found and found.phase == "learner trains step 7" and found.fleet == SERVING
    assert [each.actor for each in SamplesSince(tmp_path).news()] == [""]


def watched(
    tmp_path: Path,
    ends: list[dict[str, int]],
    stop_cause: str = "",
    restarts: int = 0,
    silent: bool = False,
) -> str:
    """Why the run has ended, where these have ended, poll by poll, and replay names this cause."""
    status = Status((), (), {}, SERVING, phase="", stop_cause=stop_cause)
    fleet = SimpleNamespace(members={}, dead=lambda: ends.pop(0) if len(ends) > 1 else ends[0])
    fleet.news, fleet.evicted, fleet.displaced = list, lambda waiting: {}, str
    for name in ("replay", "learner", "learner-1", "actor-0", "actor-1"):
        words = {"name": name, "log_path": f"{name}.log", "last_words": lambda: ""}
        fleet.members[name] = SimpleNamespace(pid=1, started_at=0.0, exit_code=0, **words)
        fleet.members[name].ready_at = lambda: 1.0
        fleet.members[name].seat = SimpleNamespace(gone="", leaving="", node_id="")
    limited = FleetConfig(restarts=restarts)
    config, stop = Config(run_dir=str(tmp_path), fleet=limited), SimpleNamespace(cause="")
    parts = (config, fleet, Console(), stop, Progress(), lambda name: [name])
    supervisor = Supervisor(*parts)  # type: ignore[arg-type]

    def told(*_: int) -> Status:
        if silent:
            raise ReplayTimeout("no answer")
        return status

    return supervisor.watch(SimpleNamespace(status=told))  # type: ignore[arg-type]


def first_to_blame(tmp_path: Path, ends: list[dict[str, int]]) -> str:
    """The cause that the supervisor names when these have ended, poll by poll."""
    with pytest.raises(RunFailed) as failure:
        watched(tmp_path, ends)
    return str(failure.value)


def test_a_learner_that_makes_way_while_the_run_ends_ends_with_it(tmp_path: Path) -> None:
    ends = [{"learner": Exit.MADE_WAY, "learner-1": Exit.DONE}]
    assert watched(tmp_path, ends, "no reward") == "no reward"


@pytest.mark.parametrize("code", [1, -9])
def test_a_consequence_that_ends_first_is_not_the_cause(tmp_path: Path, code: int) -> None:
    ends = [{"learner": Exit.CONSEQUENCE}] * 3 + [{"learner": Exit.CONSEQUENCE, "actor-0": code}]
    assert first_to_blame(tmp_path, ends).startswith("actor-0 ")


@pytest.mark.parametrize("restarts", [0, 8])
def test_a_run_that_is_done_ends_beside_an_actor_that_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """Replay has left before it could be asked why."""
    monkeypatch.setattr("scripts.fleet.supervisor.stop_cause", lambda _: "completed")
    done = {"learner": 0, "learner-1": 0, "replay": 0, "actor-0": 0, "actor-1": 1}
    assert watched(tmp_path, [done], restarts=restarts, silent=True) == "completed"


def test_a_failure_is_the_cause_at_once(tmp_path: Path) -> None:
    ends = [{"learner": 1}, {"learner": 1, "actor-0": -9}]
    assert first_to_blame(tmp_path, ends).startswith("learner ended with code 1")


def test_of_consequences_alone_the_first_name_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.fleet.supervisor.SETTLE_S", 0.5)
    assert first_to_blame(tmp_path, [{"learner": Exit.CONSEQUENCE}]).startswith("learner ")
    every = dict.fromkeys(("learner", "actor-1", "replay"), Exit.CONSEQUENCE)
    assert first_to_blame(tmp_path, [every | {"replay": 0}]).startswith("replay ")


def test_replay_comes_back_at_once_for_an_end_that_somebody_asked_for(tmp_path: Path) -> None:
    """Learner and actors would wait for it, and its pause after a few deaths is long."""
    started: list[str] = []
    told: list[str] = []
    members = {name: Member(name, told) for name in ("replay", "learner", "actor-0")}
    for member in members.values():
        member.poll = lambda: -9  # type: ignore[attr-defined]
        member.command, member.log_path = ["replay"], ""  # type: ignore[attr-defined]
        member.last_words = lambda: ""  # type: ignore[attr-defined]
    fleet = SimpleNamespace(
        members=members,
        dead=lambda: {"learner": 0} if started else {"replay": -9},
        start=lambda commands: started.extend(commands) or list(commands),
        room=lambda name: "",
        outdated=list,
        news=list,
        evicted=lambda waiting: {},
        displaced=str,
    )
    config = Config(run_dir=str(tmp_path), fleet=FleetConfig(first_pause_s=100.0))
    stop = SimpleNamespace(cause=CAUSE)
    parts = (config, fleet, Console(), stop, Progress(), lambda name: [name])
    away = Replay(told, stop, Status((), (), {}, {}, phase="", stop_cause=""), silent=True)
    assert Supervisor(*parts).watch(away) == CAUSE  # type: ignore[arg-type]
    assert started == ["replay"]
    assert "learner" in told


def supervised(tmp_path: Path, fleet: Any) -> Supervisor:
    """A supervisor of these processes; the run ends once the learner has ended well."""
    config, stop = Config(run_dir=str(tmp_path)), SimpleNamespace(cause="")
    parts = (config, fleet, Console(), stop, Progress(), lambda name: [name])
    return Supervisor(*parts)  # type: ignore[arg-type]


@pytest.mark.parametrize("returning", [False, True])
def test_an_actor_frees_its_seat_once_it_has_left_for_good(tmp_path: Path, returning: bool) -> None:
    ends: list[dict[str, int]] = [{"actor-1": 0}, {"actor-1": 0}, {"learner": 0}]
    left: list[str] = []
    members = {name: Member(name, []) for name in ("replay", "learner", "actor-0", "actor-1")}
    for member in members.values():
        member.poll, member.stopped = lambda: 0, list  # type: ignore[attr-defined]

    def start(commands: dict[str, list[str]]) -> list[str]:
        for name in commands:
            members[name] = Member(name, [])
            members[name].exit_code = None  # type: ignore[assignment]
            members[name].stopped = list  # type: ignore[attr-defined]
        return list(commands)

    fleet = SimpleNamespace(
        members=members,
        dead=lambda: ends.pop(0) if len(ends) > 1 else ends[0],
        start=start,
        leave=left.append,
        room=lambda name: "",
        news=list,
        evicted=lambda waiting: {},
        displaced=str,
    )
    supervisor = supervised(tmp_path, fleet)
    if returning:
        supervisor.restarts._returning["actor-1"] = ["actor-1"]
    status = Status((), (), {}, SERVING, phase="", stop_cause="completed")
    ended = iter([*[Status((), (), {}, SERVING, phase="", stop_cause="")] * 2, status])
    observer = SimpleNamespace(status=lambda *_: next(ended))
    assert supervisor.watch(observer) == "completed"  # type: ignore[arg-type]
    assert left == ([] if returning else ["actor-1"])


@pytest.mark.parametrize("why", ["its pause", "rests", "finds no room", "is to start"])
def test_a_silent_replay_is_replaced_beside_an_actor_that_does_not_serve(
    tmp_path: Path, why: str
) -> None:
    """That may last for hours; only what is back in a moment may be why replay is silent."""
    told = list[str]()
    made, ended = supervised(tmp_path, Fleet(told)), {"actor-1": -9}
    kept = made.restarts
    if why == "is to start":
        kept._returning["actor-1"] = ["actor-1"]
    else:
        kept._due["actor-1"] = time.monotonic() + 1.0
    if why == "rests":
        kept._resting.add("actor-1")
    if why == "finds no room":
        kept._roomless["actor-1"] = "no GPU is free"
    kept._unready.clear()
    made._heard_s -= 86_400.0
    made._judge_silence(ended, ReplayTimeout("no answer"))
    assert told == ([] if why == "its pause" else ["replay"])


def test_the_newest_step_is_told_to_who_bounds_restarts(tmp_path: Path) -> None:
    made, told = supervised(tmp_path, Fleet([])), list[int]()
    made.restarts = SimpleNamespace(reach=told.append, states=dict)  # type: ignore[assignment]
    evaluation = EvalResult(5, 1, 1.0, 1.0, {}, {}, 1.0, 5, 5)
    steps = (StepReport(4, {}), StepReport(6, {}))
    for status in (Status(steps, (), {}, {}, "", ""), Status((), (evaluation,), {}, {}, "", "")):
        made._show(status)
    assert told == [6, 5]


def test_steps_trained_again_after_a_resumption_are_not_new(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path), fleet=FleetConfig(restarts=1))
    shown = Progress(log=True, reports=7, step=7)
    parts: Any = (config, Fleet([]), Console(), SimpleNamespace(cause=""), shown, lambda name: name)
    made = Supervisor(*parts)
    made.restarts._allowed.spend("learner", now=-1e9)
    for step, spent in ((7, True), (8, False)):
        made._show(Status((StepReport(step, {}),), (), {}, {}, "", ""))
        assert bool(made.restarts._allowed.spent("learner", now=0.0)) == spent


def test_a_replay_that_is_restored_gets_on_as_long_as_it_comes_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = supervised(tmp_path, Fleet([]))
    monkeypatch.setattr(time, "monotonic", iter(range(9)).__next__)
    monkeypatch.setattr(supervisor._console, "remind", lambda _: None)
    for far in ("restoring: 1", "restoring: 1", "restoring: 2"):
        supervisor._show(Status((), (), {}, {}, far, "", restoring=True))
    assert supervisor.restarts.got_on == {"replay": 1}


def test_more_actors_than_replay_may_hold_sockets_of_are_refused_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "most_descriptors", lambda: 256)
    config, scaled = Config(run_dir=str(tmp_path)), list[int]()
    stop, fleet = SimpleNamespace(cause=""), Fleet([])
    made = Supervisor(config, fleet, Console(), stop, Progress(), lambda name: [name])
    made.restarts = SimpleNamespace(scale=lambda count, _: scaled.append(count))
    for count in (28, 29):
        made._scale(count)
    said = " ".join(capsys.readouterr().out.split())
    assert scaled == [28]
    assert "29 actors wanted: refused: replay then holds up to 258 sockets and files" in said
