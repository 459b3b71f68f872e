"""One optimiser step against the algorithm written out, and what must not change its gradient."""

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from configs.algorithm.critic import CriticConfig
from configs.runtime.files import MOST_IDS
from configs.schema import Config
from learner.algorithm.correction import ActionTokens, token_loss
from learner.algorithm.kl import penalised
from learner.algorithm.objectives import moment_bounds
from learner.batch import TrainingBatch, build, build_shares, credit_of
from learner.errors import Diverged
from learner.model.ema import Averages, Ema
from learner.update import logprobs_under, recredit, score, step_bounds, update
from replay.codec import decode_trajectory, encode_trajectory
from replay.protocol import Batch
from replay.trajectory import TokenSequence

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
    """The whole objective, one rollout at a time, from the formula."""
    sums, counts = [], []
    for group in given.groups:
        records = [decode_trajectory(payload) for payload in group]
        rewards = torch.tensor([record.reward for record in records])
        credits = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for record, credit in zip(records, credits, strict=True):
            parts = [naive_sum(model, average, each, credit) for each in record.sequences]
            sums.append(torch.stack(parts).sum())
            counts.append(record.action_count)
    whole, rollouts = config.learner.constant_length_tokens, len(sums)
    if config.learner.reduction == "sequence_mean":
        return sum(s / n for s, n in zip(sums, counts, strict=True)) / rollouts
    return sum(sums) / (rollouts * whole if whole else sum(counts))


def naive_sum(model: Any, average: Any, sequence: TokenSequence, credit: Tensor) -> Tensor:
    """The losses of one sequence's tokens, each under what the model had read of it before."""
    total, tokens = torch.zeros(()), torch.tensor(sequence.tokens.tolist())
    current, proximal = (
        (m(input_ids=tokens[None]).logits[0] / 0.7).log_softmax(-1) for m in (model, average)
    )
    t = len(sequence.prompt_tokens)
    for turn in sequence.turns:
        for token, behaviour in zip(turn.action_tokens, turn.behaviour_logprobs, strict=True):
            lp, lo = current[t - 1, token], proximal[t - 1, token].detach()
            ratio = (lp - lo).exp()
            weight = min(float((lo - float(behaviour)).exp()), 2.0)
            clipped = ratio.clamp(0.8, 1.28)
            total = total - weight * torch.minimum(ratio * credit, clipped * credit)
            t += 1
        t += len(turn.observation_tokens)
    return total


@pytest.mark.parametrize(
    ("sequences", "fields"),
    [
        (1, {}),
        (3, {}),
        (3, {"reduction": "sequence_mean"}),
        (3, {"reduction": "constant_length", "constant_length_tokens": 50}),
    ],
)
def test_equals_the_algorithm_written_out(
    config: Config,
    make_plain_engine: Engines,
    batch: Callable[..., Batch],
    sequences: int,
    fields: dict[str, Any],
) -> None:
    config = with_learner(config, **fields)
    engine, twin = make_plain_engine(config), make_plain_engine(config)
    average = make_plain_engine(config).model
    ema = Averages(Ema(engine, 0.8), None)
    for each in (engine, twin):
        away_from_its_average(each, ema)
    given = batch(sequences=sequences)
    loss = naive_loss(twin.model, average, given, config)
    loss.backward()
    norm = twin.step(config.learner.lr)
    gauges = update(engine, ema, build(given, config.learner, vocabulary=MOST_IDS), config.learner)
    assert gauges["learner/loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert gauges["learner/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert 0 < gauges["learner/clip_fraction"] < 1
    for name, gradient in engine.gradients.items():
        torch.testing.assert_close(gradient, twin.gradients[name], rtol=1e-3, atol=1e-5)
    moved = {name: 0.8 * start + 0.2 * engine.trainable()[name]
             for name, start in average.named_parameters()}  # fmt: skip
    for name, expected in moved.items():
        torch.testing.assert_close(
            ema.proximal.master[name], expected.detach(), rtol=1e-5, atol=1e-6
        )


REGULARISED = {
    "rejection": "mean_k2", "rejection_bound": 10.0, "entropy_coef": 0.1, "guard": "action",
    "guard_coef": 0.3, "baseline": "none", "advantage_std": "whiten",
}  # fmt: skip


def test_the_entropy_bonus_is_part_of_loss_and_gradient(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch]
) -> None:
    found = []
    for coef in (0.0, 0.5):
        learner = with_learner(config, entropy_coef=coef, proximal="start_of_update").learner
        engine = make_plain_engine(config)
        training = build(batch(), learner, vocabulary=MOST_IDS)
        gauges = update(engine, Averages(None, None), training, learner)
        found.append((gauges, engine.gradients))
    (plain, before), (rewarded, after) = found
    entropy = plain["learner/entropy"]
    assert rewarded["learner/loss"] == pytest.approx(plain["learner/loss"] - 0.5 * entropy)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def rollouts_moved(engine: Any, training: TrainingBatch) -> dict[int, float]:
    """The sum of current − behaviour over each rollout's action tokens."""
    moved: dict[int, float] = defaultdict(float)
    for micro in training.micro_batches:
        own = engine.score(micro, training.temperature).logprobs
        apart = (own - micro.behaviour_logprobs[micro.loss_mask]).double()
        for row, number in zip(micro.row_ids[micro.rows].tolist(), apart.tolist(), strict=True):
            moved[training.rollouts[row]] += number
    return moved


def recredited_by(engine: Any, averages: Averages, training: TrainingBatch, learner: Any) -> Any:
    micro_batches = list(training.micro_batches)
    scored = score(engine, averages, micro_batches, training.temperature, learner)
    return recredit(engine, training, micro_batches, scored, learner)


@pytest.mark.parametrize("sequences", [1, 3])
def test_the_optimal_baseline_is_of_the_rollouts_own_ratios(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch], sequences: int
) -> None:
    learner = with_learner(config, baseline="optimal", micro_batch_tokens=60).learner
    engine = make_plain_engine(config)
    given = batch(sequences=sequences)
    training = build(given, learner, vocabulary=MOST_IDS)
    moved = rollouts_moved(engine, training)
    recredited, gauges = recredited_by(engine, Averages(None, None), training, learner)
    records = [[decode_trajectory(payload) for payload in group] for group in given.groups]
    expected = []
    for i, group in enumerate(records):
        rewards = [record.reward for record in group]
        weights = [
            record.action_count * math.exp(2 * moved[3 * i + j]) for j, record in enumerate(group)
        ]
        base = sum(r * w for r, w in zip(rewards, weights, strict=True)) / sum(weights)
        spread = torch.tensor(rewards).std() + 1e-6
        expected += [float((r - base) / spread) for r in rewards]
    found = {
        int(row_id): float(micro.advantages[row][micro.loss_mask[row]].unique())
        for micro in recredited
        for row, row_id in enumerate(micro.row_ids)
    }
    of_rows = [expected[rollout] for rollout in training.rollouts]
    assert [found[i] for i in range(len(found))] == pytest.approx(of_rows, rel=1e-4)
    assert gauges["learner/advantage_mean"] == pytest.approx(sum(expected) / 6, rel=1e-4)
    told = update(engine, Averages(None, None), training, learner)
    assert told["learner/advantage_mean"] == gauges["learner/advantage_mean"]


def test_a_batch_worth_less_is_learnt_from_at_a_lower_rate(
    config: Config, plain_engine: Any, batch: Callable[..., Batch]
) -> None:
    learner = with_learner(config, ess_base=0.9).learner
    training = build(batch(), learner, vocabulary=MOST_IDS)
    gauges = update(plain_engine, Averages(Ema(plain_engine, 0.8), None), training, learner)
    share = math.sqrt(gauges["learner/current_ess_sequence"] / 0.9)
    assert gauges["learner/lr"] == pytest.approx(learner.lr * share) and share < 1


def test_the_second_moment_bounds_the_whole_step_at_once(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch]
) -> None:
    learner = with_learner(
        config, proximal="behaviour", second_moment=0.5, micro_batch_tokens=60
    ).learner
    engine = make_plain_engine(config)
    training = build(batch(), learner, vocabulary=MOST_IDS)
    own = [engine.score(m, training.temperature).logprobs for m in training.micro_batches]
    micro_batches = list(training.micro_batches)
    moved = [
        lp - m.behaviour_logprobs[m.loss_mask] for m, lp in zip(micro_batches, own, strict=True)
    ]
    credit = [m.advantages[m.loss_mask] for m in micro_batches]
    scored = score(engine, Averages(None, None), micro_batches, training.temperature, learner)
    bounds = step_bounds(engine, micro_batches, scored, learner)
    assert len(own) > 1 and bounds == moment_bounds(torch.cat(moved), torch.cat(credit), 0.5)
    told = update(engine, Averages(None, None), training, learner)
    assert 0 < told["learner/clip_fraction"] < 1
    assert step_bounds(engine, micro_batches, scored, config.learner) is None


MOMENT = {"proximal": "behaviour", "second_moment": 0.5}


@pytest.mark.parametrize("fields", [{}, REGULARISED, {"baseline": "optimal"}, MOMENT])
def test_micro_batching_does_not_change_the_gradient(
    config: Config,
    make_plain_engine: Engines,
    batch: Callable[..., Batch],
    fields: dict[str, Any],
) -> None:
    gradients, sizes = [], []
    for budget in (1, 60, 10_000):
        learner = with_learner(config, micro_batch_tokens=budget, **fields).learner
        engine = make_plain_engine(config)
        gauges = update(
            engine,
            Averages(Ema(engine, 0.8), None),
            build(batch(groups=4), learner, vocabulary=MOST_IDS),
            learner,
        )
        gradients.append(engine.gradients)
        sizes.append(gauges["learner/micro_batches"])
        if "guard" in fields:
            assert 0 < gauges["learner/rejected_fraction"] < 1
            assert 0 < gauges["learner/guarded_fraction"] < 1
    assert sizes[0] == 12 and sizes[0] > sizes[1] >= sizes[2]
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-3, atol=1e-6)


def test_a_rewarded_action_becomes_likelier_and_a_fruitless_one_less(
    config: Config, plain_engine: Any, batch: Callable[..., Batch]
) -> None:
    training = build(batch(), config.learner, vocabulary=MOST_IDS)

    def likelihood() -> Tensor:
        with torch.no_grad():
            scores = [plain_engine.score(m, training.temperature) for m in training.micro_batches]
        pairs = zip(scores, training.micro_batches, strict=True)
        return torch.stack([(s.logprobs * m.advantages[m.loss_mask]).sum() for s, m in pairs]).sum()

    before = likelihood()
    update(plain_engine, Averages(Ema(plain_engine, 0.8), None), training, config.learner)
    assert likelihood() > before


def sampled_by(engine: Any, given: Batch) -> Batch:
    """The batch with the engine's own log-probs as the behaviour policy's, token by token."""
    payloads = []
    for payload in (p for group in given.groups for p in group):
        record = decode_trajectory(payload)
        tokens = torch.tensor(record.sequences[0].tokens.tolist())
        with torch.no_grad():
            logits = engine.model(input_ids=tokens[None]).logits[0] / record.sampling.temperature
        chosen = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
        turns, t = [], len(record.prompt_tokens)
        for turn in record.turns:
            own = chosen[t - 1 : t - 1 + len(turn.action_tokens)].astype(np.float32)
            turns.append(msgspec.structs.replace(turn, behaviour_logprobs=own))
            t += len(turn.action_tokens) + len(turn.observation_tokens)
        only = TokenSequence(record.prompt_tokens, tuple(turns))
        payloads.append(encode_trajectory(msgspec.structs.replace(record, sequences=(only,))))
    groups = tuple(tuple(payloads[i : i + 3]) for i in range(0, len(payloads), 3))
    return msgspec.structs.replace(given, groups=groups)


def test_on_its_own_fresh_samples_every_weight_is_one(
    config: Config, plain_engine: Any, batch: Callable[..., Batch]
) -> None:
    training = build(sampled_by(plain_engine, batch()), config.learner, vocabulary=MOST_IDS)
    gauges = update(plain_engine, Averages(Ema(plain_engine, 0.8), None), training, config.learner)
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
        training = spoilt(build(batch(), config.learner, vocabulary=MOST_IDS), value)
        gauges = update(engine, Averages(Ema(engine, 0.8), None), training, config.learner)
        assert gauges["learner/masked_tokens"] == float(math.isnan(value))
        assert all(math.isfinite(number) for number in gauges.values())
        gradients.append(engine.gradients)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)


def test_proximal_logprobs_are_those_of_a_model_loaded_from_the_saved_average(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch], tmp_path: Path
) -> None:
    engine, twin = make_plain_engine(config), make_plain_engine(config)
    ema, training = (
        Averages(Ema(engine, 0.8), None),
        build(batch(), config.learner, vocabulary=MOST_IDS),
    )
    update(engine, ema, training, config.learner)
    with torch.no_grad():
        for name, weight in twin.trainable().items():
            weight.copy_(ema.proximal.master[name])
    twin.model.save_pretrained(tmp_path / "ema")
    model = msgspec.structs.replace(config.model, path=str(tmp_path / "ema"))
    loaded = make_plain_engine(msgspec.structs.replace(config, model=model))
    under = logprobs_under(engine, ema.proximal, training.micro_batches, training.temperature)
    for micro, proximal in zip(training.micro_batches, under, strict=True):
        assert not proximal.requires_grad
        assert torch.equal(proximal, loaded.score(micro, training.temperature).logprobs)
        assert not torch.equal(proximal, engine.score(micro, training.temperature).logprobs)


def test_lr_zero_changes_nothing(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch]
) -> None:
    frozen = with_learner(config, lr=0.0)
    engine = make_plain_engine(frozen)
    ema = Averages(Ema(engine, 0.8), None)
    before = {name: weight.detach().clone() for name, weight in engine.trainable().items()}
    update(engine, ema, build(batch(), frozen.learner, vocabulary=MOST_IDS), frozen.learner)
    for name, weight in before.items():
        assert torch.equal(engine.trainable()[name], weight)
        assert torch.equal(ema.proximal.master[name], weight)


def test_weights_that_are_no_numbers_stop_the_run(
    config: Config, plain_engine: Any, batch: Callable[..., Batch]
) -> None:
    ema = Averages(Ema(plain_engine, 0.8), None)
    next(iter(plain_engine.trainable().values())).data.fill_(math.nan)
    with pytest.raises(Diverged, match="step 1: the loss is nan"):
        update(
            plain_engine, ema, build(batch(), config.learner, vocabulary=MOST_IDS), config.learner
        )


@pytest.mark.parametrize(
    ("objective", "proximal"),
    [
        ("reinforce", "ema"),
        *((objective, proximal)
          for objective in ("grpo", "cispo", "gspo", "dppo_tv")
          for proximal in ("ema", "start_of_update", "behaviour")),
    ],
)  # fmt: skip
def test_every_mode_takes_a_step_and_reports_finite_numbers(
    config: Config, plain_engine: Any, batch: Callable[..., Batch], objective: str, proximal: str
) -> None:
    learner = with_learner(
        config, objective=objective, proximal=proximal, anchor="ema", kl_coef=0.1
    ).learner
    averages = Averages.begin(plain_engine, learner)
    away_from_its_average(plain_engine, averages.proximal)
    gauges = update(
        plain_engine,
        averages,
        spoilt(build(batch(), learner, vocabulary=MOST_IDS), math.nan),
        learner,
    )
    assert all(math.isfinite(value) for value in gauges.values())
    assert gauges["learner/grad_norm"] > 0.0
    assert gauges["learner/anchor_kl"] > 0.0
    assert gauges["learner/masked_tokens"] == 1.0
    assert gauges["learner/ess"] < 1.0, "the recorded log-probs are another policy's"


class Counting:
    """An engine whose passes are counted."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.passes = engine, {"score": 0, "accumulate": 0}

    def __getattr__(self, name: str) -> Any:
        if name in self.passes:
            self.passes[name] += 1
        return getattr(self.engine, name)


@pytest.mark.parametrize(
    ("fields", "passes"),
    [
        ({"proximal": "start_of_update"}, 0),
        ({"proximal": "start_of_update", "objective": "gspo"}, 0),
        ({"objective": "reinforce"}, 0),
        ({"proximal": "behaviour"}, 0),
        ({"proximal": "behaviour", "behaviour_weight": "mask"}, 0),
        ({"proximal": "start_of_update", "behaviour_level": "sequence"}, 1),
        ({"proximal": "behaviour", "anchor": "frozen"}, 1),
        ({"proximal": "behaviour", "anchor": "frozen", "kl_coef": 0.1, "kl_top_k": 2}, 1),
        ({"proximal": "behaviour", "anchor": "frozen", "kl_coef": 0.1, "kl_in": "reward"}, 2),
        ({}, 1),
    ],
)
def test_a_mode_pays_for_the_passes_that_it_needs(
    config: Config,
    make_plain_engine: Engines,
    batch: Callable[..., Batch],
    fields: dict[str, Any],
    passes: int,
) -> None:
    learner = with_learner(config, **fields).learner
    engine, training = (
        Counting(make_plain_engine(config)),
        build(batch(), learner, vocabulary=MOST_IDS),
    )
    update(engine, Averages.begin(engine, learner), training, learner)
    count = len(training.micro_batches)
    assert engine.passes == {"score": passes * count, "accumulate": count}


@pytest.mark.parametrize("rule", ["truncate", "mask", "none"])
@pytest.mark.parametrize("objective", ["grpo", "cispo", "gspo", "dppo_tv", "reinforce"])
def test_without_the_pass_loss_and_gradient_are_the_same_to_the_bit(
    config: Config,
    make_plain_engine: Engines,
    batch: Callable[..., Batch],
    objective: str,
    rule: str,
) -> None:
    centre = {} if objective == "reinforce" else {"proximal": "start_of_update"}
    fields = {"behaviour_weight": rule, "anchor": "frozen", "kl_coef": 0.1}
    learner = with_learner(config, objective=objective, **centre, **fields).learner
    engine, twin = make_plain_engine(config), make_plain_engine(config)
    averages, training = (
        Averages.begin(engine, learner),
        build(batch(groups=4), learner, vocabulary=MOST_IDS),
    )
    anchors = logprobs_under(twin, averages.anchor, training.micro_batches, 0.7)
    expected = 0.0
    for micro, far in zip(training.micro_batches, anchors, strict=True):
        now = twin.score(micro, training.temperature).logprobs
        loss = token_loss(ActionTokens.of(micro), now, now, far, learner)
        scores = twin.accumulate(micro, training.temperature, loss)
        expected += float(loss.tokens(scores.logprobs).double().sum())
    twin.step(learner.lr)
    gauges = update(engine, averages, training, learner)
    assert gauges["learner/loss"] == pytest.approx(expected, rel=1e-12, abs=1e-15)
    for name, gradient in engine.gradients.items():
        assert torch.equal(gradient, twin.gradients[name]), name


def test_untruncated_modes_without_a_clip_share_one_gradient(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch]
) -> None:
    free = {"clip_low": 1.0, "clip_high": 1e9}
    gradients = []
    for objective, proximal in (
        ("grpo", "ema"), ("grpo", "start_of_update"), ("grpo", "behaviour"), ("cispo", "ema"),
        ("reinforce", "ema"),
    ):  # fmt: skip
        bounded = objective != "reinforce" and proximal != "start_of_update"
        bounds = free if bounded else {}
        named = {"objective": objective, "proximal": proximal}
        cap = {} if proximal == "behaviour" else {"behaviour_cap": 1e9}
        learner = with_learner(config, **named, **bounds, **cap).learner
        engine = make_plain_engine(config)
        averages = Averages.begin(engine, learner)
        away_from_its_average(engine, averages.proximal)
        update(engine, averages, build(batch(), learner, vocabulary=MOST_IDS), learner)
        gradients.append(engine.gradients)
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-3, atol=1e-5)


def test_the_kl_to_an_anchor_starts_at_zero_and_pulls_back(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch]
) -> None:
    pull = {"anchor": "frozen", "kl_coef": 100.0, "kl_estimator": "k2", "lr": 1e-3}
    learner = with_learner(config, proximal="start_of_update", **pull).learner
    engine = make_plain_engine(config)
    averages = Averages.begin(engine, learner)
    training = build(sampled_by(engine, batch()), learner, vocabulary=MOST_IDS)
    assert update(engine, averages, training, learner)["learner/anchor_kl"] == pytest.approx(
        0.0, abs=1e-6
    )
    away_from_its_average(engine, averages.proximal)
    distances = [update(engine, averages, training, learner)["learner/anchor_kl"] for _ in range(3)]
    assert distances[0] > distances[1] > distances[2] > 0.0


def test_half_lives_are_reported_in_steps_and_in_staleness(
    config: Config, plain_engine: Any, batch: Callable[..., Batch]
) -> None:
    averages = Averages(Ema(plain_engine, 0.8), None)
    training = build(batch(step=3, version=0), config.learner, vocabulary=MOST_IDS)
    gauges = update(plain_engine, averages, training, config.learner)
    assert gauges["learner/ema_half_life_steps"] == pytest.approx(math.log(0.5) / math.log(0.8))
    half = gauges["learner/ema_half_life_steps"] / 2.0
    assert gauges["learner/ema_half_life_staleness"] == pytest.approx(half)
    assert gauges["learner/staleness_tokens_2"] == 1.0


def exact_reverse_kl(model: Any, anchor: Any, given: Batch) -> Tensor:
    """The mean over the action tokens of the KL at their positions, at the batch's temperature."""
    found = []
    for payload in (p for group in given.groups for p in group):
        record = decode_trajectory(payload)
        tokens = torch.tensor(record.sequences[0].tokens.tolist())
        log_p, log_q = (
            (m(input_ids=tokens[None]).logits[0] / record.sampling.temperature).log_softmax(-1)
            for m in (model, anchor)
        )
        each = (log_p.exp() * (log_p - log_q.detach())).sum(-1)
        t = len(record.prompt_tokens)
        for turn in record.turns:
            found.append(each[t - 1 : t - 1 + len(turn.action_tokens)])
            t += len(turn.action_tokens) + len(turn.observation_tokens)
    return torch.cat(found).mean()


@pytest.mark.parametrize("centre", ["ema", "start_of_update", "behaviour"])
def test_over_all_tokens_the_kl_is_exact_whatever_was_sampled(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch], centre: str
) -> None:
    engine, twin, anchor = (make_plain_engine(config) for _ in range(3))
    vocabulary = len(engine.model.get_output_embeddings().weight)
    kl = {"kl_coef": 1e5, "anchor": "frozen", "kl_top_k": vocabulary}  # the policy's part is lost
    learner = with_learner(config, proximal=centre, **kl).learner
    averages = Averages.begin(engine, learner)
    for each in (engine, twin):
        away_from_its_average(each, averages.proximal)
    given = batch()
    expected = exact_reverse_kl(twin.model, anchor.model, given)
    (1e5 * expected).backward()
    twin.step(learner.lr)
    gauges = update(engine, averages, build(given, learner, vocabulary=MOST_IDS), learner)
    assert gauges["learner/anchor_kl"] == pytest.approx(float(expected.detach()), rel=1e-4)
    for name, gradient in engine.gradients.items():
        torch.testing.assert_close(gradient, twin.gradients[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fields", [
    {"kl_direction": "forward"}, {"kl_tail": False}, {"kl_gradient": "ema_pg"},
    {"kl_weight": "none"},
])  # fmt: skip
def test_every_kl_over_candidates_takes_a_step_of_its_own(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch], fields: dict[str, Any]
) -> None:
    gradients, gauges = [], {}
    for given in ({}, fields):
        kl = {"kl_coef": 10.0, "anchor": "frozen", "kl_top_k": 2} | given
        learner = with_learner(config, proximal="behaviour", **kl).learner
        engine = make_plain_engine(config)
        averages = Averages.begin(engine, learner)
        away_from_its_average(engine, averages.proximal)
        training = spoilt(build(batch(), learner, vocabulary=MOST_IDS), math.nan)
        gauges = update(engine, averages, training, learner)
        assert all(math.isfinite(value) for value in gauges.values())
        gradients.append(torch.cat([g.flatten() for g in engine.gradients.values()]))
    assert not torch.allclose(*gradients, rtol=1e-2)


def test_micro_batching_does_not_change_the_gradient_of_a_kl_over_candidates(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch]
) -> None:
    gradients = []
    for budget in (1, 10_000):
        kl = {"kl_coef": 10.0, "anchor": "frozen", "kl_top_k": 3, "micro_batch_tokens": budget}
        learner = with_learner(config, **kl).learner
        engine = make_plain_engine(config)
        averages = Averages.begin(engine, learner)
        away_from_its_average(engine, averages.proximal)
        update(engine, averages, build(batch(), learner, vocabulary=MOST_IDS), learner)
        gradients.append(engine.gradients)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-6)


IN_REWARD = {"anchor": "frozen", "kl_coef": 0.5, "kl_in": "reward", "advantage_std": "none"}


def rollout_kls(model: Any, anchor: Any, training: TrainingBatch, rollouts: int) -> Tensor:
    """The sum of current − reference over each rollout's action tokens, one token at a time."""
    sums = torch.zeros(rollouts)
    for micro in training.micro_batches:
        log_p, log_q = (
            (m(input_ids=micro.tokens).logits / training.temperature).log_softmax(-1).detach()
            for m in (model, anchor)
        )
        for row, t in micro.loss_mask.nonzero().tolist():
            token, rollout = micro.tokens[row, t], training.rollouts[micro.row_ids[row]]
            sums[rollout] += log_p[row, t - 1, token] - log_q[row, t - 1, token]
    return sums


class Adding:
    """An engine that sums over ranks, of which the others bring these numbers."""

    def __init__(self, engine: Any, others: list[float]) -> None:
        self.engine, self.others, self.own = engine, others, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def total(self, values: list[float]) -> list[float]:
        self.own = values
        return [own + other for own, other in zip(values, self.others, strict=True)]


@pytest.mark.parametrize(("ranks", "sequences"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_in_the_reward_a_rollout_is_credited_with_the_kl_of_all_its_tokens(
    config: Config,
    make_plain_engine: Engines,
    batch: Callable[..., Batch],
    ranks: int,
    sequences: int,
) -> None:
    learner = with_learner(config, ranks=ranks, micro_batch_tokens=60, **IN_REWARD).learner
    engine, anchor = make_plain_engine(config), make_plain_engine(config)
    averages = Averages.begin(engine, learner)
    away_from_its_average(engine, averages.proximal)
    shares = build_shares(batch(sequences=sequences), learner, vocabulary=MOST_IDS)
    own = [rollout_kls(engine.model, anchor.model, share, 6) for share in shares]
    kls, rewards = sum(own), torch.tensor([1.0, 0.0, 0.0] * 2)
    penalised = (rewards - 0.5 * kls).reshape(2, 3)
    expected = (penalised - penalised.mean(1, keepdim=True)).flatten()
    share, others = shares[0], (kls - own[0]).tolist()
    credited, gauges = recredited_by(Adding(engine, others), averages, share, learner)
    assert gauges["learner/kl_penalty"] == pytest.approx(0.5 * float(kls.mean()), rel=1e-4)
    for micro in credited:
        of = [share.rollouts[row] for row in micro.row_ids[micro.rows].tolist()]
        ours = micro.advantages[micro.loss_mask]
        torch.testing.assert_close(ours, expected[of], rtol=1e-3, atol=1e-4)
        assert not micro.advantages[~micro.loss_mask].any()


def test_the_optimal_baseline_is_of_rewards_that_the_kl_is_taken_off(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch]
) -> None:
    learner = with_learner(config, baseline="optimal", **IN_REWARD).learner
    engine, anchor = make_plain_engine(config), make_plain_engine(config)
    averages = Averages.begin(engine, learner)
    away_from_its_average(engine, averages.proximal)
    training = build(batch(), learner, vocabulary=MOST_IDS)
    moved, kls = (
        rollouts_moved(engine, training),
        rollout_kls(engine.model, anchor.model, training, 6),
    )
    rewards = [torch.tensor(group, dtype=torch.float64) for group in training.rewards]
    counts = [torch.tensor(group) for group in training.action_counts]
    logs = [torch.tensor([moved[3 * i + j] for j in range(3)]).double() for i in range(2)]
    made = credit_of(penalised(rewards, kls.double(), 0.5), counts, logs, learner)
    expected = torch.tensor([each for group in made for each in group])
    credited, gauges = recredited_by(engine, averages, training, learner)
    assert gauges["learner/kl_penalty"] == pytest.approx(0.5 * float(kls.mean()), rel=1e-4)
    for micro in credited:
        ours = micro.advantages[micro.loss_mask]
        torch.testing.assert_close(ours, expected[micro.row_ids[micro.rows]], rtol=1e-3, atol=1e-4)


def test_with_a_critic_each_token_loses_its_own_kl(
    config: Config,
    make_plain_engine: Engines,
    make_plain_critic: Engines,
    batch: Callable[..., Batch],
) -> None:
    learner = with_learner(config, baseline="critic", micro_batch_tokens=60, **IN_REWARD).learner
    engine, anchor = make_plain_engine(config), make_plain_engine(config)
    averages = Averages.begin(engine, learner)
    away_from_its_average(engine, averages.proximal)
    training = build(batch(), learner, vocabulary=MOST_IDS)
    expected = []
    for micro in training.micro_batches:
        log_p, log_q = (
            (m(input_ids=micro.tokens).logits / training.temperature).log_softmax(-1).detach()
            for m in (engine.model, anchor.model)
        )
        for row, reward in enumerate(micro.rewards.sum(1)):
            at = micro.loss_mask[row].nonzero().flatten()
            of = at - 1, micro.tokens[row][at]
            later = (log_p[row][of] - log_q[row][of]).flip(0).cumsum(0).flip(0)
            expected.append(reward - 0.5 * later)  # the values are 0
    kls = rollout_kls(engine.model, anchor.model, training, 6)
    gauges = update(engine, averages, training, learner, make_plain_critic(config))
    assert gauges["learner/kl_penalty"] == pytest.approx(0.5 * float(kls.mean()), rel=1e-4)
    credit = torch.cat(expected)
    assert gauges["learner/advantage_mean"] == pytest.approx(float(credit.mean()), rel=1e-4)
    assert gauges["learner/advantage_abs"] == pytest.approx(float(credit.abs().mean()), rel=1e-4)


def test_on_the_policy_s_trunk_both_losses_make_one_gradient(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch]
) -> None:
    fields = {"baseline": "critic", "advantage_std": "none", "proximal": "start_of_update"}
    critic = CriticConfig(on="policy", coef=0.25, gae_lambda=1.0)
    fields |= {"behaviour_weight": "none", "max_grad_norm": 1e9, "micro_batch_tokens": 60}
    config = with_learner(config, critic=critic, **fields)
    engine, twin = make_plain_engine(config), make_plain_engine(config)
    for each in (engine, twin):
        torch.nn.init.normal_(each.scorer.value_head.weight, generator=torch.manual_seed(3))
    training = build(batch(), config.learner, vocabulary=MOST_IDS)
    count, loss, taught = sum(int(m.loss_mask.sum()) for m in training.micro_batches), 0.0, 0.0
    for micro in training.micro_batches:
        hidden = twin.model.base_model(input_ids=micro.tokens).last_hidden_state
        values = hidden @ twin.scorer.value_head.weight + twin.scorer.value_head.bias
        log_p = (twin.model(input_ids=micro.tokens).logits / training.temperature).log_softmax(-1)
        for row, reward in enumerate(micro.rewards.sum(1)):
            at = micro.loss_mask[row].nonzero().flatten()
            off = reward - values[row][at - 1]  # λ = γ = 1: the advantage, and the error
            loss = loss - (off.detach() * log_p[row][at - 1, micro.tokens[row][at]]).sum() / count
            taught = taught + 0.5 * off.square().sum() / count
    (loss + 0.25 * taught).backward()
    gauges = update(engine, Averages.begin(engine, config.learner), training, config.learner)
    assert gauges["learner/value_loss"] == pytest.approx(float(taught.detach()), rel=1e-4)
    assert any("value_head" in name for name in engine.gradients)
    for name, weight in twin.trained().items():
        torch.testing.assert_close(engine.gradients[name], weight.grad, rtol=1e-3, atol=1e-5)


def test_while_the_critic_learns_alone_the_trunk_stays(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch]
) -> None:
    critic = CriticConfig(on="policy", lr=1e-2, warmup_steps=0, alone_steps=1)
    fields = {"baseline": "critic", "advantage_std": "whiten", "critic": critic}
    config = with_learner(config, **fields)
    engine = make_plain_engine(config)
    start = {name: weight.detach().clone() for name, weight in engine.trained().items()}
    training = build(batch(), config.learner, vocabulary=MOST_IDS)
    gauges = update(engine, Averages.begin(engine, config.learner), training, config.learner)
    moved = {n for n, weight in engine.trained().items() if not torch.equal(weight, start[n])}
    assert moved == {"value_head.weight", "value_head.bias"}
    assert (gauges["learner/lr"], gauges["learner/critic_lr"]) == (0.0, 1e-2)


def test_in_the_reward_the_kl_pulls_back_and_is_not_in_the_loss_too(
    config: Config, make_plain_engine: Engines, batch: Callable[..., Batch]
) -> None:
    settings = IN_REWARD | {"kl_coef": 1.0, "lr": 1e-3}
    learner = with_learner(config, proximal="start_of_update", **settings).learner
    engine = make_plain_engine(config)
    averages = Averages.begin(engine, learner)
    away_from_its_average(engine, averages.proximal)
    training = build(sampled_by(engine, batch()), learner, vocabulary=MOST_IDS)
    gauges = update(engine, averages, training, learner)
    # At the start of an update the loss is −Σ c A ρ with ρ = 1: of centred credit, by token counts.
    assert gauges["learner/advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    assert gauges["learner/advantage_abs"] != training.gauges["learner/advantage_abs"]
    assert math.isfinite(gauges["learner/loss"]) and gauges["learner/grad_norm"] > 0.0
