"""The learning rate as a pure function of the step: a checkpoint needs nothing of it."""

import math

from msgspec.structs import replace

from configs.schema import LearnerConfig


def learning_rate(step: int, config: LearnerConfig) -> float:
    """The rate of optimiser step `step` (from 1): linear warm-up, then constant, or towards 0 on a
    line or half a cosine wave.

    Both would reach 0 one step after `total_steps`: the last step still learns.
    """
    warmup = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
    if config.lr_schedule == "constant":
        return config.lr * warmup
    left = config.total_steps - step + 1
    decay = min(1.0, max(0.0, left / max(config.total_steps - config.warmup_steps, 1)))
    if config.lr_schedule == "cosine":
        decay = 0.5 - 0.5 * math.cos(math.pi * decay)
    return config.lr * warmup * decay


def at_scale(config: LearnerConfig, scale: float) -> LearnerConfig:
    """The learner with so many times its rates, also a critic's."""
    if scale == 1.0:
        return config
    critic = config.critic
    if config.baseline == "critic":
        critic = replace(critic, lr=critic.lr * scale)
    return replace(config, lr=config.lr * scale, critic=critic)


def scaled_rate(rate: float, ess: float, base: float | None) -> float:
    """The rate for a batch of this effective sample size in (0, 1]: lr · √min(1, ESS / base), as
    its gradient's variance grows with 1 / ESS (VCPO, arXiv 2602.17616); `base` None: the rate.
    """
    return rate if base is None else rate * math.sqrt(min(1.0, ess / base))
