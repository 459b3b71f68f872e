"""Every mode of the off-policy correction against its formula: each factor exactly once."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.algorithm.correction import (
    ActionTokens,
    loss_as_scored,
    token_loss,
)
from learner.algorithm.loss import row_coefficients
from learner.algorithm.objectives import choose
from learner.algorithm.passes import looks_ahead
from learner.model.head import ChunkLoss
from learner.packing import MicroBatch

OBJECTIVES = ("grpo", "cispo", "gspo", "dppo_tv", "reinforce")
PROXIMALS = ("ema", "start_of_update", "behaviour")
LEVELS = ("token", "sequence", "geometric")
RULES = ("truncate", "mask", "none")
SHAPE = (5, 9)
# Nothing is clipped; about a third of the weights is truncated or rejected.
WIDE = {"clip_low": 0.9, "clip_high": 9.0, "behaviour_floor": 0.95, "behaviour_cap": 1.05}


# Reinforce has no policy ratio, whose centre could be another.
MODES = [(o, p) for o in OBJECTIVES for p in PROXIMALS if o != "reinforce" or p == "ema"]


def acts(proximal: str, rule: str, level: str = "token") -> bool:
    """False where a rule or a level acts on nothing, and is refused."""
    if proximal == "behaviour" and rule != "mask":
        return rule == "truncate" and level == "token"
    return rule != "none" or level == "token"


def wide(objective: str, proximal: str = "ema", rule: str = "truncate") -> dict[str, Any]:
    """WIDE, without the bounds that act on nothing."""
    unused = {"clip_low", "clip_high"} if objective == "reinforce" else set()
    if rule == "none" or (proximal == "behaviour" and rule == "truncate"):
        unused |= {"behaviour_floor", "behaviour_cap"}
    if proximal == "start_of_update" and objective != "dppo_tv":
        unused |= {"clip_low", "clip_high"}
    return {name: value for name, value in WIDE.items() if name not in unused}


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
                zeros,
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


# Statistics of x = log ratio and of the two policies' log-probs; about a third is beyond the bound.
STATISTICS: dict[str, tuple[float, Callable[[float, float], float]]] = {
    "mean_k2": (1.5e-3, lambda now, then: (now - then) ** 2 / 2),
    "mean_k3": (1.5e-3, lambda now, then: math.exp(now - then) - 1 - (now - then)),
    "max_k2": (4e-3, lambda now, then: (now - then) ** 2 / 2),
    "max_k3": (4e-3, lambda now, then: math.exp(now - then) - 1 - (now - then)),
    "opsm": (5e-3, lambda now, then: then - now),
    "binary_kl": (4e-4, lambda now, then: max(two_point(now, then), two_point(then, now))),
}


def two_point(log_p: float, log_q: float) -> float:
    p, q = math.exp(log_p), math.exp(log_q)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def rejected(config: LearnerConfig, old: dict[int, tuple[float, float]], credit: Any) -> set[int]:
    """The tokens of a sequence that its rejection leaves out."""
    if config.rejection == "none":
        return set()
    bound, statistic = STATISTICS[config.rejection]
    values = {t: statistic(*pair) for t, pair in old.items()}
    if config.rejection == "binary_kl":
        return {t for t, value in values.items() if value > bound}
    whole = max(values.values(), default=0.0)
    if not config.rejection.startswith("max"):
        whole = sum(values.values()) / max(len(values), 1)
    out = set(values) if whole > bound else set()
    return {t for t in out if config.rejection != "opsm" or credit[t] < 0}


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
        pairs = {t: ((lp if two else lo)[t], lm[t]) for t in acting}
        out = rejected(config, pairs, credit)
        for t in acting:
            ratio = ratio_of(list(old.values()), old[t], config.behaviour_level)
            weight = weight_of(ratio, config) if config.behaviour_weight != "none" else 1.0
            if two:
                weight = float(config.behaviour_weight != "mask" or weight > 0.0)
            level = "geometric" if config.objective == "gspo" else "token"
            policy = ratio_of(list(new.values()), new[t], level)
            slope[t] = 0.0 if t in out else -weight * policy * credit[t] / total
    return slopes


@pytest.mark.parametrize(
    ("objective", "proximal", "level", "rule"),
    [(*m, level, rule) for m in MODES for level in LEVELS for rule in RULES
     if acts(m[1], rule, level)],
)  # fmt: skip
def test_the_gradient_is_the_formulas(objective: str, proximal: str, level: str, rule: str) -> None:
    config = LearnerConfig(
        objective=objective, proximal=proximal, behaviour_level=level, behaviour_weight=rule,
        reduction="token_mean", **wide(objective, proximal, rule),
    )  # fmt: skip
    for seed in range(6):
        case = Case(seed, config)
        gradient, expected = case.gradient(), torch.tensor(naive(case), dtype=torch.float64)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-12)
        silent = ~case.mask | ~case.behaviour.isfinite()
        assert (gradient[silent] == 0.0).all()


@pytest.mark.parametrize("rejection", STATISTICS)
@pytest.mark.parametrize(("objective", "proximal"), MODES)
def test_rejection_is_by_the_policies_of_the_behaviour_weight(
    objective: str, proximal: str, rejection: str
) -> None:
    config = LearnerConfig(
        objective=objective, proximal=proximal, reduction="token_mean", rejection=rejection,
        rejection_bound=STATISTICS[rejection][0], **wide(objective, proximal),
    )  # fmt: skip
    plain = msgspec.structs.replace(config, rejection="none", rejection_bound=None)
    fewer = 0
    for seed in range(4):
        gradient, whole = Case(seed, config).gradient(), Case(seed, plain).gradient()
        expected = torch.tensor(naive(Case(seed, config)), dtype=torch.float64)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-12)
        kept = gradient.ne(0.0)
        assert torch.equal(gradient[kept], whole[kept]), "the others keep their share"
        fewer += int(whole.ne(0.0).sum() - kept.sum())
    assert fewer > 0


@pytest.mark.parametrize("guard", ["action", "sequence"])
@pytest.mark.parametrize("proximal", PROXIMALS)
def test_the_guard_holds_what_did_no_harm(proximal: str, guard: str) -> None:
    rule = "truncate" if proximal == "behaviour" else "none"
    config = LearnerConfig(
        proximal=proximal, behaviour_weight=rule, guard=guard, guard_coef=0.3,
        **wide("grpo", proximal, rule),
    )  # fmt: skip
    plain = msgspec.structs.replace(config, guard="none", guard_coef=None)
    held = 0
    for seed in range(4):
        case = Case(seed, config)
        extra = case.gradient() - Case(seed, plain).gradient()
        expected = torch.tensor(guarding(case), dtype=torch.float64)
        torch.testing.assert_close(extra, expected, rtol=1e-6, atol=1e-12)
        held += int(expected.ne(0.0).sum())
    assert held > 0


def guarding(case: Case) -> list[list[float]]:
    """The guard's gradient, one span at a time."""
    slopes = [[0.0] * SHAPE[1] for _ in range(SHAPE[0])]
    for i, slope in enumerate(slopes):
        lp, lm, credit = (x[i].tolist() for x in (case.current, case.behaviour, case.advantages))
        sampled = [t for t in range(SHAPE[1]) if case.mask[i, t]]
        spans: list[list[int]] = [[]]
        for t in sampled:
            if case.config.guard == "action" and spans[-1] and t - 1 not in sampled:
                spans.append([])
            spans[-1].append(t)
        for span in spans:
            good = [t for t in span if credit[t] >= 0 and math.isfinite(lm[t])]
            if sum(lm[t] - lp[t] for t in good) > 0:
                for t in good:
                    slope[t] = -0.3 * (lm[t] > lp[t]) / int(case.mask.sum())
    return slopes


@pytest.mark.parametrize(("objective", "proximal"), [m for m in MODES if m[0] != "gspo"])
def test_untruncated_every_mode_corrects_from_behaviour_to_current(
    objective: str, proximal: str
) -> None:
    fields = wide(objective, proximal) | {"behaviour_floor": 0.0}
    if "behaviour_cap" in fields:
        fields["behaviour_cap"] = 9.0
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


@pytest.mark.parametrize(
    ("objective", "proximal", "rule"),
    [(*m, rule) for m in MODES for rule in RULES
     if (m[0] == "reinforce" or m[1] != "ema") and acts(m[1], rule)],
)  # fmt: skip
def test_a_weight_made_with_the_gradient_is_that_known_before(
    objective: str, proximal: str, rule: str
) -> None:
    config = LearnerConfig(
        objective=objective,
        proximal=proximal,
        behaviour_weight=rule,
        **wide(objective, proximal, rule),
    )
    if looks_ahead(config):
        return
    for seed in range(6):
        case = Case(seed, config)
        assert torch.equal(case.gradient(cuts=(0, 3, 4, 11, 45)), case.gradient(ahead=True))
