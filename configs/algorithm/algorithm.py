"""The switches of the algorithm that are off by default."""

from typing import Annotated, Literal

from msgspec import Meta

from configs.algorithm.divergence import DivergenceConfig
from configs.section import NonNegativeFloat, PositiveFloat

_OF_ROLLOUTS = {  # credit that turns of their own cannot be added to
    "optimal": "which is of whole rollouts alone",
    "critic": "which credits every token already",
}


class AlgorithmConfig(DivergenceConfig, frozen=True):
    """Credit by turns, rejection, regularisers and what scales the rate: a part of `learner`.

    Raises ValueError where one field of a pair is given without the other.
    """

    # The batch's own clip bounds, by the second moment of its log ratios (M2PO); null: clip_low and
    # clip_high
    second_moment: PositiveFloat | None = None
    # Of the turns' own advantages (learner/algorithm/turns.py), added to the rollout's
    turn_credit: NonNegativeFloat = 0.0
    # Of a turn's later rewards; null: .95
    turn_discount: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    # Tokens or sequences that are left out (learner/algorithm/rejection.py), by a bound on how far
    # the behaviour weight's two policies are apart there
    rejection: Literal["none", "mean_k2", "mean_k3", "max_k2", "max_k3", "binary_kl", "opsm"] = (
        "none"
    )
    rejection_bound: PositiveFloat | None = None  # of `rejection`
    # The rate is multiplied by √(ESS / this) where the sample is worth less; null: never
    ess_base: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    entropy_coef: NonNegativeFloat = 0.0  # of a bonus for each token's entropy
    # Holds the likelihood of what did no harm (learner/algorithm/guard.py)
    guard: Literal["none", "action", "sequence"] = "none"
    guard_coef: PositiveFloat | None = None  # of `guard`

    def __post_init__(self) -> None:
        super().__post_init__()
        for switch, amount in (("rejection", "rejection_bound"), ("guard", "guard_coef")):
            name, value = getattr(self, switch), getattr(self, amount)
            if name != "none" and value is None:
                raise ValueError(f"learner.{switch} = {name!r} needs learner.{amount} above 0")
            if name == "none" and value is not None:
                raise ValueError(
                    f"learner.{amount} = {value!r} acts on nothing with learner.{switch} = 'none': "
                    f"choose a {switch}, or set it to null"
                )
        if self.turn_discount is not None and not self.turn_credit:
            raise ValueError(
                f"learner.turn_discount = {self.turn_discount!r} acts on nothing with "
                "learner.turn_credit = 0: raise that, or set it to null"
            )


def check_credit(baseline: str, std: str, turn_credit: float, kl_in: str) -> None:
    """Raise ValueError where advantages cannot be made so."""
    if baseline == "none" and std not in ("none", "whiten"):
        raise ValueError(
            f"learner.advantage_std = {std!r} is the spread about a group's mean, which "
            "learner.baseline = 'none' leaves in: set it to 'whiten' or 'none'"
        )
    if turn_credit and (why := _OF_ROLLOUTS.get(baseline)):
        raise ValueError(
            f"learner.turn_credit = {turn_credit!r} with learner.baseline = {baseline!r}, {why}: "
            "set it to 0, or take learner.baseline=mean"
        )
    if turn_credit and kl_in == "reward":
        raise ValueError(
            f"learner.turn_credit = {turn_credit!r} with learner.kl_in = 'reward', which changes "
            "the rewards of whole rollouts alone: set it to 0, or take learner.kl_in=loss"
        )


def check_moment(moment: float | None, objective: str, centre: str, *bounds: float | None) -> None:
    """Raise ValueError where a second moment would bound nothing, or beside other bounds."""
    if moment is None:
        return
    name, remedy = f"learner.second_moment = {moment!r}", "set it to null"
    if objective != "grpo":
        raise ValueError(f"{name} acts on nothing with learner.objective = {objective!r}: {remedy}")
    if centre == "start_of_update":
        raise ValueError(
            f"{name} acts on nothing with learner.proximal = {centre!r}, where every ratio is 1: "
            "take 'behaviour' or 'ema'"
        )
    if any(bound is not None for bound in bounds):
        raise ValueError(f"{name} takes the place of learner.clip_low and clip_high: {remedy}")
