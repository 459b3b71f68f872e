"""What an OpenAI-compatible server sends when it completes: server-sent events, errors, addresses.

A leaf: it holds what comes, and says what is wrong with it.
"""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
from msgspec import UNSET, UnsetType

from actors.errors import PolicyError
from configs.load import ConfigError

_SHOWN = 300  # characters of a server's own words
_ID = "token_id:"


class EndpointFailed(PolicyError):
    """The server did not complete; the message names server and remedy."""


class NotUnderstood(EndpointFailed):
    """A 400 or 422: the request, or this form of it, is refused."""


class _Logprobs(msgspec.Struct):
    tokens: list[str] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None

    @property
    def ids(self) -> list[int]:
        """The ids, as newer or as older vLLMs say them; empty where they are not said."""
        named = (self.logprobs.tokens if self.logprobs else None) or []
        if self.token_ids is None and all(name.startswith(_ID) for name in named):
            return [int(name.removeprefix(_ID)) for name in named]
        return self.token_ids or []


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


class Reply:
    """A completion as far as it has come. `stop_reason`: unset where the server never names it;
    None: an end token."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.ids: list[int] = []
        self.text = self.finish_reason = ""
        self.stop_reason: int | str | UnsetType | None = UNSET

    def take(self, line: bytes) -> Iterator[tuple[list[int], str]]:
        """Take a line of the stream in; yield the ids that are new, or their text where the server
        gives no ids. Raises EndpointFailed."""
        name, _, data = line.partition(b":")
        if name != b"data" or data.strip() == b"[DONE]":
            return
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except msgspec.MsgspecError as error:
            raise EndpointFailed(
                f"{self._url}: no OpenAI-compatible stream ({error}): name another server"
            ) from error
        if chunk.error:
            raise EndpointFailed(f"{self._url}: the server failed: {words(chunk.error)}: ask again")
        for choice in chunk.choices[:1]:
            ids, text = choice.ids, choice.text or ""
            self.ids += ids
            self.text += text
            self.finish_reason = choice.finish_reason or self.finish_reason
            if choice.stop_reason is not UNSET:
                self.stop_reason = choice.stop_reason
            if ids or not self.ids:
                yield ids, text

    def check(self) -> None:
        """Raise EndpointFailed unless it is whole."""
        if self.finish_reason not in ("stop", "length"):
            how = f"by {self.finish_reason!r}" if self.finish_reason else "before its end"
            raise EndpointFailed(f"{self._url}: the reply was cut off {how}: ask again")


async def lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Lines as server-sent events have them; httpx would also break them at U+2028 and others."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
    yield rest


def words(body: Any) -> str:
    """What a server says of an error, on one line."""
    try:
        said = json.loads(body) if isinstance(body, bytes) else body
    except ValueError:
        said = body.decode(errors="replace")
    for name in ("error", "message", "detail"):
        said = said.get(name, said) if isinstance(said, dict) else said
    return " ".join(str(said).split())[:_SHOWN]


def base_url(url: str) -> str:
    """`http://host:8000`, `…/v1` and `…/v1/completions` all as `http://host:8000/v1`. Raises
    ConfigError."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        known = False
    if not known:
        raise ConfigError(f"{url!r} is no URL of a server: give http://HOST:PORT or https://HOST")
    base = url.rstrip("/").removesuffix("/completions").rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"
