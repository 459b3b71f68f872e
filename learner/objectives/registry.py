"""Objectives by the name that `learner.objective` gives them, and each one's own bounds."""

from configs.schema import LearnerConfig
from learner.objectives import cispo, dppo_tv, grpo, gspo, reinforce
from learner.objectives.base import Bounds, Objective

OBJECTIVES: dict[str, tuple[Objective, Bounds]] = {
    "grpo": (grpo.grpo, grpo.BOUNDS),
    "cispo": (cispo.cispo, cispo.BOUNDS),
    "gspo": (gspo.gspo, gspo.BOUNDS),
    "dppo_tv": (dppo_tv.dppo_tv, dppo_tv.BOUNDS),
    "reinforce": (reinforce.reinforce, reinforce.BOUNDS),
}


def choose(config: LearnerConfig) -> tuple[Objective, Bounds]:
    """The configured objective with its bounds: the configured ones, else its own.

    Raises ValueError on an unknown name.
    """
    if config.objective not in OBJECTIVES:
        known = ", ".join(repr(name) for name in OBJECTIVES)
        raise ValueError(f"learner.objective = {config.objective!r}: one of {known}")
    objective, own = OBJECTIVES[config.objective]
    return objective, Bounds(
        own.low if config.clip_low is None else config.clip_low,
        own.high if config.clip_high is None else config.clip_high,
        own.cap if config.ratio_cap is None else config.ratio_cap,
    )
