"""Conversations: messages and tools become a prompt's ids, and a completion becomes a message.

Tokens in, tokens out: where the messages go on from an earlier call of the session, and the chat
template shows all that was said up to it, the prompt is that call's ids, sampled ones included, and
only what follows them is tokenised; else the whole is. The text of a special token in anybody's
words never becomes that token.
"""

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import msgspec
import numpy as np

from actors.environments.chat import (
    OWN,
    Call,
    call_begin,
    can_be_encoded,
    format_of,
    opens_thought,
    place_calls,
    thoughts,
    without_thoughts,
)
from actors.environments.vllm_formats import VllmFormat
from actors.gateway.history import History, Key, keys_of
from actors.gateway.protocol import (
    ChatRequest,
    Message,
    Refused,
    Tool,
    ToolCall,
    require_room,
    require_served,
    require_small,
)
from actors.prompt import Prompter, Tokens, end_tokens
from configs.load import ConfigError
from configs.schema import Config

_TURN = "\ue000FORAGE-TURN\ue001"
_MARK = "\ue000FORAGE-{}\ue001"
_HELD = {"hermes": "<tool_call>", "llama3_json": '{"name":'}
_PROBE = [{"role": "user", "content": "a question"}]
_KNOWN_READERS = 32


@dataclass(frozen=True)
class Conversation:
    """A request's messages, as a template takes them, its tools, and the keys of both."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    keys: list[Key]


@dataclass(frozen=True)
class Said:
    """A turn of the policy as a message: `calls` are those that could be read, in order."""

    content: str
    calls: tuple[Call, ...] = ()
    malformed: bool = False


class Chats:
    """The conversations of one gateway, through the model's own chat template. `most_chars`: of the
    messages of one call.
    """

    def __init__(self, prompter: Prompter, config: Config, most_chars: int) -> None:
        self._prompter, self._config, self._most_chars = prompter, config, most_chars
        self._ends = end_tokens(prompter, config.model.path)
        self._reader = lru_cache(_KNOWN_READERS)(self._reader_now)

    def conversation(self, request: ChatRequest) -> Conversation:
        """Check messages and tools. Raises Refused, naming the field."""
        if not self._prompter.has_chat_template:
            raise Refused(
                "messages: this model's tokenizer has no chat template, or questions.chat_template "
                "is false: use /v1/completions",
                param="messages",
            )
        most = self._config.environment.gateway.messages
        if len(request.messages) > most:
            raise Refused(
                f"messages: {len(request.messages)}, over {most} (environment.gateway.messages)",
                param="messages",
            )
        chars, tokens = sum(map(_chars, request.messages)), self._config.model.max_model_len
        require_room(chars, self._most_chars, "messages", tokens)
        messages = [_message(each, place) for place, each in enumerate(request.messages)]
        tools = [_schema(each) for each in request.tools or ()]
        require_small(tools)
        try:
            keys = keys_of([_for_key(each) for each in messages], tools)
        except (ValueError, RecursionError) as error:
            raise Refused(f"messages: nested too deeply: {error}", param="messages") from error
        return Conversation(messages, tools, keys)

    def prompt(self, of: Conversation, history: History) -> Tokens:
        """Return int32[P]: what the engine is to read. Raises Refused."""
        if (found := history.conversation(of.keys)) is not None:
            count, read = found
            if (after := self._after(of, count)) is not None:
                closed = len(after) and after[0] == read.ids[-1] and int(after[0]) in self._ends
                return np.concatenate([read.ids, after[1:] if closed else after])
        try:
            return self._tokens(of)
        except Exception as error:  # templates raise whatever they like
            raise Refused(
                f"messages: the model's chat template does not take them: {error}",
                param="messages",
            ) from error

    def reader(self, of: Conversation, calls: bool) -> "Reader":
        """Return the reader of the policy's turns with these tools; without `calls` they stay
        text. Raises Refused for tools that the model was not taught to call.
        """
        if not (calls and of.tools):
            return Reader("")
        try:
            return self._reader(msgspec.json.encode(of.tools))
        except ConfigError as error:
            raise Refused(f"tools: {error}", param="tools") from error
        except Exception as error:  # templates raise whatever they like
            raise Refused(
                f"tools: the model's chat template does not take them: {error}", param="tools"
            ) from error

    def opens_thought(self, prompt: Tokens) -> bool:
        """True where the prompt has opened the policy's thought."""
        return opens_thought(self._prompter, prompt)

    def _reader_now(self, tools: bytes) -> "Reader":
        schemas, prompter = msgspec.json.decode(tools), self._prompter
        path, asked = self._config.model.path, self._config.environment.tool_format
        if prompter.render(_PROBE, schemas) == prompter.render(_PROBE):
            raise ConfigError("the chat template of this model shows the policy no tools")
        format = format_of(prompter, schemas, asked, path)
        if format in OWN:
            return Reader(format)
        return Reader(format, VllmFormat(format, self._parsers_tokenizer, schemas))

    @cached_property
    def _parsers_tokenizer(self) -> Any:
        """The tokenizer of vLLM's parsers, which read turns on another thread than prompts are."""
        return self._prompter.copy().tokenizer

    def _after(self, of: Conversation, count: int) -> Tokens | None:
        """Return int32[n]: what follows the message with this count, which the policy has said;
        None where the template does not show all of it, or shows less than it did of what was
        before: it drops thoughts, say.
        """
        marked = _Marked(self._prompter.special_texts)
        messages, tools = marked.put(of.messages), marked.put(of.tools) or None
        read, turn, more = messages[: count - 1], messages[count - 1], messages[count:]
        mark = {"role": "assistant", "content": _TURN}
        try:
            before = self._prompter.render(read, tools, generate=False)
            whole = self._prompter.render(messages, tools)
            _, after = self._prompter.render([*read, mark, *more], tools).split(_TURN)
        except Exception:  # noqa: BLE001 - templates raise whatever they like; it is rendered anew
            return None
        end = len(whole) - len(after)
        if not (whole.startswith(before) and whole.endswith(after) and len(before) <= end):
            return None
        return self._ids(marked, after) if _shows(whole[len(before) : end], turn) else None

    def _tokens(self, of: Conversation) -> Tokens:
        """Render a conversation, and tokenise it."""
        marked = _Marked(self._prompter.special_texts)
        text = self._prompter.render(marked.put(of.messages), marked.put(of.tools) or None)
        return self._ids(marked, text)

    def _ids(self, marked: "_Marked", text: str) -> Tokens:
        pieces = [
            (self._prompter.plain if foreign else self._prompter.text)(piece)
            for piece, foreign in marked.pieces(text)
        ]
        return np.concatenate(pieces)


def _shows(text: str, message: dict[str, Any]) -> bool:
    """True where a text has all that a message says, in its order, white space apart."""
    names = [each["function"]["name"] for each in message.get("tool_calls", ())]
    text, at = "".join(text.split()), 0
    for said in (message["content"], *names):
        said = "".join(said.split())
        if (at := text.find(said, at)) < 0:
            return False
        at += len(said)
    return True


class _Marked:
    """Special tokens' texts in other people's words, marked while a template is rendered."""

    def __init__(self, special: Sequence[str]) -> None:
        self._special = special
        self._marks = {text: _MARK.format(number) for number, text in enumerate(special)}

    def put(self, value: Any) -> Any:
        """Replace them in all texts of a value."""
        if isinstance(value, str):
            value = value.replace("\ue000", "")
            for text in self._special:
                value = value.replace(text, self._marks[text])
            return value
        if isinstance(value, dict):
            return {self.put(name): self.put(each) for name, each in value.items()}
        return [self.put(each) for each in value] if isinstance(value, list) else value

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """Cut a rendered text where they stand: pieces, and True for theirs."""
        found = [(text, False)]
        for special, mark in self._marks.items():
            if mark in text:
                found = [each for piece in found for each in _cut(piece, mark, special)]
        return [each for each in found if each[0]]


def _cut(piece: tuple[str, bool], mark: str, special: str) -> list[tuple[str, bool]]:
    text, foreign = piece
    if foreign:
        return [piece]
    first, *others = text.split(mark)
    return [(first, False)] + [each for rest in others for each in ((special, True), (rest, False))]


class Reader:
    """Reads the policy's turns with the tools of a request; `format` '': nothing is a call."""

    def __init__(self, format: str, vllm: VllmFormat | None = None) -> None:
        self._format, self._vllm = next((own for own in OWN if own == format), None), vllm

    def read(self, text: str, opened: bool) -> Said:
        """Read a whole turn. All but the calls that can be read is its content."""
        if self._format is not None:
            found = place_calls(_outside(text, opened), self._format)
            read = [(begin, end, call) for begin, end, call in found if _is_whole(call)]
            inside = thoughts(text, opened)
            content = _beside(text, [each for a, b, _ in read for each in _around(a, b, inside)])
            calls = tuple(call for _, _, call in read if isinstance(call, Call))
            return Said(content, calls, len(calls) < len(found))
        if self._vllm is None:
            return Said(text)
        beside, made = self._vllm.read(without_thoughts(text, opened))
        calls = tuple(call for call in made if isinstance(call, Call) and _is_whole(call))
        thought = "".join(text[begin:end] for begin, end in thoughts(text, opened))
        return Said(thought + beside if calls else text, calls, len(calls) < len(made))

    def certain(self, text: str, opened: bool) -> int:
        """Return how much of an unfinished turn is content whatever follows."""
        if self._format is None:
            return 0 if self._vllm is not None else len(text)
        shown = _outside(text, opened)
        if (begin := call_begin(shown, self._format)) is not None:
            return begin
        return len(text) - _begun(shown, self._format)


def _is_whole(call: object) -> bool:
    """True for a call that a client can be told."""
    if not isinstance(call, Call) or not can_be_encoded(call.name, call.arguments):
        return False
    try:
        json.dumps(call.arguments, allow_nan=False)
    except ValueError:
        return False
    return True


def _around(begin: int, end: int, parts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield a span without the parts of it."""
    for first, last in parts:
        if begin <= first < end:
            yield begin, first
            begin = last
    yield begin, end


def _beside(text: str, calls: Sequence[tuple[int, int]]) -> str:
    """Return a turn without its calls, nor the white space behind them."""
    at, kept = 0, list[str]()
    for begin, end in (*calls, (len(text), len(text))):
        piece = text[at:begin]
        if not kept or piece.strip():
            kept.append(piece)
        at = end
    return "".join(kept)


def _outside(text: str, opened: bool) -> str:
    """Return the text with a line's end for each character of a thought."""
    at, kept = 0, list[str]()
    for begin, end in thoughts(text, opened):
        kept += text[at:begin], "\n" * (end - begin)
        at = end
    return "".join([*kept, text[at:]])


def _begun(text: str, format: str) -> int:
    """Return how many characters at the end may be the beginning of a call's."""
    if format == "hermes":
        tag = _HELD[format]
        return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
    begin = text.rfind("{")
    return len(text) - begin if begin >= 0 and '":' not in text[begin:] else 0


def tool_calls(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return calls as OpenAI's, each with an id of its own."""
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": each.name, "arguments": json.dumps(each.arguments)},
        }
        for each in calls
    ]


def key_of(said: Said) -> dict[str, Any]:
    """Return the policy's message as it is once a client has sent it back, for its key."""
    made = [{"function": {"name": each.name, "arguments": each.arguments}} for each in said.calls]
    return _for_key({"role": "assistant", "content": said.content, "tool_calls": made})


def _for_key(message: dict[str, Any]) -> dict[str, Any]:
    """Return what tells a message from others: ids of calls do not, nor does what is empty."""
    calls = [each["function"] for each in message.get("tool_calls", ())]
    kept = {name: message.get(name, "") for name in ("role", "content", "name")}
    return {name: each for name, each in (kept | {"tool_calls": calls}).items() if each}


def _chars(message: Message) -> int:
    """Return how many characters a message says."""
    content, calls = message.content or "", message.tool_calls or ()
    said = [content] if isinstance(content, str) else [each.text or "" for each in content]
    return sum(map(len, said)) + sum(len(each.function.arguments) for each in calls)


def _message(message: Message, place: int) -> dict[str, Any]:
    """Return a message as templates take it. Raises Refused."""
    where = f"messages[{place}]."
    require_served(message, where)
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": _content(message, where)}
    made |= {"name": message.name} if message.name else {}
    made |= {"tool_call_id": message.tool_call_id} if message.tool_call_id else {}
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": each.id,
                "type": "function",
                "function": {"name": each.function.name, "arguments": _arguments(each, where)},
            }
            for each in message.tool_calls
        ]
    return made


def _content(message: Message, where: str) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    for each in message.content:
        if each.type != "text" or each.text is None:
            raise Refused(
                f"{where}content: a part of type {each.type!r} cannot be read: only text can",
                param=f"{where}content",
            )
    return "\n".join(each.text or "" for each in message.content)


def _arguments(call: ToolCall, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or not can_be_encoded(arguments):
        raise Refused(
            f"{where}tool_calls: the arguments of {call.function.name!r} are no JSON object",
            param=f"{where}tool_calls",
        )
    return arguments


def _schema(tool: Tool) -> dict[str, Any]:
    """Return a tool as templates take it: what its request said, without what was left out."""
    asked = tool.function
    function: dict[str, Any] = {"name": asked.name}
    function |= {"description": asked.description} if asked.description is not None else {}
    function |= {"parameters": asked.parameters} if asked.parameters is not None else {}
    return {"type": "function", "function": function}
