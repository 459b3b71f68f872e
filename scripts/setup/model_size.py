"""A model's size, read from its folder or known by its name, and the bytes of its activations,
logits, keys and values.

The bytes that autograd keeps of a layer were counted, tensor by tensor, in transformers' Llama,
Qwen2 and Qwen3 (a test counts them again): of each norm the residual in fp32, what it is scaled to
and what it gives; queries, keys, values and the attention's result, but no scores; gate, up,
activation and their product.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from actors.policies.engine_keys import block_tokens, token_width
from configs.schema import Config
from weight_sync.adapter import weight_in_a_block

SLICE_ENTRIES = 4096  # learner/model/head.py, which imports torch
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SHAPES = {  # hidden, intermediate, layers, heads, heads of keys, vocabulary
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151_936),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151_936),
    "Qwen2.5-3B": (2048, 11_008, 36, 16, 2, 151_936),
    "Qwen2.5-7B": (3584, 18_944, 28, 28, 4, 152_064),
    "Qwen2.5-14B": (5120, 13_824, 48, 40, 8, 152_064),
    "Qwen2.5-32B": (5120, 27_648, 64, 40, 8, 152_064),
}
_TIED = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B")
_VOCABULARY_PADDING = 64  # vLLM's, before it shares a vocabulary out


@dataclass(frozen=True)
class Linear:
    """A linear layer of a block, by the last part of its name."""

    name: str
    inputs: int
    outputs: int


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
    kept: int = 0  # elements of keys and values of a token; 0: some layers keep less of a text
    heads: int = 0  # of queries
    key_heads: int = 0
    linears: tuple[Linear, ...] = ()  # of all blocks

    @property
    def parameters(self) -> int:
        """The elements of all weights."""
        return sum(self.weights)

    @property
    def trunk_parameters(self) -> int:
        """The same without an output layer of its own: what a critic takes over."""
        outer = self.vocabulary * self.hidden
        return self.parameters - outer * (self.weights.count(outer) > 1)

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
    return _model(path, _shapes_in(path))


def find_model(path: str) -> Model:
    """The same, of a folder without weights too, or of a model known by its name."""
    folder = Path(path)
    if (folder / "config.json").is_file():
        found = read_model(folder)
        return found if found.weights else model_of_shape(_tree(folder))
    shape = known_shape(folder.name)
    return model_of_shape(shape) if shape else read_model(folder)


def known_shape(name: str) -> dict[str, Any]:
    """The config.json of a model whose shape is known by its name; empty for others."""
    short = name.removesuffix("-Instruct")
    if short not in _SHAPES:
        return {}
    hidden, intermediate, layers, heads, keys, vocabulary = _SHAPES[short]
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": vocabulary,
        "tie_word_embeddings": short in _TIED,
    }


def model_of_shape(tree: dict[str, Any]) -> Model:
    """A model of a config.json, with the weights that a Llama, Qwen2 or Qwen3 of its shape has."""
    kind, shape = tree.get("model_type", ""), _shaped(tree)
    hidden, queries, keys = shape.hidden, shape.queries, shape.keys
    biases = kind == "qwen2" or tree.get("attention_bias")
    attention = [hidden * queries, *[hidden * keys] * 2, queries * hidden]
    layer = [*attention, *[hidden * shape.intermediate] * 3, hidden, hidden]
    layer += [queries, keys, keys] if biases else []
    normed = kind == "qwen3"
    layer += [tree.get("head_dim") or hidden // tree["num_attention_heads"]] * 2 * normed
    outer = [shape.vocabulary * hidden] * (1 if tree.get("tie_word_embeddings") else 2)
    weights = (*outer, *layer * shape.layers, hidden)
    linears = _llama_linears(shape) * shape.layers
    return replace(shape, weights=weights, normed_heads=normed, linears=linears)


def _llama_linears(shape: Model) -> tuple[Linear, ...]:
    hidden, inner = shape.hidden, shape.intermediate
    return (
        Linear("q_proj", hidden, shape.queries),
        Linear("k_proj", hidden, shape.keys),
        Linear("v_proj", hidden, shape.keys),
        Linear("o_proj", shape.queries, hidden),
        Linear("gate_proj", hidden, inner),
        Linear("up_proj", hidden, inner),
        Linear("down_proj", inner, hidden),
    )


def known_model(path: Path) -> Model:
    """The same, or less where the folder says too little: what is wrong is said elsewhere."""
    shapes: dict[str, tuple[int, ...]] = {}
    with contextlib.suppress(OSError, ValueError):
        shapes = _shapes_in(path)
    try:
        return _model(path, shapes)
    except (OSError, ValueError, KeyError, TypeError):
        return Model(weights=tuple(map(math.prod, shapes.values())))


def _shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for file in path.glob("*.safetensors"):
        try:
            with safe_open(file, "np") as tensors:  # "pt" imports torch; shapes need none
                for name in tensors.keys():  # noqa: SIM118 - it is no dict
                    found[name] = tuple(tensors.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(f"{file.name}: {error}") from error
    return found


def _model(path: Path, shapes: dict[str, tuple[int, ...]]) -> Model:
    named = ((weight_in_a_block(name), shape) for name, shape in shapes.items())
    return replace(
        _shaped(_tree(path)),
        weights=tuple(map(math.prod, shapes.values())),
        normed_heads=any(name.endswith("q_norm.weight") for name in shapes),
        linears=tuple(Linear(layer, s[1], s[0]) for layer, s in named if layer and len(s) == 2),
    )


def _tree(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((path / "config.json").read_text())
    return tree.get("text_config") or tree


def _shaped(tree: dict[str, Any]) -> Model:
    """A model of a config.json, as yet without weights."""
    hidden, heads = tree["hidden_size"], tree.get("num_attention_heads") or 1
    head = tree.get("head_dim") or hidden // heads
    return Model(
        hidden=hidden,
        layers=tree["num_hidden_layers"],
        intermediate=tree.get("intermediate_size") or 4 * hidden,
        queries=heads * head,
        keys=(tree.get("num_key_value_heads") or heads) * head,
        vocabulary=tree.get("vocab_size") or 0,
        experts=experts(tree),
        kept=_kept_elements(tree),
        heads=tree.get("num_attention_heads") or 0,
        key_heads=tree.get("num_key_value_heads") or tree.get("num_attention_heads") or 0,
    )


def _kept_elements(tree: dict[str, Any]) -> int:
    """Elements of keys and values of a token; 0 where layers keep less than all of them."""
    kinds = set(tree.get("layer_types") or ()) - {"full_attention"}
    window = tree.get("sliding_window") and tree.get("use_sliding_window", True)
    if kinds or window or tree.get("kv_lora_rank") or tree.get("num_kv_shared_layers"):
        return 0
    try:
        head = tree.get("head_dim") or tree["hidden_size"] // tree["num_attention_heads"]
        return int(2 * tree["num_hidden_layers"] * tree["num_key_value_heads"] * head)
    except (KeyError, TypeError):
        return 0


def experts(tree: dict[str, Any]) -> int:
    """How many experts a config.json has in a layer; 0 or 1: it is dense."""
    counts = (tree.get(name) for name in EXPERTS)
    return max((count for count in counts if isinstance(count, int)), default=0)


def adapted_linears(config: Config, model: Model) -> list[Linear]:
    """The linear layers that get an adapter."""
    lora = config.learner.lora
    chosen = [each for each in model.linears if not lora.layers or each.name in lora.layers]
    return chosen if lora.rank else []


def trained_elements(config: Config, model: Model) -> tuple[int, ...]:
    """Elements of each weight that the policy's optimiser has: the model's, or its adapter's, and
    those of a critic on its trunk.
    """
    policy = _adapter_elements(config, model) if config.learner.lora.rank else model.weights
    return (*policy, model.hidden, 1) if config.learner.has_value_head else policy


def sent_elements(config: Config, model: Model) -> tuple[int, ...]:
    """Elements of each weight that is published."""
    lora = config.learner.lora
    as_adapter = lora.rank and lora.publish == "adapter"
    return _adapter_elements(config, model) if as_adapter else model.weights


def _adapter_elements(config: Config, model: Model) -> tuple[int, ...]:
    rank, linears = config.learner.lora.rank, adapted_linears(config, model)
    return tuple(rank * size for each in linears for size in (each.inputs, each.outputs))


def width_of(dtype: str) -> int:
    """Bytes of an element."""
    return 2 if dtype == "bfloat16" else 4


def token_bytes(config: Config, model: Model) -> int:
    """Bytes of keys and values of a token, over all workers of an engine; 0 where config.json does
    not tell. More workers than heads of keys hold copies.
    """
    copies = max(1, config.actors.tensor_parallel // max(1, model.key_heads))
    return token_width(config) * model.kept * copies


def contexts_bytes(config: Config, model: Model, count: int = 1) -> int:
    """Bytes of keys and values without which vLLM does not hold so many whole contexts: each in
    blocks of its own, and a block that it keeps for itself. 0 where config.json does not tell.
    """
    block = block_tokens(config)
    blocks = count * -(-config.model.max_model_len // block) + 1
    return blocks * block * token_bytes(config, model)


def uneven_shares(config: Config, model: Model) -> Iterator[str]:
    """Yield what vLLM cannot share out evenly among an engine's workers."""
    workers = config.actors.tensor_parallel
    heads, keys = model.heads or workers, model.key_heads or workers
    padded = -(-model.vocabulary // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
    left_over = {
        f"num_attention_heads {heads}": heads % workers,
        f"num_key_value_heads {keys}": max(keys, workers) % min(keys, workers),
        f"intermediate_size {model.intermediate}": model.intermediate % workers,
        f"vocab_size, padded to {padded}": padded % workers,
    }
    if uneven := [what for what, left in left_over.items() if left]:
        yield (
            f"actors.tensor_parallel = {workers!r}: the model's {', '.join(uneven)} cannot be "
            "shared out evenly among so many workers: set it to a divisor of each (of "
            "num_key_value_heads a multiple will do: workers then hold copies), or to 1"
        )


def tokens_at_once(config: Config) -> int:
    """Padded tokens of the largest micro-batch: a row longer than the budget goes alone (its width
    is rounded up, by a sixteenth at most, which is not reckoned).
    """
    longest, group = config.model.max_model_len, config.replay.group_size
    step = config.replay.groups_per_step * group * longest
    return min(max(config.learner.micro_batch_tokens, longest), step)


def activation_bytes(config: Config, model: Model) -> int:
    """Bytes of the activations of one rank's micro-batch, and of the gradients of one layer's."""
    width = width_of(config.model.dtype)
    layer = model.layer_bytes(width) + adapted_bytes(config, model)
    if config.learner.gradient_checkpointing:
        token_bytes = width * model.hidden * model.layers + 2 * layer
    else:
        token_bytes = layer * (model.layers + 1)
    return tokens_at_once(config) * token_bytes


def adapted_bytes(config: Config, model: Model) -> int:
    """Bytes that autograd keeps of a layer's adapters for each token: what goes into B. What goes
    into A is kept for the layer; that frozen layers need none of it themselves is not taken off.
    """
    width, linears = width_of(config.model.dtype), adapted_linears(config, model)
    return width * config.learner.lora.rank * len(linears) // max(1, model.layers)


def candidate_bytes(config: Config, model: Model) -> int:
    """Bytes of a rank's share of a step's candidates of the KL: an id and a log-prob of each."""
    rollouts = config.replay.groups_per_step * config.replay.group_size
    tokens = rollouts * config.model.max_model_len // config.learner.ranks
    return 8 * min(config.learner.kl_top_k, model.vocabulary) * tokens  # more are refused


def head_bytes(config: Config, model: Model, device: str) -> int:
    """Bytes of the head while it makes its gradient: one piece of logits with the slices beside
    it, the sums in fp32, and their cast to the weights' dtype; where those are frozen, the sums
    of the hidden states alone.
    """
    width, tokens = width_of(config.model.dtype), tokens_at_once(config)
    piece = config.learner.chunk_bytes(device)
    if model.vocabulary:
        piece = min(piece, 4 * model.vocabulary * tokens)
        piece += piece * 3 * min(SLICE_ENTRIES, model.vocabulary) // model.vocabulary
    cast = width if width == 2 else 0
    trained = 0 if config.learner.lora.rank else model.vocabulary
    return piece + (4 + cast) * model.hidden * (trained + tokens)


def value_head_bytes(config: Config, model: Model) -> int:
    """Bytes of a value head on the policy's trunk while it makes its gradient: hidden states in
    fp32 and their gradient, and its cast where the model is not in fp32.
    """
    if not config.learner.has_value_head:
        return 0
    width = width_of(config.model.dtype)
    each = 4 + (4 + width) * (width < 4)
    return width * (model.hidden + 1) + each * model.hidden * tokens_at_once(config)
