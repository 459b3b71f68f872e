"""The timeline: lanes of what records tell, and bins that say what a plain count says."""

import json
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from learner.metrics.applications import FILE_NAME as FILE
from replay.log.event_log import FILE_NAME, EventLog
from replay.log.records import (
    CaughtUp,
    GroupDropped,
    LearnerResumed,
    Leased,
    LeaseReturned,
    Record,
    Reported,
    RunResumed,
    RunStarted,
    Sampled,
    StepsCommitted,
)
from replay.protocol import Lease
from replay.trajectory import Question, Sampling, Search, TokenSequence
from scripts.runs.waits_log import FILE_NAME as STANDINGS
from scripts.runs.waits_log import LAPSE_S
from scripts.view import lanes
from scripts.view import timeline as answers
from scripts.view.bins import STRIDE, WIDTHS
from scripts.view.index import Index
from scripts.view.lanes import ACTORS, STATES, Span
from scripts.view.rollouts.wanted import Wanted
from scripts.view.spans import keep
from scripts.view.timeline import MOST_BINS_IN_ALL, MOST_LANES, timeline
from tests.replay.conftest import trajectory_for
from tests.scripts.conftest import RecordedRun
from tests.scripts.view.conftest import delivery

START = 1_000_000.0
LANES = ACTORS + 3


def leased(at: float, number: int, actor: str = "actor") -> Leased:
    return Leased(at, actor, number, (0,), (0,))


def delivered(at: float, number: int, *turns: tuple[float, float, float]) -> list[Record]:
    """A group, opened and delivered: turns from, to, and the seconds of their searches."""
    like = trajectory_for(_lease(number), "actor", 1.0).turns[0]
    played = tuple(
        msgspec.structs.replace(
            like,
            started_at=START + begin,
            ended_at=START + end,
            searches=(Search("q", (), seconds, "ok"), Search("q", (), seconds / 2, "ok")),
        )
        for begin, end, seconds in turns
    )
    sequences = (TokenSequence(like.action_tokens, played),)
    opened, told = delivery(number, sequences=sequences)
    return [
        msgspec.structs.replace(opened, now=START),  # type: ignore[type-var]
        msgspec.structs.replace(told, now=at),  # type: ignore[type-var]
    ]


def _lease(number: int) -> Lease:
    return Lease(number, 0, "train", Question(f"q-{number}", "?", ("a",)), Sampling(1.0, 0))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """run(record, …): a run of these records."""

    def made(*records: Record) -> Path:
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        with EventLog.create(folder / FILE_NAME) as log:
            log.append([RunStarted(START, 0, ""), *records])
            log.sync()
        return folder

    return made


def means(found: dict[str, Any], kind: str) -> dict[str, float]:
    """The states of the only lane of a kind, in seconds."""
    (lane,) = [each for each in found["lanes"] if each["kind"] == kind]
    length = found["width"] * found["bins"]
    return {each["name"]: round(each["mean"] * length, 2) for each in lane["states"]}


def test_a_rollout_generates_searches_and_does_other_things(
    index_of: Callable[..., Index], run: Callable[..., Path]
) -> None:
    turns = ((1.0, 3.0, 0.5), (4.0, 6.0, 9.0), (7.0, 8.0, 5.0))  # the later searches are cut
    index = index_of(run(leased(START, 1), *delivered(START + 10, 1, *turns)))
    found = timeline(index, 0, None, None)
    assert means(found, "actor") == {
        "generate": 5.0, "search": 3.5, "other": 1.5, "unknown": 0.0,
    }  # fmt: skip
    assert found["first"] == START and found["last"] == START + 10
    assert found["lanes"][0]["name"] == "actor" and found["lanes"][0]["busy"]["mean"] == 0.85


@pytest.mark.parametrize("wide", [False, True], ids=["one by one", "by cells"])
def test_busy_is_the_time_in_which_anyone_works_however_wide_the_bins(
    index_of: Callable[..., Index],
    run: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    wide: bool,
) -> None:
    if wide:
        monkeypatch.setattr(answers, "MOST_READ", 0)
    records = list[Record]()
    for at in range(0, 3200, 40):  # two at once, of which one is told later
        records += [leased(START, at), leased(START, at + 1)]
        for number, offset in ((at, 0), (at + 1, 2)):
            turn = (at + offset, at + offset + 2.0 + number % 2, 0.0)
            records += delivered(START + 3200, number, turn)
    records += [GroupDropped(START + 3200, n, "no_signal") for n in (0, 1)]
    index = index_of(run(*records))
    for most in (5600, 70):  # bins of 4 seconds and of some minutes
        found = timeline(index, 0, START, START + 3200, most=most)
        (lane,) = [each for each in found["lanes"] if each["kind"] == "actor"]
        length = found["to"] - found["from"]
        assert length == pytest.approx(found["width"] * found["bins"])
        assert lane["busy"]["mean"] * length == pytest.approx(80 * 5.0, rel=1e-3)
        assert sum(lane["busy"]["levels"]) * found["width"] == pytest.approx(400, rel=1e-2)


def test_groups_that_are_ready_at_once_are_one_time_of_replay(
    index_of: Callable[..., Index], run: Callable[..., Path]
) -> None:
    index = index_of(
        run(
            *delivered(START + 1, 1, (0, 1, 0)),
            *delivered(START + 2, 2, (0, 1, 0)),
            *delivered(START + 3, 3, (0, 1, 0)),
            *delivered(START + 3, 4, (0, 1, 0)),
            Sampled(START + 4, 1, 1, (1, 2), (), {}),
            StepsCommitted(START + 10, 1, 1),  # two are ready still
        )
    )
    (lane,) = [e for e in timeline(index, 0, None, None)["lanes"] if e["kind"] == "replay"]
    assert lane["busy"]["mean"] == 0.9  # and of the parts 5 + 7 + 7
    assert means(timeline(index, 0, None, None), "replay")["ready"] == 19.0


def test_times_are_taken_once_and_those_far_behind_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn, plain = random.Random(5), set[int]()
    times = lanes._Times()
    for _ in range(400):
        begin = drawn.randrange(2000)
        end = begin + drawn.randrange(9)
        new = {n for a, b in times.take(begin, end) for n in range(int(a), int(b))}
        assert new == set(range(begin, end)) - plain
        plain |= new
    monkeypatch.setattr(lanes, "_MOST_APART", 4)
    few = lanes._Times()
    assert all(few.take(n, n + 1) == [(n, n + 1)] for n in range(0, 20, 2))
    free = [(n, n + 1) for n in range(11, 19, 2)]
    assert few.take(0, 30) == [*free, (19, 30)] and few.take(0, 30) == []


def test_searches_of_all_actors_lie_on_one_lane(
    index_of: Callable[..., Index], run: Callable[..., Path]
) -> None:
    records = [leased(START, 1), leased(START, 2)]
    for number, turn in ((1, (1.0, 2.0, 4.0)), (2, (0.0, 3.0, 99.0))):
        records += delivered(START + 10, number, turn)  # type: ignore[arg-type]
    found = timeline(index_of(run(*records)), 0, None, None)
    assert means(found, "retrieval") == {"asked": 4.0 + 2.0 + 7.0 + 7.0}  # two a turn, cut
    (lane,) = [each for each in found["lanes"] if each["kind"] == "retrieval"]
    assert lane["busy"]["mean"] == 0.8 and max(lane["states"][0]["levels"]) == 4.0
    one = run(leased(START, 1), *delivered(START + 9, 1, (0, 1, 0)))
    without = timeline(index_of(one), 0, None, None)
    assert [each["kind"] for each in without["lanes"]] == ["actor", "learner", "replay"]


def test_weights_that_actors_take_up_have_a_lane(
    index_of: Callable[..., Index], run: Callable[..., Path]
) -> None:
    folder = run(StepsCommitted(START + 20, 1, 1))
    lines = [[START + 5, "actor-0", 1, 2.0, 0.5], [START + 6, "actor-1", 1, 1.0, 1.0]]
    (folder / FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '[1, "torn')
    index = index_of(folder)
    whole = timeline(index, 0, None, None)
    assert means(whole, "apply") == {"apply": 1.5, "receive": 3.0}
    with (folder / FILE).open("a") as file:
        file.write(f'"]\n[NaN]\n{json.dumps([START + 9, "actor-0", 2, -1.0, 0.5])}\n')
        file.write(f"{json.dumps([START + 9, 'actor-0', 2, 0.0, 0.5])}\n")
    assert index.catch_up(threading.Event()) and not index.catch_up(threading.Event())
    assert means(timeline(index, 0, None, None), "apply") == {"apply": 2.0, "receive": 3.0}


def stand(run: Path, *lines: list[Any]) -> None:
    """Append to what a run's launcher saw, at seconds from the start."""
    with (run / STANDINGS).open("a") as file:
        for at, *others in lines:
            file.write(f"{json.dumps([START + at, *others])}\n")


@pytest.mark.parametrize("wide", [False, True], ids=["one by one", "by cells"])
def test_an_engine_and_leases_that_an_actor_waits_for_have_lanes(
    index_of: Callable[..., Index],
    run: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    wide: bool,
) -> None:
    monkeypatch.setattr(answers, "MOST_READ", 0 if wide else 20_000)
    folder = run(leased(START, 1), *delivered(START + 40, 1, (1.0, 3.0, 0.5)))
    index = index_of(folder)
    found = timeline(index, 0, None, None)
    assert not found["sampled"] and "engine" not in [each["kind"] for each in found["lanes"]]
    assert "lease" not in means(found, "actor")
    stand(folder, [0, ""], [0, "actor", 7, 0, 1, 0, 25], [8, "actor", 3, 1, 4, 2, 75], [16])
    with (folder / STANDINGS).open("a") as file:
        file.write("[1000020.0, ")  # torn: it is being written
    assert index.catch_up(threading.Event())
    assert means(timeline(index, 0, None, None), "actor")["lease"] == 7 * 8 + 3 * 28  # for now
    stand(folder, [20, ""])  # it makes the torn line none
    stand(folder, [24, "actor", 0, 0, 0, 0, 0], [32, "actor", 0, 0], [36, "actor"])
    index.catch_up(threading.Event())
    found = timeline(index, 0, START, START + 40)
    assert found["sampled"] and len(found["lanes"]) == 6  # retrieval, weights, learner, replay
    assert means(found, "actor")["lease"] == 7 * 8 + 3 * 16
    told, over = means(found, "engine"), found["to"] - START - 40  # to the end of a cell
    assert told == {"running": 8 + 64, "queued": 32, "untold": 8 + over, "kv": 2 + 12}
    assert means(found, "apply")["behind"] == 16
    (lane,) = [each for each in found["lanes"] if each["kind"] == "engine"]
    assert lane["name"] == "actor"
    assert lane["busy"]["mean"] == pytest.approx(24 / (40 + over), abs=1e-4)


def test_a_standing_lasts_no_longer_than_its_launcher(
    index_of: Callable[..., Index], run: Callable[..., Path]
) -> None:
    folder = run(StepsCommitted(START + 1000, 1, 1))
    here = ["actor", 0, 0, 1, 0, 0]
    stand(folder, [0, ""], [0, *here], [9], [18])  # it was killed
    stand(folder, [100, ""], [100, *here], *([at] for at in range(110, 400, 10)), [400, ""])
    stand(folder, [500, ""], [500, *here], [490, *here], [500])  # its clock was put back
    index = index_of(folder)
    found = timeline(index, 0, None, None)
    assert means(found, "engine")["running"] == 18 + 300 + 0 + 10 + LAPSE_S
    assert index.runs[0].longest <= 60.0
    again = run(StepsCommitted(START + 1, 1, 1))
    stand(again, [0, *here], *([at] for at in range(10, 100, 10)))  # no record for long
    assert timeline(index_of(again), 0, None, None)["last"] == START + 90


def test_of_many_actors_engines_share_a_lane(
    index_of: Callable[..., Index], run: Callable[..., Path]
) -> None:
    for many, own in ((13, 13), (14, 14), (40, 26)):
        folder = run(StepsCommitted(START + 10, 1, 1))
        stand(folder, *([0, f"actor-{n:02}", 1, 0, 2, 0, 50] for n in range(many)), [10, ""])
        found = timeline(index_of(folder), 0, None, None)
        kinds = [each["kind"] for each in found["lanes"]]
        assert len(kinds) <= MOST_LANES and kinds.count("engine") == (many if many < 14 else 1)
        assert len([e for e in found["lanes"] if e["kind"] == "actor" and e["name"]]) == own
        engine = [each for each in found["lanes"] if each["kind"] == "engine"][-1]
        told = {each["name"]: each["mean"] for each in engine["states"]}
        share = engine.get("others", 1)
        assert told == {"running": 2.0 * share, "queued": 0, "untold": 0, "kv": 0.5}


def test_leases_that_tell_nothing_are_told_apart(
    index_of: Callable[..., Index], run: Callable[..., Path]
) -> None:
    index = index_of(
        run(
            leased(START, 1),
            LeaseReturned(START + 2, "actor", 1, 0, "died"),
            leased(START + 2, 2),
            leased(START + 3, 3),
            StepsCommitted(START + 4, 1, 1),
            RunResumed(START + 100, ""),  # what was held ended with what went before
            leased(START + 101, 4),
            StepsCommitted(START + 105, 1, 1),  # and the last one is held still
        )
    )
    assert means(timeline(index, 0, None, None), "actor")["unknown"] == 2.0 + 2.0 + 1.0 + 4.0


def test_the_learner_trains_publishes_and_waits(
    index_of: Callable[..., Index], run: Callable[..., Path]
) -> None:
    gauges = {"learner/update_s": 3.0, "sync/publish_s": 1.0, "learner/wait_for_batch_s": 2.0}
    index = index_of(
        run(
            LearnerResumed(START + 1, 1, 0),
            Reported(START + 10, 1, 1, gauges),
            Reported(START + 20, 1, 2, gauges),  # it published nothing: the gauge stands
            Reported(START + 22, 1, 3, gauges | {"learner/update_s": float("nan")}),
            Reported(START + 23, 1, 4, gauges | {"learner/update_s": 9.0, "sync/publish_s": 0.5}),
        )
    )
    found = timeline(index, 0, None, None)
    assert means(found, "learner") == {"train": 6.5, "publish": 1.5, "wait": 6.0}
    assert found["versions"] == [(START + 1, 0), (START + 10, 1), (START + 23, 4)]
    later = timeline(index, 0, START + 12, START + 16)
    assert later["versions"] == [(START + 10, 1)]  # that of its begin


def test_a_version_that_was_not_published_is_not_told(
    index_of: Callable[..., Index], run: Callable[..., Path]
) -> None:
    def gauges(version: int) -> dict[str, float]:
        return {"sync/published": float(version), "sync/publish_s": 1.0 + version}

    index = index_of(
        run(
            LearnerResumed(START + 1, 1, 0),  # it has put out version 0
            Reported(START + 10, 1, 1, gauges(0)),
            Reported(START + 20, 1, 2, gauges(2)),
            LearnerResumed(START + 30, 2, 0),
            Reported(START + 40, 2, 1, {}),
            Reported(START + 50, 2, 2, {}),  # trained again
            CaughtUp(START + 51, 2, 2),
            Reported(START + 60, 2, 3, gauges(2)),
            Reported(START + 70, 2, 4, gauges(4)),
        )
    )
    found = timeline(index, 0, None, None)
    assert found["versions"] == [
        (START + 1, 0), (START + 20, 2), (START + 51, 2), (START + 70, 4),
    ]  # fmt: skip
    assert means(found, "learner")["publish"] == 3.0 + 5.0
    assert index.runs[0].course.published == (4, START + 70)


def test_groups_fill_and_wait_for_the_learner(
    index_of: Callable[..., Index], run: Callable[..., Path]
) -> None:
    index = index_of(
        run(
            *delivered(START + 4, 1, (0, 1, 0)),
            Sampled(START + 6, 1, 1, (1,), (), {}),
            *delivered(START + 7, 2, (0, 1, 0)),
            GroupDropped(START + 7, 2, "no_signal"),
            *delivered(START + 8, 3, (0, 1, 0)),
            StepsCommitted(START + 10, 1, 1),  # the third is ready still
        )
    )
    found = timeline(index, 0, None, None)
    assert means(found, "replay") == {"ready": 2.0 + 2.0, "filling": 4.0 + 7.0 + 8.0}
    marks = [(each["at"] - START, each["kind"], each["count"]) for each in found["marks"]]
    assert marks == [(0.0, "start", 1), (7.0, "group", 1), (10.0, "checkpoint", 1)]


def test_a_sentinel_that_begins_to_fire_is_an_event(
    index_of: Callable[..., Index], run: Callable[..., Path]
) -> None:
    fires = {"learner/sentinel_ess": 1.0, "learner/sentinel_ess_median": 0.5}
    steps = [Reported(START + n, 1, n, fires if n > 2 else {}) for n in range(1, 6)]
    index = index_of(run(*steps))
    ((at, said),) = index.rows("SELECT at, said FROM events WHERE kind = 'sentinel'")
    assert at == START + 3 and said.startswith("sentinel ess at step 3: ")


@pytest.fixture(scope="module")
def many() -> list[Span]:
    """Some thousand spans of five lanes."""
    drawn = random.Random(3)
    found = list[Span]()
    for _ in range(3000):
        begun = START + drawn.uniform(0, 50_000)
        parts = tuple(
            (drawn.randrange(len(STATES)), begun + a, begun + a + drawn.expovariate(0.05))
            for a in (0.0, drawn.uniform(0, 30))
        )
        levels = tuple((drawn.randrange(LANES), *part, drawn.randrange(9)) for part in parts[1:])
        end = max(part[2] for part in parts)
        found.append(Span(drawn.randrange(LANES), begun, end, parts, levels=levels))
    return found


@pytest.fixture(scope="module")
def filled(many: list[Span], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    """An index of these spans, written in pieces."""
    folder = tmp_path_factory.mktemp("many")
    index = Index([folder], folder / "index.sqlite")
    told = index.runs[0]
    told.first, told.last = START, START + 50_000
    told.lanes.actors = {f"actor-{n}": n + ACTORS for n in range(3)}
    told.longest = max(each.ended - each.begun for each in many)
    for begin in range(0, len(many), 700):
        keep(index._base, 0, many[begin : begin + 700])
    index._base.commit()
    yield index
    index.close()


@pytest.mark.parametrize("most", [10**9, 10], ids=["one by one", "by cells"])
@pytest.mark.parametrize("times", [(0, 50_000), (100, 101), (7_777.7, 31_000), (49_000, 50_000)])
def test_bins_are_what_a_plain_count_says(
    filled: Index,
    many: list[Span],
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    times: tuple[float, float],
) -> None:
    monkeypatch.setattr(answers, "MOST_READ", most)
    begin, width, levels = answers._levels(
        filled, 0, START + times[0], START + times[1], 100, LANES
    )
    assert begin <= START + times[0] and begin + width * levels.shape[1] >= START + times[1] - 1e-6
    assert levels.shape[0] == LANES * STRIDE and 1 <= levels.shape[1] <= 101
    plain: dict[tuple[int, int], list[tuple[float, float, int]]] = defaultdict(list)
    for span in many:
        for lane, state, *part in (*((span.lane, *p, 1) for p in span.parts), *span.levels):
            plain[lane, state].append(tuple(part))  # type: ignore[arg-type]
    for place in (0, levels.shape[1] // 2, levels.shape[1] - 1):
        first, last = begin + place * width, begin + (place + 1) * width
        for lane in range(LANES):
            for state in range(len(STATES)):
                seconds = sum(
                    max(0.0, min(end, last) - max(start, first)) * count
                    for start, end, count in plain[lane, state]
                )
                found = levels[lane * STRIDE + state, place]
                assert found == pytest.approx(seconds / width, abs=1e-5)


def test_an_answer_is_bounded_however_many_actors_there_are(filled: Index) -> None:
    told = filled.runs[0]
    before = told.lanes.actors
    told.lanes.actors = {f"actor-{n:03}": ACTORS + n % 3 for n in range(200)}
    try:
        found = timeline(filled, 0, None, None)
    finally:
        told.lanes.actors = before
    assert len(found["lanes"]) * found["bins"] <= MOST_BINS_IN_ALL
    whole = timeline(filled, 0, None, None)
    assert len(whole["lanes"]) == 5 and whole["bins"] == 800


def test_rollouts_of_a_time_are_those_under_way(
    index_of: Callable[..., Index], run: Callable[..., Path]
) -> None:
    records = [leased(START + n, n) for n in range(1, 4)]
    for n in range(1, 4):
        records += delivered(START + 10 * n, n, (n, n + 1, 0))  # type: ignore[arg-type]
    index = index_of(run(*records))

    def of(**wanted: Any) -> list[int]:
        _, rows = index.rollouts(Wanted(descending=False, **wanted), 0, 10)
        return [row["group_id"] for row in rows]

    assert of(times=(START + 11, START + 15)) == [2, 3] == of(times=(START + 20, START + 20))
    assert of(times=(START, START + 1)) == [1] and of(actor="actor") == [1, 2, 3]
    assert of(actor="another") == []


def test_an_index_that_reads_on_tells_the_same(
    index_of: Callable[..., Index], recorded_run: RecordedRun
) -> None:
    index = index_of(recorded_run.path)
    for step in range(3):
        recorded_run.now += 5
        recorded_run.train(step)
        index.catch_up(threading.Event())
    again = index_of(recorded_run.path)
    assert timeline(index, 0, None, None) == timeline(again, 0, None, None)
    assert timeline(index, 0, None, None)["lanes"][0]["kind"] == "actor"


def test_cells_are_of_lengths_that_are_made_of_each_other() -> None:
    assert all(longer % shorter == 0 for shorter, longer in pairwise(WIDTHS))
