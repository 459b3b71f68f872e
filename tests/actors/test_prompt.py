"""Text to tokens: questions, observations that keep their tags, and back; the end tokens."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from actors.prompt import (
    Prompter,
    end_tokens,
    load_tokenizer,
    single_token_ids,
    tokenizer_digest,
)
from actors.rewards.scorer import Rewards
from actors.rollout import rollout
from configs.load import ConfigError
from configs.prompts import SEARCH_R1_PROMPT
from configs.rewards import RewardsConfig, RewardWeights
from configs.schema import ActorsConfig, QuestionsConfig
from replay.trajectory import Question
from retrieval_server.protocol import Passage

PASSAGES = [Passage("1", '"Bore"\nmayor kelu', 1.0), Passage("2", "bore is the mayor", 0.5)]


def prompter(tokenizer: Any, **actors: Any) -> Prompter:
    return Prompter(tokenizer, QuestionsConfig(), ActorsConfig(**actors))


def test_the_question_stands_in_search_r1s_prompt(bpe_tokenizer: Any) -> None:
    made, asked = prompter(bpe_tokenizer), Question("q", "  who is it", ("x",))
    text = made.decode(made.question(asked, question_mark=True))
    assert text.endswith("Question: who is it?\n") and text.startswith("Answer the given question.")


def test_another_prompt_has_the_question_as_it_is_written(bpe_tokenizer: Any) -> None:
    asked = Question("q", " Compute 1+1. ", ("2",))
    made = prompter(bpe_tokenizer)
    assert made.decode(made.question(asked, "Task: {question}")) == "Task: Compute 1+1."
    own = Prompter(bpe_tokenizer, QuestionsConfig(prompt="{question}"), ActorsConfig())
    assert own.decode(own.question(asked, question_mark=True)) == "Compute 1+1."


@pytest.mark.parametrize("prompt", ["", SEARCH_R1_PROMPT])
def test_what_was_once_the_default_is_nobodys_own_prompt(bpe_tokenizer: Any, prompt: str) -> None:
    made = Prompter(bpe_tokenizer, QuestionsConfig(prompt=prompt), ActorsConfig())
    asked = Question("q", "who?", ())
    assert made.decode(made.question(asked, "Rag: {question}")) == "Rag: who?"
    assert made.decode(made.question(asked)).startswith("Answer the given question.")


def test_a_chat_template_is_applied_when_there_is_one(bpe_tokenizer: Any) -> None:
    bpe_tokenizer.chat_template = "[U]{{ messages[0]['content'] }}[A]"
    try:
        made = prompter(bpe_tokenizer)
        text = made.decode(made.question(Question("q", "who?", ("x",))))
    finally:
        bpe_tokenizer.chat_template = None
    assert text.startswith("[U]Answer") and text.endswith("who?\n[A]")


def test_an_observation_reads_as_search_r1s(bpe_tokenizer: Any) -> None:
    made = prompter(bpe_tokenizer)
    expected = (
        "\n\n<information>Doc 1(Title: Bore) mayor kelu\n"
        "Doc 2(Title: ) bore is the mayor</information>\n\n"
    )
    assert made.decode(made.observation(PASSAGES)) == expected


@pytest.mark.parametrize("limit", [1, 3, 5])
def test_long_passages_are_cut_one_by_one_and_the_tags_survive(
    bpe_tokenizer: Any, limit: int
) -> None:
    made = prompter(bpe_tokenizer, max_passage_tokens=limit)
    long = [Passage(str(n), "t\n" + "mayor " * 400, 1.0) for n in range(3)]
    tokens = made.observation(long)
    text = made.decode(tokens)
    assert text.startswith("\n\n<information>") and text.endswith("</information>\n\n")
    assert len(tokens) == len(made.observation([])) + 3 * limit


def test_no_passages_give_the_empty_block(word_tokenizer: Any) -> None:
    made = prompter(word_tokenizer, observation_template=" <information> {passages} </information>")
    assert made.decode(made.observation([])) == "<information> </information>"


def test_braces_in_passages_and_prompts_are_text(bpe_tokenizer: Any) -> None:
    questions = QuestionsConfig(prompt="{x} {question}")
    made = Prompter(bpe_tokenizer, questions, ActorsConfig())
    assert made.decode(made.question(Question("q", "{y}?", ()))) == "{x} {y}?"
    assert "{z}" in made.decode(made.observation([Passage("1", "{z}", 1.0)]))


def test_what_was_said_has_no_end_tokens(bpe_tokenizer: Any) -> None:
    made, text = prompter(bpe_tokenizer), "<answer> é </answer>"
    end, pad = bpe_tokenizer.eos_token_id, bpe_tokenizer.pad_token_id
    ids = bpe_tokenizer.encode(text)
    assert made.said(np.asarray([*ids, end, pad], np.int32)) == text
    assert made.said(np.asarray([end, *ids], np.int32)) == f"<|end|>{text}"
    assert made.said(np.asarray([end], np.int32)) == ""


@pytest.mark.parametrize(
    ("field", "template"),
    [("passage_template", "{nothing}"), ("passage_template", "{"), ("observation_template", "x")],
)
def test_a_bad_template_is_named(word_tokenizer: Any, field: str, template: str) -> None:
    with pytest.raises(ConfigError, match=rf"actors\.{field} = '{template}"):
        prompter(word_tokenizer, **{field: template})


def test_tags_are_single_tokens_only_in_one_tokenizer(
    word_tokenizer: Any, bpe_tokenizer: Any
) -> None:
    tags = ("</search>", "</answer>")
    assert single_token_ids(word_tokenizer, tags) == word_tokenizer.convert_tokens_to_ids([*tags])
    assert single_token_ids(bpe_tokenizer, tags) is None
    assert single_token_ids(word_tokenizer, ("unheard-of",)) is None


def test_digests_tell_vocabularies_apart(word_tokenizer: Any, bpe_tokenizer: Any) -> None:
    assert tokenizer_digest(word_tokenizer) == tokenizer_digest(word_tokenizer)
    assert tokenizer_digest(word_tokenizer) != tokenizer_digest(bpe_tokenizer)


@pytest.mark.parametrize("text", ["<|end|>", "mayor <|pad|> of <|end|><|end|>", "<|en <|end|>d|>"])
def test_the_text_of_special_tokens_in_foreign_text_is_text(bpe_tokenizer: Any, text: str) -> None:
    made = prompter(bpe_tokenizer)
    special = set(bpe_tokenizer.all_special_ids)
    assert special & set(made.text(text).tolist())
    tokens = made.foreign(text)
    assert not special & set(tokens.tolist()) and made.decode(tokens) == text


def test_foreign_text_without_special_tokens_is_tokenised_as_ever(bpe_tokenizer: Any) -> None:
    made, text = prompter(bpe_tokenizer), " the mayor of <search> bore \u00e9\n"
    assert made.foreign(text).tolist() == bpe_tokenizer.encode(text)


def test_a_vocabulary_of_words_has_special_tokens_left_out_of_foreign_text(
    word_tokenizer: Any,
) -> None:
    made = prompter(word_tokenizer)
    assert made.decode(made.foreign("mayor [EOS] of [PAD] bore zzz")) == "mayor of bore [UNK]"


@pytest.mark.parametrize("text", ["mayor <|end|> of", "", "<information> a<|pad|> </information>"])
def test_an_observation_given_as_text_is_uncut_and_foreign(bpe_tokenizer: Any, text: str) -> None:
    made = prompter(bpe_tokenizer, max_passage_tokens=1)
    tokens = made.observed(text)
    assert made.decode(tokens) == text
    assert not set(bpe_tokenizer.all_special_ids) & set(tokens.tolist())


def test_an_observation_given_as_text_has_the_ends_that_the_template_writes(
    bpe_tokenizer: Any,
) -> None:
    made = prompter(bpe_tokenizer, observation_template="<|end|>{passages}<|pad|>")
    shown = made.observation([Passage("1", "kelu\nis <|end|> .", 1.0)])
    assert np.array_equal(made.observed(made.decode(shown)), shown)
    assert made.observed("<|end|> kelu").tolist() == made.foreign("<|end|> kelu").tolist()


def test_special_tokens_in_passages_are_text(bpe_tokenizer: Any) -> None:
    made = prompter(bpe_tokenizer)
    tokens = made.observation([Passage("1", "a<|end|>\nb <|end|>", 1.0)])
    assert bpe_tokenizer.eos_token_id not in tokens.tolist()
    assert "Doc 1(Title: a<|end|>) b <|end|></information>" in made.decode(tokens)


def test_all_end_tokens_of_a_model_folder_are_known(
    stage: Any, config_for: Any, tmp_path: Path
) -> None:
    prompter, own = stage.prompter(config_for()), stage.tokenizer.eos_token_id
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 70, "text_config": None}))
    assert end_tokens(prompter, str(tmp_path)) == {own, 70}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [70, 90]}))
    assert end_tokens(prompter, str(tmp_path)) == {own, 70, 90}
    assert end_tokens(prompter, "") == {own}


async def test_the_models_own_end_token_is_no_fault_of_form(
    stage: Any, bpe_tokenizer: Any, scripted: Any, config_for: Any, lease_for: Any, tmp_path: Path
) -> None:
    end = bpe_tokenizer.encode("!")  # whatever the model's folder says
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    weights = RewardWeights(em=0.0, format=1.0)
    config = config_for(rewards=RewardsConfig(weights=weights), max_action_tokens=60)
    config = replace(config, model=replace(config.model, path=str(tmp_path), max_model_len=900))
    stage.tokenizer = bpe_tokenizer
    trajectory = await rollout(
        lease_for(),
        policy=scripted(bpe_tokenizer, ["<think>t</think><answer>kelu</answer>!"]),
        retriever=stage.retriever,
        prompter=stage.prompter(config),
        rewards=Rewards.open(config),
        config=config,
        actor_id="actor-0",
    )
    assert trajectory.reward == 1.0 and len(end) == 1


LOADED = """
import sys
from actors.prompt import load_tokenizer, tokenizer_digest
print(tokenizer_digest(load_tokenizer(sys.argv[1])), "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("family", "torch"), [("llama", False), pytest.param("qwen2", True, marks=pytest.mark.slow)]
)
def test_a_llamas_plain_tokenizer_is_the_one_that_auto_chooses_and_needs_no_torch(
    family: str, torch: bool, word_tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    word_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    chosen, own = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))
    assert type(own) is type(chosen) and own.init_kwargs.keys() == chosen.init_kwargs.keys()
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [tokenizer_digest(chosen), str(torch)]
