"""Defaults by device: chosen by what is here, below whatever a file or the command line says."""

from pathlib import Path

import pytest

from configs import devices
from configs.load import ConfigError, load
from configs.runtime.process import REPOSITORY
from configs.schema import Config

BASE = REPOSITORY / "configs" / "base.yaml"


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the driver's; torch is said to be one for GPUs."""
    monkeypatch.setattr(devices, "GPUS", tmp_path / "gpus")
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "gpus"


@pytest.mark.parametrize(
    ("there", "visible", "counted"),
    [(0, None, 0), (1, None, 1), (8, None, 8), (8, "2,3", 2), (8, "", 0), (1, "0,1", 1)],
)
def test_the_gpus_that_a_run_may_use_are_counted(
    gpus: Path, monkeypatch: pytest.MonkeyPatch, there: int, visible: str | None, counted: int
) -> None:
    for number in range(there):
        (gpus / f"0000:0{number}:00.0").mkdir(parents=True)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.gpus_here() == counted
    assert devices.device_here() == devices.DEVICES[min(counted, 2)]


def test_an_installation_for_the_cpu_uses_none(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gpus / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(devices, "on_cpu", lambda: True)
    assert devices.gpus_here() == 0


@pytest.mark.parametrize("device", devices.DEVICES)
def test_each_device_has_defaults_that_agree_with_each_other(device: str) -> None:
    assert load(BASE, [f"defaults={device}"]) != Config()


def test_a_machine_without_gpus_gets_those_of_a_cpu() -> None:
    config = load(BASE)
    assert config == load(BASE, ["defaults=cpu"])
    assert config.replay.groups_per_step * config.replay.group_size == 16
    assert config.actors.rollouts_in_flight == 16


def test_several_gpus_are_shared_between_learner_and_actors(
    gpus: Path,
) -> None:
    for number in range(8):
        (gpus / f"0000:0{number}:00.0").mkdir(parents=True)
    config = load(BASE)
    assert (config.learner.ranks, config.actors.count) == (4, 4)


def test_a_file_and_the_command_line_stand_above_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: cpu\nactors:\n  max_turns: 4\nreplay:\n")
    config = load(path, ["actors.count=2"])
    assert (config.actors.max_turns, config.actors.count) == (4, 2)
    assert config.actors.rollouts_in_flight == 16 and config.replay.group_size == 4


def test_without_the_key_they_are_the_schemas(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("")
    assert load(tmp_path / "mine.yaml") == Config()


def test_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="'tpu': choose one of by_device, cpu, one_gpu, gpus"):
        load(BASE, ["defaults=tpu"])
