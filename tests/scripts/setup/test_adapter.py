"""A PEFT folder stands for its model with the adapter in it, everywhere that a model is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from configs.load import ConfigError, parse
from configs.lora import LoraConfig
from configs.schema import ModelConfig
from learner.model import peft_folder
from learner.model.lora import adapt, adapted
from learner.model.scorer import load_model
from scripts.setup import adapter, hub
from scripts.setup.model_source import EMA, find
from weight_sync.adapter import PREFIX

LORA = LoraConfig(rank=2, layers=("q_proj", "down_proj"))


@pytest.fixture
def lora(tiny_model_path: Path, tmp_path: Path) -> Path:
    """An adapter that does something."""
    model = load_model(ModelConfig(path=str(tiny_model_path), dtype="float32"))
    adapt(model, LORA, seed=0)
    for layer in adapted(model).values():
        nn.init.normal_(layer.lora_B.weight)
    named = {PREFIX + n: w.detach() for n, w in model.named_parameters() if w.requires_grad}
    peft_folder.write(tmp_path / "adapter", named, LORA, str(tiny_model_path))
    with torch.no_grad():
        save_file({"logits": model(torch.arange(6)[None]).logits}, tmp_path / "expected")
    return tmp_path / "adapter"


def test_its_model_computes_what_the_adapter_did(lora: Path, tiny_model_path: Path) -> None:
    config = hub.with_hub_paths(parse("", [f"model.path={lora}"], "test"), ("model.path",))
    whole = Path(config.model.path)
    assert whole == lora / "merged" and (whole / "tokenizer.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    expected = load_file(lora.parent / "expected")["logits"]
    with torch.no_grad():
        torch.testing.assert_close(
            model(torch.arange(6)[None]).logits, expected, rtol=1e-4, atol=1e-4
        )
    start, made = (load_file(each / "model.safetensors") for each in (tiny_model_path, whole))
    changed = {n.split(".")[-2] for n in start if not torch.equal(start[n], made[n])}
    assert changed == {"q_proj", "down_proj"} and start.keys() == made.keys()


def test_it_is_merged_once_and_again_where_it_has_changed(lora: Path) -> None:
    whole = Path(adapter.whole("MODEL", str(lora)))
    first = (whole / "model.safetensors").stat().st_mtime_ns
    assert adapter.whole("MODEL", str(lora)) == str(whole)
    assert (whole / "model.safetensors").stat().st_mtime_ns == first
    file = lora / peft_folder.WEIGHTS
    save_file({name: 2.0 * each for name, each in load_file(file).items()}, file)
    adapter.whole("MODEL", str(lora))
    second = (whole / "model.safetensors").stat().st_mtime_ns
    assert second > first
    settings = json.loads((lora / peft_folder.CONFIG).read_text())
    (lora / peft_folder.CONFIG).write_text(json.dumps(settings | {"lora_alpha": 1.0}))
    adapter.whole("MODEL", str(lora))
    assert (whole / "model.safetensors").stat().st_mtime_ns > second


def test_a_checkpoint_s_average_may_be_one(lora: Path, checkpointed: Path) -> None:
    (step,) = checkpointed.glob("checkpoints/step-20")
    for file in (step / EMA).iterdir():
        file.unlink()
    for file in lora.iterdir():
        file.rename(step / EMA / file.name)
    (checkpointed / "checkpoints" / "best").unlink()
    for given in (checkpointed, step / EMA):
        found = find(str(given), EMA if given is checkpointed else "model")
        assert found.folder == step / EMA / "merged" and found.record is not None
        assert adapter.MERGED not in found.name


def refused(lora: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        adapter.whole("MODEL", str(lora))
    return str(raised.value)


def test_what_cannot_be_merged_is_refused(lora: Path, tmp_path: Path) -> None:
    path = lora / peft_folder.CONFIG
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"base_model_name_or_path": "Qwen/Qwen2.5-3B"}))
    assert "a LoRA adapter of 'Qwen/Qwen2.5-3B', which is no folder of a model" in refused(lora)
    path.write_text(json.dumps(settings | {"use_dora": True}))
    assert "use_dora = True, which is more than plain LoRA" in refused(lora)
    path.write_text(json.dumps(settings | {"init_lora_weights": "pissa_niter_4"}))
    assert "init_lora_weights = 'pissa_niter_4', which is more than" in refused(lora)
    base = tmp_path / "base"
    base.mkdir()
    for file in Path(settings["base_model_name_or_path"]).iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    weights = load_file(base / "model.safetensors")
    save_file({n: 2.0 * w for n, w in weights.items()}, base / "model.safetensors")
    path.write_text(json.dumps(settings | {"base_model_name_or_path": str(base)}))
    assert f"of other weights than those in {str(base)!r} now: put these back" in refused(lora)
    assert not (lora / adapter.MERGED).exists()


def test_layers_that_its_model_lacks_are_named(lora: Path) -> None:
    file = lora / peft_folder.WEIGHTS
    named = {name.replace("q_proj", "qq"): each for name, each in load_file(file).items()}
    save_file(named, file)
    assert "which has no layer model.layers.0.self_attn.qq" in refused(lora)


def test_layers_of_another_shape_than_its_model_s_are_named(lora: Path) -> None:
    file = lora / peft_folder.WEIGHTS
    named = load_file(file)
    name = next(each for each in named if "q_proj.lora_B" in each)
    save_file(named | {name: named[name][:-1].clone()}, file)
    assert "its layer model.layers." in refused(lora) and "q_proj is of " in refused(lora)
