"""DeepSpeed at ZeRO 0 and 1 against plain torch: the same steps, the same weights."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from configs.schema import Config, LearnerConfig, ModelConfig
from learner.batch import build
from learner.ema import Averages, Ema
from learner.engine import Engine
from learner.errors import BadModel
from learner.update import update
from replay.protocol import Batch

LEARNER = LearnerConfig(
    lr=1e-2, warmup_steps=2, max_grad_norm=0.5, micro_batch_tokens=60, betas=(0.9, 0.98)
)


@contextmanager
def stdout_into(path: Path) -> Iterator[None]:
    """The process's own file descriptor 1, whoever writes to it."""
    sys.stdout.flush()
    saved = os.dup(1)
    with path.open("wb") as target:
        os.dup2(target.fileno(), 1)
    try:
        yield
        sys.stdout.flush()
    finally:
        os.dup2(saved, 1)
        os.close(saved)


@pytest.fixture(scope="module", params=[1, 0], ids=["zero1", "zero0"])
def prepared(
    request: pytest.FixtureRequest, tiny_model_path: Path
) -> Iterator[tuple[Config, Engine, str]]:
    """The config, its engine, and what making it wrote to stdout."""
    config = Config(
        model=ModelConfig(path=str(tiny_model_path), dtype="float32"),
        learner=msgspec.structs.replace(LEARNER, zero_stage=request.param),
    )
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "stdout"
        with stdout_into(written):
            engine = Engine(config)
        text = written.read_text()
    yield config, engine, text
    engine.close()


def test_nothing_on_stdout_and_no_launcher_variables(prepared: tuple[Config, Engine, str]) -> None:
    assert prepared[2] == ""
    assert "LOCAL_RANK" not in os.environ


def test_weights_are_named_as_in_the_checkpoint_tied_ones_once(
    prepared: tuple[Config, Engine, str],
) -> None:
    config, engine, _ = prepared
    saved = load_file(Path(config.model.path) / "model.safetensors")
    named = dict(engine.named_weights())
    assert named.keys() == saved.keys() and "lm_head.weight" not in named
    assert not any(weight.requires_grad for weight in named.values())


def test_probe_is_the_log_prob_of_each_token_after_its_prefix(
    prepared: tuple[Config, Engine, str],
) -> None:
    engine = prepared[1]
    tokens = [3, 14, 15, 9, 2, 6]
    with torch.no_grad():
        logits = engine.model(input_ids=torch.tensor([tokens])).logits[0]
    expected = [float(logits[t - 1].log_softmax(-1)[tokens[t]]) for t in range(1, 6)]
    assert engine.probe(tokens) == pytest.approx(expected, abs=1e-5)


def test_steps_equal_plain_torch(
    prepared: tuple[Config, Engine, str],
    make_plain_engine: Callable[..., Any],
    batch: Callable[..., Batch],
) -> None:
    config, engine, _ = prepared
    plain = make_plain_engine(config)
    for one, other in zip(engine.trainable().values(), plain.trainable().values(), strict=True):
        assert torch.equal(one, other)
    pairs = [(each, Averages(Ema(each, 0.8), None)) for each in (engine, plain)]
    for step in (1, 2, 3):
        training = build(batch(step, step - 1, groups=3), config.learner)
        gauges, expected = (update(*pair, training, config.learner) for pair in pairs)
        assert gauges["learner/micro_batches"] > 1 and gauges["learner/grad_norm"] > 0.5
        assert gauges == pytest.approx(expected, rel=1e-3, abs=1e-5)
    for name, weight in plain.trainable().items():
        # A percent of the rate: where gradients vanish, Adam steps on their rounding.
        torch.testing.assert_close(engine.trainable()[name], weight, rtol=1e-4, atol=1e-4)
        masters = [ema.proximal.master[name] for _, ema in pairs]
        torch.testing.assert_close(*masters, rtol=1e-4, atol=1e-4)


def test_what_is_not_supported_is_refused_before_anything_is_loaded(config: Config) -> None:
    learner = msgspec.structs.replace(config.learner, zero_stage=3)
    with pytest.raises(BadModel, match=r"learner.zero_stage = 3"):
        Engine(msgspec.structs.replace(config, learner=learner))
