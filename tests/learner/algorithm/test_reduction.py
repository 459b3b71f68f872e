"""Coefficients against the means they stand for."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithm.loss import row_coefficients

losses = st.lists(st.lists(st.floats(-5, 5), max_size=5), min_size=1, max_size=6)


@settings(deadline=None)
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
