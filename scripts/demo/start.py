"""The demo's starting policy: a small Llama made from scratch that has the skill and a bad habit.

1. Copying: spans of a row of random tokens said again. 2. Clean demonstrations, a fresh world per
batch, never the one that is trained on later, until it answers well. 3. Bad habits, the commonest
of which is to guess without searching: reinforcement learning is left to find out when to search,
how often and what for; it discovers neither copying nor reading. Copying by content has a long
plateau before it is found, so the first layer's heads start out looking at the previous token
(through the biases of queries and keys).
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learner.batch import TrainingBatch
from learner.imitation import TEMPERATURE, Segment, imitate, lay_out
from learner.model.head import ChunkLoss
from learner.model.scorer import TokenScores, score_logits
from learner.packing import MicroBatch, pad
from scripts.demo.errors import ColdStartFailed
from scripts.demo.play import Habits, demonstrate, exact_match, play
from scripts.demo.tokenizer import END, IDS, PAD, VOCABULARY
from scripts.demo.world import Chain, World, make_world

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
    look_back: tuple[int, ...] = (1, 1, 1)
    look_strength: float = 4.0
    warmup_steps: int = 20
    copy_rows: int = 24
    copy_lr: float = 4e-3
    copy_loss: float = 0.1
    copy_steps: int = 700  # at most
    batch: int = 24
    rehearsal_rows: int = 6  # of copying, beside the demonstrations
    clean_steps: int = 1000  # at most
    clean_lr: float = 3e-3
    clean_em: float = 0.7  # sampled, for each number of hops: then it has the skill
    habit_steps: int = 240  # at most
    habit_lr: float = 1.0e-3
    habits: Habits = Habits(  # noqa: RUF009 - frozen
        guess=0.6, wrong_relation=0.2, garbled=0.1, wrong_copy=0.15, skip_second=0.4
    )
    sampled_em: tuple[float, float] = (0.05, 0.3)  # of the start; below 0.02 there is no signal
    greedy_em: float = 0.2  # of the start, at most
    world_countries: int = 8  # of each batch's own world


@contextmanager
def one_thread() -> Iterator[None]:
    """Hold torch to one thread: two spin against each other on a small machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def make_model(recipe: Recipe) -> LlamaForCausalLM:
    """A Llama with biases and tied embeddings in fp32, from torch's current seed. Not a Qwen2:
    transformers replaces the tokenizer beside one by Qwen's, whatever its own is.
    """
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=recipe.hidden,
            intermediate_size=recipe.feed_forward,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=recipe.max_tokens,
            rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
            tie_word_embeddings=True,
            attention_bias=True,
            bos_token_id=None,
            eos_token_id=IDS[END],
            pad_token_id=IDS[PAD],
            dtype="float32",
        )
    )


def cold_start(
    recipe: Recipe, seed: int, world: World, held_out: Sequence[Chain], report: Report
) -> LlamaForCausalLM:
    """Make and train a start, gated on `held_out` of `world`. Raises ColdStartFailed."""
    torch.manual_seed(seed)
    trainer = Trainer(make_model(recipe), recipe, random.Random(seed), report)
    look_back(trainer.model, recipe.look_back, recipe.look_strength)
    trainer.copying()
    _until_clean(trainer, make_world(seed + 1_000_003, 12), seed)
    _until_spoilt(trainer, world, held_out, seed)
    return trainer.model


def _until_clean(trainer: "Trainer", practice: World, seed: int) -> None:
    recipe = trainer.recipe
    questions = [chain for hops in (1, 2) for chain in practice.chains(hops)[:60]]
    for step in range(0, recipe.clean_steps, 50):
        trainer.imitate("clean demonstrations", Habits(), 50, recipe.clean_lr, step)
        plays = play(trainer.model, questions, practice.index, 1.0, seed)
        if min(exact_match(plays, 1), exact_match(plays, 2)) >= recipe.clean_em:
            return
    raise ColdStartFailed(f"the skill was not there after {recipe.clean_steps} clean steps")


def _until_spoilt(trainer: "Trainer", world: World, held_out: Sequence[Chain], seed: int) -> None:
    recipe = trainer.recipe
    low, high = recipe.sampled_em
    for step in range(0, recipe.habit_steps, 20):
        trainer.imitate("bad habits", recipe.habits, 20, recipe.habit_lr, step)
        greedy, sampled = (
            exact_match(play(trainer.model, held_out, world.index, temperature, seed))
            for temperature in (0.0, 1.0)
        )
        trainer.tell(f"bad habits, step {step + 20}: EM {greedy:.2f} greedy, {sampled:.2f} sampled")
        if step >= 40 and greedy <= recipe.greedy_em and low <= sampled <= high:
            return
    raise ColdStartFailed(
        f"sampled EM was not in {low}..{high} with greedy EM ≤ {recipe.greedy_em} within "
        f"{recipe.habit_steps} steps of bad habits"
    )


@torch.no_grad()  # type: ignore[untyped-decorator]
def look_back(model: LlamaForCausalLM, offsets: Sequence[int], strength: float) -> None:
    """Make each first-layer head attend `offset` tokens back, whatever stands there; 0: as it is.
    Rotary embeddings turn a constant query and a constant key into a function of their distance,
    which peaks where the key's phase says.
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
        self, model: LlamaForCausalLM, recipe: Recipe, rng: random.Random, report: Report
    ) -> None:
        self.model, self.recipe = model, recipe
        self._rng, self._report, self._started = rng, report, time.monotonic()
        self._engine, self._steps = PlainEngine(model), 0

    def copying(self) -> None:
        """Until the loss is low enough, or the steps run out."""
        recipe = self.recipe
        for step in range(1, recipe.copy_steps + 1):
            rows = [copy_row(self._rng) for _ in range(recipe.copy_rows)]
            loss = self._step(rows, recipe.copy_lr * min(1.0, step / recipe.warmup_steps))
            if step % 100 == 0 or loss < recipe.copy_loss:
                self.tell(f"copying, step {step}, loss {loss:.2f}")
            if loss < recipe.copy_loss:
                return

    def imitate(self, name: str, habits: Habits, steps: int, lr: float, done: int = 0) -> None:
        """Follow demonstrators with these habits through fresh worlds, half one hop, half two."""
        recipe, rng = self.recipe, self._rng
        loss = 0.0
        for step in range(1, steps + 1):
            world = make_world(rng.getrandbits(63), recipe.world_countries)
            share = recipe.batch // 2
            chains = [chain for hops in (1, 2) for chain in rng.sample(world.chains(hops), share)]
            rows = [demonstrate(chain, world.index, habits, rng) for chain in chains]
            rows += [copy_row(rng) for _ in range(recipe.rehearsal_rows)]
            loss = self._step(rows, lr * min(1.0, (done + step) / recipe.warmup_steps))
        if (done + steps) % 100 == 0:
            self.tell(f"{name}, step {done + steps}, loss {loss:.2f}")

    def tell(self, what: str) -> None:
        """Report one line with the seconds so far."""
        self._report(f"cold start {time.monotonic() - self._started:5.1f} s: {what}")

    def _step(self, rows: Sequence[Sequence[Segment]], lr: float) -> float:
        self._steps += 1
        whole = pad(range(len(rows)), lay_out(rows))  # one micro-batch, in this order
        share = TrainingBatch(self._steps, TEMPERATURE, (whole,), {})
        return imitate(self._engine, share, lr)["learner/loss"]


class PlainEngine:
    """The engine of the learner's supervised steps here: the same loss on the same tokens, in plain
    torch. A model of 240,000 parameters needs no sharding, its logits fit whole, and this process
    becomes the launcher: DeepSpeed's start and the process group that it leaves behind are not for
    it.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.device, self._model = torch.device("cpu"), model
        self._optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)

    def accumulate(self, micro: MicroBatch, temperature: float, loss: ChunkLoss) -> TokenScores:
        """Add the loss's gradient; the scores it was made from, attached no more."""
        scores = self._scores(micro, temperature)
        loss(scores.logprobs, slice(None)).backward()
        return TokenScores(scores.logprobs.detach(), scores.entropy)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def score(self, micro: MicroBatch, temperature: float) -> TokenScores:
        """Log-probs and entropies of the trained tokens."""
        return self._scores(micro, temperature)

    def step(self, lr: float) -> float:
        """Clip, step, clear; the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for group in self._optimiser.param_groups:
            group["lr"] = lr
        self._optimiser.step()
        self._optimiser.zero_grad()
        return float(norm)

    def total(self, values: Sequence[float]) -> list[float]:
        """There is one rank."""
        return list(values)

    def _scores(self, micro: MicroBatch, temperature: float) -> TokenScores:
        tokens, predicts = micro.tokens, micro.loss_mask[:, 1:]  # position t − 1 predicts token t
        hidden = self._model.model(input_ids=tokens[:, :-1]).last_hidden_state
        logits = self._model.lm_head(hidden[predicts])
        return score_logits(logits, tokens[:, 1:][predicts], temperature)


def copy_row(rng: random.Random) -> list[Segment]:
    """Twenty different tokens, then seven spans of four of them; the first of each is given."""
    row = rng.sample(range(3, len(IDS)), 20)
    segments: list[Segment] = [(row, False)]
    for _ in range(7):
        start = rng.randrange(len(row) - 3)
        segments += [(row[start : start + 1], False), (row[start + 1 : start + 4], True)]
    return segments
