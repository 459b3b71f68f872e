"""AMX where it works, on this processor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.runtime import amx
from configs.runtime.amx import MOST, TRIAL, WITH, WITHOUT, use_amx_where_it_works

HERE = amx.announced() and amx.works()
UNPERMITTED = TRIAL.replace("0x1023, 18", "0x1022, 18")  # only asks what is permitted
CHECKED = """
import torch
a = (torch.arange(64 * 64) % 7).reshape(64, 64).bfloat16()
assert torch.equal((a @ a).float(), (a.float() @ a.float()).bfloat16().float())
"""


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MOST, raising=False)


@pytest.mark.parametrize(
    ("announced", "works", "chosen"),
    [(True, True, WITH), (True, False, WITHOUT), (False, True, WITHOUT)],
)
def test_it_is_used_where_it_is_announced_and_works(
    announced: bool, works: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amx, "announced", lambda: announced)
    monkeypatch.setattr(amx, "works", lambda: works)
    use_amx_where_it_works()
    assert os.environ[MOST] == chosen


def test_what_the_environment_says_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MOST, "AVX2")
    monkeypatch.setattr(amx, "announced", lambda: pytest.fail("asked"))
    use_amx_where_it_works()
    assert os.environ[MOST] == "AVX2"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("flags\t\t: fpu amx_bf16 avx512_bf16 amx_tile amx_int8\n", True),
        ("flags\t\t: fpu avx512_bf16 amx_tile\n", False),
        ("Features\t: fp asimd bf16\n", False),
        (None, False),
    ],
)
def test_both_flags_announce_it(text: str | None, found: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if text is not None:
        cpuinfo.write_text(text)
    assert amx.announced(cpuinfo) is found


def test_a_child_that_is_killed_or_hangs_says_that_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert amx.works("") and not amx.works("import os; os.kill(os.getpid(), 4)")
    monkeypatch.setattr(amx, "DEADLINE_S", 0.2)
    assert not amx.works("while True: pass")


@pytest.mark.skipif(not amx.announced(), reason="this processor has no AMX")
def test_whoever_has_not_asked_linux_dies_of_it() -> None:
    assert not amx.works(UNPERMITTED)


@pytest.mark.slow
@pytest.mark.skipif(not HERE, reason="this processor has no AMX that works")
def test_where_the_trial_lives_torch_multiplies_rightly() -> None:
    environment = {**os.environ, MOST: WITH, "ONEDNN_VERBOSE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", CHECKED], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    assert "avx10_1_512_amx" in ended.stdout or "avx512_core_amx" in ended.stdout
