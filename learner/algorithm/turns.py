"""Credit by turns: what a turn led to, against the other turns that were taken in the same state.

GiGPO, arXiv 2505.10978: within the rollouts of one question, turns whose policy had just read the
same are a group of their own. Its step return G_t = Σ_{k ≥ t} γ^{k−t} r_k is of the rewards that
the environment gave for turns, and is centred like a rollout's reward in its group.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch

from learner.algorithm.advantage import Std, advantages

DISCOUNT = 0.95  # GiGPO's γ


def step_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """G_t of each turn of a rollout: its reward and the later ones, each discounted once more."""
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total = reward + discount * total
        returns.append(total)
    return returns[::-1]


def turn_advantages(states: Sequence[Hashable], returns: Sequence[float], std: Std) -> list[float]:
    """Each turn's return less the mean of all in the same state, divided by their deviation where
    `std` is "group"; exactly 0 where it is alone there, or all returned the same.
    """
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, state in enumerate(states):
        places[state].append(place)
    groups = [
        torch.tensor([returns[i] for i in each], dtype=torch.float64) for each in places.values()
    ]
    made = advantages(groups, "mean", "group" if std == "group" else "none")
    found = {
        place: float(value)
        for each, credit in zip(places.values(), made, strict=True)
        for place, value in zip(each, credit, strict=True)
    }
    return [found[place] for place in range(len(states))]
