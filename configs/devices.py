"""The defaults that depend on what a run runs on, for a file that says `defaults: by_device`."""

import importlib.metadata
import os
from pathlib import Path
from typing import Any

KEY = "defaults"  # of a file or an override; no field of a configuration
BY_DEVICE = "by_device"
DEVICES = ("cpu", "one_gpu", "gpus")
GPUS = Path("/proc/driver/nvidia/gpus")  # of NVIDIA's driver: one folder each


def on_cpu() -> bool:
    """True where this installation's torch and vLLM run on the CPU; imports nothing heavy."""
    try:
        return "+cpu" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


def gpus_here() -> int:
    """The number of GPUs that a run of this installation may use; imports nothing heavy."""
    if on_cpu() or not GPUS.is_dir():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = len(list(GPUS.iterdir()))
    return (
        found if visible is None else min(found, len([each for each in visible.split(",") if each]))
    )


def device_here() -> str:
    """What this machine's runs run on, one of `DEVICES`."""
    return DEVICES[min(gpus_here(), 2)]


def defaults_of(device: str) -> dict[str, Any]:
    """The tree of fields whose defaults differ on one of `DEVICES`."""
    return {"cpu": _cpu, "one_gpu": _one_gpu, "gpus": _gpus}[device]()


def _cpu() -> dict[str, Any]:
    """For some 100 million parameters: small steps, and deadlines that fit their time."""
    cores = len(os.sched_getaffinity(0))
    return {
        "model": {"max_model_len": 2048},
        "questions": {"eval_limit": 20},
        "actors": {
            "count": 1,
            "rollouts_in_flight": 16,
            "max_num_seqs": 16,
            "max_turns": 2,
            "max_action_tokens": 128,
            "kv_cache_bytes": 1 << 30,
            "threads": cores,
            "rollout_deadline_s": 1200.0,
        },
        "replay": {"groups_per_step": 4, "group_size": 4, "group_deadline_s": 1800.0},
        "weight_sync": {"publish_deadline_s": 120.0},
        "learner": {
            "eval_every": 10,
            "checkpoint_every": 10,
            "micro_batch_tokens": 4096,
            "threads": cores,
            "batch_deadline_s": 1800.0,
            "eval_deadline_s": 1800.0,
            "step_deadline_s": 1800.0,
        },
    }


def _one_gpu() -> dict[str, Any]:
    """For a model of 0.5B on 24 GiB, of which 22 can be used."""
    return {
        "actors": {
            "count": 1,
            "rollouts_in_flight": 128,
            "kv_cache_bytes": 3 << 30,  # of such a model 64 sequences of full length
            "enforce_eager": False,
        },
        "weight_sync": {"transport": "cuda_ipc"},
        "learner": {
            "micro_batch_tokens": 8192,
            "gradient_checkpointing": True,
            "logprob_chunk_bytes": 256 << 20,
        },
    }


def _gpus() -> dict[str, Any]:
    """Half of them for the learner, an engine on each of the others."""
    ranks = max(gpus_here() // 2, 1)
    return {
        "actors": {"count": max(gpus_here() - ranks, 1), "enforce_eager": False},
        "learner": {"ranks": ranks, "gradient_checkpointing": True},
    }
