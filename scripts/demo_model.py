"""The demo's starting policy: a small Qwen2 made from scratch that has the skill and a bad habit.

1. Copying: spans of a row of random tokens said again. 2. Clean demonstrations, a fresh world per batch, never the one
that is trained on later. 3. Bad habits, the commonest of which is to guess without searching. Reinforcement
learning is left to find out when to search, how often and what for; it does not discover copying, nor reading.

Two layers find copying by content, and the passage that was asked for, only after a long plateau, so the first layer's
heads start out looking a fixed number of tokens back (through the biases of queries and keys): at the previous token
while copying is learnt, then also from a passage's last name to its relation and from an answer to the query.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from scripts.demo_play import Habits, Segment, demonstrate
from scripts.demo_tokenizer import END, IDS, PAD, VOCABULARY
from scripts.demo_world import make_world

Report = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """The model's shape and its cold start."""

    hidden: int = 96
    heads: int = 3  # of 32
    layers: int = 2
    feed_forward: int = 256
    max_tokens: int = 512
    rope_theta: float = 10_000.0
    look_strength: float = 4.0
    look_copying: tuple[int, ...] = (1, 1, 1)
    look_reading: tuple[int, ...] = (0, 5, 34)  # 0: as it is; 34: answer → query, across three passages
    warmup_steps: int = 20
    copy_rows: int = 24
    copy_lr: float = 4e-3
    copy_loss: float = 0.35
    copy_steps: int = 700  # at most
    batch: int = 24
    rehearsal_rows: int = 6  # of copying, beside the demonstrations
    one_hop_steps: int = 140
    clean_steps: int = 160
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
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=IDS[END],
            pad_token_id=IDS[PAD],
            dtype="float32",
        )
    )


def cold_start(model: Qwen2ForCausalLM, recipe: Recipe, seed: int, report: Report) -> None:
    """Train `model` in place: copying, clean demonstrations, bad habits."""
    rng = random.Random(seed)
    trainer = Trainer(model, recipe, rng, report)
    look_back(model, recipe.look_copying, recipe.look_strength)
    trainer.copying()
    look_back(model, recipe.look_reading, recipe.look_strength)
    trainer.imitate("one search", Habits(), recipe.one_hop_steps, recipe.clean_lr, (1,))
    trainer.imitate("one and two", Habits(), recipe.clean_steps, recipe.clean_lr)
    trainer.imitate("bad habits", recipe.habits, recipe.habit_steps, recipe.habit_lr)


@torch.no_grad()
def look_back(model: Qwen2ForCausalLM, offsets: Sequence[int], strength: float) -> None:
    """Make each first-layer head attend `offset` tokens back, whatever stands there; 0 leaves a head alone.

    Rotary embeddings turn a constant query and a constant key into a function of their distance, which peaks
    where the key's phase says.
    """
    attention = model.model.layers[0].self_attn
    size = attention.head_dim
    theta = model.config.rope_parameters["rope_theta"]
    frequencies = theta ** (-torch.arange(0, size, 2) / size)
    for head, offset in enumerate(offsets):
        if offset:
            ones, rows = torch.ones(size // 2), slice(head * size, (head + 1) * size)
            phases = offset * frequencies
            attention.q_proj.bias[rows] = strength * torch.cat([ones, 0 * ones])
            attention.k_proj.bias[rows] = strength * torch.cat([phases.cos(), phases.sin()])


class Trainer:
    """Next-token training on rows of segments, loss on the policy's own tokens only."""

    def __init__(
        self, model: Qwen2ForCausalLM, recipe: Recipe, rng: random.Random, report: Report
    ) -> None:
        self._model, self._recipe, self._rng = model, recipe, rng
        self._report, self._started = report, time.monotonic()
        self._optimiser = torch.optim.AdamW(
            model.parameters(), betas=(0.9, 0.98), weight_decay=0.0
        )

    def copying(self) -> None:
        """Until the loss is low enough, or the steps run out."""
        recipe = self._recipe
        for step in range(1, recipe.copy_steps + 1):
            rows = [copy_row(self._rng) for _ in range(recipe.copy_rows)]
            loss = self._step(rows, recipe.copy_lr, step)
            if step % 100 == 0 or loss < recipe.copy_loss:
                self._tell("copying", step, loss)
            if loss < recipe.copy_loss:
                return

    def imitate(self, name: str, habits: Habits, steps: int, lr: float, kinds: Sequence[int] = (1, 2)) -> None:
        """Follow demonstrators with these habits through fresh worlds, each kind of question equally often."""
        recipe, rng = self._recipe, self._rng
        for step in range(1, steps + 1):
            world = make_world(rng.getrandbits(63), recipe.world_countries)
            share = recipe.batch // len(kinds)
            chains = [chain for hops in kinds for chain in rng.sample(world.chains(hops), share)]
            rows = [demonstrate(chain, world.index, habits, rng) for chain in chains]
            rows += [copy_row(rng) for _ in range(recipe.rehearsal_rows)]
            loss = self._step(rows, lr, step)
            if step % 100 == 0 or step == steps:
                self._tell(name, step, loss)

    def _tell(self, name: str, step: int, loss: float) -> None:
        elapsed = time.monotonic() - self._started
        self._report(f"cold start {elapsed:5.1f} s: {name}, step {step}, loss {loss:.2f}")

    def _step(self, rows: Sequence[Sequence[Segment]], lr: float, step: int) -> float:
        ids, trained = collate(rows)
        for group in self._optimiser.param_groups:
            group["lr"] = lr * min(1.0, step / self._recipe.warmup_steps)
        hidden = self._model.model(input_ids=ids[:, :-1]).last_hidden_state
        logits = self._model.lm_head(hidden[trained[:, 1:]])
        loss = functional.cross_entropy(logits, ids[:, 1:][trained[:, 1:]])
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimiser.step()
        return loss.item()


def copy_row(rng: random.Random) -> list[Segment]:
    """Twenty different tokens, then seven spans of four from among them; the first of each span is given."""
    row = rng.sample(range(3, len(IDS)), 20)
    segments: list[Segment] = [(row, False)]
    for _ in range(7):
        start = rng.randrange(len(row) - 3)
        segments += [(row[start : start + 1], False), (row[start + 1 : start + 4], True)]
    return segments


def collate(rows: Sequence[Sequence[Segment]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int64[B, T], padded on the right, and which of them the policy writes, bool[B, T]."""
    width = max(sum(len(tokens) for tokens, _ in row) for row in rows)
    ids = torch.full((len(rows), width), IDS[PAD])
    trained = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        tokens = [token for segment, _ in row for token in segment]
        ids[number, : len(tokens)] = torch.tensor(tokens)
        own = [mine for segment, mine in row for _ in segment]
        trained[number, : len(own)] = torch.tensor(own)
    return ids, trained
