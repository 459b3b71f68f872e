"""The learner's speed without DeepSpeed: tokens/s and MFU of Qwen2.5's shapes under random weights,
and the head's pieces. Needs torch; the model is transformers' own.
"""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.gpu.check import Check, Figure, at_least, at_most

VOCABULARY = 151_936
TRAINED = 0.5  # share of the tokens that are actions
PIECES = (64 << 20, 1 << 30)
REPEATS = 3


@dataclass(frozen=True)
class Shape:
    """A Qwen2.5's sizes; `mfu`: the least share of the measured peak to expect."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = VOCABULARY
    mfu: float = 0.2


SMALL = Shape("0.5B", 896, 24, 14, 2, 4864, mfu=0.2)
LARGE = Shape("3B", 2048, 36, 16, 2, 11008, mfu=0.35)


def make_model(shape: Shape, device: str) -> Any:
    """A bf16 causal LM of this shape with tied embeddings and random weights."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def flops(model: nn.Module, shape: Shape, rows: int, length: int, passes: int) -> float:
    """Useful operations of so many passes (a backward counts two) over [rows, length] tokens:
    2 per weight and token, causal attention, and the head on the trained tokens alone.
    """
    embedding = shape.vocabulary * shape.hidden
    weights = sum(weight.numel() for weight in model.parameters()) - embedding
    tokens = rows * length
    attention = 2 * shape.layers * length * shape.hidden  # half of 4·L·T·H: causal
    return passes * tokens * (2 * weights + attention + 2 * TRAINED * embedding)


def peak_flops(device: str, size: int = 8192) -> float:
    """Operations/s of this device's largest bf16 matrix product."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: a @ b, device)


def seconds_of(act: Callable[[], object], device: str, repeats: int = REPEATS) -> float:
    """The shortest of several runs, after one that does not count."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    act()
    found = []
    for _ in range(repeats):
        wait()
        begun = time.perf_counter()
        act()
        wait()
        found.append(time.perf_counter() - begun)
    return min(found)


def speed(
    shape: Shape, rows: int, length: int, *, recompute: bool, device: str = "cuda"
) -> Iterator[Figure]:
    """Yield tokens/s of an update's passes (one that scores, one that trains), MFU and memory."""
    from learner.model.scorer import TokenScorer

    model = make_model(shape, device)
    if recompute:
        _checkpoint_gradients(model)
    scorer = TokenScorer(model, PIECES[-1])
    tokens = torch.randint(shape.vocabulary, (rows, length), device=device)
    mask = torch.rand(rows, length, device=device) < TRAINED
    mask[:, 0] = False

    def update() -> None:
        with torch.no_grad():
            scorer(tokens, mask, 1.0)
        scorer(tokens, mask, 1.0, lambda logprobs, _chunk: -logprobs.mean())[2].backward()
        model.zero_grad(set_to_none=True)

    seconds = seconds_of(update, device)
    yield Figure("tokens/s", f"{rows * length / seconds:,.0f}", "see MFU", seconds > 0)
    useful = flops(model, shape, rows, length, passes=4) / seconds
    yield at_least("MFU, of the measured peak", useful / peak_flops(device), shape.mfu)
    if device == "cuda":
        held = torch.cuda.max_memory_allocated() / 2**30
        yield Figure("memory", f"{held:.1f} GiB", "below the GPU's, without an optimiser")


def head_pieces(
    tokens: int = 4096, hidden: int = 2048, vocabulary: int = VOCABULARY, device: str = "cuda"
) -> Iterator[Figure]:
    """Yield seconds and memory of the head at both sizes of pieces, and its error, against
    log_softmax over whole logits.
    """
    layer = nn.Linear(hidden, vocabulary, bias=False, device=device)
    states = torch.randn(tokens, hidden, device=device).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    seconds, logprobs = {}, {}
    for name, step in _heads(layer).items():
        act = partial(_forward_backward, step, states, targets, layer)
        _forget(device)
        seconds[name] = seconds_of(act, device)
        held = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        logprobs[name] = act()
        yield Figure(name, f"{seconds[name]:.3f} s, {held:.1f} GiB", "the larger the faster")
    small, large, whole = seconds
    yield at_least("64 MiB over 1 GiB, seconds", seconds[small] / seconds[large], 1.0)
    yield at_least("whole logits over 1 GiB, seconds", seconds[whole] / seconds[large], 0.5)
    apart = max(float((logprobs[name] - logprobs[whole]).abs().max()) for name in (small, large))
    yield at_most("largest difference of log-probs", apart, 1e-3)


Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # states, targets -> log-probs, loss


def _heads(layer: nn.Linear) -> dict[str, Step]:
    from learner.model.head import LogProbHead

    def whole(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.log_softmax(layer(states), -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return found.detach(), found.mean()

    def pieces(head: LogProbHead, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        share = 1.0 / len(targets)
        scored = head(states, targets, 1.0, lambda logprobs, _chunk: share * logprobs.sum())
        return scored[0], scored[2]

    named = {f"pieces of {size >> 20} MiB": LogProbHead(layer, size) for size in PIECES}
    ours: dict[str, Step] = {name: partial(pieces, head) for name, head in named.items()}
    return ours | {"whole logits": whole}


def _forward_backward(step: Step, states: Tensor, targets: Tensor, layer: nn.Linear) -> Tensor:
    logprobs, loss = step(states, targets)
    loss.backward()
    layer.weight.grad = states.grad = None
    return logprobs


def _forget(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _checkpoint_gradients(model: Any) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # else nothing is recomputed


def _measured(shape: Shape, rows: int, length: int, recompute: bool) -> list[Figure]:
    _forget("cuda")
    return list(speed(shape, rows, length, recompute=recompute))


def checks() -> list[Check]:
    """Every check of the learner's speed."""
    plans = [(SMALL, 4, 4096, False), (SMALL, 1, 16_384, False)]
    plans += [(LARGE, 4, 4096, True), (LARGE, 1, 16_384, True)]
    made = [Check("head pieces", head_pieces, ("torch", "numpy"))]
    for shape, rows, length, recompute in plans:
        name = f"learner {shape.name} at {length:,} tokens"
        name += ", layers recomputed" if recompute else ""
        act = partial(_measured, shape, rows, length, recompute)
        made.append(Check(name, act, ("torch", "numpy", "transformers")))
    return made
