"""Death with the parent, and children, on real processes."""

import ast
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from configs.runtime.process import (
    MOST_DESCRIPTORS,
    descriptors,
    end_child,
    most_descriptors,
    raise_descriptors,
    start_child,
)

SAYS = """
import ctypes, configs.runtime.process
configs.runtime.process.begin("x")
told = ctypes.c_int(-1)
ctypes.CDLL(None).prctl(2, ctypes.byref(told))  # PR_GET_PDEATHSIG
print(told.value)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
@pytest.mark.parametrize(
    ("parent", "code", "said"),
    [
        ({}, 0, "0"),  # a shell, which may exit
        ({"FORAGE_PARENT": str(os.getpid())}, 0, "9"),
        ({"FORAGE_PARENT": "1"}, -9, ""),  # it died before
    ],
)
def test_only_those_whose_starter_says_so(parent: dict[str, str], code: int, said: str) -> None:
    unset = {name: value for name, value in os.environ.items() if name != "FORAGE_PARENT"}
    done = subprocess.run(
        [sys.executable, "-c", SAYS],
        env=unset | parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (code, said)


def test_a_child_is_told_its_parent_its_sign_and_its_log(tmp_path: Path) -> None:
    code = "import os; print({k: v for k, v in os.environ.items() if k.startswith('FORAGE_')})"
    log, ready = tmp_path / "log", tmp_path / "ready"
    child = start_child(["-c", code], log=log, ready=ready, environment={"FORAGE_RUN": "x"})
    assert child.wait(60) == 0
    child = start_child(["-c", code], log=log, outlives_us=True)
    assert child.wait(60) == 0
    first, second = (ast.literal_eval(line) for line in log.read_text().splitlines())
    assert first["FORAGE_PARENT"] == str(os.getpid()) and first["FORAGE_RUN"] == "x"
    assert first["FORAGE_READY"] == str(ready) and "FORAGE_READY" not in second
    assert second.get("FORAGE_PARENT") == os.environ.get("FORAGE_PARENT")


@pytest.mark.parametrize(
    ("own_group", "own_session"), [(False, False), (True, False), (False, True)]
)
def test_a_child_stands_where_the_terminal_does_not_reach(
    own_group: bool, own_session: bool
) -> None:
    child = start_child(
        ["-c", "input()"], stdin=subprocess.PIPE, own_group=own_group, own_session=own_session
    )
    try:
        assert (os.getpgid(child.pid) == child.pid) is (own_group or own_session)
        assert (os.getsid(child.pid) == child.pid) is own_session
    finally:
        assert child.stdin is not None
        child.stdin.close()
        end_child(child, 60)
    assert child.returncode == 1  # EOFError: it was not killed


def test_a_child_that_stays_is_killed() -> None:
    child = start_child(["-c", "import time; time.sleep(600)"])
    end_child(child, 0.05)
    assert child.returncode == -9


HOLDS = """
import ctypes, re, sys
from pathlib import Path
from configs.runtime.process import *
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
SAID
libc.free(libc.malloc(8 << 20))  # from now on the library would take such from its heap
blocks = [libc.malloc(1 << 20) for _ in range(64)]
for block in blocks:
    ctypes.memset(block, 1, 1 << 20)
def held():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
full = held()
for block in blocks[:-1]:
    libc.free(block)
kept = held()
return_freed_blocks()
print(full - kept, full - held())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap, and Linux's /proc")
def test_freed_blocks_stay_at_hand_until_they_are_returned() -> None:
    at_once, returned = given_back("keep_freed_blocks()")
    assert at_once < 5 and returned > 55, "MiB, although the last block is held"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap, and Linux's /proc")
def test_freed_blocks_are_returned_at_once_where_none_are_kept() -> None:
    at_once, returned = given_back("")
    assert at_once < 5 and returned < 5, "MiB: nobody said that they are to be returned"
    at_once, returned = given_back("keep_no_freed_blocks()")
    assert at_once > 55 and returned > 55


def given_back(said: str) -> tuple[int, int]:
    """MiB at once, and then when blocks are returned, of 64 of which the last is held."""
    program = HOLDS.replace("SAID", said)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    at_once, returned = map(int, done.stdout.split())
    return at_once, returned


def test_a_process_may_open_as_many_files_as_its_hard_limit_says() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        most = most_descriptors()
        assert descriptors() == 128 < most <= MOST_DESCRIPTORS
        raise_descriptors()
        assert descriptors() == most
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 1 << 30])
def test_an_endless_limit_is_bounded(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: kept[-1] if kept else (128, limit))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: kept.append(limits))
    raise_descriptors()
    assert kept == [(MOST_DESCRIPTORS, limit)]
    kept.append((limit, limit))
    assert descriptors() == most_descriptors() == MOST_DESCRIPTORS
    raise_descriptors()
    assert len(kept) == 2, "what is enough stays"
