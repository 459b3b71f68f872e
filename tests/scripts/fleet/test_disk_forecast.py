"""When a run's disk is full, foretold from its growth and from the checkpoints still to come."""

import math
import os
from pathlib import Path
from typing import Literal

import pytest

from configs.fleet import FleetConfig
from configs.schema import Config, LearnerConfig, ModelConfig, QuestionsConfig, ReplayConfig
from configs.sentinels import SentinelsConfig
from scripts.fleet import disk_forecast
from scripts.fleet.disk_forecast import (
    DiskWatch,
    Look,
    forecast,
    log_bytes,
    look,
    most_checkpoints,
    reckoned,
)

GB = 10**9
HOUR = 3600.0


def looks(*grown: int, free: int = 100 * GB, checkpoints: int = 0, largest: int = 0) -> list[Look]:
    """Twenty minutes apart."""
    return [Look(1200.0 * n, each, checkpoints, largest, free) for n, each in enumerate(grown)]


def test_growth_beside_the_checkpoints_is_a_rate() -> None:
    found = forecast(looks(0, 1 * GB, 2 * GB), kept=5)
    assert found is not None and found.left_s == pytest.approx(100 / 3 * HOUR)


def test_checkpoints_are_an_amount_until_as_many_are_kept() -> None:
    found = forecast(looks(0, 0, 3 * GB, checkpoints=3, largest=20 * GB), kept=5)
    assert found is not None and found.to_come == 40 * GB
    assert found.left_s == pytest.approx(60 / 4.5 * HOUR)
    found = forecast(looks(0, 0, 3 * GB, checkpoints=9, largest=20 * GB), kept=5)
    assert found is not None and found.to_come == 0
    found = forecast(looks(0, 0, checkpoints=1, largest=30 * GB), kept=5)
    assert found is not None and found.left_s == 0


def test_a_run_that_does_not_grow_never_fills_its_disk() -> None:
    found = forecast(looks(5 * GB, 4 * GB), kept=5)  # compaction
    assert found is not None and found.left_s == math.inf


def test_nothing_is_foretold_of_a_start() -> None:
    assert forecast([], 5) is None
    assert forecast([Look(0.0, 0, 0, 0, GB), Look(599.0, GB, 0, 0, GB)], 5) is None


def test_a_directory_is_looked_at_as_the_disk_has_it(tmp_path: Path) -> None:
    for name, size in {
        "events.log": 8192,
        "checkpoints/step-1/model/w": 4096,
        "checkpoints/step-2/state/r": 8192,
        "checkpoints/step-2/model/w": 4096,
        "logs/replay.log": 4096,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "checkpoints" / "best").symlink_to("step-1")
    found = look(tmp_path, 3.0)
    assert (found.grown, found.checkpoints, found.largest) == (12288, 2, 12288)
    assert found.free > 0


def test_the_warning_comes_once_and_again_at_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    config = Config(run_dir=str(tmp_path), fleet=FleetConfig(disk_warning_s=24 * HOUR))
    watch, free = DiskWatch(config, lambda text, _: said.append(text)), [100 * GB]

    def grows(_: Path, at_s: float) -> Look:
        return Look(at_s, int(at_s / HOUR * 2 * GB), 0, 0, free[0])  # 2 GB an hour

    monkeypatch.setattr(disk_forecast, "look", grows)
    for minute in range(120):
        watch.tend(60.0 * minute)
    assert said == [], "50 hours are left"
    free[0] = 40 * GB
    for minute in range(120, 180):
        watch.tend(60.0 * minute)
    assert len(said) == 1
    assert f"the disk of {tmp_path} is full in about 20.0 h: 40.0 GB are free" in said[0]
    assert "2.00 GB an hour" in said[0] and f"kill -INT {os.getpid()})" in said[0]
    assert said[0].endswith(f"`forage resume {tmp_path} replay.keep=committed`")
    free[0] = 15 * GB
    watch.tend(60.0 * 180)
    assert len(said) == 2 and "in about 7.5 h" in said[1]


@pytest.mark.parametrize("keep", ["all", "committed"])
def test_the_warning_names_a_command_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: Literal["all", "committed"]
) -> None:
    said: list[str] = []
    config = Config(
        run_dir=str(tmp_path),
        replay=ReplayConfig(keep=keep, endpoint="tcp://10.0.0.1:5555"),
    )
    watch = DiskWatch(config, lambda text, _: said.append(text))
    monkeypatch.setattr(disk_forecast, "look", lambda _, at_s: Look(at_s, int(at_s), 0, 0, 0))
    for minute in range(20):
        watch.tend(60.0 * minute)
    command = f"`forage resume {tmp_path} --trust replay.keep=committed`"
    assert len(said) == 1 and said[0].endswith(command if keep == "all" else "free some")


def test_a_look_that_fails_ends_no_run(tmp_path: Path) -> None:
    watch = DiskWatch(Config(run_dir=str(tmp_path / "gone")), lambda *_: None)
    watch.tend(0.0)


def test_what_a_run_will_take_is_reckoned_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"0" * 10**6)
    config = Config(
        model=ModelConfig(path=str(tmp_path), max_model_len=4096),
        replay=ReplayConfig(groups_per_step=32, group_size=8),
        learner=LearnerConfig(total_steps=1000),
    )
    line, fits = reckoned(config, 5 * GB)
    assert "256,000 rollouts of at most 4,096 tokens" in line and "5.0 are free" in line
    assert not fits and reckoned(config, 500 * GB)[1]
    assert reckoned(Config(learner=LearnerConfig(total_steps=0)), 0) == ("", True)


def test_what_is_not_kept_is_not_reckoned() -> None:
    def taken(keep: str | int, steps: int = 100_000) -> int:
        replay = ReplayConfig(groups_per_step=32, group_size=8, keep=keep)
        learner = LearnerConfig(total_steps=steps, checkpoint_every=10)
        model = ModelConfig(max_model_len=4096)
        return log_bytes(Config(model=model, replay=replay, learner=learner))

    assert taken("all") > 1000 * GB
    assert 25 * GB < taken("committed") < 30 * GB, "25.6 million records, without trajectories"
    assert taken(50 * 10**9) - taken("committed") == pytest.approx(50 * GB - 25.6e6 * 1024)
    assert taken("committed", 5) == taken("all", 5), "all of it may be asked for"


@pytest.mark.parametrize(
    ("steps", "evaluated", "most"), [(100, "", 4), (100, "q", 5), (25, "q", 3), (11, "q", 2)]
)
def test_a_checkpoint_counts_once(steps: int, evaluated: str, most: int) -> None:
    learner = LearnerConfig(total_steps=steps, checkpoint_every=10, keep_checkpoints=3)
    questions = QuestionsConfig(eval=evaluated)
    assert most_checkpoints(Config(learner=learner, questions=questions)) == most


@pytest.mark.parametrize(("steps", "most"), [(100, 6), (10, 5)])
def test_what_a_sentinel_goes_back_to_is_reckoned(steps: int, most: int) -> None:
    learner = LearnerConfig(total_steps=steps, checkpoint_every=10, keep_checkpoints=3)
    sentinels = SentinelsConfig(ess="rollback")
    assert most_checkpoints(Config(learner=learner, sentinels=sentinels)) == most
