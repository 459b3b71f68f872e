"""A model behind an OpenAI-compatible server as a policy: `POST /v1/completions`, streamed.

The server must take and return token ids, as vLLM's does (`return_token_ids`), so that it is asked
exactly as in training. Log-probs and versions are not the server's to know: NaN and 0. Each piece
of a reply has `deadline_s`; EndpointFailed names server and remedy.
"""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np

from actors.errors import PolicyError
from actors.policies.base import Completion, FinishReason, Stops
from configs.load import ConfigError

CONNECT_S = 10.0
_SEED_BITS = 31  # as many as every server reads
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SHOWN = 300  # characters of a server's own words
Heard = Callable[[Sequence[int]], None]  # token ids, as they come


class EndpointFailed(PolicyError):
    """The server did not complete; the message names server and remedy."""


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


class Reply:
    """A completion as far as it has come."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.ids: list[int] = []
        self.text = self.finish_reason = ""

    def take(self, line: bytes) -> list[int]:
        """Take a line of the stream; return its ids. Raises EndpointFailed."""
        name, _, data = line.partition(b":")
        if name != b"data" or data.strip() == b"[DONE]":
            return []
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except msgspec.MsgspecError as error:
            raise EndpointFailed(
                f"{self._url}: no OpenAI-compatible stream ({error}): name another server"
            ) from error
        if chunk.error:
            raise EndpointFailed(
                f"{self._url}: the server failed: {_words(chunk.error)}: ask again"
            )
        if not chunk.choices:
            return []
        choice = chunk.choices[0]
        ids = choice.token_ids or []
        self.ids += ids
        self.text += choice.text or ""
        self.finish_reason = choice.finish_reason or self.finish_reason
        if self.text and not self.ids:
            raise EndpointFailed(
                f"{self._url}: the reply has text and no token_ids: name a server that takes and "
                "returns token ids, as vLLM's does (return_token_ids)"
            )
        return ids

    def check(self) -> None:
        """Raise EndpointFailed unless it is whole."""
        if self.finish_reason not in ("stop", "length"):
            how = f"by {self.finish_reason!r}" if self.finish_reason else "before its end"
            raise EndpointFailed(f"{self._url}: the reply was cut off {how}: ask again")


class EndpointPolicy:
    """A server's model (empty: its only one), its tokenizer; `heard` gets the ids as they come."""

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: Any,
        heard: Heard,
        key: str = "",
        deadline_s: float = 300.0,
    ) -> None:
        self.url, self._model = base_url(url), model
        self._tokenizer, self._heard = tokenizer, heard
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(deadline_s, connect=CONNECT_S),
            # A proxy of the environment must not come between us and a server on this machine.
            trust_env=httpx.URL(self.url).host not in _LOOPBACK,
        )

    async def __aenter__(self) -> Self:
        """Find the model's name where none is given. Raises EndpointFailed."""
        try:
            if not self._model:
                self._model = await self._only_model()
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def complete(
        self,
        tokens: Sequence[int],
        *,
        temperature: float,
        seed: int,
        max_tokens: int,
        stops: Stops,
        priority: int = 0,
    ) -> Completion:
        """Complete `tokens`, keeping the stop. Raises EndpointFailed, BadCompletion."""
        settings = {
            "model": self._model,
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "seed": seed % (1 << _SEED_BITS),
            "stop": list(stops),
            "stream": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
            # What is left out, vLLM takes from the model's generation_config.json.
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        return self._completion(await self._ask(settings))

    async def _ask(self, body: dict[str, Any]) -> Reply:
        reply = Reply(self.url)
        try:
            async with self._client.stream("POST", f"{self.url}/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise await self._refusal(answer)
                async for line in _lines(answer):
                    if ids := reply.take(line):
                        self._heard(ids)
        except httpx.RequestError as error:
            raise self._named(error, "while it answered") from error
        reply.check()
        return reply

    def _completion(self, reply: Reply) -> Completion:
        ids = reply.ids
        if not ids:
            raise EndpointFailed(f"{self.url}: the server completed nothing: name another --model")
        text = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        self._compare(text, reply.text)
        reason: FinishReason = "stop" if reply.finish_reason == "stop" else "length"
        nothing, zeros = np.full(len(ids), np.nan, np.float32), np.zeros(len(ids), np.int32)
        return Completion(np.asarray(ids, np.int32), nothing, zeros, reason)

    def _compare(self, ours: str, theirs: str) -> None:
        """Raise EndpointFailed where the ids mean something else here than there."""
        here, there = ("".join(filter(str.isalnum, text)) for text in (ours, theirs))
        if not here.startswith(there):
            raise EndpointFailed(
                f"{self.url}: the server says {theirs[:40]!r} where the tokenizer here reads "
                f"{ours[:40]!r}: name the folder of the served model's, --tokenizer FOLDER"
            )

    async def _only_model(self) -> str:
        try:
            answer = await self._client.get(f"{self.url}/models")
            if answer.status_code != httpx.codes.OK:
                raise await self._refusal(answer)
            names = [str(each["id"]) for each in answer.json()["data"]]
        except httpx.RequestError as error:
            raise self._named(error, "when asked for its models") from error
        except (ValueError, KeyError, TypeError) as error:
            raise EndpointFailed(
                f"{self.url}/models does not list models: name one, --model NAME"
            ) from error
        if len(names) != 1:
            raise EndpointFailed(f"{self.url}: name one of its models, --model NAME: {names}")
        return names[0]

    async def _refusal(self, answer: httpx.Response) -> EndpointFailed:
        status, said = answer.status_code, _words(await answer.aread())
        what = f"{self.url}: status {status} ({said})"
        match status:
            case 400 | 422:
                return EndpointFailed(
                    f"{what}: the request is refused: see model.max_model_len and "
                    "actors.max_action_tokens, and name a server that takes and returns token ids, "
                    "as vLLM's does (prompt, return_token_ids)"
                )
            case 401 | 403:
                return EndpointFailed(
                    f"{what}: give the server's key, --key-file FILE or OPENAI_API_KEY"
                )
            case 404:
                return EndpointFailed(
                    f"{what}: name a model that it serves ({self.url}/models), --model NAME, and a "
                    "server that completes text (/v1/completions)"
                )
            case _:
                return EndpointFailed(f"{what}: the server cannot answer now: ask again later")

    def _named(self, error: httpx.RequestError, when: str) -> EndpointFailed:
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return EndpointFailed(
                f"{self.url}: no connection ({error}): start the server, or name another URL"
            )
        what = "no word for too long" if isinstance(error, httpx.TimeoutException) else "cut off"
        return EndpointFailed(
            f"{self.url}: {what} {when} ({type(error).__name__}: {error}): ask again"
        )


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Lines of server-sent events; httpx would also break them at U+2028 and others."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
    yield rest


def _words(body: Any) -> str:
    try:
        said = json.loads(body) if isinstance(body, bytes) else body
    except ValueError:
        said = body.decode(errors="replace")
    for name in ("error", "message", "detail"):
        said = said.get(name, said) if isinstance(said, dict) else said
    return " ".join(str(said).split())[:_SHOWN]


def base_url(url: str) -> str:
    """Return `http://host:8000/v1`, also given without `/v1` or more. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        known = False
    if not known:
        raise ConfigError(f"{url!r} is no URL of a server: give http://HOST:PORT or https://HOST")
    base = url.rstrip("/").removesuffix("/completions").rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"
