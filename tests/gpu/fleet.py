"""The whole installation on a GPU: tests that need one, engines and runs. Each is a command whose
exit code and figures are judged.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.gpu.check import Check, Figure, at_most

Judge = Callable[[Path], Iterator[Figure]]  # of the folder that a command has written into

MODULES = ("torch", "vllm", "ray", "deepspeed")
PYTEST = ("-m", "pytest", "-q")
FORAGE = ("-m", "scripts.cli")
VERSIONS = 200
LEAST_EM = 0.9
FOUND = "found.json"
TO_FOUND = ("--json", f"{{folder}}/{FOUND}")
TO_RUN = "run_dir={folder}/run"
BF16 = ("model.dtype=bfloat16", f"learner.total_steps={VERSIONS}", "learner.eval_every=100")


def transports(folder: Path) -> Iterator[Figure]:
    """Yield seconds of 1,000 MB by CUDA IPC, which no machine fails by."""
    rows = json.loads((folder / FOUND).read_text())["rows"]
    large = [each for each in rows if each["transport"] == "cuda_ipc" and each["nbytes"] == 10**9]
    yield Figure("rows of 1,000 MB by cuda_ipc", str(len(large)), "one or more", bool(large))
    for name, limit in (("whole_s", 1.0), ("generation_pause_s", 0.1)):
        value = max((row[name] for row in large), default=math.nan)
        yield Figure(name, f"{value:.3g} s", f"at most {limit:g} s", value <= limit or None)


def demo(folder: Path) -> Iterator[Figure]:
    """Yield what a run of the demo has learnt, and its refits."""
    em = _summary(folder)["em_final"]
    yield Figure("EM at the end", str(em), f"at least {LEAST_EM}", (em or 0.0) >= LEAST_EM)
    yield from refits(folder)


def probed(folder: Path) -> Iterator[Figure]:
    """Yield how many versions an actor of a run has verified, and how many it got anew."""
    found = _summary(folder)
    for name, least in (("steps", VERSIONS), ("weight_syncs", VERSIONS // 2)):  # some are overtaken
        yield Figure(name, str(found[name]), f"at least {least}", found[name] >= least)
    yield from refits(folder)


def refits(folder: Path) -> Iterator[Figure]:
    """Yield a run's refits as the learner has reported them last; none reported fails."""
    from replay.log.event_log import read
    from scripts.runs.summary import RunFold

    reports = RunFold(read(folder / "run" / "events.log")).reports
    last = reports[max(reports)] if reports else {}
    yield at_most("sync/refits", last.get("sync/refits", math.nan), 0)


def goals_of_the_engine(folder: Path) -> Iterator[Figure]:
    """Yield each figure of the benchmark that has a goal."""
    from scripts.bench.engine.bench import GOALS

    yield from goals(json.loads((folder / FOUND).read_text()), GOALS)


def goals(found: Mapping[str, Any], limits: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield a figure for each goal; one that is missing fails."""
    for name, goal in limits.items():
        value = found.get(name, math.nan)
        yield Figure(name, f"{value:.3g}", str(goal), goal.met(value))


def nothing_more(folder: Path) -> Iterator[Figure]:
    """Yield nothing: the exit code says it all."""
    yield from ()


COMMANDS: dict[str, tuple[tuple[str, ...], Judge]] = {
    "tests marked gpu": ((*PYTEST, "-m", "gpu", "tests"), nothing_more),
    "vLLM and weight sync": (
        (*PYTEST, "tests/weight_sync/test_vllm.py", "tests/actors/policies/test_vllm.py"),
        nothing_more,
    ),
    "the learner's engine": (
        (*PYTEST, "tests/learner/model/test_engine.py", "tests/learner/test_update.py"),
        nothing_more,
    ),
    "make demo GPU=1": ((*FORAGE, "demo", TO_RUN), demo),
    f"bf16 probe over {VERSIONS} versions": ((*FORAGE, "demo", TO_RUN, *BF16), probed),
    "rollouts": ((*FORAGE, "bench", "engine", "--quick", *TO_FOUND), goals_of_the_engine),
}
TRANSPORTS = (("-m", "tests.gpu.transports", *TO_FOUND), transports)
OF_TRANSPORTS = ("torch", "numpy", "msgspec", "blake3", "zmq", "rich")


def command(words: tuple[str, ...], judge: Judge) -> Iterator[Figure]:
    """Run it, seen by whoever looks on; yield its exit code and, where that is 0, its figures."""
    with TemporaryDirectory(prefix="forage-gpu-") as folder:
        filled = [word.format(folder=folder) for word in words]
        code = subprocess.run([sys.executable, *filled], check=False, cwd=Path.cwd()).returncode
        yield Figure("exit code", str(code), "0", code == 0)
        if code == 0:
            yield from judge(Path(folder))


def transport_check() -> Check:
    """Weights by a publisher to a process on the same GPU, which needs no engine."""
    return Check("weight transports", partial(command, *TRANSPORTS), OF_TRANSPORTS)


def checks() -> list[Check]:
    """Every check of a whole installation."""
    return [
        Check(name, partial(command, words, judge), MODULES)
        for name, (words, judge) in COMMANDS.items()
    ]


def _summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return found
