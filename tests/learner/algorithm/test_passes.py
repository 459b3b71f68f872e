"""Which steps look ahead."""

import pytest

from configs.schema import LearnerConfig
from learner.algorithm.passes import looks_ahead

PROXIMALS = ("ema", "start_of_update", "behaviour")
RULES = ("truncate", "mask", "none")


def acts(proximal: str, rule: str, level: str) -> bool:
    """False where a rule or a level acts on nothing, and is refused."""
    if proximal == "behaviour" and rule != "mask":
        return rule == "truncate" and level == "token"
    return rule != "none" or level == "token"


def ahead(objective: str, level: str) -> set[tuple[str, str]]:
    """The centres and rules with which the current policy is looked at before the loss is made."""
    return {
        (proximal, rule)
        for proximal in (PROXIMALS if objective != "reinforce" else ("ema",))
        for rule in RULES
        if acts(proximal, rule, level)
        and looks_ahead(LearnerConfig(objective=objective, proximal=proximal, behaviour_level=level,
                                      behaviour_weight=rule))
    }  # fmt: skip


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_a_sequences_weight_is_looked_at_ahead(level: str) -> None:
    own = {("start_of_update", "truncate"), ("start_of_update", "mask"), ("behaviour", "mask")}
    for objective in ("grpo", "cispo", "dppo_tv"):
        assert ahead(objective, level) == own
    assert ahead("reinforce", level) == {("ema", "truncate"), ("ema", "mask")}


def test_a_tokens_weight_is_not() -> None:
    for objective in ("grpo", "cispo", "dppo_tv", "reinforce"):
        assert ahead(objective, "token") == set()
    drifts = {(p, rule) for p in ("ema", "behaviour") for rule in RULES if acts(p, rule, "token")}
    assert ahead("gspo", "token") == drifts, "a sequence's own ratio"


def test_a_sequences_rejection_and_the_guard_are_looked_at_ahead() -> None:
    for proximal in PROXIMALS:
        fields = {"proximal": proximal, "rejection_bound": 1.0}
        assert looks_ahead(LearnerConfig(rejection="mean_k3", **fields)) == (proximal != "ema")
        assert not looks_ahead(LearnerConfig(rejection="binary_kl", **fields))
        assert looks_ahead(LearnerConfig(proximal=proximal, guard="action", guard_coef=0.1))
