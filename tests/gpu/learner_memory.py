"""What a learner holds on a GPU, beside what `forage memory` reckons, and its tokens/s: real steps
of DeepSpeed on models of Qwen2.5's shapes with random weights.

`python -m tests.gpu.learner_memory FOLDER TOKENS LENGTH [OVERRIDE …]` is one learner: it steps on
micro-batches of so many tokens, and prints bytes and seconds as JSON.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.gpu.check import Check, Figure

MODULES = ("torch", "transformers", "deepspeed", "msgspec", "yaml", "blake3")
NOT_TENSORS = ("weights shown to actors", "CUDA")  # nothing is published here
STEPS, MICRO_BATCHES, DEADLINE_S = 3, 2, 240.0
MEMORY_FOLDER = Path("/dev/shm")
LORA = ("learner.lora.rank=16", "learner.lora.alpha=32", "learner.anchor=frozen")
TRUNK = (
    "learner.baseline=critic", "learner.critic.on=policy", "learner.advantage_std=whiten",
)  # fmt: skip
RECOMPUTED = "learner.gradient_checkpointing=true"


@dataclass(frozen=True)
class Case:
    """A learner of a model known by name; micro-batches of `tokens` in rows of `length`."""

    name: str
    model: str
    tokens: int
    length: int
    overrides: tuple[str, ...] = ()


CASES = (
    Case("0.5B", "Qwen2.5-0.5B", 8192, 4096),
    Case("0.5B with a critic", "Qwen2.5-0.5B", 8192, 4096,
         ("learner.baseline=critic", "learner.advantage_std=whiten")),
    Case("0.5B, the critic on its trunk", "Qwen2.5-0.5B", 8192, 4096, TRUNK),
    Case("0.5B offloaded, the critic on its trunk", "Qwen2.5-0.5B", 8192, 4096,
         (*TRUNK, "learner.offload=cpu")),
    Case("0.5B, ZeRO 3", "Qwen2.5-0.5B", 8192, 4096, ("learner.zero_stage=3",)),
    Case("3B by an adapter, layers recomputed", "Qwen2.5-3B", 8192, 4096, (*LORA, RECOMPUTED)),
    Case("3B, layers recomputed", "Qwen2.5-3B", 8192, 4096, (RECOMPUTED,)),
    Case("3B offloaded, layers recomputed", "Qwen2.5-3B", 8192, 4096,
         (RECOMPUTED, "learner.offload=cpu")),
    Case("7B by an adapter, layers recomputed", "Qwen2.5-7B", 8192, 4096, (*LORA, RECOMPUTED)),
)  # fmt: skip


def held(case: Case, device: str = "cuda") -> Iterator[Figure]:
    """Yield what a learner held, what was reckoned, and how fast it stepped."""
    root = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
    with TemporaryDirectory(prefix="forage-gpu-", dir=root) as folder:
        save(case.model, folder, device)
        words = (folder, str(case.tokens), str(case.length), *case.overrides)
        found = learner(words)
    yield from judged(found)


def judged(found: dict[str, Any]) -> Iterator[Figure]:
    """Yield the figures of a learner's bytes and seconds."""
    needs = {what: size for what, size in found["needs"].items() if what not in NOT_TENSORS}
    reckoned, held = sum(needs.values()), found["allocated"]
    parts = ", ".join(f"{what} {size / 2**30:.2f}" for what, size in needs.items())
    yield Figure("reckoned", f"{reckoned / 2**30:.2f} GiB", parts)
    blocks = f"{found['reserved'] / 2**30:.2f} in the allocator's blocks"
    yield Figure("held", f"{held / 2**30:.2f} GiB", f"see the next; {blocks}")
    ratio = held / reckoned
    yield Figure("held over reckoned", f"{ratio:.3f}", ".85 to 1.02", 0.85 <= ratio <= 1.02 or None)
    yield Figure("tokens/s", f"{found['tokens'] / found['step_s']:,.0f}", "of a whole step")


def save(model: str, folder: str, device: str) -> None:
    """Make a model with random weights in bf16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from scripts.setup.model_size import known_shape

    with torch.device(device):
        config = AutoConfig.for_model(**known_shape(model))
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(folder)
    del made
    torch.cuda.empty_cache()


def learner(words: tuple[str, ...]) -> dict[str, Any]:
    """What a learner in a process of its own says."""
    command = [sys.executable, "-m", "tests.gpu.learner_memory", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if ended.returncode:
        raise RuntimeError(f"exit code {ended.returncode}: {ended.stderr[-600:]}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def step(folder: str, tokens: int, length: int, *overrides: str) -> dict[str, Any]:
    """Steps of a real learner: seconds of the fastest, bytes used and reckoned."""
    import torch

    from configs.load import parse
    from learner.batch import TrainingBatch
    from learner.trainer import Trainer
    from scripts.setup.gpu_memory import learner_needs
    from scripts.setup.model_size import read_model
    from tests.scripts.setup.learner_peak import random_rows

    given = [f"model.path={folder}", f"learner.micro_batch_tokens={tokens}", *overrides]
    config = parse("", [*given, f"model.max_model_len={length}"], "here")
    model = read_model(Path(folder))
    trainer, seconds = Trainer(config), []
    for number in range(1, STEPS + 1):
        rows = [
            random_rows(tokens // length, length, model.vocabulary) for _ in range(MICRO_BATCHES)
        ]
        begun = time.perf_counter()
        trainer.learn([TrainingBatch(number, 1.0, tuple(rows), {})])
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return {
        "needs": learner_needs(config, model),
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "step_s": min(seconds),
        "tokens": MICRO_BATCHES * tokens,
    }


def checks() -> list[Check]:
    """A check of each case."""
    return [
        Check(f"memory of a learner, {case.name}", partial(held, case), MODULES) for case in CASES
    ]


if __name__ == "__main__":
    _, folder_given, tokens_given, length_given, *more = sys.argv
    print(json.dumps(step(folder_given, int(tokens_given), int(length_given), *more)))
