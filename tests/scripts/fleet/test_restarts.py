"""What is started again, when, how often, and what is said of it."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.fleet import FleetConfig
from configs.load import differences
from configs.runtime.process import Exit
from configs.runtime.signals import MAKE_WAY
from configs.schema import ActorsConfig, Config
from scripts.fleet import restarts
from scripts.fleet.host import Host
from scripts.fleet.place import NodeGone
from scripts.fleet.placement import Room
from scripts.fleet.restarts import BudgetSpent, Restarts
from scripts.runs.fleet_log import read_fleet_log
from tests.scripts.fleet.test_arrangement import arranged, node

NAMES = ("retrieval_server", "replay", "learner", "learner-1", "actor-0", "actor-1")


class Fleet:
    """Processes that are as they are told to be; `started` lists what was placed, in order."""

    def __init__(self) -> None:
        self.members: dict[str, Any] = {}
        self.started: list[dict[str, list[str]]] = []
        self.full: dict[str, str] = {}  # who finds no room, and why
        self.stale: list[str] = []
        self.left: list[str] = []  # whose seats others may have
        self.leaves = ""  # why the learner is to move
        self.start({name: [name] + (["--rank", "1"] if "-1" in name else []) for name in NAMES})

    def start(self, commands: dict[str, list[str]]) -> list[str]:
        self.started.append(commands)
        for name, command in commands.items():
            member = SimpleNamespace(name=name, command=command, pid=7, exit_code=None)
            member.started_at, member.ready_at = 1.0, lambda: None
            member.awaits_others = lambda: False
            member.log_path, member.last_words = f"{name}.log", lambda: "its last words"
            member.stopped, member.poll = list, lambda member=member: member.exit_code
            member.signal = lambda number, m=member: setattr(m, "exit_code", -int(number))
            member.drain = lambda member=member: member.signal(signal.SIGTERM)
            member.seat = SimpleNamespace(gone="", leaving="", node_id="")
            self.members[name] = member
        return list(commands)

    def room(self, name: str) -> str:
        return self.full.get(name, "")

    def leave(self, name: str) -> None:
        self.left.append(name)

    def outdated(self) -> list[str]:
        return self.stale

    def evicted(self, waiting: list[str]) -> dict[str, str]:
        alive = {n: m for n, m in self.members.items() if m.exit_code is None}
        return {n: m.seat.leaving for n, m in alive.items() if m.seat.leaving}

    def displaced(self) -> str:
        return self.leaves

    def end(self, name: str, code: int) -> dict[str, int]:
        self.members[name].exit_code = code
        return {name: code}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(restarts, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


@pytest.fixture
def keep(
    tmp_path: Path, clock: SimpleNamespace
) -> Callable[..., tuple[Fleet, Restarts, list[str]]]:
    def make(**fields: Any) -> tuple[Fleet, Restarts, list[str]]:
        fleet, said = Fleet(), []
        config = FleetConfig(first_pause_s=1.0, longest_pause_s=3.0, **fields)
        return fleet, Restarts(config, fleet, tmp_path, lambda text, _: said.append(text)), said

    return make


def test_what_ends_is_started_again_after_its_pause(keep, clock, tmp_path) -> None:
    fleet, kept, said = keep()
    dead = fleet.end("actor-0", -9)
    kept.tend(dead)
    clock.s += 0.9
    kept.tend(dead)
    assert len(fleet.started) == 1 and "actor-0" in kept.waiting
    clock.s += 0.2
    kept.tend(dead)
    assert fleet.started[1:] == [{"actor-0": ["actor-0"]}]
    assert said == ["actor-0 was killed by SIGKILL (log: actor-0.log); restart 1 of 8 in 1 s"]
    fleet.members["actor-0"].ready_at = lambda: 2.0
    kept.look()
    events = [(e["event"], e["name"]) for e in read_fleet_log(tmp_path)][len(NAMES) :]
    kinds = ["ended", "restarting", "started", "ready"]
    assert events == [(kind, "actor-0") for kind in kinds]


def test_pauses_double_up_to_the_longest_until_it_lives_for_a_while(keep, clock) -> None:
    fleet, kept, said = keep()
    for _ in range(4):
        dead = fleet.end("actor-1", 1)
        kept.tend(dead)
        clock.s += 3.5
        kept.tend(dead)
    assert [line.split()[-2] for line in said] == ["1", "2", "3", "3"]
    clock.s += 61.0
    kept.tend(fleet.end("actor-1", 1))
    assert said[-1].endswith("in 1 s")


@pytest.mark.parametrize("ended", ["learner", "learner-1"])
def test_the_ranks_of_a_learner_start_together(keep, clock, ended) -> None:
    fleet, kept, _ = keep()
    kept.tend(fleet.end(ended, Exit.CONSEQUENCE))
    assert fleet.members["learner"].exit_code and fleet.members["learner-1"].exit_code
    clock.s += 1.1
    kept.tend({name: fleet.members[name].exit_code for name in ("learner", "learner-1")})
    again = {
        "learner": ["learner", "actors.count=2", "--resume"],
        "learner-1": ["learner-1", "--rank", "1"],
    }
    assert fleet.started[1:] == [again] and len(kept.made) == 1


def test_replay_goes_on_with_its_log_as_often_as_it_starts(keep, clock) -> None:
    fleet, kept, _ = keep()
    for _ in range(2):
        dead = fleet.end("replay", -9)
        kept.tend(dead)
        clock.s += 5.0
        kept.tend(dead)
    assert fleet.started[1:] == [{"replay": ["replay", "--restart"]}] * 2


def die(fleet: Fleet, kept: Restarts, clock: SimpleNamespace, name: str) -> None:
    """It ends, and is started again if it may be."""
    dead = fleet.end(name, -9)
    kept.tend(dead)
    clock.s += 3.1
    kept.tend(dead)


def test_the_first_cause_ends_the_run_once_a_process_has_spent_its_restarts(keep, clock) -> None:
    fleet, kept, _ = keep(restarts=1)
    die(fleet, kept, clock, "replay")
    die(fleet, kept, clock, "learner")  # has its own
    words = r"(?s)^replay was killed.*fleet.restarts = 1 in 3600 s are spent; then replay ended"
    with pytest.raises(BudgetSpent, match=words):
        kept.tend(fleet.end("replay", 1))


def test_restarts_are_a_rate(keep, clock) -> None:
    """What dies now and then for weeks, while the run gets on, goes on."""
    fleet, kept, said = keep(restarts=2)
    for step in range(50):
        die(fleet, kept, clock, "replay")
        kept.reach(step)
        clock.s += 1900.0
    assert len(kept.made) == 50 and said[-1].endswith("restart 2 of 2 in 1 s")


@pytest.mark.parametrize("name", ["learner", "replay"])
def test_what_ends_each_hour_without_a_new_step_ends_the_run(keep, clock, name) -> None:
    """Steps that are trained again, after a checkpoint, are not new ones."""
    fleet, kept, _ = keep(restarts=3)
    kept.reach(7)
    for _ in range(3):
        die(fleet, kept, clock, name)
        fleet.members["learner-1"].exit_code = None
        kept.reach(6)
        kept.reach(7)
        clock.s += 4000.0
    words = (
        rf"(?s)^{name} was killed by SIGKILL.*last words\nfleet.restarts = 3 are spent without a "
    )
    words += rf"new step between them; then {name} ended with code 1.*\nmend what ends it, or raise"
    with pytest.raises(BudgetSpent, match=words):
        kept.tend(fleet.end(name, 1))


def test_an_actor_that_ends_each_hour_without_a_new_step_rests(keep, clock) -> None:
    fleet, kept, said = keep(restarts=2)
    for _ in range(3):
        die(fleet, kept, clock, "actor-0")
        clock.s += 4000.0
    assert "without a new step between them: it rests for 3600 s" in said[-1]
    kept.tend({"actor-0": -9})
    kept.reach(1)
    for _ in range(2):
        die(fleet, kept, clock, "actor-0")
        clock.s += 4000.0
    assert "rests" not in said[-1], "a new step gives all anew"


def test_an_actor_beyond_its_rate_rests_while_others_serve(keep, clock, tmp_path) -> None:
    fleet, kept, said = keep(restarts=1)
    die(fleet, kept, clock, "actor-0")
    begun = len(fleet.started)
    dead = fleet.end("actor-0", -9)
    for _ in range(3):
        kept.tend(dead)
    rests = "it rests for 3597 s, and the run goes on with 1 actors"
    assert said[-1].endswith(f"fleet.restarts = 1 in 3600 s are spent: {rests}")
    assert kept.states()["actor-0"] == "rests, and starts again in 3596.9 s" and len(said) == 2
    assert "actors.count=1" in kept._command("learner"), "it would wait for who rests"
    clock.s += 3597.0
    kept.tend(dead)
    assert fleet.started[begun:] == [{"actor-0": ["actor-0"]}]
    events = [(e["event"], e["name"]) for e in read_fleet_log(tmp_path)][len(NAMES) :]
    assert events[-3:] == [("ended", "actor-0"), ("resting", "actor-0"), ("started", "actor-0")]


def test_who_rests_may_try_once_each_time(keep, clock) -> None:
    fleet, kept, said = keep(restarts=1)
    die(fleet, kept, clock, "actor-0")
    for _ in range(4):
        die(fleet, kept, clock, "actor-0")
        clock.s += 3600.0
        kept.tend({"actor-0": -9})
    assert [("rests" in line) for line in said] == [False, True, True, True, True]


def test_the_run_ends_once_no_actor_serves(keep, clock) -> None:
    fleet, kept, _ = keep(restarts=1)
    for name in ("actor-0", "actor-0", "actor-1"):
        die(fleet, kept, clock, name)
    words = r"(?s)^actor-1 was killed by SIGKILL.*fleet.restarts = 1 in 3600 s.*then actor-1 was"
    with pytest.raises(BudgetSpent, match=words):
        die(fleet, kept, clock, "actor-1")


def test_a_start_that_hangs_is_ended_at_its_deadline_and_counts(keep, clock, tmp_path) -> None:
    fleet, kept, said = keep(start_deadline_s=100.0)
    for name, member in fleet.members.items():
        member.ready_at = lambda name=name: None if name == "actor-0" else 1.0
    clock.s += 99.0
    kept.look()
    assert fleet.members["actor-0"].exit_code is None
    clock.s += 3.1
    kept.look()
    assert fleet.members["actor-0"].exit_code == -signal.SIGKILL
    kept.tend({"actor-0": -9})
    hung = "actor-0 was not ready within 100 s (fleet.start_deadline_s)"
    assert said == [f"{hung}: it is ended", f"{hung} (log: actor-0.log); restart 1 of 8 in 1 s"]
    clock.s += 1.1
    kept.tend({"actor-0": -9})
    clock.s += 103.0
    kept.look()
    kept.tend({"actor-0": -9})  # twice in a row: it rests
    assert "it rests for 3600 s" in said[-1]


def hang(fleet: Fleet, kept: Restarts, clock: SimpleNamespace, name: str) -> None:
    """Its start does not come to its end."""
    for each, member in fleet.members.items():
        member.ready_at = lambda each=each: None if each == name else 1.0
    clock.s += 103.0
    kept.look()
    assert fleet.members[name].exit_code == -signal.SIGKILL
    kept.tend({name: -9})
    clock.s += 3.1
    kept.tend({name: -9})


def test_a_start_that_hung_and_one_that_was_good_are_no_row(keep, clock) -> None:
    fleet, kept, said = keep(start_deadline_s=100.0)
    hang(fleet, kept, clock, "actor-0")
    fleet.members["actor-0"].ready_at = lambda: 2.0
    kept.look()
    die(fleet, kept, clock, "actor-0")
    hang(fleet, kept, clock, "actor-0")
    assert said[-1].endswith("restart 3 of 8 in 1 s")


def test_who_rests_since_its_starts_hung_may_try_once_each_time(keep, clock) -> None:
    fleet, kept, said = keep(start_deadline_s=100.0)
    for _ in range(2):
        hang(fleet, kept, clock, "actor-0")
    for _ in range(2):
        assert "its last 2 starts hung: it rests for 3600 s" in said[-1]
        clock.s += 3600.0
        kept.tend({"actor-0": -9})
        said.clear()
        hang(fleet, kept, clock, "actor-0")


def test_who_hung_and_is_asked_for_anew_starts_afresh(keep, clock) -> None:
    fleet, kept, said = keep(start_deadline_s=100.0)
    for _ in range(2):
        hang(fleet, kept, clock, "actor-1")
    kept.scale(1, lambda name: [name])
    fleet.members["actor-1"].exit_code = 0
    kept.scale(2, lambda name: [name])
    die(fleet, kept, clock, "actor-1")
    assert "rests" not in said[-1] and "restart 2 of 8" in said[-1]


def test_who_has_rested_serves_once_it_is_ready(keep, clock) -> None:
    """Else actors whose starts hang, one after the other, would keep a run going for ever."""
    fleet, kept, _ = keep(start_deadline_s=100.0, restarts_window_s=300.0)
    for _ in range(2):
        hang(fleet, kept, clock, "actor-0")
    clock.s += 300.0
    kept.tend({"actor-0": -9})
    assert "actors.count=1" in kept._command("learner"), "it may hang again"
    fleet.members["actor-0"].ready_at = lambda: 2.0
    kept.look()
    assert "actors.count=2" in kept._command("learner")


def test_the_run_ends_once_all_actors_rest_or_only_try(keep, clock) -> None:
    fleet, kept, _ = keep(restarts=1, restarts_window_s=300.0)
    for _ in range(2):
        die(fleet, kept, clock, "actor-0")
    die(fleet, kept, clock, "actor-1")
    clock.s += 299.0 - 3.1
    kept.tend({"actor-0": -9})
    assert fleet.members["actor-0"].exit_code is None, "it tries"
    with pytest.raises(BudgetSpent, match="then actor-1 was killed"):
        kept.tend(fleet.end("actor-1", -9))


def test_a_start_that_has_just_ended_by_itself_did_not_hang(keep, clock) -> None:
    fleet, kept, said = keep(start_deadline_s=100.0)
    for name, member in fleet.members.items():
        member.ready_at = lambda name=name: None if name == "actor-0" else 1.0
    fleet.members["actor-0"].poll = lambda: 1
    clock.s += 103.0
    kept.look()
    assert said == []


def test_a_start_that_gets_on_does_not_hang_until_it_stops_to(keep, clock) -> None:
    fleet, kept, said = keep(start_deadline_s=100.0)
    for name, member in fleet.members.items():
        member.ready_at = lambda name=name: None if name == "replay" else 1.0
    for _ in range(4):
        clock.s += 90.0
        kept.got_on["replay"] = clock.s
        kept.look()
    assert said == [] and fleet.members["replay"].exit_code is None
    clock.s += 103.1
    kept.look()
    assert fleet.members["replay"].exit_code == -signal.SIGKILL


def test_a_start_that_waits_for_others_does_not_hang(keep, clock) -> None:
    fleet, kept, said = keep(start_deadline_s=100.0)
    for member in fleet.members.values():
        member.awaits_others = lambda: True
    clock.s += 1000.0
    kept.look()
    assert said == [] and all(m.exit_code is None for m in fleet.members.values())


def test_a_learner_whose_start_hangs_twice_ends_the_run(keep, clock) -> None:
    fleet, kept, _ = keep(start_deadline_s=100.0)
    fleet.members["learner-1"].ready_at = lambda: 1.0
    clock.s += 101.0
    kept.look()
    dead = dict.fromkeys(("learner", "learner-1"), -9)
    kept.tend(dead)
    clock.s += 1.1
    kept.tend(dead)
    clock.s += 103.0
    kept.look()
    with pytest.raises(BudgetSpent, match=r"then learner was not ready within 100 s"):
        kept.tend({"learner": -9})


def test_bad_input_is_not_tried_again(keep) -> None:
    fleet, kept, _ = keep()
    with pytest.raises(BudgetSpent, match=r"(?s)actor-0 ended with code 2.*its last words"):
        kept.tend(fleet.end("actor-0", 2))


def test_what_would_end_the_same_way_again_is_not_tried_again(keep, clock) -> None:
    fleet, kept, _ = keep()
    fleet.members["learner"].ready_at = lambda: 2.0
    kept.look()  # it has worked
    with pytest.raises(BudgetSpent, match=r"(?s)learner ended with code 4.*its last words"):
        kept.tend(fleet.end("learner", Exit.FINAL))


def test_a_stopped_process_is_named_and_in_the_end_replaced(keep, clock, tmp_path) -> None:
    fleet, kept, said = keep(stopped_deadline_s=10.0)
    learner = fleet.members["learner"]
    learner.stopped = lambda: [41, 42]
    kept.look()
    assert kept.stopped("learner") and "`kill -CONT 41 42`" in said[0] and len(said) == 1
    clock.s += 5.0
    learner.stopped = list
    kept.look()
    assert not kept.stopped("learner")
    learner.stopped = lambda: [41]
    for _ in range(2):
        clock.s += 11.0
        kept.look()
    assert learner.exit_code == -signal.SIGKILL
    events = [e["event"] for e in read_fleet_log(tmp_path)][len(NAMES) :]
    assert events == ["stopped", "continued", "stopped"]


def test_a_stopped_child_is_seen(tmp_path: Path) -> None:
    child = "import os, subprocess; subprocess.run(['sleep', '60'], start_new_session=True)"
    host = Host(["-c", child], {}, str(tmp_path / "log"), str(tmp_path / "ready"))
    pid, *_ = host.start()
    try:
        import psutil

        while not (children := psutil.Process(pid).children()):
            pass
        assert host.stopped() == []
        children[0].suspend()
        end = time.monotonic() + 10.0
        while not host.stopped() and time.monotonic() < end:
            time.sleep(0.01)
        assert host.stopped() == [children[0].pid]
        children[0].kill()
        host.kill(signal.SIGKILL)
        assert host.wait() == -signal.SIGKILL
        again, *_ = host.start(["-c", "raise SystemExit(5)"])
        assert again != pid and host.wait() == 5 == host.poll()
    finally:
        host.kill(signal.SIGKILL)
        host._thread.join(10)


def test_the_fleet_grows_and_shrinks(keep, clock) -> None:
    fleet, kept, said = keep()
    kept.scale(3, lambda name: [name])
    assert fleet.started[1:] == [{"actor-2": ["actor-2"]}] and "actor-2 starts" in said[-1]
    kept.scale(1, lambda name: [name])
    left = {name for name in (*NAMES, "actor-2") if fleet.members[name].exit_code is not None}
    assert left == {"actor-1", "actor-2"} and said[-1].endswith(
        "actor-1 is to leave, actor-2 is to leave"
    )
    fleet.members["actor-1"].exit_code = 0
    kept.scale(2, lambda name: [name])
    assert fleet.started[-1] == {"actor-1": ["actor-1"]}
    dead = fleet.end("learner", -9)
    kept.tend(dead)
    clock.s += 1.1
    kept.tend(dead | fleet.end("learner-1", -9))
    assert fleet.started[-1]["learner"] == ["learner", "actors.count=2", "--resume"]


def test_actors_that_find_no_room_are_remembered_and_start_with_it(keep, clock) -> None:
    fleet, kept, said = keep()
    fleet.full = dict.fromkeys(("actor-3", "actor-4"), "no GPU is free")
    kept.scale(5, lambda name: [name, "new"])
    assert said == [
        "actor-3, actor-4 wait for room: no GPU is free",
        "5 actors wanted: actor-2 starts, actor-3 waits, actor-4 waits",
    ]
    assert kept.states()["actor-3"] == "waits for room: no GPU is free"
    del fleet.full["actor-3"]
    kept.look()
    clock.s += restarts.LOOK_S
    kept.look()
    assert said[2:] == ["there is room now for actor-3"]
    assert fleet.started[1:] == [{f"actor-{n}": [f"actor-{n}", "new"]} for n in (2, 3)]
    assert kept.returning == {"actor-4"} and kept.states()["actor-3"].startswith("starts since")


def test_who_waits_for_room_and_is_wanted_no_longer_is_forgotten(keep, clock) -> None:
    fleet, kept, _ = keep()
    fleet.full = {"actor-2": "no GPU is free"}
    kept.scale(3, lambda name: [name])
    kept.scale(2, lambda name: [name])
    fleet.full.clear()
    clock.s += restarts.LOOK_S
    kept.look()
    assert len(fleet.started) == 1 and not kept.returning and "actor-2" not in kept.states()


def test_nobody_comes_once_the_run_is_to_end(keep, clock) -> None:
    fleet, kept, _ = keep()
    fleet.full = {"actor-2": "no GPU is free"}
    kept.scale(3, lambda name: [name])
    kept.call_off()
    fleet.full.clear()
    fleet.members["actor-1"].seat.leaving = "node b is to go"
    clock.s += restarts.LOOK_S
    kept.look()
    assert len(fleet.started) == 1 and fleet.members["actor-1"].exit_code is None


def test_who_was_told_to_leave_and_is_wanted_again_comes_back(keep, clock) -> None:
    fleet, kept, _ = keep()
    fleet.members["actor-1"].signal = lambda number: None  # it drains
    kept.scale(1, lambda name: [name])
    kept.scale(2, lambda name: [name])
    assert len(fleet.started) == 1 or fleet.started[1:] == [{}] * 2
    fleet.members["actor-1"].exit_code = 0
    kept.look()
    assert fleet.started[-1] == {"actor-1": fleet.members["actor-1"].command}
    kept.scale(2, lambda name: [name])
    kept.tend(fleet.end("actor-1", -9))  # like any other, now
    assert [each["name"] for each in kept.made] == ["actor-1"]


def test_nobody_unwanted_is_started_again(keep, clock) -> None:
    fleet, kept, _ = keep()
    kept.tend(fleet.end("actor-1", -9))
    kept.scale(1, lambda name: [name])
    assert kept.unwanted("actor-1") and not kept.unwanted("actor-0")
    assert "actor-1" not in kept.waiting - {"actor-1"} and not kept.states()["actor-1"].count(
        "again"
    )


def test_a_consequence_of_what_stands_still_costs_nothing(keep, clock) -> None:
    fleet, kept, _ = keep(restarts=1)
    fleet.members["replay"].stopped = lambda: [41]
    kept.look()
    for name in ("actor-0", "actor-1", "learner"):
        kept.tend(fleet.end(name, Exit.CONSEQUENCE))
    assert kept.made == []


@pytest.mark.parametrize("waiting", ["actor-1", "retrieval_server"])
def test_a_consequence_beside_who_finds_no_room_counts(keep, clock, waiting) -> None:
    """It may wait for weeks: the learner would be started again without end."""
    fleet, kept, _ = keep(restarts=3)
    fleet.full = {waiting: "no GPU is free"}
    fleet.end(waiting, -9)
    kept.tend({waiting: -9})
    clock.s += 3.1
    kept.tend({waiting: -9})
    spent = len(kept.made)
    with pytest.raises(BudgetSpent, match=r"fleet\.restarts = 3 in 3600 s are spent"):
        for _ in range(4):
            dead = fleet.end("learner", Exit.CONSEQUENCE) | {waiting: -9}
            kept.tend(dead)
            clock.s += 3.1
            kept.tend(dead | fleet.end("learner-1", -9))
    assert len(kept.made) == spent + 3


def test_a_consequence_of_a_learner_that_waits_for_room_costs_nothing(keep, clock) -> None:
    """That is bounded: the run ends without it after a while."""
    fleet, kept, _ = keep(restarts=1)
    fleet.full = {"learner": "no GPU is free"}
    dead = fleet.end("learner", -9) | fleet.end("learner-1", -9)
    kept.tend(dead)
    clock.s += 3.1
    kept.tend(dead)
    spent = len(kept.made)
    kept.tend(dead | fleet.end("actor-0", Exit.CONSEQUENCE))
    assert len(kept.made) == spent


def test_input_that_was_good_once_is_tried_again(keep, clock) -> None:
    fleet, kept, _ = keep()
    fleet.members["actor-0"].ready_at = lambda: 1.0
    kept.look()
    kept.tend(fleet.end("actor-0", 2))
    assert [each["name"] for each in kept.made] == ["actor-0"]


def test_a_scaled_learner_may_resume_its_checkpoint() -> None:
    given = Config(actors=ActorsConfig(count=3))
    assert differences(Config(actors=ActorsConfig(count=2)), given) == {}


def test_actors_of_a_node_that_is_to_go_drain_and_come_back_elsewhere(keep, clock) -> None:
    fleet, kept, said = keep()
    last, told = fleet.members["actor-1"], []
    last.seat.leaving, last.signal = "node b is to go in 60 s", told.append
    for _ in range(2):
        kept.look()
    assert told == [signal.SIGTERM] and said == ["actor-1 drains: node b is to go in 60 s"]
    assert kept.returning == {"actor-1"} and len(fleet.started) == 1
    kept.scale(2, lambda name: [name])
    last.exit_code = 0
    kept.look()
    assert fleet.started[-1] == {"actor-1": last.command} and not kept.returning
    assert kept.made == []


@pytest.mark.parametrize("learner_moves", [False, True])
def test_room_for_one_is_that_of_who_has_drained_for_it(
    keep, clock, tmp_path, learner_moves
) -> None:
    """The other works on for the hour that its node has left."""
    fleet, kept, _ = keep()
    plan, told = arranged(tmp_path, "a", "b", "c", cluster__actors="[b,c]"), list[str]()
    for name in ("actor-0", "actor-1"):
        plan._seats.take(name, "b")
        fleet.members[name].drain = lambda name=name: told.append(name)
    plan._seats.add(Room(node("c").node, 0, plan._needs["actor"].memory_bytes))
    plan.close("b")
    hour = {"actor-0": 3600.0, "actor-1": 3600.0}

    def evicted(waiting: list[str]) -> dict[str, str]:
        left_s = {n: s for n, s in hour.items() if fleet.members[n].exit_code is None}
        return dict.fromkeys(plan.actors_that_move(left_s, waiting), "node b is to go")

    fleet.evicted, fleet.room = evicted, lambda name: "" if plan.seat(name) else "none"
    kept.look()
    fleet.members["actor-0"].exit_code = 0
    hour.pop("actor-0")  # it has drained
    kept._moving = learner_moves  # then room is found later
    kept.look()
    assert told == ["actor-0"]
    assert plan.seats["actor-0"] == ("b" if learner_moves else "c")


def test_a_learner_whose_node_is_to_go_saves_and_moves_before_actors_come_back(keep, clock) -> None:
    fleet, kept, said = keep()
    learner, told = fleet.members["learner"], []
    learner.signal, fleet.leaves = told.append, "node b is to go in 60 s"
    fleet.members["actor-1"].seat.leaving = fleet.leaves
    for _ in range(2):
        kept.look()
    assert told == [MAKE_WAY] and said[0] == "the learner saves and moves: node b is to go in 60 s"
    assert fleet.members["actor-1"].exit_code and len(fleet.started) == 1, "it would find the old"
    kept.tend(fleet.end("learner-1", Exit.DONE))  # its other ranks leave with it
    learner.exit_code = Exit.MADE_WAY
    clock.s += 1.1
    kept.tend({"learner": Exit.MADE_WAY, "learner-1": Exit.DONE})
    fleet.leaves = ""
    kept.look()
    assert [list(each) for each in fleet.started[1:]] == [["learner", "learner-1"], ["actor-1"]]
    assert fleet.started[1]["learner"][-1] == "--resume" and kept.made == []


def test_a_learner_that_would_not_be_started_again_stays(keep, clock) -> None:
    fleet, kept, _ = keep(restarts=0)
    told: list[int] = []
    fleet.members["learner"].signal, fleet.leaves = told.append, "node b is to go in 60 s"
    kept.look()
    assert told == []


def test_who_drains_already_is_told_of_its_node_s_end_too(keep, clock) -> None:
    fleet, kept, said = keep()
    told = []
    for number in (0, 1):
        member = fleet.members[f"actor-{number}"]
        member.signal, member.drain = told.append, lambda number=number: told.append(number)
    fleet.stale = ["actor-0"]
    kept._follow_the_learner(["learner"])
    kept.scale(1, lambda name: [name])
    assert told == [signal.SIGTERM] * 2 and len(said) == 2
    for number in (0, 1):
        fleet.members[f"actor-{number}"].seat.leaving = "node b is to go in 60 s"
        kept.look()
    assert told[2:] == [0, 1] and len(said) == 2


def test_an_actor_that_finds_no_node_is_left_out_until_one_has_room(keep, clock) -> None:
    fleet, kept, said = keep()
    fleet.full = {"actor-1": "no GPU is free"}
    dead = fleet.end("actor-1", -9)
    for _ in range(3):
        kept.tend(dead)
        clock.s += restarts.LOOK_S
    assert said[1:] == ["actor-1 waits for room: no GPU is free"] and len(fleet.started) == 1
    assert kept.states()["actor-1"] == "waits for room: no GPU is free"
    fleet.full.clear()
    kept.tend(dead)
    assert said[2:] == ["there is room now for actor-1"]
    assert list(fleet.started[-1]) == ["actor-1"] and kept.states()["actor-1"].startswith("starts")


def test_a_run_waits_for_room_for_any_actor_but_not_for_ever(keep, clock) -> None:
    fleet, kept, _ = keep()
    fleet.full = dict.fromkeys(("actor-0", "actor-1"), "no node is left")
    dead = fleet.end("actor-0", -9) | fleet.end("actor-1", -9)
    kept.tend(dead)
    clock.s += 3.1
    kept.tend(dead)
    clock.s += restarts.HOMELESS_S - 1.0
    kept.tend(dead)
    clock.s += 4.1
    with pytest.raises(BudgetSpent, match="no node had room for an actor: no node is left"):
        kept.tend(dead)


def test_a_run_does_not_go_on_without_room_for_replay(keep, clock) -> None:
    fleet, kept, _ = keep()
    fleet.full = {"replay": "node a is gone"}
    dead = fleet.end("replay", -9)
    kept.tend(dead)
    clock.s += 1.1
    with pytest.raises(BudgetSpent, match="replay cannot be started again: node a is gone"):
        kept.tend(dead)


def test_ranks_wait_together_for_a_node_with_room_but_not_for_ever(keep, clock) -> None:
    fleet, kept, said = keep()
    fleet.full = {"learner-1": "no GPU is free"}
    dead = fleet.end("learner", -9)
    kept.tend(dead)
    dead |= fleet.end("learner-1", -9)
    for _ in range(3):
        clock.s += restarts.LOOK_S
        kept.tend(dead)
    assert len(fleet.started) == 1 and said[-1] == "learner-1 waits for room: no GPU is free"
    fleet.full.clear()
    clock.s += restarts.LOOK_S
    kept.tend(dead)
    kept.tend(dead)
    assert set(fleet.started[-1]) == {"learner", "learner-1"}
    fleet.full = dict.fromkeys(("learner", "learner-1"), "node b is gone")
    dead = fleet.end("learner", -9) | fleet.end("learner-1", -9)
    kept.tend(dead)
    clock.s += 5.0
    kept.tend(dead)
    clock.s += restarts.HOMELESS_S + 1.0
    with pytest.raises(BudgetSpent, match="no node had room for the learner: node b is gone"):
        kept.tend(dead)


def test_room_is_the_learner_s_before_it_is_an_actor_s(keep, clock) -> None:
    """Their node dies: the rank's pause is the longer one, and both look for the last room."""
    fleet, kept, _ = keep()
    asked: list[str] = []
    fleet.room = lambda name: asked.append(name) or ""
    kept._tries["learner"] = 1
    dead = {}
    for name in ("actor-0", "learner", "learner-1"):
        fleet.members[name].seat.gone = "node b is gone"
        dead |= fleet.end(name, -9)
    kept.tend(dead)
    clock.s += 1.1
    kept.tend(dead)
    assert asked == [] and len(fleet.started) == 1, "the learner's pause is not over"
    clock.s += restarts.LOOK_S
    kept.tend(dead)
    assert asked[:2] == ["learner", "learner-1"] and "learner" in fleet.started[1]
    clock.s += restarts.LOOK_S
    kept.tend(dead)
    assert fleet.members["actor-0"].exit_code is None


def test_a_learner_is_not_told_to_wait_for_actors_that_drain(keep, clock) -> None:
    fleet, kept, _ = keep()
    fleet.members["actor-1"].signal = lambda number: None
    kept._call_back(["actor-1"])
    assert "actors.count=1" in kept._command("learner")


def test_who_is_to_leave_for_good_does_not_follow_the_learner(keep, clock) -> None:
    fleet, kept, _ = keep()
    fleet.members["actor-1"].signal = lambda number: None  # it drains
    kept.scale(1, lambda name: [name])
    fleet.stale = ["actor-1"]
    kept._follow_the_learner(["learner"])
    assert kept.returning == set()


def test_a_seat_that_was_found_for_one_who_is_wanted_no_longer_is_given_back(keep, clock) -> None:
    fleet, kept, _ = keep()
    fleet.full = {"actor-2": "no GPU is free"}
    kept.scale(3, lambda name: [name])
    kept.scale(2, lambda name: [name])
    assert fleet.left == ["actor-2"]


def test_a_node_that_goes_while_a_process_is_laid_on_it_does_not_end_the_run(keep, clock) -> None:
    fleet, kept, said = keep()
    start, dead = fleet.start, fleet.end("actor-0", -9)

    def gone(_: dict[str, list[str]]) -> list[str]:
        raise NodeGone("node b is gone (no answer for 8 s)")

    kept.tend(dead)
    fleet.start = gone
    clock.s += 1.1
    kept.tend(dead)
    assert said[-1] == "actor-0 cannot start: node b is gone (no answer for 8 s)"
    fleet.start = start
    clock.s += restarts.LOOK_S
    kept.tend(dead)
    assert fleet.started[-1] == {"actor-0": ["actor-0"]}


def test_the_end_of_a_node_counts_once(keep, clock) -> None:
    fleet, kept, said = keep(restarts=1)
    for name in ("retrieval_server", "actor-0", "actor-1"):
        seat = fleet.members[name].seat
        seat.gone, seat.node_id = "node b is gone (no answer for 8 s)", "b's"
    kept.tend(fleet.end("actor-0", -9) | fleet.end("actor-1", -9))
    kept.tend(fleet.end("retrieval_server", -9))
    assert [each["cause"] for each in kept.made] == [
        "actor-0 has ended: node b is gone (no answer for 8 s)"
    ]
    clock.s += 1.1
    kept.tend({"actor-0": -9, "actor-1": -9})
    last = fleet.members["actor-0"].seat  # the node has come back, and goes again
    last.gone, last.node_id = "node b is gone (no answer for 8 s)", "b's next"
    kept.tend(fleet.end("actor-0", -9))
    assert "fleet.restarts = 1 in 3600 s are spent: it rests" in said[-1]


def test_actors_look_for_a_learner_that_has_moved(keep, clock) -> None:
    fleet, kept, said = keep()
    dead = fleet.end("learner", -9)
    kept.tend(dead)
    fleet.stale = ["actor-0"]
    clock.s += 1.1
    kept.tend(dead | fleet.end("learner-1", -9))
    assert said[-1] == "the learner has moved: actor-0 start again"
    assert fleet.members["actor-0"].exit_code == -signal.SIGTERM
    fleet.stale = []
    kept.look()
    assert fleet.started[-1] == {"actor-0": ["actor-0"]}
