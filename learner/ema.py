"""The proximal policy: a lagged average of the learner's weights, the centre of the trust region.

Consumes the engine's trainable tensors after each step; lends them back through `swapped_in`. The
master is fp32 whatever the training dtype: in bf16, (1 − decay)·Δ is mostly below half a unit in
the last place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Trainable(Protocol):
    """What has weights: names to the live parameters, tied ones once."""

    def trainable(self) -> dict[str, Tensor]:
        """The trainable tensors by Hugging Face name."""
        ...


class Ema:
    """master ← decay · master + (1 − decay) · weights after every step; begun from the step-0
    weights.

    After n updates: decay^n · θ_0 + (1 − decay) Σ decay^(n−i) θ_i. Buffers are not averaged: none
    is trained.
    """

    def __init__(self, engine: Trainable, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"EMA decay must be in [0, 1), got {decay!r}")
        self.decay = decay
        self.master = {
            name: weight.detach().to(torch.float32, copy=True)
            for name, weight in engine.trainable().items()
        }

    @torch.no_grad()
    def update(self, engine: Trainable) -> None:
        """Take in the weights of the step just made."""
        weights = engine.trainable()
        for name, master in self.master.items():
            master.lerp_(weights[name].detach().float(), 1.0 - self.decay)

    @contextmanager
    def swapped_in(self, engine: Trainable) -> Iterator[None]:
        """Run the engine on the averaged weights; its own come back bit for bit, whatever happens
        inside.

        Data are copied in place: DeepSpeed's flat buffers alias the parameters, so pointers must
        not move.
        """
        weights = engine.trainable()
        own = {name: weight.detach().clone() for name, weight in weights.items()}
        try:
            _copy_into(weights, self.master)
            yield
        finally:
            _copy_into(weights, own)


@torch.no_grad()
def _copy_into(weights: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        weight.copy_(values[name])
