"""No baseline is told to call a search engine, and no prompt that a user meant is changed."""

import json

import pytest

from configs.load import ConfigError, parse
from configs.prompts import SEARCH_R1_PROMPT
from scripts.fitting_prompt import with_fitting_prompt
from scripts.overrides import without_section

TAGGED = "Search by <search> and </search>. Question: {question}"


def prompt_of(prompt: str, *overrides: str, own: str = "{name: search_r1}") -> str:
    """What a run that recorded `prompt` is prompted by with these overrides."""
    text = f"questions: {{prompt: {json.dumps(prompt)}}}\nenvironment: {own}\n"
    recorded = parse(text, without_section(overrides, "environment"), "test")
    config = parse(text, overrides, "test")
    return with_fitting_prompt(config, recorded, overrides).questions.prompt


@pytest.mark.parametrize("name", ["search_r1", "no_search", "rag", "tool_call"])
def test_the_default_spelt_out_is_each_environments_own(name: str) -> None:
    assert prompt_of(SEARCH_R1_PROMPT, f"environment.name={name}") == ""


def test_a_run_is_prompted_as_it_was_trained() -> None:
    told = "{name: search_r1, tell_budget: true}"  # the environment's own prompt would say more
    assert prompt_of(SEARCH_R1_PROMPT, own=told) == SEARCH_R1_PROMPT
    assert prompt_of(TAGGED) == TAGGED


@pytest.mark.parametrize("prompt", ["{question}", "Answer: {question}"])
def test_a_neutral_prompt_is_for_all(prompt: str) -> None:
    assert prompt_of(prompt, "environment.name=no_search") == prompt


def test_what_is_given_on_the_command_line_is_meant() -> None:
    given = f"questions.prompt={TAGGED!r}"
    assert prompt_of("{question}", given, "environment.name=rag") == TAGGED
    assert prompt_of(TAGGED, "questions.prompt=", "environment.name=rag") == ""


@pytest.mark.parametrize(
    ("prompt", "own", "name", "mark"),
    [
        (TAGGED, "search_r1", "no_search", "<search>"),
        (f"{{question}} {'x' * 999} <tool_call>", "tool_call", "search_r1", "<tool_call>"),
        ("{question} {passages}", "rag", "no_search", "{passages}"),
    ],
)
def test_a_prompt_of_one_environment_is_refused_to_others(
    prompt: str, own: str, name: str, mark: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        prompt_of(prompt, f"environment.name={name}", own=f"{{name: {own}}}")
    said = str(raised.value)
    assert said.startswith(f"questions.prompt = '{prompt[:60]}") and len(said) < 320
    assert f"environment.name = '{own}' (it has {mark})" in said and "questions.prompt=" in said
