"""The step's gauges against the numbers counted by hand."""

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.health.diagnostics import TokenFacts, diagnose

CONFIG = LearnerConfig()


def facts(**known: Any) -> TokenFacts:
    """One micro-batch; whatever is not given is dull."""
    count = len(next(iter(known.values())))
    zeros = torch.zeros(count)
    dull: dict[str, Tensor] = dict.fromkeys((f.name for f in fields(TokenFacts)), zeros)
    dull |= {"rows": zeros.long(), "staleness": zeros.int()}
    dull |= {"usable": zeros == 0} | dict.fromkeys(("clipped", "rejected", "guarded"), zeros > 0)
    return TokenFacts(**dull | {name: torch.as_tensor(value) for name, value in known.items()})


def test_sums_and_fractions_are_over_all_micro_batches() -> None:
    parts = [
        facts(loss=[1.0, 2.0], clipped=[True, False], entropy=[1.0, 3.0]),
        facts(loss=[4.0, 0.0], clipped=[False, False], entropy=[0.0, 0.0]),
    ]
    gauges = diagnose(parts, CONFIG)
    assert gauges["learner/loss"] == 7.0
    assert gauges["learner/clip_fraction"] == 0.25
    assert gauges["learner/entropy"] == 1.0


def test_staleness_histogram() -> None:
    gauges = diagnose(
        [facts(staleness=[0, 0, 1, 2, 3, 4, 8, 9]), facts(staleness=[17, 99])], CONFIG
    )
    bars = [gauges[f"learner/staleness_tokens_{bar}"]
            for bar in ("0", "1", "2", "3_4", "5_8", "9_16", "17_up")]  # fmt: skip
    assert bars == pytest.approx([0.2, 0.1, 0.1, 0.2, 0.1, 0.1, 0.2])


def ess(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def test_effective_sample_sizes_of_tokens_and_sequences() -> None:
    parts = [
        facts(log_ratio=[0.5, 1.0, -2.0], rows=[0, 0, 1]),
        facts(log_ratio=[0.3, 0.0, 0.0], rows=[0, 0, 2], usable=[True, False, False]),
    ]
    gauges = diagnose(parts, CONFIG)
    tokens = [math.exp(x) for x in (0.5, 1.0, -2.0, 0.3)]
    sequences = [math.exp(x) for x in (1.5, -2.0, 0.3)]
    for name, weights in (("ess", tokens), ("ess_sequence", sequences)):
        truncated = [min(weight, 2.0) for weight in weights]
        assert gauges[f"learner/{name}"] == pytest.approx(ess(weights), rel=1e-5)
        assert gauges[f"learner/{name}_truncated"] == pytest.approx(ess(truncated), rel=1e-5)
    assert gauges["learner/masked_tokens"] == 2.0
    assert gauges["learner/truncated_fraction"] == 0.25
    assert gauges["learner/behaviour_ratio_max"] == pytest.approx(math.e, rel=1e-5)


def test_no_ratio_overflows() -> None:
    gauges = diagnose([facts(log_ratio=[900.0, 0.0], rows=[0, 1])], CONFIG)
    assert gauges["learner/ess"] == gauges["learner/ess_sequence"] == pytest.approx(0.5)
    assert all(math.isfinite(value) for value in gauges.values())


def test_likelihood_changes_by_the_sign_of_the_advantage() -> None:
    part = facts(
        current=[-1.0, -2.0, -1.0, -9.0],
        behaviour=[-3.0, -2.0, -0.5, math.nan],
        usable=[True, True, True, False],
        advantages=[1.0, 0.5, -1.0, 1.0],
    )
    gauges = diagnose([part], CONFIG)
    assert gauges["learner/likelihood_change_positive"] == pytest.approx(1.0)
    assert gauges["learner/likelihood_change_negative"] == pytest.approx(-0.5)
    expected = sum(math.exp(d) - 1 - d for d in (2.0, 0.0, -0.5)) / 3
    assert gauges["learner/behaviour_kl"] == pytest.approx(expected)
    ratios = [math.exp(d) for d in (2.0, 0.0, -0.5)]
    ess = sum(ratios) ** 2 / sum(r * r for r in ratios) / len(ratios)
    assert gauges["learner/current_ess"] == pytest.approx(ess)
    assert gauges["learner/current_ratio_max"] == pytest.approx(math.exp(2.0))


def test_the_sample_size_of_sequences_under_the_current_policy() -> None:
    parts = [
        facts(current=[-1.0, -2.0, -1.0], behaviour=[-1.5, -1.0, -2.0], rows=[0, 0, 1]),
        facts(current=[-1.0], behaviour=[math.nan], usable=[False]),
    ]
    size = diagnose(parts, CONFIG)["learner/current_ess_sequence"]
    assert size == pytest.approx(ess([math.exp(-0.5), math.exp(1.0)]))


def test_what_is_rejected_or_guarded_is_counted_where_that_is_switched_on() -> None:
    part = facts(
        rejected=[True, False, False, False], guarded=[True, True, True, False],
        usable=[True, True, False, True],
    )  # fmt: skip
    switched = LearnerConfig(
        rejection="max_k3", rejection_bound=1.0, guard="action", guard_coef=0.1
    )
    gauges = diagnose([part], switched)
    assert gauges["learner/rejected_fraction"] == pytest.approx(1 / 3)
    assert gauges["learner/guarded_fraction"] == pytest.approx(3 / 4)
    assert not {"learner/rejected_fraction", "learner/guarded_fraction"} & {
        *diagnose([part], CONFIG)
    }


def test_mismatch_is_measured_on_fresh_tokens_alone() -> None:
    part = facts(current=[-1.0, -1.0, -5.0], behaviour=[-1.1, -0.7, -1.0], staleness=[0, 0, 1])
    gauges = diagnose([part], CONFIG)
    assert gauges["learner/mismatch"] == pytest.approx(0.2)
    assert gauges["learner/mismatch_max"] == pytest.approx(0.3)
    assert "learner/mismatch" not in diagnose([facts(staleness=[1, 2])], CONFIG)


def test_the_kl_to_the_anchor_is_reported_where_there_is_one() -> None:
    part = facts(divergence=[0.2, 0.4, 9.0], usable=[True, True, False])
    anchored = diagnose([part], LearnerConfig(anchor="ema"))
    assert anchored["learner/anchor_kl"] == pytest.approx(0.3)
    assert "learner/anchor_kl" not in diagnose([part], CONFIG)


def test_nothing_usable_and_nothing_at_all_are_no_error() -> None:
    unusable = diagnose([facts(usable=[False, False], behaviour=[math.nan] * 2)], CONFIG)
    assert unusable["learner/masked_tokens"] == 2.0
    assert all(math.isfinite(value) for value in unusable.values())
    empty = diagnose([facts(loss=[])], CONFIG)
    assert empty == {"learner/loss": 0.0, "learner/masked_tokens": 0.0}
