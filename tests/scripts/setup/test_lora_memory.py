"""The arithmetic of adapters: what they take of a GPU, and which models then fit which GPUs."""

from typing import Any

import pytest
import torch
import transformers

from configs.load import load, parse
from configs.runtime.process import REPOSITORY
from learner.model.lora import adapt
from scripts.setup.gpu_memory import learner_needs
from scripts.setup.memory import MemoryOptions, reckon
from scripts.setup.model_size import (
    adapted_bytes,
    find_model,
    model_of_shape,
    read_model,
    sent_elements,
    trained_elements,
)
from tests.scripts.setup.kept import kept_bytes
from tests.scripts.setup.test_gpu_memory import SHAPES

RANK = "learner.lora.rank=16"
TWO_OF_24 = ("base", "7B", 2, 24.0, "learner.micro_batch_tokens=4096")
GOALS = [
    ("one_gpu", "3B", 1, 24.0, ""),
    ("one_gpu", "7B", 1, 48.0, ""),
    TWO_OF_24,
    ("base", "32B", 8, 80.0, "actors.tensor_parallel=2"),
]


@pytest.mark.parametrize(("name", "size", "gpus", "gib", "more"), GOALS)
def test_models_fit_with_an_adapter_and_not_without(
    name: str, size: str, gpus: int, gib: float, more: str
) -> None:
    path = str(REPOSITORY / "configs" / f"{name}.yaml")
    words = (f"model.path=Qwen2.5-{size}", *filter(None, [more]))
    assert reckon(MemoryOptions(path, (*words, RANK), gpus, gib)).fits
    whole = (*words, "learner.offload=none")
    assert not reckon(MemoryOptions(path, whole, gpus, gib)).fits


def test_what_is_trained_and_what_is_sent(tiny_model_path: Any) -> None:
    model = read_model(tiny_model_path)  # hidden 96, intermediate 256, 2 layers
    config = parse("", ["learner.lora.rank=2", "learner.lora.layers=[q_proj,down_proj]"], "test")
    assert sorted(trained_elements(config, model)) == sorted([192, 192, 2 * 256, 192] * 2)
    assert sent_elements(config, model) == trained_elements(config, model)
    merged = parse("", ["learner.lora.rank=2", "learner.lora.publish=merged"], "test")
    assert sent_elements(merged, model) == model.weights
    assert trained_elements(parse("", [], "test"), model) == model.weights


def test_a_shape_has_the_linear_layers_of_its_model(tiny_model_path: Any) -> None:
    tree = {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "vocab_size": 8,
    }
    key = lambda linear: (linear.name, linear.inputs, linear.outputs)  # noqa: E731
    ours, theirs = model_of_shape(tree).linears, read_model(tiny_model_path).linears
    assert sorted(ours, key=key) == sorted(theirs, key=key) and len(ours) == 14


def test_gradients_optimiser_and_averages_are_of_the_adapter() -> None:
    model = find_model("Qwen2.5-3B")
    words = [RANK, "learner.anchor=ema", "learner.lora.publish=merged"]
    config = load(REPOSITORY / "configs" / "one_gpu.yaml", words)
    needs, adapter = learner_needs(config, model), sum(trained_elements(config, model))
    names = ("adapter", "gradients", "optimiser, with fp32 weights", "averages")
    assert [needs[name] // adapter for name in names] == [4, 4, 8, 8]
    assert needs["weights"] == needs["weights shown to actors"] == 2 * model.parameters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_autograd_keeps_for_adapters_is_reckoned(dtype: str) -> None:
    kept, tokens = [], 256
    words = ["learner.lora.rank=4", f"model.dtype={dtype}"]
    config = parse("", words, "test")
    for layers in (1, 3):
        shape = transformers.LlamaConfig(num_hidden_layers=layers, **SHAPES)
        model = transformers.LlamaForCausalLM(shape).to(getattr(torch, dtype))
        adapt(model, config.learner.lora, seed=0)
        kept.append(kept_bytes(model, tokens))
    reckoned = model_of_shape({"num_hidden_layers": 3, **SHAPES})
    each = reckoned.layer_bytes(getattr(torch, dtype).itemsize) + adapted_bytes(config, reckoned)
    assert 0.7 * each <= (kept[1] - kept[0]) / 2 / tokens <= each
