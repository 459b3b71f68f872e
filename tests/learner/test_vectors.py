"""Other systems' numbers (tests/vectors/losses.json): values and gradients of our functions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learner.advantage import group_advantages
from learner.importance import behaviour_ratio, effective_sample_size
from learner.model import score_logits
from learner.objectives.grpo import grpo_loss, token_mean

FILE = json.loads((Path(__file__).parent.parent / "vectors" / "losses.json").read_text())
VECTORS = {vector["name"]: vector for vector in FILE["vectors"]}
EXACT = {"rtol": 1e-8, "atol": 1e-10}  # verl adds 1e-8 to its denominators
SINGLE = {"rtol": 1e-5, "atol": 1e-6}

# vector: (clip_low, clip_high, dual_clip, cap of the behaviour ratio, gradient's name, tolerance)
LOSSES = {
    "verl.loss.ppo_clip_higher.token-mean": (0.2, 0.28, 3.0, None, "grad_log_prob", EXACT),
    "verl.loss.ppo_dual_c1.5": (0.2, 0.2, 1.5, None, "grad_log_prob", EXACT),
    "verl.loss.ppo_decoupled_tis2": (0.2, 0.28, 3.0, 2.0, "grad_log_prob", EXACT),
    "trl.loss.dapo": (0.2, 0.28, None, None, "grad", EXACT),
    "searchr1.policy_loss": (0.2, 0.2, None, None, "grad", EXACT),
    "areal.ppo.decoupled_clamp2": (0.2, 0.2, None, 2.0, "grad", SINGLE),
}
# Their groups of one get A = R where ours get 0: left out of the comparison.
ADVANTAGES = {
    "verl.adv.grpo.R1.stdTrue": "group",
    "verl.adv.grpo.R1.stdFalse": "none",
    "verl.adv.grpo.R3.stdTrue": "group",
    "searchr1.grpo.R1": "group",
    "primerl.adv.grpo.mixed": "none",
}


def tensor(value: Any) -> Tensor:
    if isinstance(value, dict) and "$fx" in value:
        value = FILE["fixtures"][value["$fx"]]
    if not isinstance(value, dict):
        return torch.tensor(value, dtype=torch.float64)
    data = [float(x) for x in value["data"]]
    return torch.tensor(data, dtype=torch.float64).reshape(value["shape"])


def first(inputs: dict[str, Any], *names: str) -> Tensor:
    return next(tensor(inputs[name]) for name in names if name in inputs)


@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss(name: str) -> None:
    low, high, dual, cap, gradient, tolerance = LOSSES[name]
    inputs, expected = VECTORS[name]["inputs"], VECTORS[name]["expected"]
    current = first(inputs, "log_prob", "per_token_logps", "logprobs").requires_grad_()
    proximal = first(inputs, "proximal_logprobs", "old_log_prob", "old_per_token_logps")
    mask = first(inputs, "response_mask", "mask", "loss_mask", "eos_mask").bool()
    advantages = tensor(inputs["advantages"])
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand_as(current)
    weights = torch.ones_like(proximal)
    if cap is not None:
        behaviour = tensor({"$fx": "A.rollout_log_prob"})
        weights = behaviour_ratio(proximal, behaviour, mask, cap)
    losses, _ = grpo_loss(
        *(current, proximal, advantages, weights, mask),
        clip_low=low, clip_high=high, dual_clip=dual,
    )  # fmt: skip
    loss = token_mean(losses, int(mask.sum()))
    loss.backward()
    torch.testing.assert_close(loss.detach(), tensor(expected["loss"]), **tolerance)
    torch.testing.assert_close(current.grad, tensor(expected[gradient]), **tolerance)


def test_truncated_weights() -> None:
    vector = VECTORS["verl.rollout_corr.is_token_2.0"]
    old, rollout, mask = (tensor(value) for value in vector["inputs"].values())
    ratio = behaviour_ratio(old, rollout, mask.bool(), 2.0)
    torch.testing.assert_close(ratio, tensor(vector["expected"]["weights"]), **EXACT)
    size = effective_sample_size(ratio, mask.bool())
    expected = vector["expected"]["metrics"]["rollout_corr/rollout_is_eff_sample_size"]
    assert float(size) == pytest.approx(expected, rel=1e-6)  # theirs is of truncated weights


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages(name: str) -> None:
    inputs, expected = VECTORS[name]["inputs"], tensor(VECTORS[name]["expected"]["advantages"])
    if "rewards" in inputs:
        ours = group_advantages(tensor(inputs["rewards"]), ADVANTAGES[name])
        torch.testing.assert_close(ours, expected, **SINGLE)
        return
    rewards, index = tensor(inputs["token_level_rewards"]).sum(-1), tensor(inputs["index"])
    mask = first(inputs, "response_mask", "eos_mask")
    for group in (0, 1):
        rows = index == group
        ours = group_advantages(rewards[rows], ADVANTAGES[name])
        torch.testing.assert_close(ours[:, None] * mask[rows], expected[rows], **EXACT)


def test_entropy() -> None:
    vector = VECTORS["verl.entropy"]
    logits, mask = tensor(vector["inputs"]["logits"]), tensor(vector["inputs"]["response_mask"])
    chosen = logits[mask.bool()]
    entropy = score_logits(chosen, torch.zeros(len(chosen), dtype=torch.int64), 1.0).entropy
    expected = tensor(vector["expected"]["loss"]).float()
    torch.testing.assert_close(entropy.mean(), expected, **SINGLE)


def test_effective_sample_size() -> None:
    vector = VECTORS["vcpo.ess"]
    weights = tensor(vector["inputs"]["seq_weights"])
    size = effective_sample_size(weights, torch.ones_like(weights, dtype=torch.bool))
    assert float(size) == pytest.approx(vector["expected"]["ess_ratio"], rel=1e-6)
