"""The demo's starting policy: a small Qwen2 from scratch that has the skill and a bad habit.

1. Copying: half-repeated rows of random words. 2. Clean demonstrations, a fresh world per batch, never the one that is
trained on later. 3. Bad habits, the commonest of which is to guess without searching. Reinforcement learning
is left to find out when to search, how often and what for; it does not discover copying.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from scripts.demo_play import Habits, Segment, demonstrate, exact_match, play
from scripts.demo_tokenizer import END, IDS, PAD, VOCABULARY
from scripts.demo_world import Chain, World, make_world


Report = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """The model's shape and its cold start; every value is part of the cache's key."""

    hidden: int = 96
    heads: int = 3  # of 32
    layers: int = 2
    feed_forward: int = 256
    max_tokens: int = 512
    rope_theta: float = 10_000.0
    initial_std: float = 0.02
    batch: int = 32
    copy_words: int = 12
    copy_lr: float = 4e-3
    copy_loss: float = 0.2
    copy_steps: int = 500  # at most
    clean_steps: int = 120
    clean_lr: float = 3e-3
    habit_steps: int = 100
    habit_lr: float = 1.5e-3
    habits: Habits = Habits(
        guess=0.55, wrong_relation=0.3, garbled=0.2, wrong_copy=0.3, skip_second=0.5
    )
    world_countries: int = 8  # of each batch's own world


def make_model(recipe: Recipe) -> Qwen2ForCausalLM:
    """A Qwen2 with tied embeddings in fp32, from torch's current seed."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(VOCABULARY),
            hidden_size=recipe.hidden,
            intermediate_size=recipe.feed_forward,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=recipe.max_tokens,
            rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
            initializer_range=recipe.initial_std,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=IDS[END],
            pad_token_id=IDS[PAD],
            dtype="float32",
        )
    )


def copying(model: PreTrainedModel, recipe: Recipe, rng: random.Random, report: Report) -> None:
    """Teach it to repeat what it has seen: loss on the second half of a row said twice."""
    optimiser = _adamw(model, recipe.copy_lr)
    words = range(len(IDS) - 150, len(IDS))
    for step in range(1, recipe.copy_steps + 1):
        rows = [[rng.choice(words) for _ in range(recipe.copy_words)] for _ in range(recipe.batch)]
        loss = _step(model, optimiser, [[(row, False), (row, True)] for row in rows])
        if step % 50 == 0 or loss < recipe.copy_loss:
            report(f"copying: step {step}, loss {loss:.2f}")
        if loss < recipe.copy_loss:
            return


def imitate(model, recipe, habits, steps, lr, name, rng, report) -> None:
    optimiser = _adamw(model, lr)
    for step in range(1, steps + 1):
        world = make_world(rng.getrandbits(63), recipe.world_countries)
        chains = rng.sample(world.chains(1), recipe.batch // 2) + rng.sample(world.chains(2), recipe.batch // 2)
        loss = _step(model, optimiser, [demonstrate(c, world.index, habits, rng) for c in chains])
        if step % 40 == 0 or step == steps:
            report(f"{name}: step {step}, loss {loss:.2f}")


def _adamw(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)


def _step(model, optimiser, rows: Sequence[Sequence[Segment]]) -> float:
    width = max(sum(len(tokens) for tokens, _ in row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    trained = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        tokens = [token for segment, _ in row for token in segment]
        mask = [own for segment, own in row for _ in segment]
        ids[number, : len(tokens)] = torch.tensor(tokens)
        trained[number, : len(mask)] = torch.tensor(mask)
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state[trained[:, 1:]]
    loss = functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][trained[:, 1:]])
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss.item()
