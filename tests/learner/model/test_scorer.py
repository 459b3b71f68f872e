"""Scores against a loop over single prefixes; gradients that ignore what was not sampled."""

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM, PreTrainedModel

from configs.schema import ModelConfig
from learner.errors import BadModel
from learner.model.scorer import TokenScorer, load_model, score_logits


@pytest.fixture(scope="module")
def model(tiny_model_path: Path) -> PreTrainedModel:
    return load_model(ModelConfig(path=str(tiny_model_path), dtype="float32"))


def draw(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and a random mask with holes; a first token is never predicted."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, 20, (3, 11), generator=generator)
    mask = torch.rand(3, 11, generator=generator) < 0.4
    mask[:, 0], mask[0, 5] = False, True
    return tokens, mask


@torch.no_grad()
def naive(model: PreTrainedModel, prefix: Tensor, token: int, temperature: float) -> Tensor:
    logits = model(input_ids=prefix.unsqueeze(0)).logits[0, -1] / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    return torch.stack([distribution.log_prob(torch.tensor(token)), distribution.entropy()])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_column_t_scores_token_t_given_what_came_before(
    model: PreTrainedModel, temperature: float
) -> None:
    tokens, mask = draw(1)
    logprobs, entropy, value = TokenScorer(model, 300)(tokens, mask, temperature)
    assert value is None and len(logprobs) == len(entropy) == mask.sum()
    for n, (row, t) in enumerate(mask.nonzero().tolist()):
        expected = naive(model, tokens[row, :t], int(tokens[row, t]), temperature)
        found = torch.stack([logprobs[n], entropy[n]])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_right_padding_changes_nothing(model: PreTrainedModel) -> None:
    tokens, mask = draw(2)
    wider = [torch.cat([t, torch.zeros(3, 4, dtype=t.dtype)], 1) for t in (tokens, mask)]
    narrow, wide = TokenScorer(model)(tokens, mask, 1.0)[0], TokenScorer(model)(*wider, 1.0)[0]
    torch.testing.assert_close(wide, narrow, rtol=1e-5, atol=1e-6)


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_logits_of_untrained_tokens_have_exactly_no_gradient(
    model: PreTrainedModel, seed: int
) -> None:
    tokens, mask = draw(seed)
    kept: list[Tensor] = []

    def keep(_module: object, _inputs: object, output: object) -> None:
        output.last_hidden_state.retain_grad()
        kept.append(output.last_hidden_state)

    hook = model.base_model.register_forward_hook(keep)
    slopes = torch.rand(int(mask.sum())) + 0.1
    _, _, value = TokenScorer(model)(
        tokens, mask, 1.0, lambda logprobs, chunk: (slopes[chunk] * logprobs).sum()
    )
    hook.remove()
    value.backward()
    touched = kept[0].grad.abs().sum(-1) > 0  # column t − 1 makes the logits of token t
    assert torch.equal(touched[:, :-1], mask[:, 1:]) and not touched[:, -1].any()


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_every_weight_is_that_of_whole_logits(
    model: PreTrainedModel, tied: bool
) -> None:
    model = copy.deepcopy(model)
    if not tied:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    tokens, mask = draw(3)
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1][mask[:, 1:]]
    expected = score_logits(logits, tokens[mask], 0.7).logprobs.square().sum()
    value = TokenScorer(model, 300)(tokens, mask, 0.7, lambda logprobs, _: logprobs.square().sum())[
        2
    ]
    weights = list(model.parameters())
    for ours, whole in zip(
        torch.autograd.grad(value, weights), torch.autograd.grad(expected, weights), strict=True
    ):
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-4)


def test_a_micro_batch_without_action_tokens_has_zero_gradients(model: PreTrainedModel) -> None:
    tokens, mask = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.bool)
    value = TokenScorer(model)(tokens, mask, 1.0, lambda logprobs, _: logprobs.sum())[2]
    gradients = torch.autograd.grad(value, list(model.parameters()))
    assert value.item() == 0.0 and not any(gradient.any() for gradient in gradients)


def test_the_head_shares_the_models_parameters(model: PreTrainedModel) -> None:
    scorer = TokenScorer(model)
    assert scorer.head.weight is model.get_output_embeddings().weight
    assert len(list(scorer.parameters())) == len(list(model.parameters()))


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"model.path = '.*nowhere'.*config.json"):
        load_model(ModelConfig(path=str(tmp_path / "nowhere")))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(BadModel, match="cannot be loaded"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_a_model_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 30}
    GraniteForCausalLM(GraniteConfig(**shape, **heads, logits_scaling=3.0)).save_pretrained(
        tmp_path
    )
    with pytest.raises(BadModel, match="GraniteForCausalLM changes its logits after the head"):
        load_model(ModelConfig(path=str(tmp_path), dtype="float32"))
