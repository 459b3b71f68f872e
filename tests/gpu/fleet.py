"""The whole installation on a GPU: tests that need one, engines and runs. Each is a command."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.gpu.check import Check, Figure

MODULES = ("torch", "vllm", "ray", "deepspeed")
PYTEST = ("-m", "pytest", "-q")
FORAGE = ("-m", "scripts.cli")
VERSIONS = 200
BF16 = ("model.dtype=bfloat16", f"learner.total_steps={VERSIONS}", "learner.eval_every=100")
COMMANDS = {
    "tests marked gpu": ((*PYTEST, "-m", "gpu", "tests"), "all pass"),
    "vLLM and weight sync": (
        (*PYTEST, "tests/weight_sync/test_vllm.py", "tests/actors/policies/test_vllm.py"),
        "all pass",
    ),
    "the learner's engine": (
        (*PYTEST, "tests/learner/model/test_engine.py", "tests/learner/test_update.py"),
        "all pass",
    ),
    "weight transports": (
        ("-m", "tests.gpu.transports"),
        "whole s below 1 for 1,000 MB by cuda_ipc; pause s below 0.1",
    ),
    "make demo GPU=1": ((*FORAGE, "demo"), "exit code 0, the last evaluation's EM at least .9"),
    f"bf16 probe over {VERSIONS} versions": (
        (*FORAGE, "demo", *BF16),
        f"exit code 0: {VERSIONS} versions verified, sync/refits 0 in TensorBoard",
    ),
    "rollouts": ((*FORAGE, "bench", "engine", "--quick"), "every goal of its table met"),
}


def command(words: tuple[str, ...], should_be: str) -> Iterator[Figure]:
    """Run it, seen by whoever looks on; yield its exit code."""
    code = subprocess.run([sys.executable, *words], check=False, cwd=Path.cwd()).returncode
    yield Figure("exit code", str(code), should_be, code == 0)


def checks() -> list[Check]:
    """Every check of a whole installation."""
    return [
        Check(name, partial(command, words, should_be), MODULES)
        for name, (words, should_be) in COMMANDS.items()
    ]
