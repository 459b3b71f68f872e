"""One of two workers that share vLLM's own modules out: `python one_of_two_workers.py RANK FOLDER`.

It checks what the worker says of the checkpoint, and each parameter after a load, shard by shard.
"""

import sys
from pathlib import Path

import torch

from actors.policies.engine import prepare_environment
from configs.runtime.process import die_with_parent
from configs.schema import Config
from tests.weight_sync.test_layouts import SHAPE, adapted, saved, served
from weight_sync import buckets
from weight_sync.protocol import Adapter

WORKERS = 2
CASES = [("Qwen3", True, 2), ("Llama", False, 1), ("Qwen2", False, 2)]  # the last with biases


def rows(whole: torch.Tensor, rank: int, of: int = WORKERS) -> torch.Tensor:
    """A worker's rows."""
    return whole.chunk(of)[rank]


def expected(name: str, weights: dict[str, torch.Tensor], rank: int, keys: int) -> torch.Tensor:
    """What a worker's parameter holds, as Megatron-LM shares a layer out."""
    path, _, kind = name.rpartition(".")
    if path.endswith("qkv_proj"):
        q, k, v = (weights[f"{path[: -len('qkv_proj')]}{p}_proj.{kind}"] for p in "qkv")
        part = rank if keys >= WORKERS else 0  # fewer heads than workers: each has a copy
        return torch.cat(
            [rows(q, rank), *(rows(each, part, min(keys, WORKERS)) for each in (k, v))]
        )
    if path.endswith("gate_up_proj"):
        parent = path[: -len("gate_up_proj")]
        return torch.cat([rows(weights[f"{parent}{p}_proj.{kind}"], rank) for p in ("gate", "up")])
    if path.endswith(("o_proj", "down_proj")):
        return weights[name].chunk(WORKERS, dim=1)[rank]
    if path.endswith(("embed_tokens", "lm_head")):
        padded = -(-SHAPE["vocab_size"] // 64) * 64
        return weights[name][rank * padded // WORKERS :][: padded // WORKERS]
    return weights[name]


def check(model: torch.nn.Module, part: torch.nn.Module, rank: int) -> None:
    """Load a version and compare. Raises AssertionError, ManifestMismatch."""
    from weight_sync import vllm_worker

    weights = {name: each.detach() * 1.5 for name, each in model.named_parameters()}
    offered = {n: (tuple(t.shape), buckets.dtype_name(t.dtype)) for n, t in weights.items()}
    buckets.require_same(offered, vllm_worker.checkpoint_layout(part), ("learner", "actor"))
    vllm_worker._load(part, weights.items())
    for name, held in part.named_parameters():
        shard = expected(name, weights, rank, model.config.num_key_value_heads)
        assert torch.equal(held[: len(shard)], shard), f"{type(part).__name__}: {name}"


def check_adapter(folder: Path, model: torch.nn.Module, rank: int, keys: int) -> None:
    """Load an adapter into vLLM's own layers around another part, and compare. Raises
    AssertionError, VerificationFailed.
    """
    from weight_sync.adapter import names_of
    from weight_sync.adapter_slot import AdapterSlot
    from weight_sync.vllm_worker import _output_sizes

    adapter = Adapter(rank=4, alpha=8.0, layers=())
    part, manager = adapted(folder, WORKERS)
    slot = AdapterSlot(part, manager, adapter, _output_sizes)
    weights: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and ".layers." in name:
            rows, columns = layer.weight.shape
            a, b = torch.randn(4, columns), torch.randn(rows, 4)
            weights |= dict(zip(names_of(name), (a, b), strict=True))
    offered = {n: (tuple(t.shape), buckets.dtype_name(t.dtype)) for n, t in weights.items()}
    buckets.require_same(offered, slot.layout(), ("learner", "actor"))
    slot.load(weights.items())
    slot.checksum(weights.items())
    for name, layer in manager.modules.items():
        held = torch.cat([b[0, 0, :, :4] for b in layer.lora_b_stacked])
        parts = {
            f"{each}.weight": 2.0 * weights[names_of(each)[1]]
            for each in manager.packed_modules.get(name, [name])
        }
        if not name.endswith(("o_proj", "down_proj")):
            assert torch.equal(held, expected(f"{name}.weight", parts, rank, keys)), name
            continue
        assert torch.equal(held, parts[f"{name}.weight"]), name
        a = weights[names_of(name)[0]].chunk(WORKERS, dim=1)[rank]
        assert torch.equal(layer.lora_a_stacked[0][0, 0, :4], a), name


def main(rank: int, folder: Path) -> None:
    """Check every case in a group of two."""
    prepare_environment(Config())
    folders = [folder / f"{rank}-{number}" for number in range(len(CASES))]
    models = [  # transformers saves in the first of several ranks alone: before they are
        saved(where, family, tied, num_key_value_heads=keys)
        for where, (family, tied, keys) in zip(folders, CASES, strict=True)
    ]
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(WORKERS, rank, f"file://{folder}/store", rank, "gloo")
        initialize_model_parallel(WORKERS, 1)
    for model, where, (_, _, keys) in zip(models, folders, CASES, strict=True):
        check(model, served(where, WORKERS), rank)
        torch.manual_seed(0)
        check_adapter(where, model, rank, keys)
    print(f"worker {rank} holds its shards", flush=True)


if __name__ == "__main__":
    die_with_parent()
    main(int(sys.argv[1]), Path(sys.argv[2]))
