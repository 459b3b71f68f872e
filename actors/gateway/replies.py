"""OpenAI's replies and the events of its streams, of chats and of plain completions."""

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.gateway.chat import tool_calls
from actors.gateway.completing import Asked, Made, Piece
from actors.prompt import Tokens

_LEAST_LOGPROB = -9999.0  # OpenAI's, for what JSON cannot hold
_encode = msgspec.json.Encoder().encode
Decode = Callable[[Tokens], str]
Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


class Replies:
    """The replies to one call, in the form of its endpoint."""

    def __init__(self, asked: Asked, decode: Decode) -> None:
        self._asked, self._decode = asked, decode
        self._chat = asked.conversation is not None
        self._role: Json = {"role": "assistant"}
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": asked.wanted.model,
        }

    def whole(self, made: Made) -> bytes:
        """Return the body of the reply to a call that is not streamed."""
        said, sampled = made.said, made.completion
        choice: Json = {"index": 0, "finish_reason": _reason(made)}
        if self._chat:
            message: Json = {"role": "assistant", "content": said.content, "refusal": None}
            if calls := tool_calls(said.calls):
                message |= {"content": said.content or None, "tool_calls": calls}
            choice["message"] = message
        else:
            choice["text"] = said.content
        choice["logprobs"] = self._logprobs(sampled.tokens, sampled.logprobs)
        if self._asked.wanted.return_ids:
            choice["token_ids"] = sampled.tokens.tolist()
        body = self._body("", [choice]) | self._prompt_ids() | {"usage": self._usage(made)}
        return _encode(body)

    def events(self, piece: Piece) -> bytes:
        """Return the events of a piece: what is said, and after the last its end."""
        return b"".join(self._events(piece))

    def _events(self, piece: Piece) -> Iterator[bytes]:
        first = self._prompt_ids() if self._role else {}
        logprobs = self._logprobs(piece.tokens, piece.logprobs)
        ids = {"token_ids": piece.tokens.tolist()} if self._asked.wanted.return_ids else {}
        if piece.text or first or logprobs or ids or self._role:
            yield self._event([self._choice(piece.text, logprobs) | ids], first)
        if piece.made is None:
            return
        if self._chat and (calls := tool_calls(piece.made.said.calls)):
            listed = [{"index": place} | call for place, call in enumerate(calls)]
            delta = {"index": 0, "delta": {"tool_calls": listed}, "finish_reason": None}
            yield self._event([delta | {"logprobs": None}])
        yield self._event([self._choice("", None, _reason(piece.made))])
        if self._asked.wanted.include_usage:
            yield self._event([], {"usage": self._usage(piece.made)})
        yield DONE

    def _choice(self, text: str, logprobs: Json | None, reason: str | None = None) -> Json:
        said: Json = {"text": text}
        if self._chat:
            content = {"content": text} if text or self._role else {}
            said = {"delta": self._role | content}
        self._role = {}
        return {"index": 0, "logprobs": logprobs, "finish_reason": reason} | said

    def _event(self, choices: list[Json], more: Json | None = None) -> bytes:
        return event(self._body(".chunk", choices) | (more or {}))

    def _body(self, suffix: str, choices: list[Json]) -> Json:
        kind = f"chat.completion{suffix}" if self._chat else "text_completion"
        return self._head | {"object": kind, "choices": choices}

    def _prompt_ids(self) -> Json:
        if not self._asked.wanted.return_ids:
            return {}
        return {"prompt_token_ids": self._asked.prompt.tolist()}

    def _usage(self, made: Made) -> Json:
        read, sampled = len(self._asked.prompt), len(made.completion.tokens)
        return {
            "prompt_tokens": read,
            "completion_tokens": sampled,
            "total_tokens": read + sampled,
        }

    def _logprobs(self, tokens: Tokens, logprobs: NDArray[np.float32]) -> Json | None:
        if not self._asked.wanted.logprobs or not len(tokens):
            return None
        texts = [self._decode(tokens[place : place + 1]) for place in range(len(tokens))]
        scores = np.maximum(np.nan_to_num(logprobs, nan=_LEAST_LOGPROB), _LEAST_LOGPROB).tolist()
        if self._chat:
            content = [
                {"token": text, "logprob": score, "bytes": [*text.encode()], "top_logprobs": []}
                for text, score in zip(texts, scores, strict=True)
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": texts,
            "token_logprobs": scores,
            "top_logprobs": None,
            "text_offset": None,
        }


def event(body: Json) -> bytes:
    """Return a server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


def _reason(made: Made) -> str:
    reason = made.completion.finish_reason
    return "tool_calls" if made.said.calls and reason == "stop" else reason
