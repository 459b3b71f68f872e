"""Who waits for whom in a run right now: by its records, and by what its launcher says each second
(`waits.json`).
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from configs.schema import Config
from scripts.command.terminal import clean
from scripts.runs import waits_file as file
from scripts.runs.waits_file import Snapshot, read_snapshot
from scripts.view.course import Course
from scripts.view.index import Index, Told

LATE_S = 10.0  # a launcher that has said nothing for so long is gone
MOST_LINES = 200
Line = tuple[str, str, str]  # who, for whom ('': it works), for what or at what


def wait_graph(index: Index, told: Told, config: Config | None) -> dict[str, Any]:
    """The waits of a running run; none, and no time, of another."""
    snapshot = read_snapshot(told.path)
    if snapshot is None or config is None or abs(time.time() - snapshot.at_s) > LATE_S:
        return {"at": None, "lines": [], "unseen": 0}
    with index.still():
        lines = list(_lines(snapshot, told.course, config))
    shown = [{"who": clean(a), "whom": b, "what": clean(c)} for a, b, c in lines[:MOST_LINES]]
    unnamed = snapshot.actors - len(snapshot.fleet)
    return {"at": snapshot.at_s, "lines": shown, "unseen": len(lines) - len(shown) + unnamed}


def _lines(snapshot: Snapshot, course: Course, config: Config) -> Iterator[Line]:
    """All lines: who is no actor first."""
    for name in ("learner", "replay"):
        if name in snapshot.states:
            yield name, "launcher", snapshot.states[name]
        elif name == "learner":
            yield _learner(snapshot, course, config)
        else:
            yield _replay(snapshot, course, config)
    others = snapshot.states.keys() - snapshot.fleet.keys() - {"learner", "replay"}
    for name in sorted(others):
        yield name, "launcher", snapshot.states[name]
    for name, gauges in snapshot.fleet.items():
        if name in snapshot.states:
            yield name, "launcher", snapshot.states[name]
        else:
            yield from ((name, *each) for each in _actor(gauges, course, snapshot.at_s))


def _learner(snapshot: Snapshot, course: Course, config: Config) -> Line:
    step, last = course.completed, config.learner.total_steps
    since = f"since {max(0.0, snapshot.at_s - course.since):.0f} s"
    if step < 0:
        return "learner", "actors", "the first weights to be verified, once it has its own"
    if snapshot.phase.startswith("stopped"):
        return "learner", "", snapshot.phase
    if course.batch > step:
        return "learner", "", f"trains step {course.batch} {since}"
    if step in course.evaluating and step in (0, last):
        return "learner", "actors", f"the {_evaluation(snapshot, step)}"
    if step >= last:
        return "learner", "actors", f"version {step} to be applied, {since}"
    if snapshot.phase.startswith("learner trains"):  # replay was asked for no batch yet
        return "learner", "", f"is done with step {step} {since}: it puts out or saves its weights"
    told = f": {snapshot.phase}" if snapshot.phase.startswith("step ") else ""
    return "learner", "replay", f"the batch of step {step + 1} {since}{told}"


def _evaluation(snapshot: Snapshot, step: int) -> str:
    told = snapshot.phase
    return told if told.startswith("evaluation") else f"evaluation of step {step}"


def _replay(snapshot: Snapshot, course: Course, config: Config) -> Line:
    wanted = config.replay.groups_per_step
    groups = f"{snapshot.ready:.0f} groups ready, {snapshot.open:.0f} under way"
    if course.completed < 0:
        return "replay", "learner", "to begin"
    if snapshot.ready < wanted:
        return "replay", "actors", f"groups of the next batch: {groups}, {wanted} make one"
    return "replay", "learner", f"to take a batch: {groups}"


def _actor(gauges: Mapping[str, float], course: Course, at_s: float) -> Iterator[tuple[str, str]]:
    """What an actor does, and for whom it waits, and for what."""
    if not gauges:
        yield "replay", "its first numbers"
        return
    held, room = gauges.get(file.HELD, 0.0), gauges.get(file.ROOM, 0.0)
    if held:
        yield "", f"{held:.0f} rollouts, {gauges.get(file.PACE, 0.0):.0f} tokens/s"
    version, (newest, put_out_s) = gauges.get(file.VERSION, -1.0), course.published
    if 0 <= version < newest:
        since = f"put out {max(0.0, at_s - put_out_s):.0f} s before"
        yield "learner", f"version {newest}, {since}: version {version:.0f} serves"
    if searches := gauges.get(file.SEARCHES):
        yield "retrieval", f"{searches:.0f} call{'s' * (searches != 1)} of rollouts that search"
    if held < room:
        yield "replay", f"leases: {room - held:.0f} of {room:.0f} places are free"
    if queued := gauges.get(file.QUEUED):
        yield "its engine", f"room for {queued:.0f} request{'s' * (queued != 1)}"
