"""One optimiser step against the algorithm written out, and what must not change its gradient."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from configs.schema import Config
from learner import checkpoint
from learner.batch import TrainingBatch, build
from learner.ema import Ema
from learner.errors import Diverged
from learner.update import proximal_logprobs, update
from replay.codec import decode_trajectory, encode_trajectory
from replay.protocol import Batch

Engines = Callable[..., Any]


def with_learner(config: Config, **fields: object) -> Config:
    return msgspec.structs.replace(
        config, learner=msgspec.structs.replace(config.learner, **fields)
    )


def away_from_its_average(engine: Any, ema: Ema) -> None:
    """Move the weights, so that proximal and current policy differ."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in engine.trainable().values():
            weight += 0.05 * torch.randn_like(weight)


def naive_loss(model: Any, average: Any, given: Batch, config: Config) -> Tensor:
    """The whole objective, one trajectory at a time, from the formula."""
    total, count = torch.zeros(()), 0
    for group in given.groups:
        records = [decode_trajectory(payload) for payload in group]
        rewards = torch.tensor([record.reward for record in records])
        for record, credit in zip(
            records, (rewards - rewards.mean()) / (rewards.std() + 1e-6), strict=True
        ):
            tokens = torch.tensor(record.tokens.tolist())
            current, proximal = (
                (m(input_ids=tokens[None]).logits[0] / 0.7).log_softmax(-1)
                for m in (model, average)
            )
            t = len(record.prompt_tokens)
            for turn in record.turns:
                for token, behaviour in zip(
                    turn.action_tokens, turn.behaviour_logprobs, strict=True
                ):
                    lp, lo = current[t - 1, token], proximal[t - 1, token].detach()
                    ratio = (lp - lo).exp()
                    weight = min(float((lo - float(behaviour)).exp()), config.learner.behaviour_cap)
                    clipped = ratio.clamp(1 - config.learner.clip_low, 1 + config.learner.clip_high)
                    total = total - weight * torch.minimum(ratio * credit, clipped * credit)
                    t, count = t + 1, count + 1
                t += len(turn.observation_tokens)
    return total / count


def test_equals_the_algorithm_written_out(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch]
) -> None:
    engine, twin = make_plain_engine(config), make_plain_engine(config)
    average = make_plain_engine(config).model
    ema = Ema(engine, 0.8)
    for each in (engine, twin):
        away_from_its_average(each, ema)
    given = batch()
    loss = naive_loss(twin.model, average, given, config)
    loss.backward()
    norm = twin.step(config.learner.lr)
    gauges = update(engine, ema, build(given, config.learner), config.learner)
    assert gauges["learner/loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert gauges["learner/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert 0 < gauges["learner/clip_fraction"] < 1
    for name, gradient in engine.gradients.items():
        torch.testing.assert_close(gradient, twin.gradients[name], rtol=1e-3, atol=1e-5)
    moved = {name: 0.8 * start + 0.2 * engine.trainable()[name]
             for name, start in average.named_parameters()}  # fmt: skip
    for name, expected in moved.items():
        torch.testing.assert_close(ema.master[name], expected.detach(), rtol=1e-5, atol=1e-6)


def test_micro_batching_does_not_change_the_gradient(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch]
) -> None:
    gradients, sizes = [], []
    for budget in (1, 60, 10_000):
        learner = with_learner(config, micro_batch_tokens=budget).learner
        engine = make_plain_engine(config)
        gauges = update(engine, Ema(engine, 0.8), build(batch(groups=4), learner), learner)
        gradients.append(engine.gradients)
        sizes.append(gauges["learner/micro_batches"])
    assert sizes[0] == 12 and sizes[0] > sizes[1] >= sizes[2]
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-3, atol=1e-6)


def test_a_rewarded_action_becomes_likelier_and_a_fruitless_one_less(
    config: Config, plain_engine: Any, batch: Callable[..., Batch]
) -> None:
    training = build(batch(), config.learner)

    def likelihood() -> Tensor:
        with torch.no_grad():
            scores = [plain_engine.score(m, training.temperature) for m in training.micro_batches]
        pairs = zip(scores, training.micro_batches, strict=True)
        return torch.stack([(s.logprobs * m.advantages).sum() for s, m in pairs]).sum()

    before = likelihood()
    update(plain_engine, Ema(plain_engine, 0.8), training, config.learner)
    assert likelihood() > before


def sampled_by(engine: Any, given: Batch) -> Batch:
    """The batch with the engine's own log-probs as the behaviour policy's, token by token."""
    payloads = []
    for payload in (p for group in given.groups for p in group):
        record = decode_trajectory(payload)
        tokens = torch.tensor(record.tokens.tolist())
        with torch.no_grad():
            logits = engine.model(input_ids=tokens[None]).logits[0] / record.sampling.temperature
        chosen = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
        turns, t = [], len(record.prompt_tokens)
        for turn in record.turns:
            own = chosen[t - 1 : t - 1 + len(turn.action_tokens)].astype(np.float32)
            turns.append(msgspec.structs.replace(turn, behaviour_logprobs=own))
            t += len(turn.action_tokens) + len(turn.observation_tokens)
        payloads.append(encode_trajectory(msgspec.structs.replace(record, turns=tuple(turns))))
    groups = tuple(tuple(payloads[i : i + 3]) for i in range(0, len(payloads), 3))
    return msgspec.structs.replace(given, groups=groups)


def test_on_its_own_fresh_samples_every_weight_is_one(
    config: Config, plain_engine: Any, batch: Callable[..., Batch]
) -> None:
    training = build(sampled_by(plain_engine, batch()), config.learner)
    gauges = update(plain_engine, Ema(plain_engine, 0.8), training, config.learner)
    assert gauges["learner/mismatch_max"] < 1e-5
    ones = ("behaviour_ratio_mean", "behaviour_ratio_max", "ess")
    assert [gauges[f"learner/{name}"] for name in ones] == pytest.approx([1.0] * 3, abs=1e-4)
    assert gauges["learner/clip_fraction"] == gauges["learner/masked_tokens"] == 0.0
    assert gauges["replay/staleness"] == 0.0


def spoilt(training: TrainingBatch, value: float) -> TrainingBatch:
    first = training.micro_batches[0]
    row, column = first.loss_mask.nonzero()[0].tolist()
    first.behaviour_logprobs[row, column] = value
    return training


def test_a_token_without_a_number_is_masked_counted_and_stays_in_the_denominator(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch]
) -> None:
    gradients = []
    # A weight of exp(-20) at most is as good as none: both runs must divide by the same count.
    for value in (math.nan, 20.0):
        engine = make_plain_engine(config)
        training = spoilt(build(batch(), config.learner), value)
        gauges = update(engine, Ema(engine, 0.8), training, config.learner)
        assert gauges["learner/masked_tokens"] == float(math.isnan(value))
        assert all(math.isfinite(number) for number in gauges.values())
        gradients.append(engine.gradients)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)


def test_proximal_logprobs_are_those_of_a_model_loaded_from_the_saved_average(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch], word_tokenizer: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    engine = make_plain_engine(config)
    ema, training = Ema(engine, 0.8), build(batch(), config.learner)
    update(engine, ema, training, config.learner)
    folder = checkpoint.save(tmp_path, 1, engine, ema, word_tokenizer)
    loaded = make_plain_engine(
        msgspec.structs.replace(
            config, model=msgspec.structs.replace(config.model, path=str(folder / "ema"))
        )
    )
    for micro, proximal in zip(
        training.micro_batches, proximal_logprobs(engine, ema, training), strict=True
    ):
        assert not proximal.requires_grad
        assert torch.equal(proximal, loaded.score(micro, training.temperature).logprobs)
        assert not torch.equal(proximal, engine.score(micro, training.temperature).logprobs)


def test_lr_zero_changes_nothing(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch]
) -> None:
    frozen = with_learner(config, lr=0.0)
    engine = make_plain_engine(frozen)
    ema = Ema(engine, 0.8)
    before = {name: weight.detach().clone() for name, weight in engine.trainable().items()}
    update(engine, ema, build(batch(), frozen.learner), frozen.learner)
    for name, weight in before.items():
        assert torch.equal(engine.trainable()[name], weight)
        assert torch.equal(ema.master[name], weight)


def test_weights_that_are_no_numbers_stop_the_run(
    config: Config, plain_engine: Any, batch: Callable[..., Batch]
) -> None:
    ema = Ema(plain_engine, 0.8)
    next(iter(plain_engine.trainable().values())).data.fill_(math.nan)
    with pytest.raises(Diverged, match="step 1: the loss is nan"):
        update(plain_engine, ema, build(batch(), config.learner), config.learner)


def test_the_checkpoint_gives_the_same_logits(
    config: Config, plain_engine: Any, word_tokenizer: Any, tmp_path: Path
) -> None:
    folder = checkpoint.save(tmp_path, 4, plain_engine, Ema(plain_engine, 0.8), word_tokenizer)
    tokens = torch.arange(2, 12)[None]
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    assert torch.equal(loaded(input_ids=tokens).logits, plain_engine.model(input_ids=tokens).logits)
    embeddings, head = loaded.get_input_embeddings(), loaded.get_output_embeddings()
    assert embeddings.weight.data_ptr() == head.weight.data_ptr(), "tied weights stay tied"
