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
from learner.model.lora import PREFIX, adapt, adapted
from learner.model.scorer import load_model
from scripts.setup import adapter, hub
from scripts.setup.model_source import EMA, find

LORA = LoraConfig(rank=2, layers=("q_proj", "down_proj"))


@pytest.fixture
def folder(tiny_model_path: Path, tmp_path: Path) -> Path:
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


def test_its_model_computes_what_the_adapter_did(folder: Path, tiny_model_path: Path) -> None:
    config = hub.with_hub_paths(parse("", [f"model.path={folder}"], "test"), ("model.path",))
    whole = Path(config.model.path)
    assert whole == folder / "merged" and (whole / "tokenizer.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    expected = load_file(folder.parent / "expected")["logits"]
    with torch.no_grad():
        torch.testing.assert_close(model(torch.arange(6)[None]).logits, expected)
    start, made = (load_file(each / "model.safetensors") for each in (tiny_model_path, whole))
    changed = {n.split(".")[-2] for n in start if not torch.equal(start[n], made[n])}
    assert changed == {"q_proj", "down_proj"} and start.keys() == made.keys()


def test_it_is_merged_once_and_again_where_it_has_changed(folder: Path) -> None:
    whole = Path(adapter.whole("MODEL", str(folder)))
    first = (whole / "model.safetensors").stat().st_mtime_ns
    assert adapter.whole("MODEL", str(folder)) == str(whole)
    assert (whole / "model.safetensors").stat().st_mtime_ns == first
    file = folder / peft_folder.WEIGHTS
    save_file({name: 2.0 * each for name, each in load_file(file).items()}, file)
    adapter.whole("MODEL", str(folder))
    assert (whole / "model.safetensors").stat().st_mtime_ns > first


def test_a_checkpoint_s_average_may_be_one(folder: Path, checkpointed: Path) -> None:
    (step,) = checkpointed.glob("checkpoints/step-20")
    for file in (step / EMA).iterdir():
        file.unlink()
    for file in folder.iterdir():
        file.rename(step / EMA / file.name)
    (checkpointed / "checkpoints" / "best").unlink()
    for given in (checkpointed, step / EMA):
        found = find(str(given), EMA if given is checkpointed else "model")
        assert found.folder == step / EMA / "merged" and found.record is not None
        assert adapter.MERGED not in found.name


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        adapter.whole("MODEL", str(folder))
    return str(raised.value)


def test_what_cannot_be_merged_is_refused(folder: Path, tmp_path: Path) -> None:
    path = folder / peft_folder.CONFIG
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"base_model_name_or_path": "Qwen/Qwen2.5-3B"}))
    assert "a LoRA adapter of 'Qwen/Qwen2.5-3B', which is no folder of a model" in refused(folder)
    path.write_text(json.dumps(settings | {"use_dora": True}))
    assert "use_dora = True, which is more than plain LoRA" in refused(folder)
    base = tmp_path / "base"
    base.mkdir()
    for file in Path(settings["base_model_name_or_path"]).iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    weights = load_file(base / "model.safetensors")
    save_file({n: 2.0 * w for n, w in weights.items()}, base / "model.safetensors")
    path.write_text(json.dumps(settings | {"base_model_name_or_path": str(base)}))
    assert f"of other weights than those in {str(base)!r} now: put these back" in refused(folder)
    assert not (folder / adapter.MERGED).exists()


def test_layers_that_its_model_lacks_are_named(folder: Path) -> None:
    file = folder / peft_folder.WEIGHTS
    named = {name.replace("q_proj", "qq"): each for name, each in load_file(file).items()}
    save_file(named, file)
    assert "which has no layer model.layers.0.self_attn.qq" in refused(folder)
