"""Estimators of KL(π ‖ reference) at sampled tokens, with d = current − reference:

    k1 = d     k2 = d² / 2     k3 = e^{−d} − 1 + d     k3++ = exp(current − sg(current)) · k3
    k5 = sg(e^{−d}) · (−d) + current − sg(current)

Their gradients differ *in the loss*, under tokens drawn from the current policy:

    estimator   E[value]     E[gradient]
    k1          KL(π ‖ ref)  0: no use as a loss, only as a number to watch
    k2          biased       ∇ KL(π ‖ ref)
    k3          KL(π ‖ ref)  ∇ KL(ref ‖ π): the *forward* KL
    k3++        KL(π ‖ ref)  ∇ KL(π ‖ ref): value and gradient agree
    k5          KL(ref ‖ π)  ∇ KL(ref ‖ π): likewise

`over_candidates` sums over a set S of tokens, and samples the rest. Drawn from another policy, what
is sampled needs the detached importance weight that `TokenLoss` gives it. k1–k3: Schulman 2020;
k3++, k5, candidates: EMA-PG, arXiv 2602.04417; the weight: DeepSeek-V3.2, arXiv 2512.02556,
equation 7.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from learner.algorithm.importance import LOG_RATIO_LIMIT

Estimator = Literal["k1", "k2", "k3", "k3++", "k5"]
Direction = Literal["reverse", "forward"]  # KL(π ‖ ref), KL(ref ‖ π)
Gradient = Literal["unbiased", "ema_pg"]


def estimate(name: Estimator, current_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """float[n]: the estimate at each token; the reference gets no gradient.

    In k3, k3++ and k5 d is clamped to ±20 before `exp`, so no token is ever infinite. Raises
    ValueError on an unknown name.
    """
    difference = current_logprobs - reference_logprobs.detach()
    if name == "k1":
        return difference
    if name == "k2":
        return difference.square() / 2
    clamped = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if name == "k5":
        weighted = torch.exp(-clamped).detach() * -clamped
        return weighted + current_logprobs - current_logprobs.detach()
    k3 = torch.exp(-clamped) - 1 + clamped
    if name == "k3":
        return k3
    if name == "k3++":
        return torch.exp(current_logprobs - current_logprobs.detach()) * k3
    raise ValueError(f"learner.kl_estimator = {name!r}: one of 'k1', 'k2', 'k3', 'k3++', 'k5'")


class Parts(NamedTuple):
    """A KL in two, float[n] each: the sum over the candidates, which no importance weight belongs
    to, and the estimate of the rest at the sampled token, 0 where that is a candidate.
    """

    head: Tensor
    tail: Tensor


@dataclass(frozen=True, slots=True)
class TopK:
    """The KL of N tokens over candidates, the same for every sample: the reference's log-probs of
    them float[N, k], and `outside` bool[N], true where the sampled token is none.
    """

    logprobs: Tensor
    outside: Tensor
    direction: Direction = "reverse"
    gradient: Gradient = "unbiased"
    keeps_tail: bool = True

    def part(self, chunk: slice) -> "TopK":
        """These tokens alone."""
        return replace(self, logprobs=self.logprobs[chunk], outside=self.outside[chunk])

    def parts(self, current_logprobs: Tensor, reference_logprobs: Tensor) -> Parts:
        """The KL at each token: `over_candidates`, its tail 0 where that is not kept."""
        parts = over_candidates(
            current_logprobs, reference_logprobs, self.logprobs, self.direction, self.gradient
        )
        kept = self.outside if self.keeps_tail else torch.zeros_like(self.outside)
        return Parts(parts.head, torch.where(kept, parts.tail, 0.0))


def over_candidates(
    current_logprobs: Tensor,
    reference_logprobs: Tensor,
    candidates: Tensor,
    direction: Direction,
    gradient: Gradient,
) -> Parts:
    """The sum over candidates S, and what stands for the rest where the sampled token a lies there.

        reverse  Σ_S p log(p/q)    exp(lp − sg(lp)) · sg(lp − lr)
        forward  Σ_S q log(q/p)    sg(w) log w + lp − sg(lp),   w = exp(lr − lp)

    current_logprobs float[n, 1 + k]: of a (lp) and of S (log p); of the reference lr float[n] and
    log q float[n, k], without gradient. As EMA-PG prints them ("ema_pg") they have the KL's value,
    but not its gradient: that is off by +∇P (reverse) or −∇P (forward), P = Σ_S p, so that mass is
    pushed out of S, or into it. "unbiased" takes ∇P off again, which needs no sample and is 0 where
    the policies agree. Raises ValueError on an unknown direction or gradient.
    """
    own, log_p = current_logprobs[:, 0], current_logprobs[:, 1:]
    p, log_q = log_p.exp(), candidates.detach()
    if direction == "reverse":
        head = (p * (log_p - log_q)).sum(-1)
        tail = torch.exp(own - own.detach()) * (own - reference_logprobs).detach()
    elif direction == "forward":
        head = (log_q.exp() * (log_q - log_p)).sum(-1)
        tail = estimate("k5", own, reference_logprobs)
    else:
        raise ValueError(f"learner.kl_direction = {direction!r}: one of 'reverse', 'forward'")
    if gradient == "unbiased":
        excess = p.sum(-1) - p.sum(-1).detach()
        head = head - excess if direction == "reverse" else head + excess
    elif gradient != "ema_pg":
        raise ValueError(f"learner.kl_gradient = {gradient!r}: one of 'unbiased', 'ema_pg'")
    return Parts(head, tail)


def penalised(rewards: Sequence[Tensor], divergences: Tensor, coef: float) -> list[Tensor]:
    """Each group's rewards float[n], less `coef` times the sum of k1 over a rollout's tokens.

    divergences: float[rollouts], in the order of the groups. What rewards hold is never
    differentiated, and k1 there is what makes the policy gradient that of KL(π ‖ ref).
    """
    taken = divergences.split([len(group) for group in rewards])
    return [group - coef * own.to(group) for group, own in zip(rewards, taken, strict=True)]
