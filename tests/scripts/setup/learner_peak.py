"""`python -m tests.scripts.setup.learner_peak MODEL DTYPE STAGE`: the memory of a learner that
steps on random tokens, at rest and at its peak, beside what is reckoned: bytes, as JSON.
"""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from configs.load import parse
from configs.schema import Config
from scripts.setup.gpu_memory import learner_needs
from scripts.setup.model_size import read_model

if TYPE_CHECKING:
    from learner.packing import MicroBatch

TOKENS, LENGTHS, STEPS = 512, (256, 170), 2


def resident(what: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at its highest."""
    text = Path("/proc/self/status").read_text()
    return int(dict(re.findall(r"(\w+):\s+(\d+) kB", text))[what]) << 10


def random_rows(rows: int, length: int, vocabulary: int) -> "MicroBatch":
    """Random tokens, of which two in five are actions."""
    import torch

    from learner.packing import MicroBatch

    mask = torch.rand(rows, length) < 0.4
    mask[:, 0] = False
    return MicroBatch(
        row_ids=torch.arange(rows),
        tokens=torch.randint(vocabulary, (rows, length)),
        loss_mask=mask,
        behaviour_logprobs=-torch.rand(rows, length),
        advantages=torch.randn(rows, length),
        staleness=torch.zeros(rows, length, dtype=torch.int32),
        rewards=torch.ones(rows, length),
        coefficients=torch.full((rows,), 1e-4),
    )


def measure(config: Config) -> dict[str, float]:
    """Step, and read what the kernel says."""
    import torch

    from learner.batch import TrainingBatch
    from learner.trainer import Trainer

    torch.set_num_threads(2)
    torch.manual_seed(0)
    vocabulary = read_model(Path(config.model.path)).vocabulary
    trainer = Trainer(config)
    for step in range(1, STEPS + 1):
        micro_batches = tuple(random_rows(TOKENS // n, n, vocabulary) for n in LENGTHS)
        trainer.learn([TrainingBatch(step, 1.0, micro_batches, {})])
    return {"peak": resident("VmHWM"), "rest": resident("VmRSS")}


def main(model: str, dtype: str, stage: str, *overrides: str) -> None:
    """Print both."""
    given = [f"model.path={model}", f"model.dtype={dtype}", f"learner.zero_stage={stage}"]
    given += [f"learner.micro_batch_tokens={TOKENS}", "model.max_model_len=512", *overrides]
    config = parse("", given, "here")
    needs = learner_needs(config, read_model(Path(model)), "cpu")
    print(json.dumps({"needs": needs, **measure(config)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
