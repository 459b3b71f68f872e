"""Scores against a loop over single prefixes; gradients that ignore what was not sampled."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM, PreTrainedModel

from configs.schema import ModelConfig
from learner.errors import BadModel
from learner.model import TokenScorer, load_model


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
    scores = TokenScorer(model)(tokens, mask, temperature)
    for row, t in mask.nonzero().tolist():
        expected = naive(model, tokens[row, :t], int(tokens[row, t]), temperature)
        found = torch.stack([scores.logprobs[row, t], scores.entropy[row, t]])
        torch.testing.assert_close(found.detach(), expected, rtol=1e-4, atol=1e-5)
    assert not scores.logprobs[~mask].any() and not scores.entropy[~mask].any()


def test_right_padding_changes_nothing(model: PreTrainedModel) -> None:
    tokens, mask = draw(2)
    wider = [torch.cat([t, torch.zeros(3, 4, dtype=t.dtype)], 1) for t in (tokens, mask)]
    narrow = TokenScorer(model)(tokens, mask, 1.0).logprobs
    wide = TokenScorer(model)(*wider, 1.0).logprobs
    torch.testing.assert_close(wide[:, :11], narrow, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=15)
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
    scores = TokenScorer(model)(tokens, mask, 1.0)
    hook.remove()
    (scores.logprobs * torch.randn(3, 11)).sum().backward()
    touched = kept[0].grad.abs().sum(-1) > 0  # column t − 1 makes the logits of token t
    assert torch.equal(touched[:, :-1], mask[:, 1:]) and not touched[:, -1].any()
    assert not scores.entropy.requires_grad


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
