"""Everything that needs a GPU: `make test-gpu GPU=1`, or `python -m tests.gpu.checks --part A`.

Part A needs a CUDA torch and this folder's tree, no installation and no network: pinned staging,
NCCL, CUDA IPC, FAISS where it is there, the head's pieces, and the learner's tokens/s and MFU; with
DeepSpeed and what else our own code imports also what whole learners hold, beside what is reckoned.
It takes about nine minutes on one GPU of 80 GiB. Part B needs the whole installation. Each
figure is shown with what it should be: `!` fails its check, `?` is worth a look. What cannot be
checked here is skipped by name.

Modules that are missing may be given as wheels: `--wheels FOLDER`.
"""

import argparse
import json
import os
import sys
import tempfile
import zipfile
from contextlib import ExitStack
from pathlib import Path

from tests.gpu import fleet, learner_memory, learner_speed, weights
from tests.gpu.check import Check, perform


def checks_of(part: str) -> list[Check]:
    """The checks of part A, B or all."""
    a = [*weights.checks(), fleet.transport_check(), *learner_speed.checks()]
    a += learner_memory.checks()
    b = fleet.checks()
    return {"A": a, "B": b, "all": [*a, *b]}[part]


def main(words: list[str] | None = None) -> int:
    """Check and say how it went; exit code 1 where a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="all", choices=("A", "B", "all"))
    parser.add_argument("--only", help="checks whose name holds this")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to import from")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args(words)
    with ExitStack() as stack:
        if given.wheels:
            unpacked = stack.enter_context(tempfile.TemporaryDirectory())
            import_from(given.wheels, unpacked)
        chosen = [each for each in checks_of(given.part) if (given.only or "") in each.name]
        found = perform(chosen, lambda line: print(line, flush=True))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    outcomes = [each["outcome"] for each in found.values()]
    counts = {name: outcomes.count(name) for name in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return 1 if counts["failed"] else 0


def import_from(wheels: Path, folder: str) -> None:
    """Unpack wheels into a folder that modules are imported from, here and in children."""
    for wheel in sorted(wheels.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(folder)
    sys.path.insert(0, folder)
    known = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{known}" if known else folder


if __name__ == "__main__":
    sys.exit(main())
