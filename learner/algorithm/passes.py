"""The forward passes of a step beside the one that makes its gradient. Imports nothing heavy."""

from configs.schema import LearnerConfig

# Of learner.algorithm.rejection, which imports torch: where a token's fate depends on its sequence.
OVER_SEQUENCES = frozenset({"mean_k2", "mean_k3", "max_k2", "max_k3", "opsm"})


def looks_ahead(config: LearnerConfig) -> bool:
    """True where the loss of a token needs the current log-probs of its whole sequence, rollout or
    step: one pass more.
    """
    if config.guard != "none" or config.second_moment is not None:
        return True
    if config.baseline == "optimal" or config.kl_in == "reward":
        return True
    if config.objective == "gspo" and config.centre != "start_of_update":
        return True  # at the start of the update its sequence's ratio is 1
    if config.centre == "ema":
        return False
    if config.rejection in OVER_SEQUENCES:
        return True
    if config.behaviour_level == "token":
        return False
    if config.kl_coef and config.kl_weight != "none" and config.centre == "start_of_update":
        return True
    rules = ("mask",) if config.centre == "behaviour" else ("mask", "truncate")
    return config.behaviour_weight in rules


def scores_current(config: LearnerConfig) -> bool:
    """True where a step begins with a pass of the weights as they are: it looks ahead, or judges by
    a critic on the policy's trunk.
    """
    return config.has_value_head or looks_ahead(config)
