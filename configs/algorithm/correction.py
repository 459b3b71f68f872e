"""The objective, the centre of its trust region, the behaviour weight, and how tokens are summed. A
leaf module but for `section`.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta
from msgspec.structs import fields

from configs.section import NonNegative, NonNegativeFloat, PositiveFloat, Section

_UNUSED = {
    "reinforce": ("clip_low", "clip_high", "ratio_cap", "proximal"),
    "cispo": ("ratio_cap",),
}
_AT_A_RATIO_OF_1 = {  # one step a batch: the policy before the step is the current one
    "grpo": ("clip_low", "clip_high", "ratio_cap"),
    "gspo": ("clip_low", "clip_high", "ratio_cap"),
    "cispo": ("clip_low", "clip_high"),
    "dppo_tv": ("ratio_cap",),  # its bounds are on the distance from who sampled
}


class CorrectionConfig(Section, frozen=True):
    """The policy's loss and its off-policy correction: a part of `learner`.

    Raises ValueError where a field acts on nothing, or two contradict each other.
    """

    # The loss of a token (docs/algorithms.md)
    objective: Literal["grpo", "cispo", "gspo", "dppo_tv", "reinforce"] = "grpo"
    # None: the objective's own (learner/algorithm/objectives.py)
    clip_low: NonNegativeFloat | None = None
    clip_high: NonNegativeFloat | None = None  # likewise, above 1
    ratio_cap: Annotated[float, Meta(gt=1.0)] | None = None  # grpo, gspo: dual clip; dppo_tv: cap
    # The centre of the trust region, where both weights meet
    proximal: Literal["ema", "start_of_update", "behaviour"] = "ema"
    proximal_decay: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.5  # per step
    # What is done to the weight of the centre over who sampled
    behaviour_weight: Literal["truncate", "mask", "none"] = "truncate"
    # Of each token, or of a sequence: its product or geometric mean
    behaviour_level: Literal["token", "sequence", "geometric"] = "token"
    behaviour_cap: PositiveFloat = 2.0  # the largest such weight
    behaviour_floor: NonNegativeFloat = 0.0  # the least
    # None: the objective's own too
    reduction: Literal["token_mean", "sequence_mean", "constant_length"] | None = None
    constant_length_tokens: NonNegative = 0  # the denominator of "constant_length"

    def __post_init__(self) -> None:
        for name in _UNUSED.get(self.objective, ()):
            self.refuse(name, "objective")
        if self.proximal == "start_of_update":
            for name in _AT_A_RATIO_OF_1[self.objective]:
                self.refuse(name, "proximal")
        if self.centre != "ema":
            self.refuse("proximal_decay", "objective" if self.proximal == "ema" else "proximal")
        if self.behaviour_weight == "none":
            self.refuse("behaviour_floor", "behaviour_weight")
        elif self.centre == "behaviour" and self.behaviour_weight == "truncate":
            self.refuse("behaviour_floor", "proximal")  # the policy ratio has the whole correction
        if self.centre == "behaviour" and self.behaviour_weight == "none":
            self.refuse("behaviour_weight", "proximal")  # it only rejects there
        if self.reduction == "constant_length" and not self.constant_length_tokens:
            raise ValueError(
                "learner.reduction = 'constant_length' needs learner.constant_length_tokens above 0"
            )
        if self.reduction != "constant_length":
            self.refuse("constant_length_tokens", "reduction")
        if self.behaviour_floor > self.behaviour_cap:
            raise ValueError(
                f"learner.behaviour_floor = {self.behaviour_floor!r} lies above "
                f"learner.behaviour_cap = {self.behaviour_cap!r}"
            )

    @property
    def centre(self) -> Literal["ema", "start_of_update", "behaviour"]:
        """The policy at whose log-probs the behaviour weight and the policy ratio meet.

        REINFORCE has no policy ratio: its weight must reach the current policy, in every mode.
        """
        return "start_of_update" if self.objective == "reinforce" else self.proximal

    def refuse(self, name: str, because: str) -> None:
        """Raise ValueError where a field is no default, since another leaves it nothing to do."""
        value, default = getattr(self, name), _default(self, name)
        if value != default:
            raise ValueError(
                f"learner.{name} = {value!r} acts on nothing with learner.{because} = "
                f"{getattr(self, because)!r}: set it to {_written(default)}, or change that"
            )


def _default(section: Section, name: str) -> Any:
    return next(field.default for field in fields(section) if field.name == name)


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return str(list(value))
    return "null" if value is None else str(value)
