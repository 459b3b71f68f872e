"""Tool calls in the text of one turn, in the format that the model was taught. Pure.

hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen and Hermes have it.
llama3_json: objects `{"name": …, "parameters": {…}}` in the text, as Llama 3 has it (sometimes with
a `"type"` first).
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from actors.actions import Malformed

Format = Literal["hermes", "llama3_json"]
_ARGUMENTS = {"hermes": "arguments", "llama3_json": "parameters"}
_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_NAMED = re.compile(r'\{\s*"(?:name|type)"\s*:')
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Call:
    """A call that could be read; whether there is such a tool is not known yet."""

    name: str
    arguments: dict[str, Any]


def parse_calls(text: str, format: Format) -> list[Call | Malformed]:
    """The closed calls of a turn's own text, in order; one that cannot be read is Malformed."""
    found = _HERMES.findall(text) if format == "hermes" else _objects(text)
    return [_call(each, _ARGUMENTS[format]) for each in found]


def begins_call(text: str, format: Format) -> bool:
    """Whether a call begins in the text, closed or not."""
    return "<tool_call>" in text if format == "hermes" else _NAMED.search(text) is not None


def texts_of(value: Any) -> list[str] | None:
    """A list of texts, stripped, none of them empty; None where `value` is something else."""
    if not isinstance(value, list) or not value:
        return None
    texts = [text_of(each) for each in value]
    return [each for each in texts if each] if all(texts) else None


def text_of(value: Any) -> str:
    """A text, stripped; empty where `value` is something else, or holds what no text can (JSON can
    escape half a character).
    """
    if not isinstance(value, str):
        return ""
    try:
        value.encode()
    except UnicodeEncodeError:
        return ""
    return value.strip()


def _call(text: str, arguments: str) -> Call | Malformed:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # nested too deeply
        return Malformed()
    if not isinstance(value, dict):
        return Malformed()
    name, given = value.get("name"), value.get(arguments)
    return Call(name, given) if isinstance(name, str) and isinstance(given, dict) else Malformed()


def _objects(text: str) -> Iterator[str]:
    """Each object that begins like a call, to its end; where it has none, to the text's."""
    position = 0
    while found := _NAMED.search(text, position):
        begin = found.start()
        try:
            _, position = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            position = len(text)
        yield text[begin:position]
