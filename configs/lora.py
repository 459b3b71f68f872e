"""Low-rank adapters of `learner.lora`, trained in place of the model's weights. A leaf module but
for `section`.
"""

from typing import Annotated, Literal

from msgspec import Meta

from configs.section import ONE_OR_MORE, PositiveFloat, Section

_OUTSIDE = ("lm_head", "embed_tokens", "embed_out", "wte")  # head and embeddings: never adapted


class LoraConfig(Section, frozen=True):
    """An adapter on linear layers of the frozen model: y = W x + (alpha / rank) B A x, without
    dropout, under which engine and learner would disagree. Raises ValueError where a field acts on
    nothing.
    """

    rank: Annotated[int, Meta(ge=0, le=512)] = 0  # 0: the whole model is trained
    alpha: PositiveFloat = 32.0  # the adapter counts by alpha / rank
    # Last parts of their names, such as q_proj; empty: every linear layer of the blocks
    layers: Annotated[tuple[str, ...], ONE_OR_MORE] = ()
    # To the engines: the adapter itself, or the whole weights with it added
    publish: Literal["adapter", "merged"] = "adapter"

    def __post_init__(self) -> None:
        if not self.rank:
            for name in ("alpha", "layers", "publish"):
                if (value := getattr(self, name)) != _DEFAULTS[name]:
                    raise ValueError(
                        f"learner.lora.{name} = {value!r} acts on nothing with learner.lora.rank = "
                        "0: set that above 0, or leave this out"
                    )
        for name in self.layers:
            if name in _OUTSIDE:
                raise ValueError(
                    f"learner.lora.layers names {name!r}, which is never adapted: name linear "
                    "layers of the blocks, such as q_proj, or leave it empty for all of them"
                )
            if not name or self.layers.count(name) > 1:
                raise ValueError(
                    f"learner.lora.layers = {list(self.layers)!r}: {name!r} is "
                    f"{'no name' if not name else 'named twice'}: leave it out"
                )

    @property
    def scale(self) -> float:
        """The factor of B A; 0 without an adapter."""
        return self.alpha / self.rank if self.rank else 0.0


_DEFAULTS = {"alpha": 32.0, "layers": (), "publish": "adapter"}
