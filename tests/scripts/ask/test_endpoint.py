"""A policy behind a real HTTP server: token ids, refusals, replies that are cut off."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from actors.policies.base import Completion
from configs.load import ConfigError
from scripts.ask.endpoint import EndpointFailed, EndpointPolicy, base_url
from tests.scripts.ask.asking import Bytes, Reply, chunk, endpoint, event, refuse, stream

TOKENIZER = Bytes()
PROMPT = TOKENIZER.encode("who?")
STOPS = ("</search>", "</answer>")
DONE = b"data: [DONE]\n\n"
SEARCH = "<search> bore </search>"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, False)


def said(*pieces: str, stop_reason: str | int | None = None) -> bytes:
    """vLLM's stream: ids with every piece of text."""
    *first, last = pieces
    events = [event(piece, token_ids=ids(piece), stop_reason=None) for piece in first]
    end = event(last, "stop", token_ids=ids(last), stop_reason=stop_reason)
    return stream(*events, end, DONE)


class Heard:
    """What was told, and an event when something was."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.something = asyncio.Event()

    def __call__(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.something.set()


BEGUN = event("bo", token_ids=ids("bo"))


async def complete(url: str, heard: Heard | None = None, **settings: Any) -> Completion:
    settings = {"model": "forage", "tokenizer": TOKENIZER} | settings
    stops = settings.pop("stops", STOPS)
    async with EndpointPolicy(url, heard=heard or Heard(), **settings) as policy:
        return await policy.complete(
            PROMPT, temperature=0.5, seed=1 << 62 | 5, max_tokens=40, stops=stops
        )


async def test_ids_go_out_and_come_back_as_they_are() -> None:
    async with endpoint(said("<search> bo", "re </search>", stop_reason="</search>")) as server:
        done = await complete(server.url)
    assert done.tokens.tolist() == ids(SEARCH) and done.finish_reason == "stop"
    assert np.isnan(done.logprobs).all() and not done.versions.any()
    (body,) = server.bodies
    assert body["prompt"] == PROMPT and body["stop"] == list(STOPS) and body["stream"] is True
    assert body["include_stop_str_in_output"] and body["return_token_ids"]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("forage", 40, 0.5)
    assert body["seed"] == 5


async def test_nothing_of_the_sampling_is_left_to_the_model_s_folder() -> None:
    async with endpoint(said(SEARCH)) as server:
        await complete(server.url)
    (body,) = server.bodies
    sampling = {name: body.get(name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    assert sampling == {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


async def test_what_is_sampled_is_told_while_the_server_goes_on() -> None:
    heard = Heard()

    async def slowly(writer: asyncio.StreamWriter) -> None:
        writer.write(stream(event("<ans", token_ids=ids("<ans")), whole=False))
        await heard.something.wait()
        last = event("wer>", "length", token_ids=ids("wer>"))
        writer.write(chunk(last) + b"0\r\n\r\n")

    async with endpoint(slowly) as server:
        done = await complete(server.url, heard)
    assert heard.ids == ids("<answer>") == done.tokens.tolist()
    assert done.finish_reason == "length"


@pytest.mark.parametrize(
    ("sampled", "stop_reason", "completed"),
    [
        ([*ids("<search> bo"), 1], None, [*ids("<search> bo"), 1]),
        (ids(SEARCH), "</search>", ids(SEARCH)),
    ],
)
async def test_ids_end_as_they_were_sampled(
    sampled: list[int], stop_reason: str | None, completed: list[int]
) -> None:
    reply = stream(event("", "stop", token_ids=sampled, stop_reason=stop_reason))
    async with endpoint(reply) as server:
        assert (await complete(server.url)).tokens.tolist() == completed


async def test_a_server_of_text_alone_is_refused_by_what_is_missing() -> None:
    heard = Heard()
    async with endpoint(stream(event("so <sea"), event("rch> bore ", "stop"))) as server:
        with pytest.raises(EndpointFailed, match=r"text and no token_ids: name a server"):
            await complete(server.url, heard)
    assert not heard.ids and len(server.bodies) == 1


async def test_a_request_that_is_refused_is_told_in_the_server_s_words() -> None:
    said = r"at most 8 tokens.*see model.max_model_len .* a server that takes and returns token ids"
    async with endpoint(refuse(400, "at most 8 tokens")) as server:
        with pytest.raises(EndpointFailed, match=said):
            await complete(server.url)
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (
            refuse(401, "no key"),
            r"401 \(no key\): give the server's key, --key-file FILE or OPENAI",
        ),
        (refuse(404, "no model x"), r"404 \(no model x\): name a model that it serves .* --model"),
        (refuse(503, "full"), r"503 \(full\): the server cannot answer now: ask again later"),
        (stream(BEGUN, whole=False), r"cut off while it answered .*: ask again"),
        (stream(BEGUN), "the reply was cut off before its end: ask again"),
        (stream(event("", "abort")), "the reply was cut off by 'abort': ask again"),
        (stream(event("", "stop")), "the server completed nothing: name another --model"),
        (stream(b'data: {"error": {"message": "oh"}}\n\n'), "the server failed: oh: ask again"),
        (stream(b"data: <html>\n\n"), "no OpenAI-compatible stream .*: name another server"),
        (b"", "cut off while it answered"),
    ],
)
async def test_what_goes_wrong_is_told_with_its_remedy(reply: Reply, words: str) -> None:
    async with endpoint(reply) as server:
        with pytest.raises(EndpointFailed, match=f"^{server.url}/v1: .*{words}"):
            await complete(server.url)


async def test_nobody_listening_is_told_with_the_remedy() -> None:
    async with endpoint(b"") as server:
        pass
    with pytest.raises(EndpointFailed, match=r"no connection .*: start the server, or name"):
        await complete(server.url)


async def test_the_only_model_need_not_be_named_and_the_key_is_shown() -> None:
    async with endpoint(said(SEARCH)) as server:
        await complete(server.url, model="", key="sesame-12")
    assert server.bodies[0]["model"] == "forage"
    assert [head.partition(" http")[0] for head in server.heads] == [
        "get /v1/models", "post /v1/completions",
    ]  # fmt: skip
    assert all("authorization: bearer sesame-12" in head for head in server.heads)


async def test_of_several_models_one_must_be_named() -> None:
    async with endpoint(said(SEARCH), models=("a", "b")) as server:
        with pytest.raises(EndpointFailed, match=r"--model NAME: \['a', 'b'\]"):
            await complete(server.url, model="")
    assert not server.bodies


async def test_another_tokenizer_than_the_server_s_is_noticed() -> None:
    reply = stream(event("bore", "stop", token_ids=ids("kelu")))
    async with endpoint(reply) as server:
        with pytest.raises(
            EndpointFailed, match=r"says 'bore' where .* reads 'kelu': .*--tokenizer"
        ):
            await complete(server.url)


async def test_lines_end_at_line_feeds_alone() -> None:
    text = "a\u2028b\u0085c"
    raw = event(text, "length", token_ids=ids(text)).replace(b"\n", b"\r\n")
    for each in "\u2028\u0085":  # as they are, not escaped
        raw = raw.replace(b"\\u%04x" % ord(each), each.encode())
    async with endpoint(stream(b": a comment\r\n\r\n", raw)) as server:
        assert (await complete(server.url)).tokens.tolist() == ids(text)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/completions"])
def test_a_server_is_named_with_its_path_or_without(path: str) -> None:
    assert base_url(f"https://host:8000{path}") == "https://host:8000/v1"


@pytest.mark.parametrize("url", ["http://", "http://host:port", "http://host:99999", "ftp://host"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"is no URL of a server: give http://HOST:PORT"):
        base_url(url)
