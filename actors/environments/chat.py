"""A chat template's frame for tool messages between two turns of the policy, and the tool calls in
the text of one turn.

The frame is read once: a fixed conversation is rendered with marks in place of the policy's turn
and of the tool messages; the text around the marks is the frame. An observation's tokens are the
frame's and the messages', tokenised apart and joined as ids; nothing sampled is rendered.

Hermes and Qwen write calls as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, Llama 3 as
objects `{"name": …, "parameters": {…}}`. Other formats are read by vLLM's parsers
(`actors/environments/vllm_formats.py`).
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from actors.environments.search_r1 import Malformed
from actors.prompt import Message, Prompter, Schemas, Tokens, end_tokens
from configs.load import ConfigError

Format = Literal["hermes", "llama3_json"]
OWN: tuple[Format, ...] = ("hermes", "llama3_json")
ToolMessage = tuple[str, list[Tokens]]  # a tool's name, and the pieces of what it says

_ARGUMENTS = {"hermes": "arguments", "llama3_json": "parameters"}
_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_NAMED = re.compile(r'\{\s*"(?:name|type)"\s*:')  # Llama 3 writes a type first, sometimes
_BEGINS = {"hermes": re.compile("<tool_call>"), "llama3_json": _NAMED}
_DECODER = json.JSONDecoder()
_THINK = re.compile("<(/?)think>")
_OPENING_TOKENS = 16  # in which a template's `<think>` stands at the end of a context
_TURN = "FORAGE-TURN"
_TOOL = "FORAGE-TOOL"
_MARK = re.compile(r"<[^<>\s]+>?|\[[A-Z_]{3,}\]")  # a tag or its beginning, or Mistral's
_PROBE = 'one "two"\nthree'
_SEARCH = ("search",)
_BASE: list[Message] = [{"role": "user", "content": "a question"}]


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed call; its tool may not exist."""

    name: str
    arguments: dict[str, Any]


class Chat:
    """The frame of one chat template with these tools.

    Raises ConfigError, naming the template's fault: it shows no tools, does not close a turn by a
    token that ends completions, or does more to a tool message than write it as JSON.
    """

    def __init__(self, prompter: Prompter, tools: Schemas, system: str, model_path: str) -> None:
        self._prompter, self._tools = prompter, tools
        self._before: list[Message] = [{"role": "system", "content": system}, *_BASE]
        self._model_path = model_path
        try:
            self.change = self._find_change()
            if prompter.render(self._before, tools) == prompter.render(self._before):
                raise self._fault("it shows the policy no tools")
        except ConfigError:
            raise
        except Exception as error:  # templates raise whatever they like
            raise self._fault(f"it takes no tool messages: {error}") from error
        self._frame = cache(self._frame_now)
        closing = self._frame(_SEARCH)[0]
        if not len(closing) or int(closing[0]) not in end_tokens(prompter, model_path):
            raise self._fault(
                f"it closes a turn by {prompter.decode(closing[:1])!r}, which ends no completion "
                "of this model: see eos_token_id in its generation_config.json"
            )

    def observation(
        self, action_tokens: Tokens, said: Sequence[ToolMessage], after: Tokens
    ) -> Tokens:
        """Return int32[O]: from the end of the policy's turn to where it goes on, `after` included.

        The token by which the template closes a turn is left out where the policy has sampled that
        very token; after another end token it stays, as the model was taught to read no turn
        without it.
        """
        frame = self._frame(tuple(name for name, _ in said))
        ended = int(action_tokens[-1]) == int(frame[0][0])
        pieces: list[Tokens] = [frame[0][1:] if ended else frame[0]]
        for (_, texts), following in zip(said, frame[1:], strict=True):
            pieces += [*texts, following]
        return np.concatenate([*pieces, after])

    def _find_change(self) -> Callable[[str], str]:
        """Find the template's change to a tool message: none, or JSON escapes."""
        for change in (_same, _as_json):
            if all(self._holds(change, names) for names in (_SEARCH, _SEARCH * 2)):
                return change
        raise self._fault("it does not leave what tools say as it is")

    def _holds(self, change: Callable[[str], str], names: tuple[str, ...]) -> bool:
        """True where frame and messages, joined, equal the template's rendering of the whole."""
        texts = [f"{_PROBE} {number}" for number in range(len(names))]
        whole, pieces = self._rendered(names, texts), self._pieces(names)
        joined = "".join(a + change(b) for a, b in zip(pieces, texts, strict=False))
        return whole == joined + pieces[-1]

    def _frame_now(self, names: tuple[str, ...]) -> list[Tokens]:
        return [self._prompter.text(piece) for piece in self._pieces(names)]

    def _pieces(self, names: tuple[str, ...]) -> list[str]:
        """Return the text before, between and after the messages of the tools with these names."""
        marks = [f"FORAGE-{number}-SAID" for number in range(len(names))]
        pieces, rest = [], self._rendered(names, marks)
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found:
                raise self._fault("it leaves out what tools say")
            pieces.append(before)
        return [*pieces, rest]

    def _rendered(self, names: Sequence[str], said: Sequence[str]) -> str:
        """Return the template's text after a turn of the policy, with these tool messages."""
        turn: Message = {"role": "assistant", "content": _TURN}
        messages = [
            {"role": "tool", "name": name, "content": text}
            for name, text in zip(names, said, strict=True)
        ]
        text = self._prompter.render([*self._before, turn, *messages], self._tools)
        _, found, after = text.partition(_TURN)
        if not found or _TURN in after:
            raise self._fault("it does not show the policy's turn as it is, once")
        return after

    def _fault(self, what: str) -> ConfigError:
        return ConfigError(
            f"model.path = {self._model_path!r}: its chat template cannot be used with "
            f"environment.name = 'tool_call': {what}"
        )


def format_of(prompter: Prompter, tools: Schemas, asked: str, model_path: str) -> str:
    """Return `environment.tool_format`, or for auto the template's: one of OWN, or a parser of
    vLLM's. Raises ConfigError.
    """
    if asked != "auto":
        return asked
    template = prompter.chat_template(tools)
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "<tool_call>" in template and "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    if '"parameters"' in template and "<tool_call>" not in template:
        return "llama3_json"
    raise ConfigError(
        f"environment.tool_format = {asked!r}: the chat template of model.path = {model_path!r} "
        "shows no format that is known: say hermes, llama3_json or a parser of vLLM's, whichever "
        "the model was taught"
    )


def call_mark(prompter: Prompter, tools: Schemas) -> str:
    """Return the tag by which the chat template begins the calls of a turn; '' where it writes none
    before them.
    """
    for content, arguments in ((_TURN, {}), (_TURN, "{}"), ("", {}), ("", "{}")):
        call = {"type": "function", "function": {"name": _TOOL, "arguments": arguments}}
        turn: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
        try:
            text = prompter.render([*_BASE, turn], tools, generate=False)
        except Exception:  # noqa: BLE001 - templates raise whatever they like
            continue
        before, found, _ = text.partition(_TOOL)
        opened = content or prompter.render(_BASE, tools)
        if found and opened in before:
            tag = _MARK.match(before.rpartition(opened)[2].lstrip())
            return tag[0] if tag else ""
    return ""


def opens_thought(prompter: Prompter, before: Tokens) -> bool:
    """True where the context, of which `before` is the end, opens the policy's thought."""
    return prompter.decode(before[-_OPENING_TOKENS:]).rstrip().endswith("<think>")


def without_thoughts(text: str, opened: bool = False) -> str:
    """Return a turn's own text without its thoughts. A line's end stands for each, so that what is
    around it joins to no call.
    """
    at, kept = 0, list[str]()
    for begin, end in thoughts(text, opened):
        kept += text[at:begin], "\n"
        at = end
    return "".join([*kept, text[at:]])


def thoughts(text: str, opened: bool = False) -> list[tuple[int, int]]:
    """Return where what stands in `<think>`, nested or not, closed or not, begins and ends in a
    turn's own text; `opened`: the template has written the first one, which the policy may repeat.
    """
    depth = int(opened and not text.lstrip().startswith("<think>"))
    begin, found = 0, list[tuple[int, int]]()
    for tag in _THINK.finditer(text):
        before, depth = depth, max(0, depth + (-1 if tag[1] else 1))
        if depth and not before:
            begin = tag.start()
        elif before and not depth:
            found.append((begin, tag.end()))
    return [*found, (begin, len(text))] if depth else found


def parse_calls(text: str, format: Format) -> list[Call | Malformed]:
    """Parse the closed calls of a turn's own text, in order; an unreadable one is Malformed."""
    return [call for _, _, call in place_calls(text, format)]


def place_calls(text: str, format: Format) -> list[tuple[int, int, Call | Malformed]]:
    """Parse the closed calls of a turn's own text, in order: where each begins and ends, and it."""
    if format == "llama3_json":
        found = [(begin, end, text[begin:end]) for begin, end in _objects(text)]
    else:
        found = [(each.start(), each.end(), each[1]) for each in _HERMES.finditer(text)]
    return [(begin, end, _call(call, _ARGUMENTS[format])) for begin, end, call in found]


def begins_call(text: str, format: Format) -> bool:
    """True where a call begins in the text, closed or not."""
    return call_begin(text, format) is not None


def call_begin(text: str, format: Format) -> int | None:
    """Return where the first call begins in the text, closed or not; None where none does."""
    found = _BEGINS[format].search(text)
    return found.start() if found else None


def texts_of(value: Any) -> list[str] | None:
    """Return a list of non-empty texts, stripped; None where `value` is anything else."""
    if not isinstance(value, list) or not value:
        return None
    texts = [text_of(each) for each in value]
    return [each for each in texts if each] if all(texts) else None


def text_of(value: Any) -> str:
    """Return a text, stripped; '' for anything else, and for half a JSON escape (no Unicode)."""
    if not isinstance(value, str):
        return ""
    try:
        value.encode()
    except UnicodeEncodeError:
        return ""
    return value.strip()


def can_be_encoded(*values: Any) -> bool:
    """True where JSON values hold no half of an escape, which is no Unicode."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _call(text: str, arguments: str) -> Call | Malformed:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # nested too deeply
        return Malformed()
    if not isinstance(value, dict):
        return Malformed()
    name, given = value.get("name"), value.get(arguments)
    if isinstance(name, str) and isinstance(given, dict) and can_be_encoded(name, given):
        return Call(name, given)
    return Malformed()


def _objects(text: str) -> Iterator[tuple[int, int]]:
    """Yield where each object that begins like a call begins and ends: with the text where it has
    no end.
    """
    position = 0
    while found := _NAMED.search(text, position):
        begin = found.start()
        try:
            _, position = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            position = len(text)
        yield begin, position


def _same(text: str) -> str:
    return text


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
