"""Death with the parent, on real processes."""

import os
import subprocess
import sys

import pytest

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
