"""The memory that each GPU has to hold, before anything is started on it.

It counts what stays (weights, gradients, optimiser, averages) and the most that comes on top of it:
while a gradient is made, activations, the head's sums and, on a CPU, freed blocks that are kept at
hand; while the optimiser steps, its temporaries. A test compares it with what a learner on a CPU
holds at its peak.
"""

import importlib
import os
from collections.abc import Iterator
from pathlib import Path

from actors.policies.engine import gpus_of_actor
from configs.devices import on_cpu
from configs.schema import Config
from retrieval_server.index.manifest import PARTS, VECTORS
from scripts.setup.model_size import (
    Model,
    activation_bytes,
    candidate_bytes,
    head_bytes,
    sent_elements,
    trained_elements,
    value_head_bytes,
    width_of,
)

GIB = 1 << 30
CONTEXT_BYTES = GIB // 2  # of CUDA, in each process
ENGINE_BYTES = 2 * GIB  # activations, logits and CUDA graphs of an engine, roughly
BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's: of a reduction, half of what it keeps gathered
HEADROOM = 0.05  # of a GPU, left for allocators and NCCL by what is found (scripts/setup/fit.py)
WIKI_18_BYTES = 21_015_324 * 768 * 4  # e5_Flat.index, for a file of vectors that is not here
FAISS_BYTES = 3 * GIB // 2  # its scratch on each GPU
ENCODER_BYTES = GIB  # of E5-base's size, with a batch's activations
STEP_COPIES = {"cuda": 1, "cpu": 2}  # in fp32, while torch's Adam steps
GAPS, MOST_GAPS_BYTES = 0.4, GIB  # of the passes' blocks on a CPU; those above 32 MiB leave none


def totals() -> list[int]:
    """Bytes of each GPU that this process may use; none on an installation for the CPU."""
    if on_cpu():
        return []
    torch = importlib.import_module("torch")
    return [
        torch.cuda.get_device_properties(index).total_memory
        for index in range(torch.cuda.device_count())
    ]


def why_none() -> str:
    """The cause for which torch can use no GPU, in its own words where it has any."""
    try:
        importlib.import_module("torch").cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().partition("\n")[0].rstrip(".")
    return f"CUDA_VISIBLE_DEVICES = {os.environ.get('CUDA_VISIBLE_DEVICES', '')!r} hides them"


def state_bytes(config: Config, model: Model) -> dict[str, int]:
    """Bytes of what ZeRO shares out among the ranks and `learner.offload` may move to the host: of
    one rank, by what they are for.
    """
    learner, count = config.learner, sum(trained_elements(config, model))
    in_bf16 = config.model.dtype == "bfloat16"
    own, critics = (4 * (in_bf16 and not learner.lora.rank), 4 * in_bf16)  # masters
    moments = 8 if learner.optimiser == "adamw" else 0
    averages = (learner.centre == "ema") + (learner.anchor != "none")
    critic = model.trunk_parameters * learner.has_critic_model
    ranks = learner.ranks if learner.zero_stage else 1
    return {
        "optimiser, with fp32 weights": (moments + own) * count // ranks,
        "averages": 4 * averages * count // ranks,
        "critic's optimiser": (moments + critics) * critic // ranks,
    }


def learner_needs(config: Config, model: Model, device: str = "cuda") -> dict[str, int]:
    """Bytes of one rank on its device, by what they are for."""
    learner, count = config.learner, model.parameters
    width, on_gpu = width_of(config.model.dtype), device == "cuda"
    trained = sum(trained_elements(config, model))
    adapter = trained if learner.lora.rank else 0
    offloads = learner.offload == "cpu" and on_gpu
    summed = offloads and not adapter and learner.zero_stage == 1 and width == 2
    of_gradient = 4 if summed or not offloads or adapter else width
    # ZeRO shares out gradients from stage 2, weights from 3.
    shared = {stage: learner.ranks if learner.zero_stage >= stage else 1 for stage in (2, 3)}
    half = max(1, learner.ranks // 2)  # on two nodes
    activations, head = activation_bytes(config, model), head_bytes(config, model, device)
    state = {} if offloads else state_bytes(config, model)
    ranks = learner.ranks if learner.zero_stage else 1
    gaps = 0 if on_gpu else min(int(GAPS * (activations + head)), MOST_GAPS_BYTES)
    leaving = _leaving(trained, ranks) if summed else 0
    stepping = 0 if offloads else 4 * STEP_COPIES[device] * trained // ranks
    needs = {
        "weights": width * count // shared[3],
        "adapter": 4 * adapter // shared[3],
        "weights within a node": width * count // half if learner.hierarchical else 0,
        "gradients": of_gradient * trained // shared[2],
        **state,
        "critic, with its gradients": _critic_bytes(config, model, offloads),
        "activations": activations,
        "head, with its gradient": head,
        "value head, with its gradient": value_head_bytes(config, model),
        "the anchor's likeliest tokens": candidate_bytes(config, model),
        "gaps between blocks": gaps,
        "optimiser's temporaries": max(0, stepping - activations - head - gaps),
        "reductions": _reduced(config, model, trained, 4 if adapter else width),
        "gradients on their way to the host": max(0, leaving - activations - head - gaps),
        "weights shown to actors": on_gpu * width * sum(sent_elements(config, model)),
        "CUDA": on_gpu * CONTEXT_BYTES,
    }
    return {what: size for what, size in needs.items() if size}


def _critic_bytes(config: Config, model: Model, offloads: bool) -> int:
    """Bytes of a critic's weights, gradients and reductions: one rank's, as the policy's are."""
    learner, count = config.learner, model.trunk_parameters
    if not learner.has_critic_model:
        return 0
    width, ranks = width_of(config.model.dtype), learner.ranks
    weights = width * count // (ranks if learner.zero_stage == 3 else 1)
    within_a_node = width * count // max(1, ranks // 2) if learner.hierarchical else 0
    gradients = (width if offloads else 4) * count // (ranks if learner.zero_stage > 1 else 1)
    reduced = _reduced(config, model, model.parameters, width)
    return weights + within_a_node + gradients + reduced


def _leaving(trained: int, ranks: int) -> int:
    """Bytes beside the sum in fp32 that DeepSpeed keeps on the GPU at stage 1, while it goes to the
    host: this rank's share of it once more, and a bucket as it is sent, in bf16.
    """
    return 4 * trained // ranks + 2 * min(BUCKET_ELEMENTS, trained)


def _reduced(config: Config, model: Model, trained: int, width: int) -> int:
    """Bytes of the buffers in which DeepSpeed sums gradients, `width` bytes an element, and, at
    stage 3, gathers weights.
    """
    learner, bucket = config.learner, min(BUCKET_ELEMENTS, trained)
    if learner.zero_stage == 3:
        gathered = min(2 * BUCKET_ELEMENTS, model.parameters)
        return width * bucket + width_of(config.model.dtype) * gathered
    if learner.zero_stage == 2:
        return width * bucket
    summed = width == 2 and learner.offload != "cpu"  # by DeepSpeed's BF16_Optimizer
    alone = learner.ranks == 1 and (learner.zero_stage == 0 or summed)
    if alone:
        return 0
    offloads = learner.offload == "cpu"  # by way of a buffer for the largest weight
    return 4 * bucket + offloads * width * max(model.weights, default=0)


def engine_needs(config: Config, model: Model) -> dict[str, int]:
    """Bytes of one worker of an actor's engine, by what they are for."""
    width, workers = width_of(config.engine_dtype), config.actors.tensor_parallel
    sent = sent_elements(config, model)
    received = width * sum(sent)
    if workers > 1:  # on the host: here only what passes through (weight_sync/receiver.py)
        largest = max(sent, default=0)
        received = min(received, max(config.weight_sync.bucket_bytes, width * largest))
    needs = {
        "weights": width * model.parameters // workers,
        "keys and values": config.actors.kv_cache_bytes // workers,
        "engine": ENGINE_BYTES,
        "weights received": received,
        "CUDA": CONTEXT_BYTES,
    }
    return needs | ({"adapter": received // workers} if sent is not model.weights else {})


def retrieval_needs(config: Config, gpu: int, gpus: int) -> dict[str, int]:
    """Bytes of the run's own retrieval server on one of `gpus`, by what they are for: vectors over
    all of them, the encoder on the first.
    """
    retrieval, needs = config.retrieval, {}
    if not config.starts_retrieval_server:
        return {}
    if retrieval.device == "cuda" and gpu == 0:
        needs["encoder"] = ENCODER_BYTES
    if retrieval.index_device == "cuda":
        halves = vector_bytes(config) // 2 // gpus
        needs |= {"vectors in halves": halves, "FAISS": FAISS_BYTES}
    return needs | {"CUDA": CONTEXT_BYTES} if needs else {}


def vector_bytes(config: Config) -> int:
    """Bytes of the vectors that the run's own retrieval server reads into memory; Search-R1's where
    vectors are to be searched on GPUs and their file is not here.
    """
    retrieval = config.retrieval
    if not config.starts_retrieval_server or retrieval.map_index:
        return 0
    path = Path(retrieval.index)
    files = [path, path / VECTORS, *path.glob(PARTS)] if retrieval.index else []
    sizes = [file.stat().st_size for file in files if file.is_file()]
    return sum(sizes) if sizes or retrieval.index_device == "cpu" else WIKI_18_BYTES


def tenants(config: Config, model: Model, gpus: int) -> list[dict[str, dict[str, int]]]:
    """What each of `gpus` holds: who, and its bytes by what they are for. Over a cluster they are
    those of all nodes, and retrieval servers are beside actors.
    """
    ranks, actors = config.learner.ranks, config.actors.count
    workers = config.actors.tensor_parallel
    found: list[dict[str, dict[str, int]]] = [{} for _ in range(gpus)]
    for rank in range(ranks):
        found[rank % gpus][f"learner rank {rank}"] = learner_needs(config, model)
    for index in range(actors):
        for worker, gpu in enumerate(gpus_of_actor(index, ranks, gpus, workers)):
            who = f"actor-{index}" + (f" worker {worker}" if workers > 1 else "")
            found[gpu][who] = engine_needs(config, model)
    first = ranks if config.cluster.address and config.cluster.retrieval_replicas else 0
    for gpu, each in enumerate(found):
        if needs := retrieval_needs(config, (gpu - first) % gpus, gpus):
            each["retrieval server"] = needs
    return found


def plan(config: Config, model: Model, gpus: list[int]) -> Iterator[tuple[str, bool]]:
    """Yield, for each GPU in use, a line on what it must hold, and True where that fits."""
    for gpu, each in enumerate(tenants(config, model, len(gpus))):
        if each:
            yield line_of(gpu, gpus[gpu], each)


def line_of(gpu: int, total: int, tenants: dict[str, dict[str, int]]) -> tuple[str, bool]:
    """A line on what a GPU must hold, and True where that fits."""

    def shown(needs: dict[str, int]) -> str:
        return ", ".join(f"{what} {size / GIB:.2f}" for what, size in needs.items())

    needed = sum(sum(needs.values()) for needs in tenants.values())
    detail = "; ".join(
        f"{who} {sum(needs.values()) / GIB:.1f} ({shown(needs)})" for who, needs in tenants.items()
    )
    line = f"GPU {gpu}: about {needed / GIB:.1f} of {total / GIB:.1f} GiB: {detail}"
    return line, needed <= total
