"""Learning rates by step."""

import pytest

from configs.schema import LearnerConfig
from learner.algorithm.schedule import learning_rate, scaled_rate


def test_warm_up_then_constant() -> None:
    config = LearnerConfig(lr=0.8, warmup_steps=4, total_steps=10)
    rates = [learning_rate(step, config) for step in range(1, 7)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_linear_falls_towards_zero_and_the_last_step_still_learns() -> None:
    config = LearnerConfig(lr=1.0, warmup_steps=2, total_steps=6, lr_schedule="linear")
    rates = [learning_rate(step, config) for step in range(1, 7)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_no_warm_up() -> None:
    assert learning_rate(1, LearnerConfig(lr=0.3, warmup_steps=0)) == 0.3


def test_cosine_falls_slowly_at_both_ends() -> None:
    config = LearnerConfig(lr=1.0, warmup_steps=2, total_steps=6, lr_schedule="cosine")
    rates = [learning_rate(step, config) for step in range(1, 8)]
    half = 0.5**0.5 / 2
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.5 + half, 0.5, 0.5 - half, 0.0])


def test_a_sample_worth_less_is_learnt_from_more_slowly() -> None:
    assert scaled_rate(0.4, 0.1, None) == 0.4
    assert [scaled_rate(0.4, ess, 0.64) for ess in (1.0, 0.64, 0.16)] == pytest.approx(
        [0.4, 0.4, 0.2]
    )
