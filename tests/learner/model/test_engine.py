"""DeepSpeed at every ZeRO stage against plain torch: the same steps, the same weights."""

import math
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

from configs.runtime.files import MOST_IDS
from configs.schema import Config, LearnerConfig, ModelConfig
from learner.batch import build
from learner.errors import BadModel
from learner.model.ema import Averages, Ema
from learner.model.engine import Engine
from learner.model.scorer import load_model
from learner.packing import MicroBatch
from learner.update import update
from replay.protocol import Batch

LEARNER = LearnerConfig(
    lr=1e-2, warmup_steps=2, max_grad_norm=0.5, micro_batch_tokens=60, betas=(0.9, 0.98)
)


def first_micro_batch(batch: Callable[..., Batch], config: Config) -> MicroBatch:
    return build(batch(), config.learner, vocabulary=MOST_IDS).micro_batches[0]


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


@pytest.fixture(
    scope="module",
    params=[
        # The last is open while tests of engines of their own run, and stage 3 changes torch.
        pytest.param((3, "none"), marks=pytest.mark.slow),
        *((3, "cpu"), (1, "none"), (0, "none")),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ((1, "cpu"), (2, "none"))),
        pytest.param((2, "cpu"), marks=pytest.mark.soak("ranks")),
    ],
    ids="zero{0[0]}-offload-{0[1]}".format,
)
def prepared(
    request: pytest.FixtureRequest, tiny_model_path: Path
) -> Iterator[tuple[Config, Engine, str]]:
    """The config, its engine, and what making it wrote to stdout."""
    config = Config(
        model=ModelConfig(path=str(tiny_model_path), dtype="float32"),
        learner=msgspec.structs.replace(
            LEARNER, zero_stage=request.param[0], offload=request.param[1]
        ),
    )
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "stdout"
        with stdout_into(written):
            engine = Engine(config)
        text = written.read_text()
    yield config, engine, text
    engine.close()


def test_nothing_on_stdout(prepared: tuple[Config, Engine, str]) -> None:
    assert prepared[2] == ""


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
    config, engine, _ = prepared
    tokens = [3, 14, 15, 9, 2, 6]
    with torch.no_grad():
        logits = load_model(config.model)(input_ids=torch.tensor([tokens])).logits[0]
    expected = [float(logits[t - 1].log_softmax(-1)[tokens[t]]) for t in range(1, 6)]
    rounding = 1e-4 if engine.device.type == "cuda" else 1e-5  # other kernels add up otherwise
    assert engine.probe(tokens) == pytest.approx(expected, abs=rounding)


def test_steps_equal_plain_torch(
    prepared: tuple[Config, Engine, str],
    make_plain_engine: Callable[..., Any],
    batch: Callable[..., Batch],
) -> None:
    config, engine, _ = prepared
    plain = make_plain_engine(config)
    for name, weight in engine.named_weights():
        assert torch.equal(weight.cpu(), plain.trainable()[name])
    pairs = [(each, Averages(Ema(each, 0.8), None)) for each in (engine, plain)]
    for step in (1, 2, 3):
        training = build(batch(step, step - 1, groups=3), config.learner, vocabulary=MOST_IDS)
        gauges, expected = (update(*pair, training, config.learner) for pair in pairs)
        assert gauges["learner/micro_batches"] > 1 and gauges["learner/grad_norm"] > 0.5
        assert gauges == pytest.approx(expected, rel=1e-3, abs=1e-5)
    made = dict(engine.named_weights())
    assert relative(made, {name: plain.trainable()[name] for name in made}) < 1e-4
    assert relative(*(ema.proximal.master for _, ema in pairs)) < 1e-4


def relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """All together: the keys' biases have no gradient, and Adam steps on its rounding."""
    one, other = (
        torch.cat([v.detach().cpu().flatten() for v in each.values()]) for each in (found, expected)
    )
    return float((one[: len(other)] - other).norm() / other.norm())  # a partition is padded


def test_a_swap_reaches_every_element_and_comes_back(
    prepared: tuple[Config, Engine, str], batch: Callable[..., Batch]
) -> None:
    config, engine, _ = prepared
    micro = first_micro_batch(batch, config).to(engine.device)
    own = {name: weight.clone() for name, weight in engine.named_weights()}
    before = engine.score(micro, 1.0).logprobs
    ema = Ema(engine, 0.8)
    for master in ema.master.values():
        master.add_(1.0)
    with ema.swapped_in(engine):
        for name, weight in engine.named_weights():
            torch.testing.assert_close(weight, own[name] + 1.0, rtol=0, atol=1e-6)
        assert not torch.equal(engine.score(micro, 1.0).logprobs, before)
    assert all(torch.equal(weight, own[name]) for name, weight in engine.named_weights())
    assert torch.equal(engine.score(micro, 1.0).logprobs, before)


def test_the_likeliest_tokens_are_found_and_scored_beside_the_sampled_ones(
    prepared: tuple[Config, Engine, str], batch: Callable[..., Batch]
) -> None:
    config, engine, _ = prepared
    micro, seen = first_micro_batch(batch, config).to(engine.device), []
    found = engine.score(micro, 1.0, 3).candidates
    assert found is not None and found.ids.shape == (len(micro.rows), 3)

    def loss(logprobs: torch.Tensor, _chunk: slice) -> torch.Tensor:
        seen.append(logprobs.shape[1])
        return logprobs[:, 1:].sum()

    scores = engine.accumulate(micro, 1.0, loss, candidates=found.ids)
    assert engine.step(0.0) > 0.0 and set(seen) == {4}
    assert torch.equal(scores.logprobs, engine.score(micro, 1.0).logprobs)
    torch.testing.assert_close(scores.candidates.logprobs, found.logprobs)
    assert torch.equal(scores.table[:, 1:], scores.candidates.logprobs)


def test_more_candidates_than_the_vocabulary_has_are_refused(config: Config) -> None:
    learner = msgspec.structs.replace(config.learner, anchor="ema", kl_coef=0.1, kl_top_k=10**6)
    with pytest.raises(BadModel, match=r"learner.kl_top_k = 1000000: the model's vocabulary has"):
        Engine(msgspec.structs.replace(config, learner=learner))


def test_an_infinite_gradient_has_no_finite_norm(
    prepared: tuple[Config, Engine, str], batch: Callable[..., Batch]
) -> None:
    config, engine, _ = prepared
    micro = first_micro_batch(batch, config).to(engine.device)
    engine.accumulate(micro, 1.0, lambda logprobs, _chunk: float("inf") * logprobs.sum())
    assert not math.isfinite(engine.step(0.0))


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_gradient_checkpointing_recomputes_layers_and_changes_nothing(
    config: Config, batch: Callable[..., Batch], stage: int
) -> None:
    micro = first_micro_batch(batch, config)
    norms, calls = [], []
    for on in (False, True):
        learner = msgspec.structs.replace(
            config.learner, gradient_checkpointing=on, zero_stage=stage
        )
        engine = Engine(msgspec.structs.replace(config, learner=learner))
        ran: list[int] = []
        mlp = engine.model.model.layers[0].mlp
        mlp.register_forward_pre_hook(lambda *_, ran=ran: ran.append(1))
        here = micro.to(engine.device)
        engine.accumulate(here, 1.0, lambda logprobs, _chunk: logprobs.sum())
        norms.append(engine.step(0.0))
        calls.append(len(ran))
        engine.close()
    assert calls == [1, 2] and norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.slow
def test_what_deepspeed_says_of_memory_goes_to_a_log(
    config: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    model = msgspec.structs.replace(config.model, dtype="bfloat16")
    Engine(msgspec.structs.replace(config, model=model)).close()
    assert "begin bf16_optimizer" not in "".join(capfd.readouterr())
    assert "begin bf16_optimizer" in (Path(config.run_dir) / "deepspeed.log").read_text()


def test_a_closed_engine_leaves_torch_and_the_environment_alone(config: Config) -> None:
    linear = torch.nn.functional.linear
    learner = msgspec.structs.replace(config.learner, zero_stage=3)
    Engine(msgspec.structs.replace(config, learner=learner)).close()
    assert torch.nn.functional.linear is linear and "LOCAL_RANK" not in os.environ


def test_pieces_of_logits_are_as_large_as_the_device_likes(config: Config) -> None:
    assert LearnerConfig().chunk_bytes("cpu") == 64 << 20
    assert LearnerConfig().chunk_bytes("cuda") == 1 << 30
    here = LearnerConfig().chunk_bytes("cuda" if torch.cuda.is_available() else "cpu")
    for given, found in ((0, here), (1000, 1000)):
        learner = msgspec.structs.replace(config.learner, logprob_chunk_bytes=given)
        assert learner.chunk_bytes("cuda") in (1 << 30, 1000)
        engine = Engine(msgspec.structs.replace(config, learner=learner))
        assert engine._engine.module.head.chunk_bytes == found
        engine.close()


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_bf16_gradient_is_held_once_in_fp32(
    config: Config, batch: Callable[..., Batch], stage: int
) -> None:
    learner = msgspec.structs.replace(config.learner, zero_stage=stage)
    model = msgspec.structs.replace(config.model, dtype="bfloat16")
    engine = Engine(msgspec.structs.replace(config, learner=learner, model=model))
    micro = build(batch(), config.learner, vocabulary=MOST_IDS).micro_batches[0].to(engine.device)
    norms = []
    for passes in (1, 2):
        for _ in range(passes):
            engine.accumulate(micro, 1.0, lambda logprobs, _chunk: logprobs.sum())
        if stage == 1:
            assert all(weight.grad is None for weight in engine.trainable().values())
        norms.append(engine.step(0.0))
    engine.close()
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-3)


def test_a_rank_by_itself_is_refused_where_several_are_configured(config: Config) -> None:
    learner = msgspec.structs.replace(config.learner, ranks=2)
    with pytest.raises(BadModel, match=r"learner.ranks = 2, but this process is one of 1"):
        Engine(msgspec.structs.replace(config, learner=learner))
