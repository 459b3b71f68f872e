"""GPUs shared out among processes: by a plan, or what is free."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.runtime.gpus import VISIBLE, GpusTaken, _uuid, hold, take
from tests.children import ends_with_us

EIGHT = {str(number): f"GPU-{number}" for number in range(8)}
# A process on a host of four GPUs: it takes so many, says which, and keeps them to its end.
TAKER = """
import sys
from pathlib import Path
from configs.runtime.gpus import take
gpus = take(int(sys.argv[2]), {str(n): f"GPU-{n}" for n in range(4)}, Path(sys.argv[1]))
print(*gpus.names, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "gpus"


def taker(folder: Path, count: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", TAKER, str(folder), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ends_with_us(),
    )


@pytest.mark.parametrize(("processes", "each"), [(4, 1), (2, 2)])
def test_processes_that_start_at_once_share_the_gpus_out(
    folder: Path, processes: int, each: int
) -> None:
    started = [taker(folder, each) for _ in range(processes)]
    told = sorted(process.stdout.readline().split() for process in started)  # type: ignore[union-attr]
    for process in started:
        process.communicate()
    assert told == [[str(n * each + k) for k in range(each)] for n in range(processes)]


def test_what_a_killed_process_held_is_free(folder: Path) -> None:
    process = taker(folder, 3)
    assert process.stdout is not None and process.stdout.readline() == "0 1 2\n"
    with pytest.raises(GpusTaken):
        take(2, dict(list(EIGHT.items())[:4]), folder)
    process.kill()
    process.communicate()
    assert take(2, dict(list(EIGHT.items())[:4]), folder).names == ("0", "1")


def test_a_run_s_own_share_what_the_plan_gives_and_others_stay_off(folder: Path) -> None:
    learner, actors = hold(["0", "1"], EIGHT, folder), hold(["2", "3"], EIGHT, folder)
    second = hold(["2", "3"], EIGHT, folder)  # by the same plan
    joined = [take(2, EIGHT, folder) for _ in range(2)]
    assert [each.names for each in joined] == [("4", "5"), ("6", "7")]
    with pytest.raises(GpusTaken, match=r"no 2 side by side of the 8 GPUs.*DEVICES=0,1"):
        take(2, EIGHT, folder)
    for each in (learner, actors):
        each.release()
        each.release()
    assert take(2, EIGHT, folder).names == ("0", "1")
    with pytest.raises(GpusTaken, match="none of the 8 GPUs here can be had"):
        take(1, EIGHT, folder)
    second.release()


def test_gpus_apart_are_no_group(folder: Path) -> None:
    held = hold(["1", "3"], EIGHT, folder)
    assert take(2, EIGHT, folder).names == ("4", "5")
    assert take(1, EIGHT, folder).names == ("0",)
    held.release()


def test_where_there_is_no_choice_gpus_are_shared(folder: Path) -> None:
    own = {"3": "GPU-3"}
    first, second = take(1, own, folder), take(1, own, folder)
    assert first.names == second.names == ("3",)
    assert take(1, {}, folder).names == ()


def test_a_gpu_taken_by_another_is_used_where_the_plan_says_so(folder: Path, caplog) -> None:
    take(1, EIGHT, folder)
    assert hold(["0"], EIGHT, folder).names == ("0",)
    assert "GPU 0 is taken by another process of Forage: both use it now" in caplog.text


@pytest.mark.parametrize("before", [None, "0,1,2,3"])
def test_an_engine_sees_its_own_alone(folder: Path, monkeypatch, before: str | None) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if before:
        monkeypatch.setenv(VISIBLE, before)
    with take(2, EIGHT, folder).visible():
        assert os.environ[VISIBLE] == "0,1"
    assert os.environ.get(VISIBLE) == before
    with take(1, {}, folder).visible():
        assert os.environ.get(VISIBLE) == before


def test_a_gpu_is_known_by_its_uuid() -> None:
    uuids = ["GPU-aa11", "GPU-bb22"]
    assert [_uuid(name, uuids) for name in ("1", "GPU-bb", "GPU-cc", "7")] == [
        "GPU-bb22", "GPU-bb22", "GPU-cc", "7",
    ]  # fmt: skip
