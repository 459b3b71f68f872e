"""A model's size, read from its folder, and the bytes of its activations and logits.

The bytes that autograd keeps of a layer were counted, tensor by tensor, in transformers' Llama,
Qwen2 and Qwen3 (a test counts them again): of each norm the residual in fp32, what it is scaled to
and what it gives; queries, keys, values and the attention's result, but no scores; gate, up,
activation and their product.
"""

import contextlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from configs.schema import Config

SLICE_ENTRIES = 4096  # learner/model/head.py, which imports torch
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Model:
    """A model's size, as far as its memory depends on it."""

    hidden: int = 0
    layers: int = 0
    intermediate: int = 0
    queries: int = 0  # heads times their size
    keys: int = 0  # the same of keys, and of values
    vocabulary: int = 0
    weights: tuple[int, ...] = ()  # elements of each
    normed_heads: bool = False
    experts: int = 0

    @property
    def parameters(self) -> int:
        """The elements of all weights."""
        return sum(self.weights)

    def layer_bytes(self, width: int) -> int:
        """Bytes that autograd keeps of a layer for each token, `width` bytes an element."""
        norm, head = (8, 6) if width == 2 else (12, 8)
        heads = self.queries + self.keys
        kept = 2 * norm * self.hidden + 2 * width * heads + 4 * width * self.intermediate
        return kept + head * heads * self.normed_heads


def read_model(path: Path) -> Model:
    """From a Hugging Face folder; what its config.json does not say is taken as in a Llama. Raises
    OSError, ValueError, KeyError where there is none.
    """
    return _model(path, _elements(path))


def known_model(path: Path) -> Model:
    """The same, or less where the folder says too little: what is wrong is said elsewhere."""
    elements: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        elements = _elements(path)
    try:
        return _model(path, elements)
    except (OSError, ValueError, KeyError, TypeError):
        return Model(weights=tuple(elements.values()))


def _elements(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for file in path.glob("*.safetensors"):
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no dict
                    found[name] = math.prod(tensors.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(f"{file.name}: {error}") from error
    return found


def _model(path: Path, shapes: dict[str, int]) -> Model:
    tree = json.loads((path / "config.json").read_text())
    tree = tree.get("text_config") or tree
    hidden, heads = tree["hidden_size"], tree.get("num_attention_heads") or 1
    head = tree.get("head_dim") or hidden // heads
    return Model(
        hidden=hidden,
        layers=tree["num_hidden_layers"],
        intermediate=tree.get("intermediate_size") or 4 * hidden,
        queries=heads * head,
        keys=(tree.get("num_key_value_heads") or heads) * head,
        vocabulary=tree.get("vocab_size") or 0,
        weights=tuple(shapes.values()),
        normed_heads=any(name.endswith("q_norm.weight") for name in shapes),
        experts=experts(tree),
    )


def experts(tree: dict[str, Any]) -> int:
    """How many experts a config.json has in a layer; 0 or 1: it is dense."""
    counts = (tree.get(name) for name in EXPERTS)
    return max((count for count in counts if isinstance(count, int)), default=0)


def width_of(dtype: str) -> int:
    """Bytes of an element."""
    return 2 if dtype == "bfloat16" else 4


def tokens_at_once(config: Config) -> int:
    """Padded tokens of the largest micro-batch: a row longer than the budget goes alone."""
    longest, group = config.model.max_model_len, config.replay.group_size
    step = config.replay.groups_per_step * group * longest
    return min(max(config.learner.micro_batch_tokens, longest), step)


def activation_bytes(config: Config, model: Model) -> int:
    """Bytes of the activations of one rank's micro-batch, and of the gradients of one layer's."""
    width = width_of(config.model.dtype)
    layer = model.layer_bytes(width)
    if config.learner.gradient_checkpointing:
        token_bytes = width * model.hidden * model.layers + 2 * layer
    else:
        token_bytes = layer * (model.layers + 1)
    return tokens_at_once(config) * token_bytes


def head_bytes(config: Config, model: Model, device: str) -> int:
    """Bytes of the head while it makes its gradient: one piece of logits with the slices beside
    it, the sums in fp32, and their cast to the weights' dtype.
    """
    width, tokens = width_of(config.model.dtype), tokens_at_once(config)
    piece = config.learner.chunk_bytes(device)
    if model.vocabulary:
        piece = min(piece, 4 * model.vocabulary * tokens)
        piece += piece * 3 * min(SLICE_ENTRIES, model.vocabulary) // model.vocabulary
    cast = width if width == 2 else 0
    return piece + (4 + cast) * model.hidden * (model.vocabulary + tokens)
