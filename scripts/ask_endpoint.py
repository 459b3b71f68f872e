"""A model behind an OpenAI-compatible server as a Policy: `POST /v1/completions`, streamed.

Consumes token ids; produces the ids that the server sampled, telling them as they come. vLLM takes
ids and gives ids, so that it is asked exactly as in training; a server that knows text alone is
given text, and what it says is tokenised here. Log-probs and versions are not the server's to know:
NaN and 0. Waits at most `deadline_s` for each piece; unblocked by it or by EndpointFailed, whose
message names the remedy.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx
import numpy as np
from msgspec import UnsetType

from actors.policy import Completion, FinishReason, Stops
from scripts.ask_wire import EndpointFailed, NotUnderstood, Reply, base_url, lines, words

CONNECT_S = 10.0
_SEED_BITS = 31  # as many as every server reads
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
Heard = Callable[[Sequence[int], str], None]  # ids, or, where the server gives none, their text


class _Form(NamedTuple):
    """How a server is asked: the prompt as ids or as text, with vLLM's own fields or without."""

    ids: bool
    extended: bool


_FORMS = (_Form(True, True), _Form(True, False), _Form(False, False))


class EndpointPolicy:
    """Asks one server's model; use as `async with`. `model` empty: the only one it serves.

    `tokenizer` must be the served model's; `heard` is told what is sampled while it comes.
    """

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
        self._form = 0  # of _FORMS: the first that the server has understood
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def complete(
        self, tokens: Sequence[int], *, temperature: float, seed: int, max_tokens: int, stops: Stops
    ) -> Completion:
        """Complete `tokens`, keeping the stop. Raises EndpointFailed, BadCompletion."""
        settings = {
            "model": self._model,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "seed": seed % (1 << _SEED_BITS),
            "stop": list(stops),
            "stream": True,
        }
        for number in range(self._form, len(_FORMS)):
            try:
                reply = await self._ask(settings | self._prompt(_FORMS[number], tokens))
            except NotUnderstood as error:
                refused = error
                continue
            self._form = number
            return self._completion(reply, stops)
        raise EndpointFailed(f"{refused}: see model.max_model_len and actors.max_action_tokens")

    def _prompt(self, form: _Form, tokens: Sequence[int]) -> dict[str, Any]:
        extensions: dict[str, Any] = {
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # older vLLMs know this one, with log-probs
            "logprobs": 0,
            # What is left out, vLLM takes from the model's generation_config.json.
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        return {
            "prompt": list(tokens) if form.ids else self._text(tokens),
            **(extensions if form.extended else {}),
        }

    def _text(self, tokens: Sequence[int]) -> str:
        """The prompt for a server that tokenises, and puts the same token first, itself."""
        begin = getattr(self._tokenizer, "bos_token_id", None)
        return self._decode(tokens[1:] if begin is not None and tokens[0] == begin else tokens)

    async def _ask(self, body: dict[str, Any]) -> Reply:
        reply = Reply(self.url)
        try:
            async with self._client.stream("POST", f"{self.url}/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise await self._refusal(answer)
                async for line in lines(answer):
                    for ids, text in reply.take(line):
                        self._heard(ids, text)
        except httpx.RequestError as error:
            raise self._named(error, "while it answered") from error
        reply.check()
        return reply

    def _completion(self, reply: Reply, stops: tuple[str, ...]) -> Completion:
        ids = list(reply.ids)
        if ids:
            text = self._decode(ids)
            self._compare(text, reply.text)
        else:
            text, ids = reply.text, self._encode(reply.text)
        if reply.finish_reason == "stop":
            ids += self._left_out(reply, text, stops)
        if not ids:
            raise EndpointFailed(f"{self.url}: the server completed nothing: name another --model")
        reason: FinishReason = "stop" if reply.finish_reason == "stop" else "length"
        nothing, zeros = np.full(len(ids), np.nan, np.float32), np.zeros(len(ids), np.int32)
        return Completion(np.asarray(ids, np.int32), nothing, zeros, reason)

    def _left_out(self, reply: Reply, text: str, stops: tuple[str, ...]) -> list[int]:
        """The stop, where the server has cut it off: a closing tag, or the end token."""
        if reply.ids and reply.ids[-1] in self._tokenizer.all_special_ids:
            return []
        if tag := self._missing_tag(reply, text, stops):
            ids = self._encode(tag)
            self._heard(ids if reply.ids else [], tag)
            return ids
        ended = any(text.rstrip().endswith(stop) for stop in stops)
        end = self._tokenizer.eos_token_id
        return [] if ended or reply.ids or end is None else [end]

    def _missing_tag(self, reply: Reply, text: str, stops: tuple[str, ...]) -> str:
        """The closing tag that the server names or, where it names none to anybody, that the last
        opened tag wants."""
        if not isinstance(reply.stop_reason, UnsetType):
            tag = str(reply.stop_reason)
            return tag if tag in stops and tag not in text else ""
        opened = [
            (text.rfind(tag.replace("</", "<", 1)), tag) for tag in stops if tag.startswith("</")
        ]
        place, tag = max(opened, default=(-1, ""))
        return tag if place > text.rfind(tag) else ""

    def _compare(self, ours: str, theirs: str) -> None:
        """Raise EndpointFailed where the ids mean something else here than there."""
        here, there = ("".join(filter(str.isalnum, text)) for text in (ours, theirs))
        if not here.startswith(there):
            raise EndpointFailed(
                f"{self.url}: the server says {theirs[:40]!r} where the tokenizer here reads "
                f"{ours[:40]!r}: name the folder of the served model's, --tokenizer FOLDER"
            )

    async def _only_model(self) -> str:
        names = await self._models()
        if len(names) != 1:
            raise EndpointFailed(f"{self.url}: name one of its models, --model NAME: {names}")
        return names[0]

    async def _models(self) -> list[str]:
        try:
            answer = await self._client.get(f"{self.url}/models")
            if answer.status_code != httpx.codes.OK:
                raise await self._refusal(answer)
            return [str(each["id"]) for each in answer.json()["data"]]
        except httpx.RequestError as error:
            raise self._named(error, "when asked for its models") from error
        except (ValueError, KeyError, TypeError) as error:
            raise EndpointFailed(
                f"{self.url}/models does not list models: name one, --model NAME"
            ) from error

    async def _refusal(self, answer: httpx.Response) -> EndpointFailed:
        """A status other than 200, in words."""
        status, said = answer.status_code, words(await answer.aread())
        what = f"{self.url}: status {status} ({said})"
        match status:
            case 400 | 422:
                return NotUnderstood(f"{what}: the request is refused")
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
        """A failure of the connection, in words."""
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return EndpointFailed(
                f"{self.url}: no connection ({error}): start the server, or name another URL"
            )
        what = "no word for too long" if isinstance(error, httpx.TimeoutException) else "cut off"
        return EndpointFailed(
            f"{self.url}: {what} {when} ({type(error).__name__}: {error}): ask again"
        )

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
