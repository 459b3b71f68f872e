"""Credit by a critic's values: generalised advantage estimation over the policy's own tokens, and
the loss that teaches the values.

GAE, arXiv 1506.02438; the clipped loss: PPO's code, arXiv 1707.06347. An episode is one sequence of
tokens; its steps are its action tokens. What lies between two of them, an observation of any
length, is no step: it has no value and no reward, and credit goes across it undiminished.
"""

import torch
from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns float[B, T] of float[B, T] rewards and values; 0 off the mask.

    Over the n action tokens of a sequence, in their order, V beyond the last of them being 0:

        δ_i = r_i + γ V_{i+1} − V_i        A_i = δ_i + γ λ A_{i+1}        returns = A + V

    verl (from 0.9) and AReaL also pass over what is not on the mask; Search-R1 does not.
    """
    advantages = torch.zeros_like(values)
    following_value = following = values.new_zeros(len(values))
    for t in mask.any(0).nonzero().flatten().flip(0).tolist():
        acts, value = mask[:, t], values[:, t]
        credit = rewards[:, t] + gamma * following_value - value + gamma * gae_lambda * following
        advantages[:, t] = torch.where(acts, credit, 0.0)
        following = torch.where(acts, credit, following)
        following_value = torch.where(acts, value, following_value)
    return advantages, torch.where(mask, advantages + values, 0.0)


def value_losses(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Losses float[B, T] of values with gradient, 0 off the mask, and where the clip decided.

        ½ max((V − R)², (clip(V, V_old − c, V_old + c) − R)²)

    Without a clip c, ½ (V − R)².
    """
    plain = (values - returns).square()
    if clip is None:
        clipped, losses = torch.zeros_like(mask), plain
    else:
        bounded = torch.clamp(values, old_values - clip, old_values + clip) - returns
        clipped, losses = mask & (bounded.square() > plain), torch.maximum(plain, bounded.square())
    return torch.where(mask, 0.5 * losses, 0.0), clipped.detach()
