"""Behaviour ratios and effective sample size."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.importance import behaviour_ratio, effective_sample_size, finite_mask

ALL = torch.ones(1, 3, dtype=torch.bool)
logprobs = st.lists(st.floats(-40, 0), min_size=3, max_size=3)


@settings(deadline=None)
@given(logprobs, logprobs, st.floats(0.5, 5))
def test_ratio_is_proximal_over_behaviour_truncated(
    proximal: list[float], behaviour: list[float], cap: float
) -> None:
    pairs = zip(proximal, behaviour, strict=True)
    expected = [min(math.exp(max(-20.0, min(20.0, p - b))), cap) for p, b in pairs]
    result = behaviour_ratio(
        torch.tensor([proximal]).double(), torch.tensor([behaviour]).double(), ALL, cap
    )
    assert result[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_untruncated_without_a_cap_and_zero_off_the_mask() -> None:
    mask = torch.tensor([[True, False, True]])
    behaviour = torch.tensor([[-3.0, -math.inf, 0.0]])
    ratio = behaviour_ratio(torch.zeros(1, 3, requires_grad=True), behaviour, mask)
    assert ratio.tolist() == [[pytest.approx(math.exp(3)), 0.0, 1.0]]
    assert not ratio.requires_grad


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_no_number_is_masked(value: float) -> None:
    mask = finite_mask(torch.tensor([[-1.0, value, -1.0]]), torch.tensor([[True, True, False]]))
    assert mask.tolist() == [[True, False, False]]


def test_effective_sample_size() -> None:
    assert float(effective_sample_size(torch.full((1, 3), 0.3), ALL)) == pytest.approx(1.0)
    weights = torch.tensor([[1.0, 2.0, 3.0]])
    assert float(effective_sample_size(weights, ALL)) == pytest.approx(36 / (3 * 14))
    first = torch.tensor([[True, True, False]])
    assert float(effective_sample_size(weights, first)) == pytest.approx(9 / (2 * 5))
