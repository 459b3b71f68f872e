"""What autograd keeps of a model's forward pass."""

from typing import Any

import torch


def kept_bytes(model: Any, tokens: int) -> int:
    """Bytes beside the weights that backward of so many tokens, in two rows, would need."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids = torch.zeros(2, tokens // 2, dtype=torch.long)
        out = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    total = sum(s.nbytes() for place, s in seen.items() if place not in weights)
    del out  # until here what it keeps is kept
    return total
