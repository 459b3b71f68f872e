"""Planted faults: `make mutants`, or `python -m tests.mutants.mutants [NAME ...]`, shows that the
tests notice each of them.

Copies the tree, checks that each fault's named tests are green without it, plants the fault, and
runs only those tests again: at least one must turn red. Exit code 1 when a fault survives or a test
was red before.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from configs.runtime.process import REPOSITORY
from tests.mutants.table import MUTANTS, Mutant

DEADLINE_S = 300  # of one fault's tests
ALL_S = 1800  # of all of them, on the unchanged tree


def plant(tree: Path, mutant: Mutant) -> str:
    """Apply the fault to a tree; returns the original text. Raises ValueError if `old` is not
    unique.
    """
    path = tree / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {text.count(mutant.old)} places in {mutant.file} match")
    path.write_text(text.replace(mutant.old, mutant.new))
    return text


def red(tree: Path, tests: tuple[str, ...], deadline_s: float = DEADLINE_S) -> tuple[bool, str]:
    """True where these tests fail in the tree, and the end of their output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    if done.returncode not in (0, 1):  # not a verdict: nothing collected, wrong usage
        raise RuntimeError(f"pytest {' '.join(tests)} ended with {done.returncode}:\n{done.stdout}")
    return done.returncode == 1, done.stdout[-2000:]


def copy_tree(target: Path) -> Path:
    """Copy what git knows (and new files it does not ignore)."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)
    return target


def main() -> int:
    """Plant every fault in turn and print a table."""
    parser = argparse.ArgumentParser(description="Show that the tests notice planted faults.")
    parser.add_argument("names", nargs="*", help="only these faults")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if not arguments.names or m.name in arguments.names]
    if unknown := set(arguments.names) - {mutant.name for mutant in MUTANTS}:
        parser.error(f"no fault is called {min(unknown)!r}")
    survivors = []
    with tempfile.TemporaryDirectory(prefix="forage-mutants-") as folder:
        tree = copy_tree(Path(folder))
        every = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        begun = time.monotonic()
        print(f"unchanged tree: {len(every)} named tests ...", end=" ", flush=True)
        failed, output = red(tree, every, ALL_S)
        print("red" if failed else "green", f"({time.monotonic() - begun:.0f} s)")
        if failed:
            print(output)
            return 1
        for mutant in chosen:
            begun = time.monotonic()
            print(f"{mutant.name:.<58}", end=" ", flush=True)
            original = plant(tree, mutant)
            caught, _ = red(tree, mutant.tests)
            (tree / mutant.file).write_text(original)
            print("caught" if caught else "SURVIVED", f"({time.monotonic() - begun:.0f} s)")
            survivors += [] if caught else [mutant.name]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
