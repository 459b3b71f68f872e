"""The loss of a micro-batch: its terms, slices and coefficients, and the KL's own weight."""

import math
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.algorithm import kl
from learner.algorithm.loss import TokenLoss, row_coefficients
from learner.algorithm.objectives import ClipBounds, Terms, grpo

N = 12


def draw(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, generator=generator, dtype=torch.float64)


CURRENT = -draw(0).abs()
WEIGHTS = draw(1).abs() * (draw(2) > -0.5)
RATIOS = draw(8).abs()
LOSS = TokenLoss(
    objective=grpo,
    bounds=ClipBounds(0.2, 0.28),
    terms=Terms(CURRENT + 0.3 * draw(3), CURRENT + 0.3 * draw(4), draw(5), torch.zeros(N)),
    weights=WEIGHTS,
    coefficients=draw(6).abs(),
    reference=CURRENT + draw(7),
    kl_coef=0.7,
    kl_cap=1.2,
    kl_ratios=RATIOS,
)


def naive(i: int) -> float:
    lp, lo, lr = (float(x[i]) for x in (CURRENT, LOSS.terms.proximal, LOSS.reference))
    weight, credit, ratio = float(WEIGHTS[i]), float(LOSS.terms.advantages[i]), math.exp(lp - lo)
    kl_weight = min(float(RATIOS[i]) * ratio, 1.2) if weight else 0.0
    policy = -min(ratio * credit, min(max(ratio, 0.8), 1.28) * credit)
    k3 = math.exp(lr - lp) - 1 + lp - lr
    return float(LOSS.coefficients[i]) * (weight * policy + 0.7 * kl_weight * k3)


def test_equals_the_formula() -> None:
    assert LOSS.tokens(CURRENT).tolist() == pytest.approx([naive(i) for i in range(N)])
    assert float(LOSS(CURRENT)) == pytest.approx(sum(naive(i) for i in range(N)))


def test_slices_sum_to_the_whole_with_the_same_gradient() -> None:
    gradients, losses = [], []
    for cuts in ([0, N], [0, 1, 5, 11, N]):
        leaf = CURRENT.clone().requires_grad_()
        pieces = [slice(a, b) for a, b in pairwise(cuts)]
        loss = sum(LOSS(leaf[piece], piece) for piece in pieces)
        loss.backward()
        gradients.append(leaf.grad)
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_the_kl_has_the_whole_correction_detached_and_capped() -> None:
    leaf = CURRENT.clone().requires_grad_()
    LOSS.divergence(leaf).sum().backward()
    ratio = (CURRENT - LOSS.terms.proximal).exp()
    weights = (RATIOS * ratio).clamp(max=1.2) * WEIGHTS.ne(0.0)
    assert ((RATIOS * ratio) > 1.2).any(), "the cap must act somewhere"
    # The gradient of k3++ is that of k2 on average; token by token it is k3 + 1 − e^{−d}.
    distance = CURRENT - LOSS.reference
    slope = (-distance).exp() - 1 + distance + 1 - (-distance).exp()
    torch.testing.assert_close(leaf.grad, weights * slope)
    assert (leaf.grad[WEIGHTS == 0.0] == 0.0).all()


def test_unweighted_the_kl_of_every_token_that_acts_counts_alike() -> None:
    acts = WEIGHTS.ne(0.0)
    expected = acts * kl.estimate("k3++", CURRENT, LOSS.reference)
    torch.testing.assert_close(replace(LOSS, kl_ratios=None).divergence(CURRENT), expected)


def test_what_is_summed_over_candidates_has_no_weight_and_what_is_sampled_has_it_once() -> None:
    table = torch.stack([CURRENT, -1 - draw(9).abs(), -2 - draw(10).abs()], -1)
    outside = draw(11) > 0.0
    topk = kl.TopK(logprobs=-1 - draw(12).abs()[:, None].expand(N, 2), outside=outside)
    head, tail = topk.parts(table, LOSS.reference)
    assert tail[outside].ne(0.0).all() and tail[~outside].eq(0.0).all() and head.ne(0.0).all()
    weights = (RATIOS * (CURRENT - LOSS.terms.proximal).exp()).clamp(max=1.2)
    expected = WEIGHTS.ne(0.0) * (head + weights * tail)
    loss = replace(LOSS, topk=topk)
    torch.testing.assert_close(loss.divergence(table), expected)
    policy = WEIGHTS * LOSS.policy(CURRENT).losses
    torch.testing.assert_close(loss.tokens(table), LOSS.coefficients * (policy + 0.7 * expected))
    pieces = [loss.tokens(table[a:b], slice(a, b)) for a, b in pairwise([0, 1, 5, 11, N])]
    torch.testing.assert_close(torch.cat(pieces), loss.tokens(table))


def test_a_token_that_must_not_act_has_no_gradient_at_all() -> None:
    leaf = CURRENT.clone().requires_grad_()
    silent = replace(LOSS, weights=torch.zeros(N, dtype=torch.float64))
    silent(leaf).backward()
    assert torch.equal(leaf.grad, torch.zeros(N, dtype=torch.float64))


def test_without_coefficient_or_anchor_there_is_no_kl() -> None:
    alone = (LOSS.coefficients * WEIGHTS * LOSS.policy(CURRENT).losses).sum()
    assert torch.equal(replace(LOSS, kl_coef=0.0)(CURRENT), alone)
    assert torch.equal(replace(LOSS, reference=None)(CURRENT), alone)


losses = st.lists(st.lists(st.floats(-5, 5), max_size=5), min_size=1, max_size=6)


@given(losses, st.integers(1, 9))
def test_the_plain_sum_is_the_mean(rows: list[list[float]], constant: int) -> None:
    tokens, filled = [x for row in rows for x in row], [row for row in rows if row]
    expected = {
        "token_mean": statistics.fmean(tokens or [0.0]),
        "sequence_mean": statistics.fmean([statistics.fmean(row) for row in filled] or [0.0]),
        "constant_length": sum(tokens) / (constant * max(len(filled), 1)),
    }
    for reduction, value in expected.items():
        shares = row_coefficients([len(row) for row in rows], reduction, constant)
        total = sum(share * sum(row) for share, row in zip(shares, rows, strict=True))
        assert total == pytest.approx(value, abs=1e-9)


def test_another_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"learner.reduction = 'sum'"):
        row_coefficients([1], "sum", 0)


def test_all_are_finite_without_any_token() -> None:
    for reduction in ("token_mean", "sequence_mean", "constant_length"):
        assert torch.tensor(row_coefficients([0, 0], reduction, 4)).isfinite().all()
