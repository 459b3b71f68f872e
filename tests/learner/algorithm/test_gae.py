"""GAE and the value loss against their formulas, written out token by token."""

import random

import pytest
import torch
from torch import Tensor

from learner.algorithm.advantage import whitened
from learner.algorithm.gae import gae, value_losses


def naive(
    rewards: list[float], values: list[float], gamma: float, gae_lambda: float
) -> list[float]:
    """A_i = Σ_k (γλ)^k δ_{i+k}, of one sequence's action tokens alone."""
    after = [*values[1:], 0.0][: len(values)]
    deltas = [r + gamma * v - own for r, v, own in zip(rewards, after, values, strict=True)]
    decay = gamma * gae_lambda
    return [sum(decay**k * delta for k, delta in enumerate(deltas[i:])) for i in range(len(deltas))]


def drawn(seed: int, shape: tuple[int, int], density: float) -> tuple[Tensor, Tensor, Tensor]:
    """Random rewards and values, also where nothing acts, and a mask with holes."""
    torch.manual_seed(seed)
    rewards, values = torch.randn(2, *shape, dtype=torch.float64)
    return rewards, values, torch.rand(shape) < density


@pytest.mark.parametrize("seed", range(20))
def test_across_observations_it_is_the_naive_transcription(seed: int) -> None:
    draw = random.Random(seed)
    shape = draw.randint(1, 5), draw.randint(1, 30)
    rewards, values, mask = drawn(seed, shape, draw.random())
    gamma, gae_lambda = draw.uniform(0.1, 1.0), draw.random()
    advantages, returns = gae(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    for row, acts in enumerate(mask):
        own = naive(rewards[row][acts].tolist(), values[row][acts].tolist(), gamma, gae_lambda)
        assert advantages[row][acts].tolist() == pytest.approx(own, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(returns, (advantages + values) * mask)
    assert not advantages[~mask].any()


def test_what_lies_between_actions_changes_nothing() -> None:
    rewards, values, mask = drawn(0, (3, 40), 0.4)
    found = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.8)
    others = gae(
        torch.where(mask, rewards, 7.0), torch.where(mask, values, -3.0), mask,
        gamma=0.9, gae_lambda=0.8,
    )  # fmt: skip
    assert torch.equal(found[0], others[0]) and torch.equal(found[1], others[1])


def test_without_discount_every_action_s_return_is_the_reward() -> None:
    _, values, mask = drawn(1, (4, 25), 0.5)
    reward = torch.tensor([1.0, 0.0, 0.25, 1.0], dtype=torch.float64)
    rewards = torch.zeros_like(values)
    for row, acts in enumerate(mask):
        rewards[row, int(acts.nonzero().max())] = reward[row]
    _, returns = gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0)
    torch.testing.assert_close(returns, reward[:, None] * mask)


def test_whitened_credit_has_mean_0_and_variance_1_on_the_mask() -> None:
    credit, _, mask = drawn(2, (4, 25), 0.5)
    on = credit[mask]
    white = whitened(credit, mask, mean=float(on.mean()), variance=float(on.var()))
    assert float(white[mask].mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(white[mask].var()) == pytest.approx(1.0, abs=1e-6)
    assert not white[~mask].any()


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_value_loss_is_its_formula(clip: float | None) -> None:
    old, values, mask = drawn(3, (4, 25), 0.5)
    returns = torch.randn(4, 25, dtype=torch.float64)
    losses, clipped = value_losses(values.requires_grad_(), old, returns, mask, clip)
    losses.sum().backward()
    for row, t in ((i, j) for i in range(4) for j in range(25)):
        v, o, r = (float(each[row, t]) for each in (values.detach(), old, returns))
        bounded = v if clip is None else min(max(v, o - clip), o + clip)
        decides = (bounded - r) ** 2 > (v - r) ** 2
        loss, slope = max((v - r) ** 2, (bounded - r) ** 2) / 2, v - r
        on = bool(mask[row, t])
        assert float(losses.detach()[row, t]) == pytest.approx(loss * on)
        assert bool(clipped[row, t]) == (on and decides)
        assert float(values.grad[row, t]) == pytest.approx(on * (not decides) * slope)
    assert (clip is None) != bool(clipped.any())
