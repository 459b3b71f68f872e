"""Other systems' numbers (tests/vectors/losses.json): values and gradients of our functions, as a
run's configuration would put them together.
"""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.runtime.process import REPOSITORY
from configs.schema import LearnerConfig
from learner.algorithm import kl
from learner.algorithm.advantage import advantages, whiten, whitened
from learner.algorithm.correction import ActionTokens, token_loss
from learner.algorithm.gae import gae, value_losses
from learner.algorithm.importance import effective_sample_size
from learner.algorithm.loss import TokenLoss, row_coefficients
from learner.algorithm.objectives import choose
from learner.model.ema import Ema
from learner.model.head import LogProbHead
from learner.model.shards import Whole
from learner.packing import MicroBatch

FILE = json.loads((REPOSITORY / "tests" / "vectors" / "losses.json").read_text())
VECTORS = {vector["name"]: vector for vector in FILE["vectors"]}
EXACT = {"rtol": 1e-8, "atol": 1e-10}  # verl adds 1e-8 to its denominators
SINGLE = {"rtol": 1e-5, "atol": 1e-6}  # computed in float32
ROLLOUT = {"$fx": "A.rollout_log_prob"}
TWO = {"proximal": "behaviour"}
UNCAPPED = {"kl_coef": 1.0, "anchor": "frozen", "behaviour_cap": math.inf}
NARROW = {"clip_low": 0.2, "clip_high": 0.2}

# vector: learner.* settings, and by name whatever is not among its inputs.
LOSSES: dict[str, dict[str, Any]] = {
    "verl.loss.ppo_clip_higher.token-mean": {"ratio_cap": 3.0},
    "verl.loss.ppo_dual_c1.5": NARROW | {"ratio_cap": 1.5},
    "verl.loss.ppo_decoupled_tis2": {"ratio_cap": 3.0, "behaviour": ROLLOUT},
    "verl.loss.gspo_wide.seq-mean-token-mean": {
        "objective": "gspo", "clip_low": 0.2, "clip_high": 0.28, "reduction": "sequence_mean",
    },
    "verl.loss.cispo_minimax": {"objective": "cispo"},
    "verl.loss.dppo_tv": TWO | {
        "objective": "dppo_tv", "clip_low": 0.15, "clip_high": 0.15, "ratio_cap": 20.0,
    },
    "verl.loss.reinforce_tis": {
        "objective": "reinforce", "behaviour": ROLLOUT,
        "proximal_logprobs": {"$fx": "A.old_log_prob"},
        "reduction": "constant_length", "constant_length_tokens": 1,
    },
    "trl.loss.dr_grpo": {"reduction": "constant_length", "constant_length_tokens": 16},
    "trl.loss.dapo": {},
    "trl.loss.dapo_is_tokmask": {
        "behaviour": ROLLOUT, "behaviour_weight": "mask", "behaviour_floor": 0.5,
        "behaviour_cap": 3.0,
    },
    "areal.ppo.decoupled_mask5": NARROW | {
        "behaviour": ROLLOUT, "behaviour_weight": "mask", "behaviour_cap": 5.0,
    },
    "areal.ppo.decoupled_clamp2": NARROW | {"behaviour": ROLLOUT},
    "areal_legacy.decoupled_cap2.0": NARROW | {
        "behaviour": ROLLOUT, "behaviour_weight": "mask", "ratio_cap": 3.0,
    },
    "searchr1.policy_loss": NARROW,
    "slime.loss.ppo_icepop.token_mean": {
        "behaviour": ROLLOUT, "behaviour_weight": "mask", "behaviour_floor": 0.5,
        "behaviour_cap": 5.0,
    },
    # Theirs is a sum, and masked only by advantages of 0.
    "tinker.cispo": TWO | {"objective": "cispo", "clip_high": 3.0, "mask": {"$fx": "A.mask"}},
}  # fmt: skip
WEIGHTS: dict[str, dict[str, Any]] = {
    "verl.rollout_corr.is_token_2.0": {},
    "verl.rollout_corr.is_sequence_2.0": {"behaviour_level": "sequence"},
    # Their bounds are on one over the ratio.
    "verl.rollout_corr.rs_seq_mean_k1": {
        "behaviour_level": "geometric", "behaviour_weight": "mask",
        "behaviour_floor": 1 / 1.1, "behaviour_cap": 1 / 0.9,
    },
    "trl.is.sequence_mask.min0.5": {
        "behaviour_level": "sequence", "behaviour_weight": "mask",
        "behaviour_floor": 0.5, "behaviour_cap": 3.0,
    },
}  # fmt: skip
REDUCTIONS = {
    "verl.agg.token-mean": ("token_mean", 0),
    "verl.agg.seq-mean-token-mean": ("sequence_mean", 0),
    "verl.agg.seq-mean-token-sum-norm": ("constant_length", 12),
}
# vector: (baseline, std, epsilon). Their groups of one may get A = R; ours get 0: left out.
ADVANTAGES = {
    "verl.adv.grpo.R1.stdTrue": ("mean", "group", 1e-6),
    "verl.adv.grpo.R1.stdFalse": ("mean", "none", 1e-6),
    "verl.adv.grpo.R3.stdTrue": ("mean", "group", 1e-6),
    "verl.adv.rloo_vectorized.R1": ("leave_one_out", "none", 1e-6),
    "searchr1.grpo.R1": ("mean", "group", 1e-6),
    "trl.adv.R1.group.G3": ("mean", "group", 1e-4),
    "trl.rloo.normFalse.nan": ("leave_one_out", "none", 1e-6),
    "primerl.adv.grpo.mixed": ("mean", "none", 1e-6),
}
# vector: (estimator, where they clamp its value and we do not: such tokens are left out)
KLS = {
    "searchr1.kl.low_var_kl": ("k3", 10.0),
    "emapg.kl.k3plusplus.iw": ("k3++", 10.0),
    "emapg.kl.k5": ("k5", 10.0),
    # Their gradient flows through the ratio instead: the same thing.
    "slime.kl.k3.unbiased": ("k3++", math.inf),
}
GAES = ["verl.adv.gae.R1.g1.0.l1.0", "verl.adv.gae.R2.g0.99.l0.95"]
# vector: learner.* settings beside kl_top_k
TOP_K: dict[str, dict[str, Any]] = {
    "emapg.full_reverse": {},
    "emapg.topk.full_reverse.tailTrue": {"kl_gradient": "ema_pg", "kl_weight": "none"},
    "emapg.topk.full_reverse.tailTrue.iw": {"kl_gradient": "ema_pg"},
}
ENUMERATED = {
    "identity.E_topk.full_reverse.k3.released": "ema_pg",
    "identity.E_topk.full_reverse.k3.gradfixed": "unbiased",
}
SINGLES = {
    "verl.value_loss", "verl.entropy", "verl.adv.rfpp_baseline.R2", "pipelinerl.rl_step.reinforce",
    "vcpo.ess", "emapg.ema_update", "areal.kl.k3.clampTrue", "identity.exact_reverse",
}  # fmt: skip
NOT_OFFERED = {
    "areal.a3po_prox": "the proximal policy is never interpolated",
    "primerl.default": "no squared log-ratio to the behaviour policy in the loss",
    "primerl.adv.max_rl.mixed": "rewards are never divided by their mean",
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


def composed(
    inputs: dict[str, Any],
    current: Tensor,
    mask: Tensor,
    topk: kl.TopK | None = None,
    **fields: Any,
) -> TokenLoss:
    """The result of `update` on [B, T] tensors under these settings."""
    old = "proximal_logprobs", "old_log_prob", "old_per_token_logps", "sampling_logprobs"
    proximal = first(inputs, *old)
    behaviour = tensor(inputs["behaviour"]) if "behaviour" in inputs else proximal
    credit = tensor(inputs["advantages"]) if "advantages" in inputs else torch.zeros_like(current)
    credit = credit if credit.ndim == 2 else credit[:, None].expand_as(current)
    config = LearnerConfig(**fields)
    counts = mask.sum(1).tolist()
    reduction = choose(config).reduction
    coefficients = row_coefficients(counts, reduction, config.constant_length_tokens)
    coefficients = torch.tensor(coefficients, dtype=torch.float64)
    zeros = torch.zeros_like(mask, dtype=torch.int64)
    rows = zeros[:, 0]
    micro = MicroBatch(rows, zeros, mask, behaviour, credit, zeros, zeros, coefficients)
    reference = tensor(inputs["ref_logprob"])[mask] if "ref_logprob" in inputs else None
    tokens = ActionTokens.of(micro)
    return token_loss(tokens, proximal[mask], current.detach()[mask], reference, config, topk)


@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss(name: str) -> None:
    given = VECTORS[name]["inputs"] | LOSSES[name]
    fields = {k: v for k, v in LOSSES[name].items() if k in LearnerConfig.__struct_fields__}
    current = first(given, "log_prob", "per_token_logps", "logprobs", "target_logprobs")
    mask = first(given, "response_mask", "mask", "loss_mask", "eos_mask").bool()
    current.requires_grad_()
    loss = composed(given, current, mask, **fields)(current[mask])
    if name == "tinker.cispo":
        loss = loss * mask.sum()
    loss.backward()
    expected = VECTORS[name]["expected"]
    gradient = first(expected, "grad", "grad_log_prob")
    tolerance = SINGLE if name.startswith("areal.") else EXACT
    torch.testing.assert_close(loss.detach(), tensor(expected["loss"]), **tolerance)
    torch.testing.assert_close(current.grad, gradient, **tolerance)


def test_pipelinerl_reinforce() -> None:
    vector = VECTORS["pipelinerl.rl_step.reinforce"]
    given, expected = vector["inputs"], vector["expected"]
    logits, tokens = tensor(given["logits"]).requires_grad_(), tensor(given["input_ids"]).long()
    mask = tensor(given["labels"]) >= 0
    current = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    current = torch.cat([torch.zeros(1, 1), current], 1)
    now = {"proximal_logprobs": current.tolist(), "behaviour": given["old_logprobs"]}
    loss = composed(
        given | now, current, mask,
        objective="reinforce", behaviour_cap=1.02,
        reduction="constant_length", constant_length_tokens=4,
    )(current[mask])  # fmt: skip
    loss.backward()
    torch.testing.assert_close(loss.detach(), tensor(expected["loss"]), **SINGLE)
    torch.testing.assert_close(logits.grad, tensor(expected["grad_logits"]), **SINGLE)


@pytest.mark.parametrize("name", WEIGHTS)
def test_behaviour_weights(name: str) -> None:
    given, expected = VECTORS[name]["inputs"], VECTORS[name]["expected"]
    mask = first(given, "response_mask", "mask").bool()
    behaviour = first(given, "rollout_log_prob", "sampling_per_token_logps")
    given = given | {"behaviour": behaviour.tolist()}
    weights = torch.zeros_like(behaviour)
    weights[mask] = composed(given, behaviour, mask, **WEIGHTS[name]).weights
    if name.startswith("trl."):
        torch.testing.assert_close(weights, tensor(expected["ratio"]) * mask, **EXACT)
    elif expected["weights"] is None:
        assert torch.equal(weights.ne(0.0), tensor(expected["modified_mask"]).bool())
    else:
        torch.testing.assert_close(weights, tensor(expected["weights"]), **EXACT)
        size = expected["metrics"]["rollout_corr/rollout_is_eff_sample_size"]  # of truncated ones
        assert float(effective_sample_size(weights[mask])) == pytest.approx(size, rel=1e-6)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str) -> None:
    losses, mask = (tensor(value) for value in VECTORS[name]["inputs"].values())
    rows = torch.tensor(row_coefficients(mask.sum(1).int().tolist(), *REDUCTIONS[name]))
    loss = (losses * mask * rows.double()[:, None]).sum()
    torch.testing.assert_close(loss, tensor(VECTORS[name]["expected"]["loss"]), **SINGLE)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages(name: str) -> None:
    given, expected = VECTORS[name]["inputs"], tensor(VECTORS[name]["expected"]["advantages"])
    if "rewards" in given:
        rewards = tensor(given["rewards"])
        groups = rewards.split(VECTORS[name]["params"].get("num_generations", len(rewards)))
        ours = torch.cat(advantages(groups, *ADVANTAGES[name]))
        torch.testing.assert_close(ours, expected, **SINGLE if "primerl" in name else EXACT)
        return
    rewards, index = tensor(given["token_level_rewards"]).sum(-1), tensor(given["index"])
    mask = first(given, "response_mask", "eos_mask")
    for group in (0, 1):
        rows = index == group
        [ours] = advantages([rewards[rows]], *ADVANTAGES[name])
        torch.testing.assert_close(ours[:, None] * mask[rows], expected[rows], **EXACT)


@pytest.mark.parametrize("name", GAES)
def test_credit_by_values(name: str) -> None:
    vector = VECTORS[name]
    given, expected, params = vector["inputs"], vector["expected"], vector["params"]
    mask, values = tensor(given["response_mask"]).bool(), tensor(given["values"])
    rewards = tensor(given["token_level_rewards"])
    credit, returns = gae(rewards, values, mask, gamma=params["gamma"], gae_lambda=params["lam"])
    on = credit[mask]
    white = whitened(credit, mask, mean=float(on.mean()), variance=float(on.var()))
    torch.testing.assert_close(white[mask], tensor(expected["advantages"])[mask], **EXACT)
    torch.testing.assert_close(returns[mask], tensor(expected["returns"])[mask], **EXACT)


def test_value_loss() -> None:
    vector = VECTORS["verl.value_loss"]
    names = "vpreds", "values", "returns", "response_mask"
    values, old, returns, mask = (tensor(vector["inputs"][name]) for name in names)
    values.requires_grad_()
    clip = vector["params"]["cliprange_value"]
    losses, clipped = value_losses(values, old, returns, mask.bool(), clip)
    loss = losses.sum() / mask.sum()
    loss.backward()
    expected = vector["expected"]
    torch.testing.assert_close(loss.detach(), tensor(expected["loss"]), **EXACT)
    torch.testing.assert_close(values.grad, tensor(expected["grad_vpreds"]), **EXACT)
    assert float(clipped.sum() / mask.sum()) == pytest.approx(float(tensor(expected["clipfrac"])))


@pytest.mark.parametrize("name", KLS)
def test_kl_in_the_loss(name: str) -> None:
    given, expected = VECTORS[name]["inputs"], VECTORS[name]["expected"]
    current, mask = first(given, "logprob", "log_probs"), tensor(given["mask_for_grad"]).bool()
    reference = first(given, "ref_logprob", "log_probs_base")
    old = first(given | {"now": current.tolist()}, "old_log_prob", "old_log_probs", "now")
    known = {"proximal_logprobs": old.tolist(), "ref_logprob": reference.tolist()}
    estimator, clamp = KLS[name]
    mask &= kl.estimate("k3", current, reference) < clamp
    current.requires_grad_()
    fields = TWO | UNCAPPED | {"kl_estimator": estimator}
    loss = composed(known, current, mask, **fields)
    divergence = loss.divergence(current[mask])
    divergence.sum().backward()
    gradient = tensor(expected["grad_of_masked_sum"])
    assert mask.sum() >= 42
    torch.testing.assert_close(divergence.detach(), tensor(expected["kl"])[mask], **SINGLE)
    torch.testing.assert_close(current.grad[mask], gradient[mask], **SINGLE)


def test_k3_where_its_value_is_not_clamped() -> None:
    vector = VECTORS["areal.kl.k3.clampTrue"]
    current, reference = (tensor(vector["inputs"][f"log_probs{which}"]) for which in ("", "_base"))
    values, theirs = kl.estimate("k3", current, reference), tensor(vector["expected"]["kl"])
    clamped = values >= 10.0  # they clamp every estimate there, and have no gradient on file
    assert (~clamped).sum() == 20 and (theirs[clamped] == 10.0).all()
    torch.testing.assert_close(values[~clamped], theirs[~clamped], **SINGLE)


@pytest.mark.parametrize("name", TOP_K)
def test_kl_over_candidates(name: str) -> None:
    given, expected = VECTORS[name]["inputs"], VECTORS[name]["expected"]
    logits, mask = first(given, "actor_logits", "logits"), tensor(given["mask_for_grad"]).bool()
    whole = {"ids": torch.arange(logits.shape[-1]).expand_as(logits).tolist()}  # the vocabulary
    ids = first(given | whole, "actor_topk_indices", "ids").long()
    own = first(given | {"any": ids[..., 0].tolist()}, "sampled_indices", "any").long()
    at = torch.cat([own.unsqueeze(-1), ids], -1)
    reference, old, current = (
        each.log_softmax(-1).gather(-1, at)
        for each in (
            tensor(given["ref_logits"]),
            first(given, "old_actor_logits", "logits"),
            logits.requires_grad_(),
        )
    )
    settings = TWO | UNCAPPED | TOP_K[name]
    if settings.get("kl_weight") == "none":
        del settings["behaviour_cap"]
    config = LearnerConfig(**settings, kl_top_k=ids.shape[-1])
    topk = kl.TopK(
        logprobs=reference[mask][:, 1:],
        outside=(ids != own.unsqueeze(-1)).all(-1)[mask],
        gradient=config.kl_gradient or "unbiased",
    )
    known = {"proximal_logprobs": old, "ref_logprob": reference}
    known = {name: values[..., 0].tolist() for name, values in known.items()}
    loss = composed(known, current[..., 0].detach(), mask, topk, **settings, kl_top_k=3)
    divergence = loss.divergence(current[mask])
    divergence.sum().backward()
    total = tensor(expected["kl"]) if "kl" in expected else sum(
        tensor(expected[part]) for part in ("L1", "L2"))  # fmt: skip
    torch.testing.assert_close(divergence.detach(), total[mask], **EXACT)
    torch.testing.assert_close(logits.grad, tensor(expected["grad_logits_of_masked_sum"]), **EXACT)


@pytest.mark.parametrize("name", ENUMERATED)
def test_expected_kl_over_candidates(name: str) -> None:
    vector = VECTORS[name]
    logits, reference = (tensor(vector["inputs"][key]) for key in ("logits", "ref_logits"))
    current, far = logits.requires_grad_().log_softmax(-1), reference.log_softmax(-1)
    ids, every = logits.topk(vector["params"]["k"]).indices, torch.arange(len(logits))
    topk = kl.TopK(
        logprobs=far[ids].expand(len(every), -1),
        outside=(every[:, None] != ids).all(-1),
        gradient=ENUMERATED[name],
    )
    table = torch.cat([current[:, None], current[ids].expand(len(every), -1)], -1)
    expectation = (current.detach().exp() * sum(topk.parts(table, far))).sum()
    expectation.backward()
    expected = vector["expected"]
    torch.testing.assert_close(expectation.detach(), tensor(expected["expected_value"]), **EXACT)
    torch.testing.assert_close(logits.grad, tensor(expected["expected_grad"]), **EXACT)


def test_ema_update() -> None:
    vector = VECTORS["emapg.ema_update"]
    weights = {"w": tensor(vector["inputs"]["ref"])}
    engine = SimpleNamespace(shards=Whole(weights))
    ema = Ema(engine, vector["params"]["tau"], vector["params"]["period"])
    weights["w"].copy_(tensor(vector["inputs"]["actor"]))
    for _ in range(vector["params"]["period"]):
        ema.update(engine)
    expected = tensor(vector["expected"]["ref"]).float()
    torch.testing.assert_close(ema.master["w"], expected, **SINGLE)


def test_exact_reverse_kl() -> None:
    vector = VECTORS["identity.exact_reverse"]
    logits, reference = (tensor(value) for value in vector["inputs"].values())
    logprobs = logits.requires_grad_().log_softmax(-1)
    estimates = kl.estimate("k3++", logprobs, reference.log_softmax(-1))
    expectation = (logprobs.detach().exp() * estimates).sum()
    expectation.backward()
    torch.testing.assert_close(expectation.detach(), tensor(vector["expected"]["kl"]), **EXACT)
    torch.testing.assert_close(logits.grad, tensor(vector["expected"]["grad"]), **EXACT)


def test_entropy_bonus() -> None:
    vector = VECTORS["verl.entropy"]
    logits, mask = tensor(vector["inputs"]["logits"]), tensor(vector["inputs"]["response_mask"])
    kept = mask.bool().flatten()
    hidden = logits.flatten(0, 1).requires_grad_()
    layer = torch.nn.Linear(logits.shape[-1], logits.shape[-1], bias=False).double()
    torch.nn.init.eye_(layer.weight)  # so that the hidden states are the logits
    targets, less = torch.zeros(int(kept.sum()), dtype=torch.int64), -1 / mask.sum()
    value = LogProbHead(layer)(
        hidden[kept], targets, 1.0, lambda logprobs, _: 0.0 * logprobs.sum(),
        less.expand(len(targets)),
    )[2]  # fmt: skip
    value.backward()
    expected = vector["expected"]
    torch.testing.assert_close(value.detach(), tensor(expected["loss"]), **SINGLE)
    torch.testing.assert_close(
        hidden.grad.view_as(logits), tensor(expected["grad_logits"]), **SINGLE
    )


def test_reinforce_plus_plus_with_a_groups_baseline() -> None:
    vector = VECTORS["verl.adv.rfpp_baseline.R2"]
    given, expected = vector["inputs"], tensor(vector["expected"]["advantages"])
    rewards, index = tensor(given["token_level_rewards"]).sum(-1), tensor(given["index"])
    mask, credit = tensor(given["response_mask"]), rewards.clone()
    for group in index.unique():
        if (index == group).sum() > 1:  # theirs is without baseline in a group of one
            [credit[index == group]] = advantages([rewards[index == group]], "mean", "none")
    [ours] = whiten([credit], [mask.sum(1)])
    torch.testing.assert_close(ours[:, None] * mask, expected, **EXACT)


def test_effective_sample_size() -> None:
    vector = VECTORS["vcpo.ess"]
    size = effective_sample_size(tensor(vector["inputs"]["seq_weights"]))
    assert float(size) == pytest.approx(vector["expected"]["ess_ratio"], rel=1e-6)


def test_every_vector_is_mapped_or_declined_with_a_reason() -> None:
    reproduced = (LOSSES, WEIGHTS, REDUCTIONS, ADVANTAGES, GAES, KLS, TOP_K, ENUMERATED, SINGLES)
    tables = (*reproduced, NOT_OFFERED)
    mapped = [name for table in tables for name in table]
    assert sorted(mapped) == sorted(VECTORS)
