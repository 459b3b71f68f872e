"""Tool calls are parsed from the text of one turn. Hermes and Qwen write `<tool_call>{"name": …,
"arguments": {…}}</tool_call>`, Llama 3 objects `{"name": …, "parameters": {…}}`.
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
_NAMED = re.compile(r'\{\s*"(?:name|type)"\s*:')  # Llama 3 writes a type first, sometimes
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed call; its tool may not exist."""

    name: str
    arguments: dict[str, Any]


def parse_calls(text: str, format: Format) -> list[Call | Malformed]:
    """Parse the closed calls of a turn's own text, in order; an unreadable one is Malformed."""
    found = _HERMES.findall(text) if format == "hermes" else _objects(text)
    return [_call(each, _ARGUMENTS[format]) for each in found]


def begins_call(text: str, format: Format) -> bool:
    """True where a call begins in the text, closed or not."""
    return "<tool_call>" in text if format == "hermes" else _NAMED.search(text) is not None


def texts_of(value: Any) -> list[str] | None:
    """Return a list of non-empty texts, stripped; None where `value` is anything else."""
    if not isinstance(value, list) or not value:
        return None
    texts = [text_of(each) for each in value]
    return [each for each in texts if each] if all(texts) else None


def text_of(value: Any) -> str:
    """Return a text, stripped; empty where `value` is anything else, or not valid Unicode (JSON can
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
    """Yield each object that begins like a call, to its end, or to the text's where it has none."""
    position = 0
    while found := _NAMED.search(text, position):
        begin = found.start()
        try:
            _, position = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            position = len(text)
        yield text[begin:position]
