"""The demo's world, tokenizer and demonstrations: what they promise to the rest of the system."""

import copy
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM

from actors.prompt import Prompter
from configs.load import load
from configs.runtime.process import REPOSITORY
from learner.imitation import Segment
from learner.packing import padded_width
from retrieval_server.protocol import Passage
from scripts.demo.play import MAX_ACTION_TOKENS, Habits, demonstrate, observation
from scripts.demo.start import Recipe, Trainer, copy_row, make_model
from scripts.demo.tokenizer import IDS, PAD, TAGS, VOCABULARY, decode, encode, save_tokenizer
from scripts.demo.world import all_chains, balanced_chains, make_world, split


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of the demo's shape, untrained."""
    path = tmp_path_factory.mktemp("model")
    make_model(Recipe()).save_pretrained(path)
    save_tokenizer(path, 512)
    return path


def test_held_out_questions_name_nothing_that_training_asks_about() -> None:
    train, held_out = split(make_world(0, 24), 0.25, 0)
    asked = {fact.subject for chain in balanced_chains(train, 0) for fact in chain.facts}
    kept = {fact.subject for chain in balanced_chains(held_out, 0) for fact in chain.facts}
    assert kept and asked and not kept & asked


def test_any_even_prefix_is_half_one_hop_and_half_two() -> None:
    chains = balanced_chains(make_world(0, 12), 0)
    for count in (2, 10, 40):
        assert sum(chain.hops == 1 for chain in chains[:count]) == count // 2


def test_every_held_out_question_is_there_once_and_the_balanced_ones_come_first() -> None:
    _, held_out = split(make_world(0, 120), 0.25, 0)
    chains, balanced = all_chains(held_out, 0), balanced_chains(held_out, 0)
    assert chains[: len(balanced)] == balanced and len(set(chains)) == len(chains) == 630
    assert sum(chain.hops == 1 for chain in chains) == 360


def test_the_saved_tokenizer_is_the_one_that_auto_loading_gives(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "what is the mayor of the capital of xanu ? <search> mayor of bore </search>".replace(
        "xanu", "tanu"
    )
    assert tokenizer.encode(text) == encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(len(tokenizer.encode(tag)) == 1 for tag in TAGS)


def test_the_correction_has_no_unknown_word() -> None:
    correction = load(REPOSITORY / "configs" / "demo.yaml").actors.correction
    assert all(word in IDS for word in correction.split())


def test_demonstrations_are_the_token_stream_that_the_actors_produce(folder: Path) -> None:
    config = load(REPOSITORY / "configs" / "demo.yaml")
    prompter = Prompter(AutoTokenizer.from_pretrained(folder), config.questions, config.actors)
    facts = make_world(0, 1).facts[:3]
    passages = [Passage(str(n), fact.passage, 1.0) for n, fact in enumerate(facts)]
    shown = prompter.observation(passages).tolist()
    assert shown == observation([fact.passage for fact in facts])


def test_a_clean_demonstration_searches_once_a_hop_and_is_right() -> None:
    world = make_world(3, 6)
    for chain in world.chains(1)[:5] + world.chains(2)[:5]:
        segments = demonstrate(chain, world.index, Habits(), random.Random(0))
        own = [decode(tokens) for tokens, mine in segments if mine]
        assert sum("<search>" in text for text in own) == chain.hops
        assert own[-1].endswith(f"<answer> {chain.answer} </answer>")
        limit = load(REPOSITORY / "configs" / "demo.yaml").actors.max_action_tokens
        assert max(len(tokens) for tokens, mine in segments if mine) <= MAX_ACTION_TOKENS <= limit


def test_copy_rows_can_only_be_learnt_by_content() -> None:
    offsets = set()
    for seed in range(20):
        (row, _), (key, _), (span, mine), *_ = copy_row(random.Random(seed))
        at = row.index(key[0])
        assert mine and span == row[at + 1 : at + 4]
        offsets.add(at)
    assert len(offsets) > 5


def test_the_cold_start_s_steps_are_those_of_plain_cross_entropy_bit_for_bit() -> None:
    torch.manual_seed(0)
    trainer = Trainer(make_model(Recipe()), Recipe(), random.Random(0), print)
    plain = copy.deepcopy(trainer.model)
    optimiser = torch.optim.AdamW(plain.parameters(), 1e-3, (0.9, 0.98), weight_decay=0.0)
    world = make_world(1, 6)
    for step in range(3):
        rows = [copy_row(random.Random(step))]
        chains = world.chains(1)[:2] + world.chains(2)[:2]
        rows += [demonstrate(c, world.index, Habits(), random.Random(step)) for c in chains]
        expected = cross_entropy_step(plain, optimiser, rows)
        assert trainer._step(rows, 1e-3) == pytest.approx(expected, rel=1e-6)
    for one, other in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def cross_entropy_step(
    model: LlamaForCausalLM, optimiser: torch.optim.Optimizer, rows: list[list[Segment]]
) -> float:
    """Padded by hand, all logits of what is written at once."""
    flat = [[(token, own) for tokens, own in row for token in tokens] for row in rows]
    width = padded_width(max(map(len, flat)))
    padded = [row + [(IDS[PAD], False)] * (width - len(row)) for row in flat]
    ids = torch.tensor([[token for token, _ in row] for row in padded])
    trained = torch.tensor([[own for _, own in row] for row in padded])[:, 1:]
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state
    loss = functional.cross_entropy(model.lm_head(hidden[trained]), ids[:, 1:][trained])
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss.item()


def test_the_vocabulary_has_no_two_tokens_alike() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY) == len(IDS)


SAVED = """
import sys
from scripts.demo.start import Recipe, make_model
make_model(Recipe()).save_pretrained(sys.argv[1])
"""


def test_no_other_library_has_a_say_while_the_start_is_saved(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
