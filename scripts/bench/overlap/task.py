"""The task of `forage bench overlap`: the demo's, with a deeper model and fewer questions.

The demo's start mostly guesses; some clean demonstrations make it search as it does after training.
Then it gets silent layers,
whose output projections are zero: it says exactly what it said, and a token costs so much that the
engine, not our processes around it, is what there is to wait for. No two of the questions lead to
the same fact, so that rollouts in flight ask different things and nobody shares a search.
"""

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from replay.trajectory import Question
from scripts.demo.play import Habits
from scripts.demo.start import Recipe, Trainer
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
    """The same function in `layers` layers: those beyond its own add zero to what they are given.

    Raises ValueError for fewer layers than it has.
    """
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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = deepened(taught(demo, report), layers)
    finally:
        torch.set_num_threads(threads)
    draft = folder.with_name(f".making-{folder.name}")
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    save_tokenizer(draft, Recipe().max_tokens)
    draft.rename(folder)
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
