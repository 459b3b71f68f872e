"""A task for a small Qwen2 whose tags are several tokens: its tokenizer, its cold start, its files.

The model learns by heart to search or to answer, whatever it is asked: so any prompt will do, some
answers are right by chance, and groups have signal.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.prompts import SEARCH_R1_CORRECTION
from tests.byte_level import QWEN_TEMPLATE, make_qwen_tokenizer

MAYORS = ("kelu", "bora", "tane", "miro")
PLACES = ("bore", "sanu", "lima", "tuvo", "keda", "rilo", "pasa", "noma")
CONFIG = """\
model: {dtype: float32, max_model_len: 1024}
questions: {prompt: "{question}"}
actors:
  count: 1
  rollouts_in_flight: 16
  max_num_seqs: 16
  max_turns: 2
  max_action_tokens: 48
  max_passage_tokens: 40
  kv_cache_bytes: 268435456
replay: {groups_per_step: 4, group_size: 4}
weight_sync: {probe_tolerance: 2.0e-4}
learner: {total_steps: 20, eval_every: 20, checkpoint_every: 20, lr: 5.0e-4, warmup_steps: 2}
"""
_STEPS, _ROWS, _LR = 140, 12, 3e-3
_ASKED = "<|im_end|>\n<|im_start|>assistant\n"
_ANSWERED = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response>" + _ASKED


@dataclass(frozen=True)
class Task:
    """The folder of the model, and a run's other files."""

    model: Path
    config: Path
    train: Path
    eval: Path
    corpus: Path

    @property
    def overrides(self) -> list[str]:
        """What a run on this task is told."""
        return [
            f"model.path={self.model}",
            f"questions.train={self.train}",
            f"questions.eval={self.eval}",
            f"retrieval.corpus={self.corpus}",
        ]


def make_task(folder: Path) -> Task:
    """Make tokenizer, model and files, in about half a minute."""
    names = ("model", "config.yaml", "train.jsonl", "eval.jsonl", "corpus.jsonl")
    task = Task(*(folder / name for name in names))
    chance = random.Random(0)
    facts = {place: chance.choice(MAYORS) for place in PLACES}
    tokenizer = make_qwen_tokenizer(_texts(), 900)
    _cold_start(tokenizer, task.model)
    task.config.write_text(CONFIG)
    questions = [
        {"id": place, "question": _question(place), "answers": [mayor]}
        for place, mayor in facts.items()
    ]
    unusable = {"question": "who is nobody's mayor?", "answers": []}
    _write(task.train, [unusable, *questions])
    _write(task.eval, questions)
    _write(task.corpus, [{"id": p, "contents": _passage(p, m)} for p, m in facts.items()])
    return task


def _question(place: str) -> str:
    return f"who is the mayor of {place}?"


def _passage(place: str, mayor: str) -> str:
    return f"mayor of {place}\nthe mayor of {place} is {mayor}."


def _call(place: str) -> str:
    arguments = {"query_list": [f"mayor of {place}"]}
    return f"<tool_call>\n{json.dumps({'name': 'search', 'arguments': arguments})}\n</tool_call>"


def _texts() -> Iterator[str]:
    """What the tokenizer is trained on."""
    yield from (QWEN_TEMPLATE, SEARCH_R1_CORRECTION)
    for place in PLACES:
        for mayor in MAYORS:
            seen = _passage(place, mayor)
            yield f"{_question(place)}\n<answer> {mayor} </answer>\n<search> {place} </search>"
            yield f"{_call(place)}\n\n<information>Doc 1(Title: {seen})</information>\n\n"


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _conversation(chance: random.Random) -> Iterator[tuple[str, bool]]:
    """A question and up to two searches before an answer, in pieces: whether the policy says each.

    The tag searches are searches of `search_r1`, the calls of `tool_call`; each is answered as its
    environment does, or by a correction.
    """
    yield f"{_question(chance.choice(PLACES))}{_ASKED}", False
    for _ in range(chance.randrange(3)):
        place, mayor = chance.choice(PLACES), chance.choice(MAYORS)
        seen = f"Doc 1(Title: {_passage(place, mayor)})"
        if chance.random() < 0.4:
            yield f"<search> mayor of {place} </search>", True
            shown = f"\n\n<information>{seen}</information>\n\n"
            yield chance.choice((shown, SEARCH_R1_CORRECTION)), False
        else:
            yield f"{_call(place)}<|im_end|>", True
            yield _ANSWERED.format(seen), False
    yield f"<answer> {chance.choice(MAYORS)} </answer><|im_end|>", True


def _row(tokenizer: Any, chance: random.Random) -> tuple[list[int], list[int]]:
    """Ids and labels: a conversation behind ids without meaning, in place of any system message."""
    ids = [chance.randrange(len(tokenizer)) for _ in range(chance.randrange(90))]
    labels = [-100] * len(ids)
    for text, said in _conversation(chance):
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        labels += piece if said else [-100] * len(piece)
    return ids, labels


def _cold_start(tokenizer: Any, folder: Path) -> None:
    """Train a Qwen2 (hidden 96, 3 heads of 32, 2 layers, tied, float32) on such rows; save both."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    model, chance = _make_model(tokenizer), random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.0)
    for _ in range(_STEPS):
        rows = [_row(tokenizer, chance) for _ in range(_ROWS)]
        ids, labels = (
            pad_sequence([torch.tensor(row[n]) for row in rows], True, value)
            for n, value in ((0, tokenizer.pad_token_id), (1, -100))
        )
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_model(tokenizer: Any) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config).float()
