"""Every mode of the off-policy correction against its formula: each factor exactly once."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithm.loss import row_coefficients
from learner.algorithm.objectives import choose
from learner.model.head import ChunkLoss
from learner.packing import MicroBatch
from learner.update import ActionTokens, looks_ahead, loss_as_scored, token_loss

OBJECTIVES = ("grpo", "cispo", "gspo", "dppo_tv", "reinforce")
PROXIMALS = ("ema", "start_of_update", "behaviour")
LEVELS = ("token", "sequence", "geometric")
RULES = ("truncate", "mask", "none")
SHAPE = (5, 9)
# Nothing is clipped; about a third of the weights is truncated or rejected.
WIDE = {"clip_low": 0.9, "clip_high": 9.0, "behaviour_floor": 0.95, "behaviour_cap": 1.05}


def wide(objective: str) -> dict[str, Any]:
    """WIDE, without the bounds that the objective does not have."""
    return {k: v for k, v in WIDE.items() if objective != "reinforce" or k.startswith("behaviour")}


class Case:
    """[B, T] log-probs near each other under a mask with holes; NaN wherever nobody may look."""

    def __init__(self, seed: int, config: LearnerConfig) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda: torch.randn(SHAPE, generator=generator, dtype=torch.float64)  # noqa: E731
        self.config, self.mask = config, draw() > -0.5
        self.current = -1 - draw().abs()
        self.proximal = self.current + 0.05 * draw()
        if config.centre == "start_of_update":
            self.proximal = self.current.clone()
        self.behaviour = self.proximal + 0.05 * draw()
        self.behaviour[draw() > 1.5] = (math.nan, math.inf, -math.inf)[seed % 3]
        self.advantages = draw()
        for values in (self.behaviour, self.advantages, self.proximal):
            values[~self.mask] = math.nan

    def gradient(self, ahead: bool | None = None, cuts: Sequence[int] = (0, 45)) -> Tensor:
        """By each current log-prob [B, T], through the loss as `update` makes it, slice by slice;
        `ahead`: with the current log-probs known before.
        """
        counts, mask = self.mask.sum(1).tolist(), self.mask
        coefficients = torch.tensor(
            row_coefficients(counts, choose(self.config).reduction, 0)
        ).double()
        zeros = torch.zeros(SHAPE, dtype=torch.int64)
        micro = MicroBatch(
            *(
                zeros[:, 0],
                zeros,
                mask,
                self.behaviour,
                self.advantages,
                zeros,
                coefficients,
                coefficients,
            )
        )
        leaf = self.current.clone().requires_grad_()
        ahead = looks_ahead(self.config) if ahead is None else ahead
        known = self.current[mask] if ahead else None
        proximal = self.proximal[mask] if self.config.centre == "ema" else None
        tokens = ActionTokens.of(micro)
        if known is None and proximal is None:
            loss: ChunkLoss = loss_as_scored(tokens, None, self.config)
        else:
            loss = token_loss(tokens, proximal, known, None, self.config)
        pieces = [slice(*ends) for ends in pairwise(cuts)]
        torch.stack([loss(leaf[mask][piece], piece) for piece in pieces]).sum().backward()
        assert leaf.grad is not None
        return leaf.grad


def ratio_of(logs: Sequence[float], own: float, level: str) -> float:
    if level == "token":
        return math.exp(own)
    return math.exp(sum(logs) / (len(logs) if level == "geometric" else 1))


def weight_of(ratio: float, config: LearnerConfig) -> float:
    floor, cap = config.behaviour_floor, config.behaviour_cap
    if config.behaviour_weight == "truncate":
        return min(max(ratio, floor), cap)
    return ratio if config.behaviour_weight != "mask" or floor <= ratio <= cap else 0.0


def naive(case: Case) -> list[list[float]]:
    """The gradient written out, one token at a time."""
    config, total = case.config, int(case.mask.sum())
    two = config.proximal == "behaviour" and config.objective != "reinforce"
    slopes = [[0.0] * SHAPE[1] for _ in range(SHAPE[0])]
    for i, slope in enumerate(slopes):
        lp, lm, credit = (x[i].tolist() for x in (case.current, case.behaviour, case.advantages))
        lo = lm if two else case.proximal[i].tolist()
        acting = [t for t in range(SHAPE[1]) if case.mask[i, t] and math.isfinite(lm[t])]
        old = {t: (lp[t] if two else lo[t]) - lm[t] for t in acting}
        new = {t: lp[t] - lo[t] for t in acting}
        for t in acting:
            ratio = ratio_of(list(old.values()), old[t], config.behaviour_level)
            weight = weight_of(ratio, config) if config.behaviour_weight != "none" else 1.0
            if two:
                weight = float(config.behaviour_weight != "mask" or weight > 0.0)
            level = "geometric" if config.objective == "gspo" else "token"
            policy = ratio_of(list(new.values()), new[t], level)
            slope[t] = -weight * policy * credit[t] / total
    return slopes


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("proximal", PROXIMALS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_gradient_is_the_formulas(objective: str, proximal: str, level: str, rule: str) -> None:
    config = LearnerConfig(
        objective=objective, proximal=proximal, behaviour_level=level, behaviour_weight=rule,
        reduction="token_mean", **wide(objective),
    )  # fmt: skip
    for seed in range(6):
        case = Case(seed, config)
        gradient, expected = case.gradient(), torch.tensor(naive(case), dtype=torch.float64)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-12)
        silent = ~case.mask | ~case.behaviour.isfinite()
        assert (gradient[silent] == 0.0).all()


@pytest.mark.parametrize("proximal", PROXIMALS)
@pytest.mark.parametrize("objective", ["grpo", "cispo", "dppo_tv", "reinforce"])
def test_untruncated_every_mode_corrects_from_behaviour_to_current(
    objective: str, proximal: str
) -> None:
    fields: dict[str, Any] = wide(objective) | {"behaviour_floor": 0.0, "behaviour_cap": 9.0}
    case = Case(4, LearnerConfig(objective=objective, proximal=proximal, **fields))
    whole = (case.current - case.behaviour).exp() * -case.advantages / int(case.mask.sum())
    acting = case.mask & case.behaviour.isfinite()
    expected = torch.where(acting, whole, 0.0)
    torch.testing.assert_close(case.gradient(), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_rejection_leaves_every_other_token_its_share(reduction: str) -> None:
    config = LearnerConfig(behaviour_weight="mask", reduction=reduction, **WIDE)
    keep_all = LearnerConfig(behaviour_weight="mask", behaviour_cap=99.0, reduction=reduction,
                             clip_low=0.9, clip_high=9.0)  # fmt: skip
    some, every = Case(1, config).gradient(), Case(1, keep_all).gradient()
    kept = some.ne(0.0)
    assert 0 < kept.sum() < every.ne(0.0).sum()
    assert torch.equal(some[kept], every[kept])


def ahead(objective: str, level: str) -> set[tuple[str, str]]:
    """The centres and rules with which the current policy is looked at before the loss is made."""
    return {
        (proximal, rule)
        for proximal in PROXIMALS
        for rule in RULES
        if looks_ahead(LearnerConfig(objective=objective, proximal=proximal, behaviour_level=level,
                                     behaviour_weight=rule))
    }  # fmt: skip


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_a_sequences_weight_is_looked_at_ahead(level: str) -> None:
    own = {("start_of_update", "truncate"), ("start_of_update", "mask"), ("behaviour", "mask")}
    for objective in ("grpo", "cispo", "dppo_tv"):
        assert ahead(objective, level) == own
    every = {(proximal, rule) for proximal in PROXIMALS for rule in ("truncate", "mask")}
    assert ahead("reinforce", level) == every


def test_a_tokens_weight_is_not() -> None:
    for objective in ("grpo", "cispo", "dppo_tv", "reinforce"):
        assert ahead(objective, "token") == set()
    drifts = {(proximal, rule) for proximal in ("ema", "behaviour") for rule in RULES}
    assert ahead("gspo", "token") == drifts, "a sequence's own ratio"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("proximal", ["start_of_update", "behaviour"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_weight_made_with_the_gradient_is_that_known_before(
    objective: str, proximal: str, rule: str
) -> None:
    config = LearnerConfig(
        objective=objective, proximal=proximal, behaviour_weight=rule, **wide(objective)
    )
    if looks_ahead(config):
        return
    for seed in range(6):
        case = Case(seed, config)
        assert torch.equal(case.gradient(cuts=(0, 3, 4, 11, 45)), case.gradient(ahead=True))
