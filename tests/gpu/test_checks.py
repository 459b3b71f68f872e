"""The GPU suite where there is none: what it says, and that its first part imports little."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.runtime.process import REPOSITORY
from tests.gpu import checks
from tests.gpu.check import Check, Figure, Skipped, at_least, at_most, perform, why_not
from tests.gpu.learner_speed import Shape, flops, head_pieces, make_model, peak_flops, speed
from tests.gpu.weights import pinned_staging

TINY = Shape("tiny", 64, 2, 4, 2, 128, vocabulary=512)
HEAVY = ("vllm", "ray", "deepspeed", "msgspec", "blake3", "zmq")
BLOCKED = """
import sys
for name in {names!r}:
    sys.modules[name] = None
from tests.gpu import checks
from learner.model import head, scorer
print([check.name for check in checks.checks_of("A")])
"""
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what lacks a GPU")


@pytest.mark.slow
def test_part_a_is_imported_with_torch_and_transformers_alone() -> None:
    program = BLOCKED.format(names=HEAVY)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "NCCL group of one" in done.stdout and "learner 3B at 16,384 tokens" in done.stdout


ALONE = """
import sys
for name in {names!r}:
    sys.modules[name] = None
from tests.gpu.weights import pinned_staging, told
shown = [(each.name, each.value) for each in pinned_staging(4096, "cpu")]
import dataclasses, json, threading, torch
from weight_sync.protocol import Rendezvous
from weight_sync.transports import collective, cuda_ipc
host = collective.GlooTransport.host("127.0.0.1", 2, 1, 1, 20.0)
second = Rendezvous(**json.loads(told(host.rendezvous)))
assert second == dataclasses.replace(host.rendezvous, rank=1)
kept, joined = torch.zeros(9, dtype=torch.uint8), []
peer = threading.Thread(
    target=lambda: collective.GlooTransport.join(second).broadcast([kept], 20.0)
)
peer.start()
host.form().broadcast([torch.ones(9, dtype=torch.uint8)], 20.0)
peer.join(20)
handles = ("gpu", [(0, b"handle", 9, 0, b"counter", 0, b"event", True)])
assert cuda_ipc._decode(cuda_ipc.msgspec.msgpack.encode(handles)) == handles
print(shown, int(kept.sum()))
"""


@pytest.mark.slow
def test_torch_alone_is_enough_for_transports_and_staging() -> None:
    command = [sys.executable, "-c", ALONE.format(names=HEAVY)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "('modules', 'stand-ins for msgspec, blake3')" in done.stdout
    assert "('digest', 'equal')" in done.stdout and done.stdout.endswith(" 9\n")


@no_gpu
def test_without_a_gpu_everything_is_skipped_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    assert checks.main(["--json", str(report)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    names = [check.name for check in checks.checks_of("all")]
    assert last == f"0 passed, 0 failed, {len(names)} skipped"
    assert [line.split(": ")[0] for line in lines] == [f"SKIPPED {name}" for name in names]
    assert all(": needs " in line for line in lines)
    assert list(json.loads(report.read_text())) == names


def _alone() -> dict[str, str]:
    """The environment without what a make around these tests tells those inside."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}


@pytest.mark.parametrize("part", ["A", "B"])
def test_make_installs_nothing_for_part_a(part: str, tmp_path: Path) -> None:
    """In a tree without an environment; part B is for the whole installation."""
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    command = ["make", "-n", "test-gpu", f"PART={part}", "PYTHON=python-with-torch"]
    done = subprocess.run(command, cwd=tmp_path, env=_alone(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("requirements/install.sh" in done.stdout) == (part == "B")
    python = "python-with-torch" if part == "A" else ".venv/bin/python"
    assert done.stdout.endswith(f"{python} -m tests.gpu.checks --part {part}\n")


def test_make_takes_the_environment_that_is_there_for_part_a(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    command = ["make", "-n", "test-gpu", "PART=A"]
    done = subprocess.run(command, cwd=tmp_path, env=_alone(), capture_output=True, text=True)
    assert done.stdout == ".venv/bin/python -m tests.gpu.checks --part A\n"


@pytest.mark.parametrize(
    ("words", "folder", "kind"), [((), ".venv", "cpu"), (("GPU=1",), ".venv-gpu", "gpu")]
)
def test_an_installation_leaves_the_other_alone(
    words: tuple[str, ...], folder: str, kind: str
) -> None:
    command = ["make", "--always-make", "-n", ".venv", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert f"rm -rf {folder} && requirements/install.sh {folder} {kind}\n" in done.stdout
    assert done.stdout.count("rm -rf") == 1


def test_on_gpus_vectors_are_searched_by_faiss_for_gpus() -> None:
    locks = (REPOSITORY / "requirements").glob("*.lock")
    text = {lock.stem: re.findall(r"^faiss-\w+", lock.read_text(), re.M) for lock in locks}
    assert text["gpu"] == ["faiss-gpu"] and text["cpu"] == ["faiss-cpu"]


def test_a_missing_module_is_named() -> None:
    assert why_not(Check("x", list, ("torch", "no_such_module"))) == "needs no_such_module"


def test_what_is_found_is_told_beside_what_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def raising(error: Exception) -> Iterator[Figure]:
        yield Figure("first", "1", "1")
        raise error

    fast, slow = at_least("speed", 3.0, 2.0, " GB/s"), at_least("speed", 1.0, 2.0)
    made = [
        Check("fast", lambda: [fast]),
        Check("slow", lambda: [slow]),
        Check("wrong", lambda: [at_most("error", 2.0, 1.0)]),
        Check("lacking", partial(raising, Skipped("no GPU code"))),
        Check("large", partial(raising, torch.OutOfMemoryError("40 GiB"))),
        Check("broken", partial(raising, ValueError("bad"))),
    ]
    said: list[str] = []
    found = perform(made, said.append)
    outcomes = [each["outcome"] for each in found.values()]
    assert outcomes == ["passed", "passed", "failed", "skipped", "skipped", "failed"]
    text = "\n".join(said)
    assert "        speed: 3 GB/s  (should be: at least 2 GB/s)" in text
    assert "      ? speed: 1 " in text and "      ! error: 2 " in text
    assert "FAILED  broken: ValueError: bad (" in text
    assert "SKIPPED large: needs more memory than this GPU has free" in text


@pytest.mark.parametrize("recompute", [False, True])
def test_the_learners_speed_is_measured_on_a_cpu_too(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.gpu.learner_speed.peak_flops", lambda _: 1e12)
    figures = list(speed(TINY, 2, 32, recompute=recompute, device="cpu"))
    assert [each.name for each in figures] == ["tokens/s", "MFU, of the measured peak"]
    assert figures[0].good and peak_flops("cpu", 64) > 0


def test_useful_operations_are_counted_as_by_hand() -> None:
    model = make_model(TINY, "cpu")
    layer = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)  # q, o, k, v, MLP
    found = flops(model, TINY, 1, 32, passes=1) / 32
    by_hand = 2 * layer + 2 * 2 * 32 * 64 + 2 * 0.5 * 512 * 64
    assert found == pytest.approx(by_hand, rel=0.02)  # norms and biases beside


@pytest.mark.slow
def test_the_heads_pieces_agree() -> None:
    figures = {each.name: each for each in head_pieces(16, 8, 300, "cpu")}
    assert figures["largest difference of log-probs"].good
    assert {"pieces of 64 MiB", "pieces of 1024 MiB", "whole logits"} <= figures.keys()


def test_staging_holds_what_the_device_held() -> None:
    figures = {each.name: each for each in pinned_staging(4096, "cpu")}
    assert figures["digest"].good
    assert figures["buckets"].good == torch.cuda.is_available()


def test_wheels_are_imported_without_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "carried-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_by_test.py", "VALUE = 7\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    checks.import_from(tmp_path, str(tmp_path / "unpacked"))
    carried: Any = __import__("carried_by_test")
    assert carried.VALUE == 7
    child = [sys.executable, "-c", "import carried_by_test"]
    assert subprocess.run(child, check=False).returncode == 0
