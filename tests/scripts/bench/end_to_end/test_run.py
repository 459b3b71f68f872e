"""The end-to-end benchmark's cells: kept, resumed, in slices; then two tiny ones for real."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.load import ConfigError
from configs.runtime.process import REPOSITORY
from replay.codec import encode_trajectory
from replay.log import records
from replay.log.summary import Summary
from replay.protocol import EvalResult
from replay.trajectory import (
    Question,
    Sampling,
    Search,
    StopReason,
    TokenSequence,
    Trajectory,
    Turn,
)
from scripts import cli
from scripts.bench.end_to_end.bench import (
    CODE,
    BenchEndToEndOptions,
    bench,
    left,
    measured_of,
    present,
    what_is_left,
)
from scripts.bench.end_to_end.fleet import recorded
from scripts.bench.end_to_end.plan import Cell
from scripts.bench.end_to_end.record import Evaluation, Parts, TaskName, Turns, turns_of
from scripts.bench.end_to_end.run import Kept, Slice, measure
from scripts.bench.end_to_end.task import DEMO, TASKS, WIKI
from scripts.bench.harness import BenchError, sources
from scripts.demo.task import prepare
from scripts.wiki.pipeline import pipeline

PARTS = Parts(1000.0, 0.002, 0.3, 1.0, 1.5, 2000)
ROW: dict[str, Any] = {
    "step_s": 2.0,
    "update_s": 0.5,
    "wait_s": 1.0,
    "oldest_s": 0.5,
    "rest_s": 0.5,
    "pause_s": 0.01,
    "tokens": 2000.0,
    "tokens_per_s": 1000.0,
    "sampled_over_trained": 1.0,
    "staleness": 1.0,
    "staleness_max": 2.0,
    "learner_idle": 0.75,
    "engine_idle": 0.2,
    "cpu": {"engine": 1.0},
    "generate_s": 0.2,
    "search_s": 0.01,
    "search_share": 0.05,
}


def payload(*searches: Search) -> bytes:
    """An encoded rollout of two turns; the first searches, and both generate .25 s each."""
    ids = np.array([1], np.int32)
    turns = tuple(
        Turn(ids, ids.astype(np.float32), ids, ids, searches=each) for each in (searches, ())
    )
    return encode_trajectory(
        Trajectory(
            group_id=1,
            sibling=0,
            question_id="q",
            kind="train",
            actor_id="actor-0",
            sampling=Sampling(),
            sequences=(TokenSequence(ids, turns),),
            stop_reason=StopReason.ANSWERED,
            answer="a",
            reward=1.0,
            timings={"generate_s": 0.5, "retrieve_s": 0.4, "total_s": 1.0},
        )
    )


def test_a_step_s_turns_are_its_rollouts() -> None:
    asked, skipped = Search("q", ("d",), 0.4, "ok"), Search("q", (), 9.0, "skipped")
    assert turns_of([]) == Turns()
    assert turns_of([payload(asked), payload(asked, skipped)]) == Turns(
        turns=4, searches=2, generate_s=1.0, search_s=0.8
    )


def test_what_is_measured_is_not_measured_again(tmp_path: Path) -> None:
    kept, cell = Kept(tmp_path, "code"), Cell("demo", "sync", "tail", 0, 8)
    assert kept.row(cell) is None and kept.parts(0) is None
    assert kept.parts(0, lambda: PARTS) == PARTS == Kept(tmp_path, "code").parts(0)
    row = kept.row(cell, lambda: ROW)
    assert row == Kept(tmp_path, "code").row(cell, lambda: 1 / 0)
    assert (row["mode"], row["seed"], row["tokens"]) == ("sync", 0, 2000.0)
    assert kept.row(Cell("demo", "sync", "tail", 0, 9)) is None
    assert Kept(tmp_path, "other code").row(cell) is None
    assert Kept(tmp_path, "code", ("learner.lr=0",)).row(cell) is None


def test_a_slice_begins_nothing_that_would_end_too_late() -> None:
    now = [0.0]
    time_left = Slice(1.0, lambda: now[0])
    assert time_left.fits(900.0)  # else nothing would ever be measured
    assert time_left.fits(59.0)
    now[0] = 30.0
    assert not time_left.fits(31.0) and time_left.fits(30.0)


def test_what_there_is_is_reported_and_what_is_left_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    options = BenchEndToEndOptions(quick=True, out=tmp_path, json=file)
    kept = Kept(tmp_path, "code")
    present(options, kept, {"cores": 2})
    assert not file.exists()  # nothing yet
    kept.parts(0, lambda: PARTS)
    for cell in options.cells[:3]:
        kept.row(cell, lambda: ROW)
    present(options, kept, {"cores": 2})
    found = json.loads(file.read_text())
    assert found["async_over_lockstep"] == 1.0
    assert found["rivals"]["async_over_lockstep"] == {
        "measured": ["lockstep_2_engines"],
        "missing": ["lockstep"],
    }
    assert found["async_over_sync_zero_latency"] is None
    assert found["left"] == [cell.name for cell in left(options, kept)] and len(found["left"]) == 3
    assert "lockstep" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"modes": ("asink",)}, "--modes 'asink': one of lockstep"),
        ({"latencies": ("none",)}, "--latencies 'none': one of tail"),
        ({"headline": "sync"}, "--headline 'sync': one of async_1"),
        ({"overrides": ("learner.stepz=3",)}, "unknown key 'learner.stepz'"),
        ({"overrides": ("actors.count=1",)}, "actors.count = 1: each cell has its own: drop it, "),
        ({"overrides": ("seed=7",)}, "seed = 7: each cell has its own: drop it, and choose by --m"),
        ({"overrides": ("learner.total_steps=9",)}, "learner.total_steps = 9: each cell has its"),
        ({"overrides": ("retrieval.index=x",), "task": "wiki"}, "retrieval.index = 'x': each cell"),
        ({"overrides": ("learner.threads=2",)}, "learner.threads = 2: each cell has its own"),
        ({"steps": 0}, "--steps 0: at least 1"),
        ({"quick": True, "modes": ("sync",)}, "--quick chooses its own modes: drop --modes"),
        ({"quick": True, "latencies": ("zero",)}, "--quick chooses its own latencies: drop"),
        ({"quick": True, "only": "em"}, "--quick chooses its own cells: drop --only"),
        ({"quick": True, "headline": "async_4"}, "--quick chooses its own modes: drop --headl"),
        ({"quick": True, "seeds": (0, 1)}, "--quick takes one seed: name one after --seeds"),
        ({"task": "wiki", "modes": ("async_8",)}, "--modes 'async_8': one of lockstep, sync, asy"),
        ({"task": "wiki", "quick": True}, "--quick --task wiki: .* do not fit ten minutes"),
        ({"task": "wiki", "only": "em"}, "--only em --task wiki: .* forage bench wiki measures"),
        ({"only": "em", "steps": 4}, "--only em trains whole runs of 80 steps: drop --steps"),
    ],
)
def test_what_it_cannot_measure_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BenchEndToEndOptions(**given)


def test_figures_are_of_a_code_and_a_configuration() -> None:
    on = {"processor": "one", "cores": 2}
    kept = measured_of(BenchEndToEndOptions(), on)
    assert kept == measured_of(BenchEndToEndOptions(quick=True), on)
    assert kept != measured_of(BenchEndToEndOptions(overrides=("actors.max_turns=2",)), on)
    assert kept != measured_of(BenchEndToEndOptions(), on | {"cores": 4})
    assert kept != measured_of(BenchEndToEndOptions(task="wiki"), on)


@pytest.mark.parametrize(
    "name", ["harness.py", "figures.py", "preflight.py", "server.py", "task.py"]
)
def test_figures_are_of_all_that_makes_them(name: str) -> None:
    assert name in {path.name for path in sources(*CODE)}


@pytest.mark.parametrize(("task", "name"), [("demo", "world.py"), ("wiki", "split.py")])
def test_figures_of_a_task_are_of_what_makes_its_files(task: TaskName, name: str) -> None:
    assert name in {path.name for path in sources(*TASKS[task].code)}


def test_figures_are_of_the_files_that_they_were_measured_with(tmp_path: Path) -> None:
    cell = Cell("wiki", "sync", "tail", 0, 4)
    as_it_comes, started = (
        Kept(tmp_path, "code", task=dataclasses.replace(WIKI, made_of=lambda seed, of=of: of))
        for of in ("as it comes", "start-0, 8 steps")
    )
    as_it_comes.row(cell, lambda: ROW)
    assert as_it_comes.row(cell) and started.row(cell) is None
    as_it_comes.parts(0, lambda: PARTS)
    assert as_it_comes.parts(0) and started.parts(0) is None


def test_a_wiki_task_that_is_not_there_is_refused_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "CACHE", tmp_path / "cache")
    options = BenchEndToEndOptions(task="wiki", seeds=(3,), out=tmp_path / "out")
    with pytest.raises(ConfigError, match="is missing: make wiki SEED=3 makes it"):
        bench(options)
    assert list(tmp_path.iterdir()) == []


def test_a_cell_that_fails_leaves_the_figures_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "figures.json"
    options = BenchEndToEndOptions(quick=True, out=tmp_path, json=file)

    def fail(cells: list[Cell], kept: Kept, *_: object) -> None:
        kept.row(cells[0], lambda: ROW)
        raise BenchError("the second ended with 1")

    monkeypatch.setattr("scripts.bench.end_to_end.bench.measure", fail)
    with pytest.raises(BenchError, match="the second ended with 1"):
        bench(options)
    assert len(json.loads(file.read_text())["rows"]) == 1


def test_what_is_left_tells_the_minutes_of_cells_and_parts(tmp_path: Path) -> None:
    options = BenchEndToEndOptions(quick=True, out=tmp_path)
    kept = Kept(tmp_path, "code")
    cells_s = [cell.about_s for cell in options.cells]
    minutes = round((sum(cells_s) + DEMO.parts_s) / 60)
    assert what_is_left(options, kept).startswith(f"6 cells left, about {minutes} minutes, lock")
    kept.parts(0, lambda: PARTS)
    kept.row(options.cells[0], lambda: ROW)
    minutes = round(sum(cells_s[1:]) / 60)
    assert what_is_left(options, kept).startswith(f"5 cells left, about {minutes} minutes, sync")


def test_a_run_s_log_tells_its_steps() -> None:
    summary = Summary(1, 0, "q", "train", 1.0, 1, 0, 2, 40, 0, 1)
    gauges = {
        "learner/update_s": 0.5,
        "learner/wait_for_batch_s": 0.2,
        "learner/wait_for_oldest_s": 0.1,
        "replay/staleness": 1.5,
        "replay/staleness_max": 2.0,
        "sync/generation_pause_s": 0.02,
    }
    log: list[records.Record] = [
        records.GroupOpened(10.0, 1, "train", Question("q", "?", ("a",)), 1, 0),
        records.Delivered(11.0, "actor-0", 1, 0, payload(), summary),
        records.Delivered(12.0, "actor-0", 1, 1, payload(), summary),
        records.Sampled(13.0, 1, 1, (1,), (), {}),
        records.Reported(14.0, 1, 1, gauges),
        records.EvaluationFinished(15.0, EvalResult(1, 4, 0.9, 0.8, {}, {}, 1.0, 1, 1)),
    ]
    found = recorded(log)
    (step,) = found.steps
    assert (step.at_s, step.tokens, step.sampled) == (14.0, 80, 80)
    assert step.wait_s == pytest.approx(0.3) and step.oldest_s == 0.1
    assert (step.pause_s, step.staleness) == (0.02, 1.5)
    assert step.turns == Turns(turns=4, generate_s=1.0)
    assert found.evaluations == (Evaluation(1, 5.0, 0.9, 0.8),)


@pytest.fixture(scope="module")
def demo_cache() -> None:
    """The demo's task of seed 0, made where it is not cached."""
    prepare(REPOSITORY / ".cache", 0, print)


TINY = (
    "replay.groups_per_step=2",
    "replay.group_size=4",
    "learner.warmup_steps=1",
)


@pytest.mark.soak("benchmarks")
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_two_tiny_cells_are_measured(demo_cache: None, tmp_path: Path) -> None:
    kept = Kept(tmp_path, "tiny", TINY)
    kept.parts(0, lambda: PARTS)
    modes = ("lockstep", "one_step_off", "async_2")
    cells = [Cell("demo", mode, "scaled", 0, 8) for mode in modes]  # steps of .2 s
    measure(cells, kept, 30.0, print)
    lockstep, ahead, asynchronous = (kept.row(cell) for cell in cells)
    assert lockstep and ahead and asynchronous
    assert ahead["staleness"] == ahead["staleness_max"] == 1.0
    assert 0.8 < ahead["sampled_over_trained"] < 1.3
    assert lockstep["staleness"] == 0.0 and lockstep["sampled_over_trained"] == 1.0
    assert 0.0 <= asynchronous["staleness_max"] <= 2.0
    for row in (lockstep, ahead, asynchronous):
        assert 0.0 <= row["engine_idle"] <= 1.0 and row["tokens_per_s"] > 0.0
        assert row["cpu"]["engine"] > 0.0


@pytest.mark.soak("benchmarks")
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_command_measures_keeps_and_goes_on(
    demo_cache: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    words = ["bench", "end-to-end", *TINY, "--only", "pace", "--latencies", "zero", "--seeds", "0"]
    words += ["--steps", "1", "--out", str(tmp_path), "--json", str(file), "--modes"]
    words += ["sync_2_engines", "async_1"]
    assert cli.main([*words, "--minutes", "0"]) == 3  # the parts alone
    assert "2 cells left" in capsys.readouterr().out
    assert cli.main(words) == 0
    found = json.loads(file.read_text())
    assert found["async_over_sync_zero_latency"] is None  # of async_8, which is not among them
    assert found["left"] == [] and len(found["rows"]) == 2
    assert (tmp_path / "demo.png").stat().st_size > 0
    capsys.readouterr()
    assert cli.main(words) == 0
    assert "steps" not in capsys.readouterr().err  # nothing is run again
