"""Adapters: their formula, the layers that get one, and PEFT, which computes the same."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from configs.lora import LoraConfig
from configs.schema import ModelConfig
from learner.errors import BadModel
from learner.model import peft_folder
from learner.model.lora import LoraLinear, adapt, adapted, merge
from learner.model.scorer import load_model
from weight_sync.adapter import PREFIX

LORA = LoraConfig(rank=3, alpha=6.0)
TOKENS = torch.arange(12).view(2, 6)


def load(path: Path, dtype: str = "float32") -> PreTrainedModel:
    return load_model(ModelConfig(path=str(path), dtype=dtype))


def with_adapter(path: Path, config: LoraConfig = LORA) -> PreTrainedModel:
    """The model with an adapter that does something."""
    model = load(path)
    adapt(model, config, seed=0)
    generator = torch.Generator().manual_seed(1)
    for layer in adapted(model).values():
        nn.init.normal_(layer.lora_B.weight, generator=generator)
    return model


def export(model: PreTrainedModel, folder: Path, base: Path, config: LoraConfig = LORA) -> Path:
    named = {PREFIX + n: w.detach() for n, w in model.named_parameters() if w.requires_grad}
    peft_folder.write(folder, named, config, str(base))
    return folder


def test_a_layer_computes_its_formula_and_trains_its_adapter_alone() -> None:
    base = nn.Linear(5, 4).requires_grad_(False)
    layer = LoraLinear(base, LORA)
    nn.init.normal_(layer.lora_B.weight)
    x, a, b = torch.randn(7, 5), layer.lora_A.weight, layer.lora_B.weight
    expected = base(x) + 6.0 / 3 * (x @ a.T @ b.T)
    torch.testing.assert_close(layer(x), expected)
    assert torch.equal(layer.merged(), layer.merged())  # what it is made of stays
    torch.testing.assert_close(x @ layer.merged().T + base.bias, expected)
    layer(x).sum().backward()
    assert {n for n, w in layer.named_parameters() if w.grad is not None} == {
        "lora_A.weight",
        "lora_B.weight",
    }


def test_an_adapter_on_bf16_weights_is_fp32_and_computes_in_bf16() -> None:
    base = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    layer = LoraLinear(base, LORA)
    nn.init.normal_(layer.lora_B.weight)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    a, b = layer.lora_A.weight, layer.lora_B.weight
    assert a.dtype == b.dtype == layer.merged().dtype == torch.float32
    low = x @ a.bfloat16().T @ b.bfloat16().T
    assert torch.equal(layer(x), (base(x).float() + 2.0 * low.float()).bfloat16())
    exact = x.float() @ layer.merged().T
    assert (layer(x).float() - exact).abs().max() < 0.02 * exact.abs().max()
    layer(x).sum().backward()
    assert a.grad is not None and a.grad.dtype == torch.float32


def test_it_begins_as_the_model_and_the_same_for_everybody(tiny_model_path: Path) -> None:
    plain, one, other = (load(tiny_model_path) for _ in range(3))
    adapt(one, LORA, seed=4)
    adapt(other, LORA, seed=4)
    with torch.no_grad():
        assert torch.equal(one(TOKENS).logits, plain(TOKENS).logits)
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    assert all(n == m and torch.equal(a, b) for (n, a), (m, b) in pairs)
    bound = 1 / 96**0.5  # kaiming_uniform_ of a = √5
    first = adapted(one)["model.layers.0.self_attn.q_proj"].lora_A.weight
    assert 0.9 * bound < first.abs().max() <= bound


def test_layers_are_chosen_by_the_last_part_of_their_name(tiny_model_path: Path) -> None:
    names = {path.rpartition(".")[2] for path in adapted(with_adapter(tiny_model_path))}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    chosen = LoraConfig(rank=1, layers=("o_proj", "up_proj"))
    model = with_adapter(tiny_model_path, chosen)
    assert [path.rpartition(".")[2] for path in adapted(model)] == ["o_proj", "up_proj"] * 2
    assert not any(w.requires_grad for n, w in model.named_parameters() if "lora" not in n)


def test_a_model_without_linear_layers_is_refused() -> None:
    shape = GPT2Config(vocab_size=8, n_positions=8, n_embd=4, n_layer=1, n_head=1)
    with pytest.raises(BadModel, match=r"rank = 2: no layer of the model's blocks is a linear one"):
        adapt(GPT2LMHeadModel(shape), LoraConfig(rank=2), seed=0)


def test_layers_that_are_not_there_are_refused(tiny_model_path: Path) -> None:
    with pytest.raises(BadModel, match=r"names 'qkv', which no linear layer .* they are down_proj"):
        adapt(load(tiny_model_path), LoraConfig(rank=1, layers=("qkv",)), seed=0)


def test_peft_computes_the_same_from_the_folder(tiny_model_path: Path, tmp_path: Path) -> None:
    model = with_adapter(tiny_model_path)
    folder = export(model, tmp_path / "adapter", tiny_model_path)
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, folder)
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS).logits)


def test_a_folder_of_peft_is_read(tiny_model_path: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    theirs = peft.get_peft_model(
        base, peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"])
    )
    for name, weight in theirs.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    theirs.save_pretrained(tmp_path)
    adapter = peft_folder.read(tmp_path)
    name = "model.layers.1.self_attn.q_proj"
    weight = base.get_submodule(name).base_layer.weight.detach().clone()
    merged = theirs.merge_and_unload().get_submodule(name).weight.detach()
    torch.testing.assert_close(merge(weight, *adapter.layers[name], adapter.scale), merged)
    assert len(adapter.layers) == 2 and adapter.base_digest == ""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "use_dora = True, which is more than plain LoRA"),
        ({"bias": "all"}, "bias = 'all', which is more than plain LoRA"),
        ({"use_rslora": True}, "use_rslora = True, which"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern = .* which is more"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3', which"),
        ({"r": 4}, "is not of rank r = 4"),
        ({"r": None}, "name a whole adapter"),
    ],
)
def test_what_is_no_plain_adapter_is_refused(
    tiny_model_path: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    folder = export(with_adapter(tiny_model_path), tmp_path, tiny_model_path)
    path = folder / peft_folder.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(BadModel, match=said):
        peft_folder.read(folder)


def test_a_folder_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / peft_folder.CONFIG).write_text("{}")
    with pytest.raises(BadModel, match=r"cannot be read: .*adapter_model"):
        peft_folder.read(tmp_path)
