"""What an engine is started with that is to compute a LoRA adapter. Imports nothing heavy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from actors.errors import EngineUnusable
from weight_sync.adapter import weight_in_a_block
from weight_sync.protocol import Adapter

# The ranks that vLLM has slots for; a smaller adapter leaves the rest of its slot zero.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def adapter_arguments(adapter: Adapter, folder: str) -> dict[str, Any]:
    """Return the further arguments of AsyncEngineArgs: one slot, on these layers alone. (vLLM would
    adapt head and embeddings too.) Raises EngineUnusable.
    """
    rank = next((each for each in _RANKS if each >= adapter.rank), 0)
    if not rank:
        raise EngineUnusable(
            f"learner.lora.rank = {adapter.rank!r}: vLLM has slots for ranks up to {_RANKS[-1]}: "
            "lower it, or set learner.lora.publish to 'merged'"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": rank,
        "lora_target_modules": list(adapter.layers or linear_layers(folder)),
    }


def linear_layers(folder: str) -> tuple[str, ...]:
    """Return the last parts of the names of a model's linear layers within its blocks."""
    try:
        return tuple(sorted(set(_linear_layers(Path(folder)))))
    except (OSError, SafetensorError) as error:
        raise EngineUnusable(f"model.path = {folder!r}: no readable weights: {error}") from error


def _linear_layers(folder: Path) -> Iterator[str]:
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:  # "pt" would import torch; shapes need none
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                found = weight_in_a_block(name)
                if found and len(tensors.get_slice(name).get_shape()) == 2:
                    yield found
