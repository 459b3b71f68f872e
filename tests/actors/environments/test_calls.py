"""Tool calls read from text, whatever a policy may write."""

import json
import random

import pytest

from actors.environments.chat import Call, begins_call, parse_calls, text_of, texts_of
from actors.environments.search_r1 import Malformed

SEARCH = Call("search", {"query_list": ["a", "b"]})
HERMES = '<tool_call>\n{"name": "search", "arguments": {"query_list": ["a", "b"]}}\n</tool_call>'
LLAMA = '{"name": "search", "parameters": {"query_list": ["a", "b"]}}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (HERMES, [SEARCH]),
        (f"<think> so </think>\n{HERMES}\n{HERMES}<|im_end|>", [SEARCH, SEARCH]),
        (f"{HERMES} <tool_call>", [SEARCH]),
        ("no call", []),
        ("<tool_call>{", []),
        ("<tool_call></tool_call>", [Malformed()]),
        ("<tool_call>search</tool_call>", [Malformed()]),
        ('<tool_call>["search"]</tool_call>', [Malformed()]),
        ('<tool_call>{"name": "search"}</tool_call>', [Malformed()]),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', [Malformed()]),
        ('<tool_call>{"name": "x", "arguments": "a"}</tool_call>', [Malformed()]),
        (LLAMA, []),
        (f"<tool_call>{'[' * 9999}</tool_call>", [Malformed()]),
        (f"<tool_call>{'1' * 9999}</tool_call>", [Malformed()]),
    ],
)
def test_hermes(text: str, calls: list[Call | Malformed]) -> None:
    assert parse_calls(text, "hermes") == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (LLAMA, [SEARCH]),
        (f"<think> {{so}} </think> <|python_tag|>{LLAMA}; {LLAMA}<|eot_id|>", [SEARCH, SEARCH]),
        ('{"type": "function", "name": "x", "parameters": {}}', [Call("x", {})]),
        ('{"name": "x", "parameters": {"y": {"name": 1}}}', [Call("x", {"y": {"name": 1}})]),
        ("no call {}", []),
        ('{"name": "search", "parameters": {', [Malformed()]),
        ('{"name": "search", "arguments": {}}', [Malformed()]),
        (f'{LLAMA} {{"name": {"[" * 9999}', [SEARCH, Malformed()]),
        (HERMES, [Malformed()]),
    ],
)
def test_llama3_json(text: str, calls: list[Call | Malformed]) -> None:
    assert parse_calls(text, "llama3_json") == calls


def test_a_call_that_was_begun_is_told_from_none() -> None:
    assert begins_call("I <tool_call>{", "hermes") and not begins_call(LLAMA, "hermes")
    assert begins_call('{ "name" : "sea', "llama3_json")
    assert not begins_call("<tool_call> {name}", "llama3_json")


def test_texts_are_stripped_and_never_empty() -> None:
    assert texts_of([" a", "b\n"]) == ["a", "b"] and text_of(" a ") == "a"
    wrong = [None, "a", [], [""], ["a", " "], ["a", 3], {"a": "b"}, ["\ud800"]]
    assert [texts_of(each) for each in wrong] == [None] * len(wrong)
    assert [text_of(each) for each in (None, 3, ["a"], "\ud800")] == [""] * 4


def test_any_text_is_read_without_a_fault() -> None:
    rng = random.Random(0)
    pieces = [*HERMES.split('"'), *LLAMA.split('"'), '"', "{", "}", "\\ud800", "\\", "\n", "1e999"]
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        for call in [*parse_calls(text, "hermes"), *parse_calls(text, "llama3_json")]:
            assert isinstance(call, Malformed) or json.dumps(call.arguments)
