"""KL estimators: values, expectations and gradients by enumeration (tests/vectors/kl.json)."""

import json
import math

import pytest
import torch
from torch import Tensor

from configs.runtime.process import REPOSITORY
from learner.algorithm import kl

FILE = json.loads((REPOSITORY / "tests" / "vectors" / "kl.json").read_text())
TOLERANCE = {"rtol": 0.0, "atol": 2e-9}  # printed to nine decimals
OFFERED = ("k1", "k2", "k3", "k3++", "k5")
# vector: direction, whether its tail is kept. k4 is the tail of no candidates at all.
TOP_K = {
    "k4": ("reverse", True),
    "topk_rev": ("reverse", True),
    "topk_rev_notail": ("reverse", False),
    "topk_fwd": ("forward", True),
}
CORRECTED = {
    "rev_sg_head": "reverse",
    "rev_plus1_tail": "reverse",
    "fwd_no_logr_tail": "forward",
    "offpolicy_rev_sg_head_tail_iw": "reverse",
}


def logprobs(name: str) -> tuple[Tensor, Tensor]:
    logits = torch.tensor(FILE[name], dtype=torch.float64, requires_grad=True)
    return logits, logits.log_softmax(-1)


@pytest.mark.parametrize("name", OFFERED)
def test_on_policy_expectation_and_gradient(name: str) -> None:
    expected = {
        key: torch.tensor(value, dtype=torch.float64)
        for key, value in FILE["on_policy"][name].items()
        if value is not None
    }
    logits, current = logprobs("policy_logits")
    values = kl.estimate(name, current, logprobs("ref_logits")[1])
    expectation = (current.detach().exp() * values).sum()
    expectation.backward()
    torch.testing.assert_close(values.detach(), expected["per_token"], **TOLERANCE)
    torch.testing.assert_close(expectation.detach(), expected["expected_value"], **TOLERANCE)
    torch.testing.assert_close(logits.grad, expected["expected_grad"], **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "gradient"),
    [
        ("k2", "grad_exact_reverse"),
        ("k3", "grad_exact_forward"),
        ("k3++", "grad_exact_reverse"),
        ("k5", "grad_exact_forward"),
    ],
)
def test_off_policy_the_detached_ratio_restores_the_gradient(name: str, gradient: str) -> None:
    logits, current = logprobs("policy_logits")
    _, old = logprobs("old_logits")
    values = kl.estimate(name, current, logprobs("ref_logits")[1])
    weights = (current - old).detach().exp()
    (old.detach().exp() * weights * values).sum().backward()
    expected = torch.tensor(FILE[gradient], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected, **TOLERANCE)


def over(
    ids: list[int], direction: str, gradient: str, keeps_tail: bool = True, sampler: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """Every token's KL over these candidates; its expectation, under tokens of the sampler (empty:
    the policy) that are weighed as they should be, and the expectation's gradient.
    """
    logits, current = logprobs("policy_logits")
    reference = logprobs("ref_logits")[1].detach()
    old = logprobs(sampler)[1].detach() if sampler else current.detach()
    chosen = torch.tensor(ids, dtype=torch.int64)
    every = torch.arange(len(current))
    topk = kl.TopK(
        logprobs=reference[chosen].expand(len(every), -1),
        outside=(every[:, None] != chosen).all(-1),
        direction=direction,
        gradient=gradient,
        keeps_tail=keeps_tail,
    )
    table = torch.cat([current[:, None], current[chosen].expand(len(every), -1)], -1)
    head, tail = topk.parts(table, reference)
    values = head + (current.detach() - old).exp() * tail
    expectation = (old.exp() * values).sum()
    expectation.backward()
    return values.detach(), expectation.detach(), logits.grad


@pytest.mark.parametrize("name", TOP_K)
def test_candidates_as_they_are_printed(name: str) -> None:
    direction, keeps_tail = TOP_K[name]
    expected = FILE["on_policy"][name]
    values, expectation, gradient = over(expected["topk"] or [], direction, "ema_pg", keeps_tail)
    for ours, field in ((values, "per_token"), (expectation, "expected_value"),
                        (gradient, "expected_grad")):  # fmt: skip
        theirs = torch.tensor(expected[field], dtype=torch.float64)
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("name", CORRECTED)
def test_candidates_with_the_right_gradient(name: str) -> None:
    expected = FILE["corrected_estimators"][name]
    sampler = "old_logits" if "topk_from_old" in expected else ""
    ids = expected.get("topk") or expected["topk_from_old"]
    _, expectation, gradient = over(ids, CORRECTED[name], "unbiased", sampler=sampler)
    for ours, field in ((expectation, "expected_value"), (gradient, "expected_grad")):
        theirs = torch.tensor(expected[field], dtype=torch.float64)
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize(("direction", "name"), [("reverse", "rev"), ("forward", "fwd")])
def test_the_printed_gradient_is_off_by_that_of_the_candidates_mass(
    direction: str, name: str
) -> None:
    ids = FILE["on_policy"][f"topk_{name}"]["topk"]
    printed, right = (over(ids, direction, how)[2] for how in ("ema_pg", "unbiased"))
    expected = torch.tensor(FILE[f"bias_of_printed_topk_{name}"]["bias"], dtype=torch.float64)
    torch.testing.assert_close(printed - right, expected, **TOLERANCE)


@pytest.mark.parametrize("ids", [[0], [2, 1], [3, 0, 4], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_without_the_tail_the_right_gradient_is_that_of_the_candidates_alone(
    direction: str, ids: list[int]
) -> None:
    values, _, gradient = over(ids, direction, "unbiased", keeps_tail=False)
    logits, log_p = logprobs("policy_logits")
    log_q = logprobs("ref_logits")[1].detach()
    if direction == "reverse":  # sum of grad(p) log(p/q)
        terms = log_p.exp() * (log_p - log_q).detach()
    else:  # sum of -q grad(log p), and grad of the candidates' mass
        terms = log_p.exp() - log_q.exp() * log_p
    terms[ids].sum().backward()
    torch.testing.assert_close(gradient, logits.grad, **TOLERANCE)
    assert bool((values == values[0]).all()), "nothing of it depends on the sample"


def test_every_estimator_of_the_file_is_reproduced() -> None:
    assert sorted([*OFFERED, *TOP_K]) == sorted(FILE["on_policy"])
    assert sorted(CORRECTED) == sorted(FILE["corrected_estimators"])


SUBSETS = [[], [0], [4], [2, 1], [3, 0, 4], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("sampler", ["", "old_logits"])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("ids", SUBSETS)
def test_over_any_candidates_value_and_gradient_are_the_exact_ones(
    ids: list[int], direction: str, sampler: str
) -> None:
    _, expectation, gradient = over(ids, direction, "unbiased", sampler=sampler)
    value = torch.tensor(FILE[f"exact_{direction}_kl"], dtype=torch.float64)
    exact = torch.tensor(FILE[f"grad_exact_{direction}"], dtype=torch.float64)
    torch.testing.assert_close(expectation, value, **TOLERANCE)
    torch.testing.assert_close(gradient, exact, **TOLERANCE)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_over_all_tokens_every_sample_says_the_same(direction: str) -> None:
    values, expectation, _ = over([4, 0, 3, 1, 2], direction, "unbiased")
    torch.testing.assert_close(values, expectation.expand(5))


@pytest.mark.parametrize("keeps_tail", [True, False])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_where_the_policies_agree_no_token_has_a_gradient(direction: str, keeps_tail: bool) -> None:
    logits, current = logprobs("policy_logits")
    own, others = current[3:4].unsqueeze(-1), current[:2].unsqueeze(0)
    topk = kl.TopK(others.detach(), torch.tensor([True]), direction, "unbiased", keeps_tail)
    parts = topk.parts(torch.cat([own, others], -1), current[3:4].detach())
    sum(parts).sum().backward()
    assert logits.grad.abs().max() < 1e-15


@pytest.mark.parametrize(
    ("direction", "gradient", "said"),
    [("sideways", "unbiased", "kl_direction = 'sideways'"), ("reverse", "x", "kl_gradient = 'x'")],
)
def test_an_unknown_direction_or_gradient_is_refused(
    direction: str, gradient: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        kl.over_candidates(
            torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, 1), direction, gradient
        )


def test_the_reward_loses_what_its_rollout_moved_away() -> None:
    groups = [torch.tensor([1.0, math.nan]), torch.tensor([0.5])]
    first, second = kl.penalised(groups, torch.tensor([2.0, 3.0, -4.0]), 0.1)
    assert first[0].item() == pytest.approx(0.8) and first[1].isnan()
    assert second.item() == pytest.approx(0.9)


@pytest.mark.parametrize("name", OFFERED)
@pytest.mark.parametrize("distance", [-500.0, 500.0])
def test_no_distance_makes_it_infinite(name: str, distance: float) -> None:
    current = torch.tensor([-1.0], requires_grad=True)
    reference = torch.tensor([-1.0 + distance], requires_grad=True)
    value = kl.estimate(name, current, reference).sum()
    value.backward()
    assert value.isfinite() and current.grad.isfinite().all()
    assert reference.grad is None


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"learner.kl_estimator = 'k9'"):
        kl.estimate("k9", torch.zeros(1), torch.zeros(1))
