"""The judge: a language model behind an OpenAI-compatible endpoint grades an answer from 0 to 1.

`rewards.judge.timeout_s` bounds a verdict, retries and the wait for a turn included. A reply that
is no verdict is always an exception here, never a 0.
"""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec

from actors.errors import Unscorable
from actors.rewards.single_flight import SingleFlight
from configs.rewards import JudgeConfig
from retrieval_server.auth import read_token
from retrieval_server.client import Backoff, Latencies

KEY_FIELD, KEY_REMEDY = "rewards.judge.key_file", "put the endpoint's key there, and nothing else"
_MAX_ANSWER_CHARS = 4000  # of what the policy wrote; the rest is not shown
_SHOWN_CHARS = 200  # of a reply, in messages
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_FIELD = re.compile(r"\{(question|gold|answer)\}")
_RETRIED_STATUS = (408, 409, 425, 429)  # and 5xx

# A verdict, where a reply may have it.
_THOUGHT = re.compile(r"^.*</think>|<think>.*$", re.DOTALL)
_YES, _NO = ("yes", "true", "correct", "right"), ("no", "false", "incorrect", "wrong")
_WORD = rf"\b(?:{'|'.join((*_YES, *_NO))})\b"
# Neither 8/10, 1 out of ten, 1 of 5, 80% nor 1,000: only a number that stands for itself.
_ONE = r"\s*1(?:\.0)?(?![.,]?\d)"
_OF = rf"(?:/|out\s+of\b)(?!{_ONE})|(?:of|in)\b(?!{_ONE})\s*\d"
_DIGITS = r"(?:\d{1,3}(?:\.\d{1,20})?|\.\d{1,20})"
_NUMBER = rf"-?{_DIGITS}(?:e-?\d{{1,3}})?(?!\w|[.,]\d)(?!\s*(?:%|{_OF}))"
_SAID = rf"(?P<said>{_WORD}|{_NUMBER})"
_MARKS = r"[\s*_`'\"#:.!()\[\]{}-]*"
_ALONE = re.compile(rf"{_MARKS}?{_SAID}(?:\s*/\s*1(?:\.0)?(?!\d))?{_MARKS}", re.IGNORECASE)
# Not "answer": a judge quotes the accepted one, which may be a number, yes or no itself.
_NAMES = "verdict|judge?ment|decision", "score|rating|grade"
_NAMED = re.compile(
    rf"\b(?:{'|'.join(_NAMES)})\b[\s*_`'\":={{-]*(?:is\b)?"
    rf"[\s*_`'\":=-]*{_SAID}",
    re.IGNORECASE,
)
_KEYS = [
    re.compile(rf"(?<!\\)[\"'](?:{names})[\"']\s*:\s*[\"']?\s*", re.IGNORECASE) for names in _NAMES
]
_VALUE = re.compile(rf"{_SAID}(?=\s*[.!]?\s*(?:[\"',}}]|$))", re.IGNORECASE)
_OPENING = re.compile(
    r"[\s*_`'\"#]*\b(?P<said>yes|no)\b(?=\s*[*_`'\"]*\s*[.,;:!\n—–-]|\s*$)", re.IGNORECASE
)


class _Case(NamedTuple):
    question: str
    golds: tuple[str, ...]
    answer: str


class _Unanswered(Exception):
    """A failed attempt that may be repeated, at the earliest after `after_s`."""

    def __init__(self, cause: str, after_s: float = 0.0) -> None:
        super().__init__(cause)
        self.after_s = after_s


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


_DECODER = msgspec.json.Decoder(_Completion)


class Judge:
    """A client of one endpoint; close it when done. Raises ConfigError for an unusable key file."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._url = _completions_of(config.url)
        self._key = read_token(config.key_file, KEY_FIELD, KEY_REMEDY)
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=None,  # each attempt has its own deadline, connecting included
            limits=httpx.Limits(max_connections=None),  # `_turns` bounds them
            trust_env=urlsplit(config.url).hostname not in _LOOPBACK,  # no proxy before our own
        )
        self._turns = asyncio.Semaphore(config.concurrency)
        self._verdicts: SingleFlight[_Case, float] = SingleFlight(config.cache_verdicts)
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._calls = self._retried = self._failures = 0
        self._latencies = Latencies()

    async def close(self) -> None:
        """Abandon open requests, and close the connections."""
        await self._verdicts.close()
        await self._client.aclose()

    async def verdict(self, question: str, golds: Sequence[str], answer: str) -> float:
        """Grade the answer, 0 to 1. Raises Unscorable (`judge`) with the cause."""
        case = _Case(question, tuple(golds), answer[:_MAX_ANSWER_CHARS])
        return await self._verdicts.get(case, self._ask)

    def gauges(self) -> dict[str, float]:
        """Return counts since the start, and latencies of recent verdicts."""
        return {
            "actor/judge_calls_count": float(self._calls),
            "actor/judge_cached_count": float(self._verdicts.saved),
            "actor/judge_retried_count": float(self._retried),
            "actor/judge_failures_count": float(self._failures),
            **self._latencies.gauges("actor/judge_latency"),
        }

    async def _ask(self, case: _Case) -> float:
        self._calls += 1
        begun, limit_s = time.monotonic(), self._config.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._reply(self._body(case), begun + limit_s)
        except (TimeoutError, _Unanswered, Unscorable) as error:
            self._failures += 1
            late = isinstance(error, TimeoutError)
            cause = f"no verdict within {limit_s:g} s" if late else f"{error}"
            if self._key:
                cause = cause.replace(self._key, "…")  # an endpoint may say what it was shown
            raise Unscorable("judge", f"{self._url}: {cause}") from error
        self._latencies.add(time.monotonic() - begun)
        if (verdict := read_verdict(reply)) is None:
            self._failures += 1
            said = repr(reply[-_SHOWN_CHARS:])
            raise Unscorable("judge", f"{self._url}: neither yes, no nor 0 to 1: {said}")
        return verdict

    def _body(self, case: _Case) -> bytes:
        words = {
            "question": case.question,
            "gold": "\n".join(f"- {gold}" for gold in case.golds),
            "answer": case.answer,
        }
        # In one pass: what stands in the texts is no field.
        prompt = _FIELD.sub(lambda field: words[field[1]], self._config.prompt)
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": prompt}],
        }
        if self._config.temperature is not None:
            body["temperature"] = self._config.temperature
        if self._config.max_tokens:
            body["max_tokens"] = self._config.max_tokens
        return json.dumps(body).encode()

    async def _reply(self, body: bytes, deadline: float) -> str:
        """Return the model's words; before the last attempt, each may use half of the time left."""
        attempt = 0
        while True:
            left = self._config.retries - attempt
            try:
                async with self._turns:
                    remaining_s = deadline - time.monotonic()
                    return await self._attempt(body, remaining_s / 2 if left else remaining_s)
            except _Unanswered as error:
                pause_s = max(self._backoff.pause_s(attempt), error.after_s)
                if not left or time.monotonic() + pause_s >= deadline:
                    raise
            attempt += 1
            self._retried += 1
            await asyncio.sleep(pause_s)

    async def _attempt(self, body: bytes, seconds: float) -> str:
        try:
            async with asyncio.timeout(seconds):
                response = await self._client.post(self._url, content=body)
        except TimeoutError as error:
            raise _Unanswered(f"no reply within {seconds:.3g} s") from error
        except httpx.RequestError as error:
            raise _Unanswered(f"{type(error).__name__}: {error}") from error
        return _words(response)


def read_verdict(reply: str) -> float | None:
    """Parse a reply: yes is 1, no is 0, a number from 0 to 1 is itself; None for any other reply.

    A thought before the verdict is passed over. The verdict is the whole reply, else the last one
    that is named ("Score: 0.5"), else a yes or no that opens the reply, else its last line. Where a
    JSON object has a key for it (`{"verdict": "no"}`), that key's value alone counts.
    """
    text = _THOUGHT.sub("", reply).strip()
    lines = text.splitlines()
    verdicts, scores = (list(key.finditer(text)) for key in _KEYS)
    if keys := verdicts or scores:
        return _read(_VALUE.match(text, keys[-1].end()))
    named = list(_NAMED.finditer(text))
    return _read(
        _ALONE.fullmatch(text)
        or (named[-1] if named else None)
        or _OPENING.match(text)
        or (_ALONE.fullmatch(lines[-1]) if lines else None)
    )


def _read(found: re.Match[str] | None) -> float | None:
    if found is None:
        return None
    said = found["said"].lower()
    if said in (*_YES, *_NO):
        return float(said in _YES)
    value = float(said)
    return value if 0.0 <= value <= 1.0 else None


def _completions_of(url: str) -> str:
    """Return the address of chat completions; a query (Azure's api-version) stays where it is."""
    parts = urlsplit(url)
    base = parts.path.rstrip("/").removesuffix("/chat/completions")
    return parts._replace(path=f"{base}/chat/completions").geturl()


def _words(response: httpx.Response) -> str:
    """Return the model's reply. Raises _Unanswered, or Unscorable where no retry would help."""
    status, after = response.status_code, response.headers.get("retry-after", "")
    said = repr(response.content[:_SHOWN_CHARS].decode(errors="replace"))
    if status in _RETRIED_STATUS or status >= 500:
        raise _Unanswered(f"status {status}: {said}", float(after) if after.isdecimal() else 0.0)
    if status != 200:
        raise Unscorable("judge", f"status {status}: {said}")
    try:
        completion = _DECODER.decode(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Unanswered(f"no chat completion ({error}): {said}") from error
    if not completion.choices:
        raise _Unanswered(f"a chat completion without choices: {said}")
    choice = completion.choices[0]
    words = choice.message.content or ""
    if choice.finish_reason == "length":
        cut = repr(words[-_SHOWN_CHARS:])
        raise Unscorable("judge", f"cut short (rewards.judge.max_tokens), no verdict: {cut}")
    return words
