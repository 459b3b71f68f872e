"""The defaults that depend on what a run runs on, for a file that says `defaults: by_device`."""

import ctypes
import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

KEY = "defaults"  # of a file or an override; no field of a configuration
BY_DEVICE = "by_device"
DEVICES = ("cpu", "one_gpu", "gpus")
DRIVER = "libnvidia-ml.so.1"  # comes with NVIDIA's driver, on WSL too
_UUID_BYTES = 96


def on_cpu() -> bool:
    """True where this installation's torch and vLLM run on the CPU; imports nothing heavy."""
    try:
        return "+cpu" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


def gpus_here() -> int:
    """The number of GPUs that a run of this installation may use; imports nothing heavy."""
    if on_cpu():
        return 0
    there, visible = _uuids(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(there)
    for count, name in enumerate(visible.split(",")):
        if not _is_one(name.strip(), there):
            return count  # CUDA, too, sees none behind it
    return min(count + 1, len(there))


def _is_one(name: str, uuids: list[str]) -> bool:
    """True where an entry of CUDA_VISIBLE_DEVICES means one of these GPUs, or a part of one."""
    if name.startswith("GPU-"):
        return sum(uuid.startswith(name) for uuid in uuids) == 1
    return name.startswith("MIG-") or (name.isdecimal() and int(name) < len(uuids))


def _uuids() -> list[str]:
    """Of this machine's GPUs, by NVIDIA's driver; none without one, or with a broken one."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return []
    if driver.nvmlInit_v2():
        return []
    try:
        count, device = ctypes.c_uint(), ctypes.c_void_p()
        if driver.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        found = []
        for index in range(count.value):
            uuid = ctypes.create_string_buffer(_UUID_BYTES)
            if not driver.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                driver.nvmlDeviceGetUUID(device, uuid, _UUID_BYTES)
                found.append(uuid.value.decode())
        return found
    finally:
        driver.nvmlShutdown()


def device_of(gpus: int) -> str:
    """What runs of a machine with so many GPUs run on, one of `DEVICES`."""
    return DEVICES[min(gpus, 2)]


def defaults_of(device: str, gpus: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of fields whose defaults differ on one of `DEVICES`, of which there are `gpus`;
    some follow from the fields that are `given`.
    """
    if device != "gpus":
        return {"cpu": _cpu, "one_gpu": _one_gpu}[device]()
    ranks = _number(given, "learner", "ranks") or max(gpus // 2, 1)
    return _gpus(gpus, ranks, _number(given, "actors", "tensor_parallel") or 1)


def _number(given: Mapping[str, Any], section: str, field: str) -> int:
    """The number above 0 that a field is given; 0 for none, and for what will be refused."""
    fields = given.get(section)
    value = fields.get(field) if isinstance(fields, Mapping) else None
    return value if type(value) is int and value > 0 else 0


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
    """For a model of 0.5B on 24 GB; larger ones on larger GPUs."""
    on_gpus = _on_gpus(seats=128)
    return on_gpus | {
        "actors": on_gpus["actors"] | {"count": 1},
        "weight_sync": on_gpus["weight_sync"] | {"transport": "cuda_ipc"},
        "learner": on_gpus["learner"]
        | {"micro_batch_tokens": 8192, "logprob_chunk_bytes": 256 << 20},
    }


def _gpus(gpus: int, ranks: int, workers: int) -> dict[str, Any]:
    """Half of them for the learner, on the others as many engines of so many `workers` as have
    GPUs of their own: for 3B to 14B on eight of 80 GB.
    """
    on_gpus = _on_gpus(seats=256)
    return on_gpus | {
        "actors": on_gpus["actors"] | {"count": max((gpus - ranks) // workers, 1)},
        "replay": on_gpus["replay"] | {"groups_per_step": 32},
        "learner": on_gpus["learner"] | {"ranks": ranks, "zero_stage": 3 if ranks > 1 else 1},
    }


def _on_gpus(seats: int) -> dict[str, Any]:
    """For any: caches and offload are found for the model (scripts/setup/fit.py). New weights have
    what is in the caches computed anew, so they come every few steps; rollouts begun in between
    may be as old as that, and as their own time in steps.
    """
    return {
        "actors": {
            "max_num_seqs": seats,
            "starting_deadline_s": 900.0,  # CUDA graphs are made
            "rollout_deadline_s": 600.0,
        },
        "replay": {"max_staleness": 8, "group_deadline_s": 1200.0},
        "weight_sync": {"publish_every": 5, "publish_deadline_s": 120.0},
        "learner": {
            "gradient_checkpointing": True,
            "offload": "auto",
            "batch_deadline_s": 1800.0,
            "eval_deadline_s": 1800.0,
            "step_deadline_s": 900.0,
        },
    }
