"""Defaults by device: chosen by what is here, below whatever a file or the command line says."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.policies.engine import gpus_of_actor
from configs import devices
from configs.load import ConfigError, load
from configs.runtime.process import REPOSITORY
from configs.schema import Config

BASE = REPOSITORY / "configs" / "base.yaml"


DRIVER = """
#include <stdio.h>
static char uuids[8][96]; static int started;
int nvmlInit_v2(void) { started = 1; return STARTS; }
int nvmlShutdown(void) { started = 0; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return started ? 0 : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = uuids[index]; return started && index < GPUS ? 0 : 2; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    int index = (char (*)[96])device - uuids;
    snprintf(uuid, length, "GPU-%d%d-aaaa", index, index); return started ? 0 : 1; }
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a library that stands for the driver's, of so many GPUs; torch is said to be one for
    them.
    """
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shutil.which("cc") is None:
        pytest.skip("a C compiler makes the library")

    def install(gpus: int, starts: int = 0) -> None:
        source, made = tmp_path / "driver.c", tmp_path / f"driver-{gpus}.so"
        source.write_text(DRIVER)
        of = (f"-DGPUS={gpus}", f"-DSTARTS={starts}")
        subprocess.run(["cc", "-shared", "-fPIC", *of, source, "-o", made], check=True)
        monkeypatch.setattr(devices, "DRIVER", str(made))

    return install


@pytest.mark.parametrize(
    ("there", "visible", "counted"),
    [
        (0, None, 0),
        (1, None, 1),
        (8, None, 8),
        (8, "2,3", 2),
        (8, " 2, 3 ", 2),
        (8, "", 0),
        (8, "-1", 0),
        (8, "0,9,1", 1),  # CUDA sees none behind one that is not there
        (1, "0,1", 1),
        (8, "GPU-22-aaaa,GPU-77", 2),
        (8, "GPU-22-aaaa,GPU-99-aaaa", 1),
        (8, "GPU-", 0),  # of more than one
        (8, "MIG-22-aaaa/1/0", 1),
    ],
)
def test_the_gpus_that_a_run_may_use_are_counted(
    driver: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    there: int,
    visible: str | None,
    counted: int,
) -> None:
    driver(there)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.gpus_here() == counted
    assert devices.device_of(counted) == devices.DEVICES[min(counted, 2)]


def test_a_driver_that_does_not_start_has_no_gpus(driver: Callable[..., None]) -> None:
    driver(8, starts=9)  # not loaded, as where its version is not the kernel's
    assert devices.gpus_here() == 0


def test_a_machine_without_a_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "on_cpu", lambda: False)
    monkeypatch.setattr(devices, "DRIVER", "libno-such-driver.so.1")
    assert devices.gpus_here() == 0


def test_an_installation_for_the_cpu_uses_none(
    driver: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(1)
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


@pytest.mark.parametrize(("gpus", "ranks", "actors"), [(2, 1, 1), (3, 1, 2), (8, 4, 4)])
def test_several_gpus_are_shared_between_learner_and_actors(
    driver: Callable[..., None], gpus: int, ranks: int, actors: int
) -> None:
    driver(gpus)
    here = load(BASE)
    assert (here.learner.ranks, here.actors.count) == (ranks, actors)
    assert here == load(BASE, gpus=gpus) == load(BASE, ["defaults=gpus"], gpus=gpus)


@pytest.mark.parametrize("gpus", [2, 4, 7, 8])
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("ranks", [None, 1, 6])
def test_no_gpu_has_two_engines(gpus: int, workers: int, ranks: int | None) -> None:
    words = [f"actors.tensor_parallel={workers}"]
    words += [f"learner.ranks={ranks}"] if ranks else []
    here = load(BASE, words, gpus=gpus)
    engines = (
        gpus_of_actor(number, here.learner.ranks, gpus, workers)
        for number in range(here.actors.count)
    )
    used = [gpu for engine in engines for gpu in engine]
    assert len(used) == len({*used}) and here.learner.ranks == (ranks or gpus // 2)


def test_a_file_too_says_how_many_workers_an_engine_has(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: by_device\nactors: {tensor_parallel: 2}\n")
    assert load(path, gpus=8).actors.count == 2
    assert load(path, ["actors.tensor_parallel=4"], gpus=8).actors.count == 1
    assert load(path, ["actors.count=4"], gpus=8).actors.count == 4


@pytest.mark.parametrize("value", ["two", "0", "[2]"])
def test_a_number_of_workers_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"actors\.tensor_parallel = "):
        load(BASE, [f"actors.tensor_parallel={value}"], gpus=8)


def test_defaults_can_be_those_of_a_machine_that_is_not_here() -> None:
    assert load(BASE, gpus=1) == load(BASE, ["defaults=one_gpu"])
    assert load(BASE, gpus=0) == load(BASE, ["defaults=cpu"])


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


@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=str)
def test_every_configuration_loads_on_every_machine(path: Path, gpus: int) -> None:
    load(path, gpus=gpus)
