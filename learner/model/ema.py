"""Lagged averages of the learner's weights: the centre of the trust region, and the KL anchor.

Each takes in the engine's fp32 masters after each step, element by element on each rank's own
partition. Its master is fp32 whatever the training dtype: in bf16, (1 − decay)·Δ is mostly below
half a unit in the last place.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from configs.schema import LearnerConfig
from learner.model.shards import Shards


class Sharded(Protocol):
    """An engine: this rank's masters, and the way from them to the weights."""

    @property
    def shards(self) -> Shards:
        """This rank's part of the weights."""
        ...


class Ema:
    """master ← decay · master + (1 − decay) · weights after every step; begun from the step-0
    weights.

    After n updates: decay^n · θ_0 + (1 − decay) Σ decay^(n−i) θ_i. Buffers are not averaged: none
    is trained.
    """

    def __init__(self, engine: Sharded, decay: float, period: int = 1) -> None:
        """`decay` acts once every `period` updates; period 0: never, the weights stay frozen."""
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"EMA decay must be in [0, 1), got {decay!r}")
        self.decay, self.period, self.updates = decay, period, 0
        self.master = {
            name: master.detach().to(torch.float32, copy=True)
            for name, master in engine.shards.masters().items()
        }

    @property
    def half_life_steps(self) -> float:
        """Steps after which the average has taken in half of a change; infinite when frozen."""
        if not self.period:
            return math.inf
        return self.period * math.log(0.5) / math.log(self.decay) if self.decay else 0.0

    def update(self, engine: Sharded) -> None:
        """Take in the weights of the step just made, when a period is over."""
        self.updates += 1
        if not self.period or self.updates % self.period:
            return
        weights = engine.shards.masters()
        with torch.no_grad():
            for name, master in self.master.items():
                master.lerp_(weights[name].detach().float(), 1.0 - self.decay)

    @contextmanager
    def swapped_in(self, engine: Sharded) -> Iterator[None]:
        """Run the engine on the averaged weights; its own come back bit for bit, whatever happens
        inside.

        Collective: every rank enters and leaves.
        """
        shards = engine.shards
        own = shards.own()
        try:
            shards.load(self.master)
            yield
        finally:
            shards.load(own)


@dataclass(frozen=True)
class Averages:
    """The proximal policy where it is an average, and the KL anchor where one is configured."""

    proximal: Ema | None
    anchor: Ema | None

    @classmethod
    def begin(cls, engine: Sharded, config: LearnerConfig) -> "Averages":
        """Those that the configuration uses; they start from the weights that the engine has."""
        proximal = anchor = None
        if config.centre == "ema":
            proximal = Ema(engine, config.proximal_decay)
        if config.anchor != "none":
            period = config.anchor_period if config.anchor == "ema" else 0
            anchor = Ema(engine, config.anchor_tau, period)
        return cls(proximal, anchor)

    def update(self, engine: Sharded) -> None:
        """Take in the weights of the step just made."""
        for average in self.all().values():
            average.update(engine)

    def all(self) -> dict[str, Ema]:
        """The averages there are, by the name of their checkpoint folder."""
        known = {"ema": self.proximal, "anchor": self.anchor}
        return {name: average for name, average in known.items() if average is not None}

    def gauges(self, staleness: float = 0.0) -> dict[str, float]:
        """Half-lives in steps and, with the tokens' mean `staleness` above 0, in units of it."""
        found = {}
        for name, average in self.all().items():
            if average.period:
                half_life = average.half_life_steps
                found[f"learner/{name}_half_life_steps"] = half_life
                if staleness > 0.0:
                    found[f"learner/{name}_half_life_staleness"] = half_life / staleness
        return found
