"""Parts of the soak tests go on where they were interrupted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.runtime.process import REPOSITORY

TESTS = """\
import os
import pytest

@pytest.mark.soak("long")
@pytest.mark.parametrize("n", range(3))
def test_long(n): assert n != int(os.environ["FAILS"])

@pytest.mark.soak("other")
def test_other(): pass

def test_without_a_part(): pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = soak(part)\n")
    return tmp_path


def soak(folder: Path, *words: str, fails: int = -1) -> tuple[int, str]:
    """The exit code and what is said at the end."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.soak", "--rootdir", str(folder)]
    command += ["-c", str(folder / "pytest.ini"), str(folder), "--soak", *words]
    env = os.environ | {"FAILS": str(fails), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout[-300:] + done.stderr


@pytest.mark.slow
def test_only_what_has_not_passed_is_run_again_until_all_is_asked_for(folder: Path) -> None:
    code, said = soak(folder, "long", fails=1)
    assert code == 1 and "1 failed, 2 passed, 2 deselected" in said
    code, said = soak(folder, "all")
    assert code == 0 and "2 passed, 3 deselected" in said
    assert "long: 2 passed before and not run (FRESH=1 runs all again)" in said
    code, said = soak(folder, "long")
    assert code == 0 and "5 deselected" in said
    code, said = soak(folder, "long", "--fresh")
    assert code == 0 and "3 passed, 2 deselected" in said


def test_a_part_that_nobody_knows_is_named(folder: Path) -> None:
    code, said = soak(folder, "lang")
    assert code == 4 and "no test is of part 'lang': name one of long, other" in said
