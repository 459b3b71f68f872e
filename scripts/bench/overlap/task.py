"""The task of `forage bench overlap`: the demo's, with a deeper model and fewer questions.

Some clean demonstrations make the demo's start search as it does after training. Then it gets
silent layers, whose output projections are zero: it says exactly what it said, and a token costs so
much that the engine is what there is to wait for. No two of the questions lead to the same fact, so
that nobody shares a search.
"""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from configs.runtime.files import making
from replay.trajectory import Question
from scripts.demo.play import Habits
from scripts.demo.start import Recipe, Trainer, one_thread
from scripts.demo.task import COUNTRIES
from scripts.demo.tokenizer import save_tokenizer
from scripts.demo.world import Chain, Fact, balanced_chains, make_world

CLEAN_STEPS, CLEAN_LR = 50, 1e-3


def taught(folder: Path, report: Callable[[str], None]) -> LlamaForCausalLM:
    """The model in `folder` after CLEAN_STEPS of imitating whoever searches for every hop."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = Trainer(model, Recipe(), random.Random(0), report)
    trainer.imitate("clean demonstrations", Habits(), CLEAN_STEPS, CLEAN_LR)
    return model


@torch.no_grad()  # type: ignore[untyped-decorator]
def deepened(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """The same function in more layers, which add zero. Raises ValueError for fewer."""
    own = model.config.num_hidden_layers
    if layers < own:
        raise ValueError(f"layers = {layers!r}: the model has {own} of its own")
    config = LlamaConfig(**(model.config.to_dict() | {"num_hidden_layers": layers}))
    deep = LlamaForCausalLM(config).float()
    deep.load_state_dict(model.state_dict(), strict=False)
    deep.tie_weights()
    for layer in deep.model.layers[own:]:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            for parameter in projection.parameters():
                parameter.zero_()
    return deep


def prepare_model(demo: Path, layers: int, report: Callable[[str], None]) -> Path:
    """The folder of the demo's model in `demo`, taught and deepened; made where it is missing."""
    folder = demo.parent / f"overlap-{layers}-{CLEAN_STEPS}"
    if folder.is_dir():
        return folder
    with one_thread():
        model = deepened(taught(demo, report), layers)
    with making(folder, durable=False) as draft:
        model.save_pretrained(draft)
        save_tokenizer(draft, Recipe().max_tokens)
    return folder


def questions(seed: int) -> tuple[Question, ...]:
    """Questions of the demo's world of that seed, in turn of one hop and of two."""
    used: set[Fact] = set()
    chosen: dict[int, list[Chain]] = {1: [], 2: []}
    for chain in balanced_chains(make_world(seed, COUNTRIES), seed):
        if used.isdisjoint(chain.facts):
            used.update(chain.facts)
            chosen[chain.hops].append(chain)
    pairs = zip(chosen[1], chosen[2], strict=False)
    return tuple(
        Question(f"q{number}", chain.question, (chain.answer,), chain.hops)
        for number, chain in enumerate(itertools.chain.from_iterable(pairs))
    )
