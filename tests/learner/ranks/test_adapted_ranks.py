"""Two real ranks train an adapter as one does, at every ZeRO stage, and go on to the same bits."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from configs.lora import LoraConfig
from configs.runtime.files import MOST_IDS
from configs.schema import Config, LearnerConfig, ModelConfig
from learner.batch import build_shares
from learner.ranks.shares import encode_share
from learner.trainer import Trainer
from replay.protocol import Batch
from tests.children import ends_with_us

pytestmark = [pytest.mark.slow, pytest.mark.soak("ranks"), pytest.mark.timeout(600)]
PROGRAM = Path(__file__).with_name("one_adapted_rank.py")


def train_two(folder: Path, config: Config, batches: list[Batch]) -> None:
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    for batch in batches:
        for rank, share in enumerate(build_shares(batch, config.learner, vocabulary=MOST_IDS)):
            (folder / f"share-{batch.step}.{rank}").write_bytes(encode_share(share))
    ranks = []
    for rank in (0, 1):
        with (folder / f"errors-{rank}").open("wb") as errors:
            command = [sys.executable, str(PROGRAM), str(folder), str(rank)]
            ranks.append(
                subprocess.Popen(command, stdout=errors, stderr=errors, env=ends_with_us())
            )
    try:
        codes = [rank.wait(timeout=500) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], (folder / "errors-0").read_text()[-3000:]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_train_the_adapter_that_one_does(
    stage: int, tiny_model_path: Path, batch: Callable[..., Batch], tmp_path: Path
) -> None:
    learner = LearnerConfig(
        lr=1e-2, warmup_steps=0, optimiser="sgd", anchor="ema", kl_coef=0.05, zero_stage=stage,
        lora=LoraConfig(rank=4, publish="merged"),
    )  # fmt: skip
    config = Config(model=ModelConfig(path=str(tiny_model_path), dtype="float32"), learner=learner)
    batches = [batch(step, step - 1, groups=3) for step in (1, 2, 3)]
    trainer = Trainer(config)
    start = {name: weight.clone() for name, weight in trainer.engine.named_weights()}
    for each in batches:
        trainer.learn(build_shares(each, learner, vocabulary=MOST_IDS))
    expected = {name: weight.clone() for name, weight in trainer.engine.named_weights()}
    trainer.close()
    two = msgspec.structs.replace(config, learner=msgspec.structs.replace(learner, ranks=2))
    train_two(tmp_path, two, batches)
    for name, weight in load_file(tmp_path / "weights.safetensors").items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)
    moved = max(float((expected[name] - start[name]).abs().max()) for name in start)
    assert moved > 1e-3
