"""The trainer on one rank: what it exports, what it takes back, and what it refuses."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from configs.schema import Config
from learner.batch import TrainingBatch, build
from learner.errors import BadModel
from learner.trainer import Trainer
from replay.protocol import Batch

SETTINGS = [(0, "float32"), (1, "float32"), (3, "float32"), (0, "bfloat16"), (1, "bfloat16")]


def with_learner(config: Config, dtype: str = "float32", **fields: Any) -> Config:
    learner = msgspec.structs.replace(config.learner, **fields)
    model = msgspec.structs.replace(config.model, dtype=dtype)
    return msgspec.structs.replace(config, learner=learner, model=model)


@contextmanager
def training(config: Config) -> Iterator[Trainer]:
    trainer = Trainer(config)
    yield trainer
    trainer.close()


@pytest.fixture
def batches(batch: Callable[..., Batch], config: Config) -> list[TrainingBatch]:
    learner = msgspec.structs.replace(config.learner, micro_batch_tokens=60)
    return [build(batch(step, step - 1, groups=3), learner) for step in range(1, 7)]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.named_weights()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("stage", "dtype"), SETTINGS)
def test_resumed_steps_equal_the_undisturbed_ones_bit_for_bit(
    config: Config, batches: list[TrainingBatch], tmp_path: Path, stage: int, dtype: str
) -> None:
    config = with_learner(config, dtype, zero_stage=stage, anchor="ema", kl_coef=0.1)
    with training(config) as trainer:
        for each in batches[:2]:
            trainer.learn([each])
        trainer.export(tmp_path / "at-2")
        expected = [trainer.learn([each]) for each in batches[2:]]
        last, noise = weights(trainer), torch.rand(3)
    with training(config) as trainer:
        trainer.restore(tmp_path / "at-2")
        assert [trainer.learn([each]) for each in batches[2:]] == expected
        assert equal(weights(trainer), last) and torch.equal(torch.rand(3), noise)
        trainer.restore(tmp_path / "at-2")  # also over a life that has gone on
        assert trainer.learn([batches[2]]) == expected[0]
