"""The KL to an anchor: which policy that is, how the KL is estimated, and where it enters."""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta

from configs.algorithm.correction import CorrectionConfig
from configs.section import NonNegative, NonNegativeFloat, Positive

_OF_TOP_K = ("kl_direction", "kl_gradient", "kl_tail")  # they act with it alone
_OF_THE_LOSS = ("kl_estimator", "kl_top_k", "kl_weight")  # a reward takes k1, weighed by its loss


class DivergenceConfig(CorrectionConfig, frozen=True):
    """The KL to an anchor: a part of `learner`. None: the default that the comment names.

    Raises ValueError where a field acts on nothing.
    """

    kl_coef: NonNegativeFloat = 0.0  # 0: no KL
    kl_in: Literal["loss", "reward"] = "loss"  # where it is taken off
    # At the sampled token alone: k3++
    kl_estimator: Literal["k1", "k2", "k3", "k3++", "k5"] | None = None
    kl_top_k: NonNegative = 0  # above 0: summed over the anchor's k likeliest tokens instead
    kl_direction: Literal["reverse", "forward"] | None = None  # reverse: KL(policy ‖ anchor)
    kl_gradient: Literal["unbiased", "ema_pg"] | None = None  # unbiased; ema_pg: as it is printed
    kl_tail: bool | None = None  # true: beyond those k, estimated at the sampled token
    kl_weight: Literal["truncate", "none"] | None = None  # of what is sampled: truncate
    # ema: an average of the weights; frozen: those of the start
    anchor: Literal["ema", "frozen", "none"] = "none"
    anchor_tau: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9  # per period
    anchor_period: Positive = 10  # steps

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor != "ema":
            self.refuse("anchor_tau", "anchor")
            self.refuse("anchor_period", "anchor")
        if self.kl_coef and self.anchor == "none":
            raise ValueError(
                f"learner.kl_coef = {self.kl_coef!r} needs an anchor: set learner.anchor to 'ema' "
                "or 'frozen'"
            )
        if not self.kl_coef:
            watches = () if self.anchor == "none" else ("kl_estimator",)
            fields = [name for name in (*_OF_TOP_K, *_OF_THE_LOSS) if name not in watches]
            self._refuse(fields, "kl_coef")
            if self.kl_in == "reward":
                self._refuse(["kl_in"], "kl_coef")
        if not self.kl_top_k:
            self._refuse(_OF_TOP_K, "kl_top_k")
        else:
            self._refuse(["kl_estimator"], "kl_top_k")
        if self.kl_in == "reward":
            self._refuse(_OF_THE_LOSS, "kl_in")
        elif self.kl_coef and self.kl_estimator == "k1":
            raise ValueError(
                f"learner.kl_estimator = 'k1' with learner.kl_coef = {self.kl_coef!r}: in the loss "
                "its expected gradient is 0, so that it only adds noise: set it to 'k3++', or "
                "leave it out and take learner.kl_top_k=32"
            )
        if self.kl_tail is False:
            self._refuse(["kl_weight"], "kl_tail")
        self._refuse_weights()

    @property
    def weighs_kl(self) -> bool:
        """True where the loss has a KL of what was sampled, multiplied by an importance weight."""
        sampled = self.kl_coef > 0 and self.kl_in == "loss" and self.kl_tail is not False
        return sampled and self.kl_weight != "none"

    def _refuse_weights(self) -> None:
        """Raise ValueError where no weight, the policy's or the KL's, has this level or cap."""
        two = self.centre == "behaviour"  # the ratio of the centre to who sampled is 1
        if self.behaviour_weight == "mask" or (not two and self.behaviour_weight != "none"):
            return
        because = "proximal" if two else "behaviour_weight"
        if two or not self.weighs_kl:
            self.refuse("behaviour_level", because)
        if not self.weighs_kl:
            self.refuse("behaviour_cap", because)

    def _refuse(self, fields: Sequence[str], because: str) -> None:
        """Raise ValueError naming the first of these fields that is set, and why it acts not."""
        for name in fields:
            value = getattr(self, name)
            if value or isinstance(value, bool):
                raise ValueError(
                    f"learner.{name} = {value!r} acts on nothing with learner.{because} = "
                    f"{getattr(self, because)!r}: leave it out, or change that"
                )
