"""Checkpoint names and loads of architectures whose layout differs, in vLLM's own modules."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.policies.adapter import adapter_arguments
from tests.children import ends_with_us
from weight_sync import buckets
from weight_sync.protocol import ADAPTER_ID, ADAPTER_NAME, Adapter

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(300)]
SHAPE: dict[str, Any] = {
    "vocab_size": 131,  # not a multiple of vLLM's padding
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
CASES = [("Qwen3", True), ("Qwen3", False), ("Llama", False), ("Qwen2", False)]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's groups of one rank in this process."""
    from actors.policies.engine import prepare_environment
    from configs.schema import Config

    prepare_environment(Config())
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
        parallel_state,
    )

    own = not torch.distributed.is_initialized()  # another test's learner may have a group already
    store = tmp_path_factory.mktemp("group") / "store"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    destroy_model_parallel()
    parallel_state._WORLD.destroy()
    parallel_state._WORLD = None
    if own:
        torch.distributed.destroy_process_group()


def saved(folder: Path, family: str, tied: bool, **shape: int) -> torch.nn.Module:
    """A random model of transformers that differs so from SHAPE, saved in a folder."""
    import transformers

    head = {"head_dim": 32} if family == "Qwen3" else {}
    config = getattr(transformers, f"{family}Config")(
        **SHAPE | head | shape, tie_word_embeddings=tied
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    model.save_pretrained(folder)
    return model


def served(folder: Path, workers: int = 1) -> torch.nn.Module:
    """vLLM's own module of a folder's model, or a worker's part of it, with other weights."""
    return _initialised(folder, workers)[0]


def adapted(folder: Path, workers: int = 1) -> tuple[torch.nn.Module, Any]:
    """The same with its layers ready for an adapter that every request names, and what manages
    that.
    """
    from vllm.config import set_current_vllm_config
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    model, config = _initialised(
        folder, workers, **adapter_arguments(Adapter(4, 8.0, ()), str(folder))
    )
    with set_current_vllm_config(config):
        manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
        manager.create_lora_manager(model, config)
    manager.add_dummy_lora(LoRARequest(ADAPTER_NAME, ADAPTER_ID, ADAPTER_NAME), rank=1)
    model.lora_manager.activate_adapter(ADAPTER_ID)
    return model, model.lora_manager


def _initialised(folder: Path, workers: int, **further: Any) -> tuple[torch.nn.Module, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    engine = EngineArgs(
        model=str(folder),
        dtype="float32",
        max_model_len=128,
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        tensor_parallel_size=workers,
        **further,
    ).create_engine_config()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with set_current_vllm_config(engine):
            return initialize_model(vllm_config=engine, model_config=engine.model_config), engine
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_the_checkpoint_of_transformers_fills_the_model_of_vllm(
    one_rank: None, tmp_path: Path, family: str, tied: bool
) -> None:
    from weight_sync import vllm_worker

    model, engine = saved(tmp_path, family, tied), served(tmp_path)
    weights = dict(model.named_parameters())
    offered = {n: (tuple(t.shape), buckets.dtype_name(t.dtype)) for n, t in weights.items()}
    assert ("lm_head.weight" in offered) != tied
    buckets.require_same(offered, vllm_worker.checkpoint_layout(engine), ("learner", "actor"))
    named = {name: weight.detach() * 1.5 for name, weight in weights.items()}
    vllm_worker._load(engine, named.items())
    held = dict(engine.named_parameters())
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn"
        parts = [named[f"{attention}.{p}_proj.weight"] for p in "qkv"]
        assert torch.equal(held[f"{attention}.qkv_proj.weight"], torch.cat(parts))
    whole = {name: weight for name, weight in named.items() if name in held}
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= set(whole)
    for name, weight in whole.items():
        assert torch.equal(held[name][: len(weight)], weight), name


def test_each_of_two_workers_says_the_whole_checkpoint_and_holds_its_shard(tmp_path: Path) -> None:
    script = Path(__file__).with_name("one_of_two_workers.py")
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path)],
            env=ends_with_us() | {"PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=280)[0].splitlines()[-1] for process in started]
    assert said == ["worker 0 holds its shards", "worker 1 holds its shards"]
