"""A policy: one async function from tokens to sampled tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from actors.errors import BadCompletion

FinishReason = Literal["stop", "length"]
Stops = tuple[str, ...]  # texts at which a completion ends


@dataclass(frozen=True, eq=False)
class Completion:
    """A sampled completion: tokens int32[A] (the stop included), their log-probs float32[A] after
    temperature, and the policy version int32[A] that sampled each.

    Raises BadCompletion unless the three are equally long and not empty.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        lengths = len(self.tokens), len(self.logprobs), len(self.versions)
        if len(set(lengths)) != 1 or not lengths[0]:
            raise BadCompletion(f"tokens, log-probs and versions number {lengths!r}")


class Policy(Protocol):
    """Samples until one of `stops`, the end token or `max_tokens`. Raises PolicyError."""

    async def complete(
        self, tokens: Sequence[int], *, temperature: float, seed: int, max_tokens: int, stops: Stops
    ) -> Completion:
        """Complete exactly `tokens`, keeping the stop; temperature 0 is greedy."""
        ...
