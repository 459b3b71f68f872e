"""The critic of `learner.baseline: critic`, and the credit that its values give."""

from typing import Annotated, Literal

from msgspec import Meta

from configs.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class CriticConfig(Section, frozen=True):
    """A value head on a copy of the model, with an optimiser of its own, whose settings but these
    are the learner's; or on the policy's trunk, taught in the policy's own step. Raises ValueError
    where two fields contradict each other.
    """

    # copy: a model of its own; policy: a head on the policy's
    on: Literal["copy", "policy"] = "copy"
    coef: PositiveFloat | None = None  # of its loss beside the policy's, on its trunk; null: .1
    lr: NonNegativeFloat = 1e-5  # on the policy's trunk, which has the learner's: the head's alone
    warmup_steps: NonNegative = 10  # of that rate; then by learner.lr_schedule
    alone_steps: NonNegative = 0  # so many first steps teach it alone: the policy's rate is 0
    updates: Positive = 1  # optimiser steps on each batch
    # How far from what it was before the batch a value's loss follows it; null: anywhere
    value_clip: PositiveFloat | None = None
    gamma: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0  # per action token
    gae_lambda: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0  # 1: returns less values

    def __post_init__(self) -> None:
        if self.on == "copy" and self.coef is not None:
            raise ValueError(
                f"learner.critic.coef = {self.coef!r} acts on nothing with learner.critic.on = "
                "'copy', whose loss stands alone: set that to 'policy', or this to null"
            )
        if self.on == "policy" and self.value_clip is not None:
            raise ValueError(
                f"learner.critic.value_clip = {self.value_clip!r} acts on nothing with "
                "learner.critic.on = 'policy', whose one step begins at the values themselves: set "
                "this to null, or take learner.critic.on=copy with updates=2"
            )
        if self.on == "policy" and self.updates > 1:
            raise ValueError(
                f"learner.critic.updates = {self.updates!r} with learner.critic.on = 'policy', "
                "whose one step is the policy's own: set it to 1, or take learner.critic.on=copy"
            )
        if self.value_clip is not None and self.updates == 1:
            raise ValueError(
                f"learner.critic.value_clip = {self.value_clip!r} acts on nothing with "
                "learner.critic.updates = 1, whose one step begins at the values themselves: set "
                "that to 2 or more, or this to null"
            )


def require_critic(
    baseline: str, advantage_std: str, critic: CriticConfig, total_steps: int
) -> None:
    """Raise ValueError where settings of the learner are of no use with, or without, a critic."""
    if baseline == "critic":
        if advantage_std not in ("whiten", "none"):
            raise ValueError(
                f"learner.advantage_std = {advantage_std!r} is the spread of groups' rewards, and "
                "with learner.baseline = 'critic' each token has an advantage of its own: set it "
                "to 'whiten' (as in PPO) or 'none'"
            )
        if 0 < total_steps <= critic.alone_steps:
            raise ValueError(
                f"learner.critic.alone_steps = {critic.alone_steps!r} with learner.total_steps = "
                f"{total_steps!r}, in which the policy then never learns: lower that to "
                f"{total_steps - 1} at most, or raise this"
            )
        return
    for field in CriticConfig.__struct_fields__:
        if (value := getattr(critic, field)) != getattr(CriticConfig(), field):
            raise ValueError(
                f"learner.critic.{field} = {value!r} acts on nothing with learner.baseline = "
                f"{baseline!r}: set that to 'critic', or leave this out"
            )
