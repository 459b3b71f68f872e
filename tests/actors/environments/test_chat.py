"""A chat template's frame around tool messages: its own text exactly, or a refusal by name; and
tool calls read from text, whatever a policy may write.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.environments.base import NOTHING
from actors.environments.chat import (
    Call,
    Chat,
    begins_call,
    format_of,
    parse_calls,
    text_of,
    texts_of,
    without_thoughts,
)
from actors.environments.search_r1 import Malformed
from actors.prompt import Prompter, end_tokens
from configs.load import ConfigError
from configs.prompts import SEARCH_TOOL
from configs.schema import ActorsConfig, QuestionsConfig
from tests.actors.chats import CHATML, LLAMA, chat_tokenizer

TOOLS = [SEARCH_TOOL]
PLAIN = CHATML.replace("{% if tools %}", "{% if false %}")
LOUD = CHATML.replace("message.content + '\n</tool_response>", "message.content | upper + '\n</t>")
DEAF = CHATML.replace("'\n<tool_response>\n' + message.content", "'\n<tool_response>\n'")
STRICT = CHATML.replace("{% if message.role == 'tool' %}", "{{ message.tool_call_id.x }}{% if 0 %}")
TWICE = CHATML.replace("message.content + '<|im_end|>\n'", "message.content * 2 + '<|im_end|>\n'")
OPEN_ENDED = CHATML.replace("message.content + '<|im_end|>\n'", "message.content + '\n'")


def prompter_of(tokenizer: Any) -> Prompter:
    return Prompter(tokenizer, QuestionsConfig(), ActorsConfig(max_passage_tokens=80))


@pytest.mark.parametrize("template", [CHATML, LLAMA], ids=["chatml", "llama"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_conversation_reads_as_the_template_has_it(
    bpe_tokenizer: Any, template: str, count: int
) -> None:
    tokenizer = chat_tokenizer(bpe_tokenizer, template)
    prompter = prompter_of(tokenizer)
    chat = Chat(prompter, TOOLS, "Be brief.", "")
    said = [f'mayor "{number}"\nkelu' for number in range(count)]
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "who?"}]
    turn = prompter.text(f"I search{tokenizer.eos_token}")
    observation = chat.observation(
        turn, [("search", [prompter.foreign(chat.change(text))]) for text in said], NOTHING
    )
    messages = [{"role": "tool", "content": text} for text in said]
    whole = [*asked, {"role": "assistant", "content": "I search"}, *messages]
    begun = prompter.render(asked, TOOLS) + prompter.decode(turn) + prompter.decode(observation)
    assert begun == prompter.render(whole, TOOLS)


@pytest.mark.parametrize("template", [CHATML, LLAMA], ids=["chatml", "llama"])
def test_the_end_token_is_supplied_only_where_none_was_sampled(
    bpe_tokenizer: Any, template: str
) -> None:
    tokenizer = chat_tokenizer(bpe_tokenizer, template)
    prompter = prompter_of(tokenizer)
    chat = Chat(prompter, TOOLS, "", "")
    said = [("search", [prompter.foreign("kelu")])]
    cut = chat.observation(prompter.text("I search"), said, NOTHING)
    ended = chat.observation(prompter.text(f"I{tokenizer.eos_token}"), said, NOTHING)
    assert cut[0] == tokenizer.eos_token_id and cut[1:].tolist() == ended.tolist()
    assert ended.tolist().count(tokenizer.eos_token_id) == 1  # of the tool message itself


def test_a_template_may_name_the_tool(bpe_tokenizer: Any) -> None:
    template = CHATML.replace("'\n<tool_response>\n'", "'\n<tool_response>' + message.name + '\n'")
    prompter = prompter_of(chat_tokenizer(bpe_tokenizer, template))
    chat = Chat(prompter, TOOLS, "", "")
    said = [(name, [prompter.foreign("kelu")]) for name in ("search", "calculator")]
    text = prompter.decode(chat.observation(prompter.text("I"), said, NOTHING))
    assert "<tool_response>search\nkelu\n" in text and "<tool_response>calculator\nkelu\n" in text


def test_after_another_end_token_the_templates_own_stands(
    bpe_tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer = chat_tokenizer(bpe_tokenizer)
    other, own = tokenizer.convert_tokens_to_ids(["<|end|>", "<|im_end|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [own, other]}))
    chat = Chat(prompter_of(tokenizer), TOOLS, "", str(tmp_path))
    firsts = [
        chat.observation(np.array([7, end]), [("search", [])], NOTHING)[0] for end in (other, own)
    ]
    assert other != own and firsts[0] == own and firsts[1] != own


def test_what_follows_is_where_the_policy_goes_on(bpe_tokenizer: Any) -> None:
    prompter = prompter_of(chat_tokenizer(bpe_tokenizer))
    chat = Chat(prompter, TOOLS, "", "")
    said = [("search", [])]
    text = prompter.decode(chat.observation(prompter.text("I"), said, prompter.text("<answer>")))
    assert text.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n<answer>")


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (PLAIN, "it shows the policy no tools"),
        (LOUD, "it does not leave what tools say as it is"),
        (DEAF, "it leaves out what tools say"),
        (STRICT, "it takes no tool messages: 'dict object' has no attribute"),
        (TWICE, "it does not show the policy's turn as it is, once"),
        (OPEN_ENDED, "which ends no completion of this model"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_by_name(
    bpe_tokenizer: Any, template: str, fault: str
) -> None:
    assert template != CHATML
    prompter = prompter_of(chat_tokenizer(bpe_tokenizer, template))
    with pytest.raises(ConfigError, match=f"model.path = 'qwen': its chat template .*{fault}"):
        Chat(prompter, TOOLS, "", "qwen")


def test_a_turn_must_close_by_what_ends_a_completion(bpe_tokenizer: Any, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(bpe_tokenizer, end="<|end|>")
    prompter = prompter_of(tokenizer)
    with pytest.raises(ConfigError, match=r"closes a turn by '<\|im_end\|>'.*generation_config"):
        Chat(prompter, TOOLS, "", str(tmp_path))
    own = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [own]}))
    assert end_tokens(prompter, str(tmp_path)) == {own, tokenizer.eos_token_id}
    Chat(prompter, TOOLS, "", str(tmp_path))


def test_the_format_is_the_templates_own(bpe_tokenizer: Any) -> None:
    coder = CHATML.replace("<tool_call>", "<tool_call><function=")
    templates = {CHATML: "hermes", LLAMA: "llama3_json"}
    for template, format in templates.items():
        prompter = prompter_of(chat_tokenizer(bpe_tokenizer, template))
        assert format_of(prompter, TOOLS, "auto", "") == format
        assert format_of(prompter, TOOLS, "hermes", "") == "hermes"
    for template in (PLAIN.replace("tool_call", "call"), coder):
        prompter = prompter_of(chat_tokenizer(bpe_tokenizer, template))
        with pytest.raises(ConfigError, match=r"environment\.tool_format = 'auto': .*say hermes"):
            format_of(prompter, TOOLS, "auto", "")


SEARCH = Call("search", {"query_list": ["a", "b"]})
HERMES_CALL = (
    '<tool_call>\n{"name": "search", "arguments": {"query_list": ["a", "b"]}}\n</tool_call>'
)
LLAMA_CALL = '{"name": "search", "parameters": {"query_list": ["a", "b"]}}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (HERMES_CALL, [SEARCH]),
        (f"<think> so </think>\n{HERMES_CALL}\n{HERMES_CALL}<|im_end|>", [SEARCH, SEARCH]),
        (f"{HERMES_CALL} <tool_call>", [SEARCH]),
        ("no call", []),
        ("<tool_call>{", []),
        ("<tool_call></tool_call>", [Malformed()]),
        ("<tool_call>search</tool_call>", [Malformed()]),
        ('<tool_call>["search"]</tool_call>', [Malformed()]),
        ('<tool_call>{"name": "search"}</tool_call>', [Malformed()]),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', [Malformed()]),
        ('<tool_call>{"name": "x", "arguments": "a"}</tool_call>', [Malformed()]),
        (LLAMA_CALL, []),
        (f"<tool_call>{'[' * 9999}</tool_call>", [Malformed()]),
        (f"<tool_call>{'1' * 9999}</tool_call>", [Malformed()]),
    ],
)
def test_hermes(text: str, calls: list[Call | Malformed]) -> None:
    assert parse_calls(text, "hermes") == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (LLAMA_CALL, [SEARCH]),
        (
            f"<think> {{so}} </think> <|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}<|eot_id|>",
            [SEARCH, SEARCH],
        ),
        ('{"type": "function", "name": "x", "parameters": {}}', [Call("x", {})]),
        ('{"name": "x", "parameters": {"y": {"name": 1}}}', [Call("x", {"y": {"name": 1}})]),
        ("no call {}", []),
        ('{"name": "search", "parameters": {', [Malformed()]),
        ('{"name": "search", "arguments": {}}', [Malformed()]),
        (f'{LLAMA_CALL} {{"name": {"[" * 9999}', [SEARCH, Malformed()]),
        (HERMES_CALL, [Malformed()]),
    ],
)
def test_llama3_json(text: str, calls: list[Call | Malformed]) -> None:
    assert parse_calls(text, "llama3_json") == calls


def test_a_call_that_was_begun_is_told_from_none() -> None:
    assert begins_call("I <tool_call>{", "hermes") and not begins_call(LLAMA_CALL, "hermes")
    assert begins_call('{ "name" : "sea', "llama3_json")
    assert not begins_call("<tool_call> {name}", "llama3_json")


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("<think>a<think>b</think>CALL</think>c", "\nc"),
        ("<tool_<think>q</think>call>", "<tool_\ncall>"),
        ("<th<think>a</think>ink>b", "<th\nink>b"),
        ("a <think>b", "a \n"),
        ("a</think>b<think>c</think></think>d", "a</think>b\n</think>d"),
        ("a", "a"),
    ],
)
def test_thoughts_are_left_out_and_join_nothing(text: str, own: str) -> None:
    assert without_thoughts(text) == own


def test_a_thought_that_the_template_opens_may_be_opened_again() -> None:
    assert without_thoughts("a</think>b", opened=True) == "\nb"
    assert without_thoughts("\n<think>a</think>b", opened=True) == "\n\nb"
    assert without_thoughts("a<think>b</think>c</think>d", opened=True) == "\nd"


def test_texts_are_stripped_and_never_empty() -> None:
    assert texts_of([" a", "b\n"]) == ["a", "b"] and text_of(" a ") == "a"
    wrong = [None, "a", [], [""], ["a", " "], ["a", 3], {"a": "b"}, ["\ud800"]]
    assert [texts_of(each) for each in wrong] == [None] * len(wrong)
    assert [text_of(each) for each in (None, 3, ["a"], "\ud800")] == [""] * 4


def test_any_text_is_read_without_a_fault() -> None:
    rng = random.Random(0)
    pieces = [
        *HERMES_CALL.split('"'),
        *LLAMA_CALL.split('"'),
        '"',
        "{",
        "}",
        "\\ud800",
        "\\",
        "\n",
        "1e999",
    ]
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        for call in [*parse_calls(text, "hermes"), *parse_calls(text, "llama3_json")]:
            assert isinstance(call, Malformed) or json.dumps(call.arguments)
