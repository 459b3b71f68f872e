"""KL estimators: values, expectations and gradients by enumeration (tests/vectors/kl.json)."""

import json

import pytest
import torch
from torch import Tensor

from configs.runtime.process import REPOSITORY
from learner.algorithm import kl

FILE = json.loads((REPOSITORY / "tests" / "vectors" / "kl.json").read_text())
TOLERANCE = {"rtol": 0.0, "atol": 2e-9}  # printed to nine decimals
OFFERED = ("k1", "k2", "k3", "k3++")
NOT_OFFERED = {
    "k4": "k3++ has its gradient and less variance",
    "k5": "an estimator of the forward KL",
    "topk_rev": "KL needs only the sampled token's log-prob",
    "topk_rev_notail": "KL needs only the sampled token's log-prob",
    "topk_fwd": "KL needs only the sampled token's log-prob",
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
    [("k2", "grad_exact_reverse"), ("k3", "grad_exact_forward"), ("k3++", "grad_exact_reverse")],
)
def test_off_policy_the_detached_ratio_restores_the_gradient(name: str, gradient: str) -> None:
    logits, current = logprobs("policy_logits")
    _, old = logprobs("old_logits")
    values = kl.estimate(name, current, logprobs("ref_logits")[1])
    weights = (current - old).detach().exp()
    (old.detach().exp() * weights * values).sum().backward()
    expected = torch.tensor(FILE[gradient], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected, **TOLERANCE)


def test_every_estimator_is_offered_or_declined_with_a_reason() -> None:
    assert sorted([*OFFERED, *NOT_OFFERED]) == sorted(FILE["on_policy"])
    assert all("topk" in entry or "topk_from_old" in entry
               for entry in FILE["corrected_estimators"].values())  # fmt: skip


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
