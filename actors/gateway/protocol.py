"""The wire types of the gateway, OpenAI's: requests checked field by field, and refusals.

A field that would change what is sampled, or that nothing here can serve, is refused by name unless
it says what happens anyway. What only labels a request is taken and has no effect.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from configs.section import Positive
from replay.bounds import MAX_REWARD
from retrieval_server.protocol import RetrieveRequest

MOST_STOPS, MOST_STOP_CHARS = 16, 256
MOST_TOOLS, MOST_TOOL_BYTES, MOST_NESTED = 128, 131_072, 64  # of one request
_INT64 = Meta(ge=-(1 << 63), le=(1 << 63) - 1)
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_KINDS = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
_WRONG = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# What a field may say that is otherwise refused, as it is what happens anyway.
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none", "required"),  # nothing is enforced
    "include_obfuscation": (False,),
    # Of a message.
    "refusal": ("",),
    "annotations": ([],),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "audio": (),
    "function_call": (),
}


class Refused(Exception):
    """A request that is not served: its HTTP status, and OpenAI's error."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self._param, self._code = status, param, code
        self._retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self._param, "code": self._code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """What tells a client whether, and when, to ask again."""
        if self._retry_after_s is not None:
            return {"retry-after": str(self._retry_after_s)}
        shown = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        return shown | {"x-should-retry": "false"}


class TooLong(Refused):
    """A prompt that leaves no room for a completion in so many tokens. Its message begins as
    OpenAI's does: clients look for those words.
    """

    def __init__(self, message: str, param: str, tokens: int) -> None:
        limit = f"This model's maximum context length is {tokens} tokens (model.max_model_len)"
        super().__init__(f"{limit}: {message}", param=param, code="context_length_exceeded")


class Error(msgspec.Struct, frozen=True):
    """What was wrong with a request: `param` names its field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, frozen=True):
    """The body of every refusal."""

    error: Error


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Any = None


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    seed: Annotated[int, _INT64] | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    # Served only as it is anyway.
    n: Any = None
    best_of: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    response_format: Any = None
    # Of no effect.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class CompletionRequest(_Request, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/completions`: a prompt as text or ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None  # the sampled tokens' own alone
    echo: Any = None
    suffix: Any = None


class Part(msgspec.Struct, frozen=True):
    """A part of a message; only text can be read."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """A function's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call in a message of the assistant's."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # Served only where they say nothing.
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    reasoning: Any = None
    reasoning_content: Any = None


class Function(msgspec.Struct, frozen=True):
    """A function that the policy may call; `strict` is not enforced."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool: a function."""

    function: Function
    type: Literal["function"] = "function"


class ChatRequest(_Request, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    top_logprobs: Any = None
    modalities: Any = None


class ResultRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/result`: what a session's program has come to."""

    answer: str | None = None
    reward: Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)] | None = None


@dataclass(frozen=True)
class Wanted:
    """What a request asks of its completion, chat or not."""

    model: str
    stream: bool
    include_usage: bool
    stops: tuple[str, ...]
    max_tokens: int | None
    temperature: float | None
    seed: int | None
    logprobs: bool
    include_stop: bool
    return_ids: bool


T = TypeVar("T", ChatRequest, CompletionRequest, ResultRequest, RetrieveRequest)


def decoded(body: bytes, kind: type[T]) -> T:
    """Decode a request's body. Raises Refused, naming the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except _WRONG as error:
        said, place = str(error), _PLACE.search(str(error))
        field = place[1] if place else ""
        if unknown := _UNKNOWN.match(said):
            name = f"{field}.{unknown[1]}" if field else unknown[1]
            raise Refused(
                f"{name}: no such field is served here: leave it out", param=name
            ) from error
        what = _PLACE.sub("", said)
        raise Refused(
            f"{field}: {what}" if field else f"the body: {what}: send a JSON object",
            param=field or None,
        ) from error


def wanted(request: ChatRequest | CompletionRequest) -> Wanted:
    """Check what both kinds share. Raises Refused, naming the field."""
    require_served(request)
    if request.stream_options is not None and not request.stream:
        raise Refused("stream_options: only with stream: true", param="stream_options")
    if request.stream_options is not None:
        require_served(request.stream_options, "stream_options.")
    limit = request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        if limit not in (None, request.max_completion_tokens):
            raise Refused("max_tokens and max_completion_tokens differ", param="max_tokens")
        limit = request.max_completion_tokens
    options = request.stream_options
    return Wanted(
        model=request.model,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        stops=_stops(request.stop),
        max_tokens=limit,
        temperature=request.temperature,
        seed=request.seed,
        logprobs=request.logprobs is not None and request.logprobs is not False,
        include_stop=bool(request.include_stop_str_in_output),
        return_ids=bool(request.return_token_ids),
    )


def require_served(of: msgspec.Struct, place: str = "") -> None:
    """Refuse fields that say what cannot be served."""
    for name in of.__struct_fields__:
        served, given = _ONLY.get(name), getattr(of, name)
        if served is None or given is None or given in served:
            continue
        instead = [
            "leave it out",
            *(f"say {msgspec.json.encode(each).decode()}" for each in served),
        ]
        raise Refused(
            f"{place}{name}: what it says cannot be served: {', or '.join(instead)}",
            param=f"{place}{name}",
        )


def require_room(chars: int, most: int, field: str, tokens: int) -> None:
    """Refuse a text that cannot fit whatever its tokens are: none is so long."""
    if chars > most:
        raise TooLong(
            f"the prompt has {chars} characters and {tokens} tokens hold at most {most}: shorten "
            "it",
            param=field,
            tokens=tokens,
        )


def require_small(tools: list[dict[str, Any]]) -> None:
    """Refuse tools that are too many, or whose schemas are too large or nested too deeply."""
    if len(tools) > MOST_TOOLS:
        raise Refused(f"tools: {len(tools)}, over {MOST_TOOLS}: give fewer", param="tools")
    level: list[Any] = list(tools)
    for _ in range(MOST_NESTED):
        inside = [each.values() if isinstance(each, dict) else each for each in level]
        level = [part for each in inside for part in each if isinstance(part, dict | list)]
    if level:
        raise Refused(f"tools: nested in over {MOST_NESTED} levels", param="tools")
    if (size := len(msgspec.json.encode(tools))) > MOST_TOOL_BYTES:
        raise Refused(f"tools: {size} bytes, over {MOST_TOOL_BYTES}: give less", param="tools")


def prompt_of(request: CompletionRequest) -> str | list[int]:
    """Return the one prompt of a request, text or ids. Raises Refused."""
    given: Any = request.prompt
    if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int):
        given = given[0]
    if isinstance(given, str) or (
        isinstance(given, list) and given and all(isinstance(each, int) for each in given)
    ):
        return given
    raise Refused("prompt: give one, a text or a list of token ids", param="prompt")


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > MOST_STOPS or not all(0 < len(each) <= MOST_STOP_CHARS for each in stops):
        raise Refused(
            f"stop: at most {MOST_STOPS} texts of 1 to {MOST_STOP_CHARS} characters", param="stop"
        )
    return tuple(dict.fromkeys(stops))
