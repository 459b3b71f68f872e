"""The gateway answers OpenAI's own client, and refuses by name what it does not serve."""

import asyncio
import socket
import threading
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from actors.errors import ActorError, GenerationFailed, UnverifiedWeights
from actors.gateway import merging, server
from actors.gateway.protocol import Refused
from actors.gateway.server import Gateway
from actors.gateway.sessions import Result
from actors.policies.base import Completion, Delta
from actors.prompt import Prompter
from scripts.ask.dry_run import Said
from tests.actors.gateway.conftest import LEASE, Serve, all_verified, config_of

USER = [{"role": "user", "content": "what is the mayor of bore ?"}]
FULL = "This model's maximum context length is 2000 tokens"  # what clients look for


async def test_a_chat_is_answered_and_kept(serve: Serve) -> None:
    served = await serve("kelu")
    reply = await served.client.chat.completions.create(model="any", messages=USER)
    assert reply.choices[0].message.content == "kelu" and reply.model == "any"
    assert reply.choices[0].finish_reason == "stop" and reply.object == "chat.completion"
    (call,) = served.session.calls
    read, said = served.prompter.decode(call.prompt), served.prompter.decode(call.completion.tokens)
    assert read == served.prompter.render(USER) and said == "kelu<|im_end|>"
    assert call.prompt.dtype == np.int32 and call.started_at <= call.ended_at
    usage = reply.usage
    assert usage.prompt_tokens == len(call.prompt)
    assert usage.completion_tokens == len(call.completion.tokens)


async def test_a_text_is_gone_on_with(serve: Serve) -> None:
    served = await serve("the mayor is kelu")
    reply = await served.client.completions.create(model="", prompt="what is", logprobs=0)
    assert reply.choices[0].text == "the mayor is kelu"
    told = reply.choices[0].logprobs
    assert "".join(told.tokens) == "the mayor is kelu<|im_end|>"
    assert told.token_logprobs == [0.0] * len(told.tokens)
    assert served.policy.asked[0]["tokens"] == served.prompter.document("what is").tolist()


async def test_ids_are_read_as_they_are(serve: Serve) -> None:
    served = await serve("kelu")
    await served.client.completions.create(model="", prompt=[[5, 6, 7]])
    assert served.policy.asked[0]["tokens"] == [5, 6, 7]


async def test_the_lease_s_sampling_holds(serve: Serve) -> None:
    served = await serve("a", "b")
    for _ in range(2):
        await served.client.chat.completions.create(
            model="", messages=USER, temperature=0.2, seed=5, max_tokens=9
        )
    asked = served.policy.asked
    assert [each["temperature"] for each in asked] == [1.0, 1.0]
    assert len({each["seed"] for each in asked}) == 2 and asked[0]["max_tokens"] == 9
    assert served.gateway.gauges()["actor/gateway_overridden_total"] == 2


async def test_by_hand_the_request_s_sampling_holds(serve: Serve) -> None:
    served = await serve("a", free=True)
    await served.client.chat.completions.create(model="", messages=USER, temperature=0.2, seed=5)
    assert [served.policy.asked[0][name] for name in ("temperature", "seed")] == [0.2, 5]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_ends_a_completion_and_is_on_record(
    serve: Serve, stream: bool, include: bool
) -> None:
    served = await serve("kelu </answer> and more")
    asked = {"include_stop_str_in_output": include}
    text, reason = await said(served, stream, stop=["</answer>"], extra_body=asked)
    assert text == "kelu </answer>" if include else "kelu "
    assert reason == "stop"
    sampled = served.session.calls[0].completion.tokens
    assert served.prompter.decode(sampled) == "kelu </answer>"


async def said(served: Any, stream: bool, **asked: Any) -> tuple[str, str]:
    """The content and the reason of a chat's end, streamed or not."""
    made = await served.client.chat.completions.create(
        model="", messages=USER, stream=stream, **asked
    )
    if not stream:
        return made.choices[0].message.content, made.choices[0].finish_reason
    choices = [each.choices[0] async for each in made]
    return "".join(each.delta.content or "" for each in choices), choices[-1].finish_reason


async def test_a_limit_ends_a_completion(serve: Serve) -> None:
    served = await serve("what is the mayor")
    assert (await said(served, False, max_completion_tokens=1))[1] == "length"
    assert len(served.session.calls[0].completion.tokens) == 1


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "a", "parameters": parameters}}


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"properties": value}
    return value


REFUSED = [
    ({"n": 2}, "n"),
    ({"top_p": 0.9}, "top_p"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
    ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice"),
    ({"tools": [tool(nested(80))]}, "tools"),
    ({"tools": [tool({"properties": {str(n): {} for n in range(20_000)}})]}, "tools"),
    ({"tools": [tool({})] * 129}, "tools"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ({"extra_body": {"guided_json": {}}}, "guided_json"),
    ({"extra_body": {"chat_template_kwargs": {"a": 1}}}, "chat_template_kwargs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"stop": [""]}, "stop"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "mayor", "content": "a"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
    ),
]


async def test_what_cannot_be_served_is_refused_by_name(serve: Serve) -> None:
    served = await serve()
    for asked, field in REFUSED:
        with pytest.raises(openai.BadRequestError) as caught:
            await served.client.chat.completions.create(**{"model": "", "messages": USER} | asked)
        assert caught.value.param == field and field in caught.value.message
        assert caught.value.type == "invalid_request_error" and not served.session.begun


async def test_of_a_text_too(serve: Serve) -> None:
    served = await serve()
    for asked, field in (
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"logprobs": 3}, "logprobs"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 10**6]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await served.client.completions.create(**{"model": "", "prompt": "a"} | asked)
        assert caught.value.param == field


async def test_a_prompt_that_leaves_no_room_is_refused(serve: Serve) -> None:
    served = await serve()
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.completions.create(model="", prompt=[5] * 1999)
    assert caught.value.code == "context_length_exceeded" and not served.session.begun
    assert f"{FULL} (model.max_model_len): the prompt is 1999 tokens long" in caught.value.message


async def test_a_text_that_cannot_fit_is_refused_unread(serve: Serve, monkeypatch: Any) -> None:
    served = await serve()
    for name in ("document", "render"):
        monkeypatch.setattr(Prompter, name, None)
    long = "the mayor " * 90_000
    said = "the prompt has 900000 characters and 2000 tokens hold at most [0-9]+: shorten it"
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        await served.client.completions.create(model="", prompt=long)
    assert caught.value.code == "context_length_exceeded" and served.session.full
    assert FULL in caught.value.message
    with pytest.raises(openai.BadRequestError, match="900000 characters") as caught:
        await served.client.chat.completions.create(
            model="", messages=[{"role": "user", "content": long}]
        )
    assert caught.value.param == "messages" and not served.session.begun


@pytest.mark.parametrize("name", ["document", "render"])
async def test_the_loop_goes_on_while_a_prompt_is_read(
    serve: Serve, monkeypatch: Any, name: str
) -> None:
    served = await serve("kelu")
    begun, go, real = threading.Event(), threading.Event(), getattr(Prompter, name)

    def slow(*given: Any, **named: Any) -> Any:
        begun.set()
        assert go.wait(5), "the loop stood still"
        return real(*given, **named)

    monkeypatch.setattr(Prompter, name, slow)
    create = served.client.completions.create
    asking = asyncio.create_task(
        said(served, False) if name == "render" else create(model="", prompt="what is")
    )
    async with asyncio.timeout(10):
        while not begun.is_set():
            await asyncio.sleep(0.01)
    go.set()
    await asking
    assert len(served.session.calls) == 1


async def test_what_happens_anyway_is_taken(serve: Serve) -> None:
    served = await serve("kelu", "bore", "end")
    assert (await said(served, False, tool_choice="required"))[0] == "kelu"
    asked = {"stream_options": {"include_obfuscation": False}}
    assert (await said(served, True, **asked))[0] == "bore"
    reply = await served.client.completions.create(model="", prompt="what is", logprobs=1)
    assert reply.choices[0].logprobs.token_logprobs and not reply.choices[0].logprobs.top_logprobs
    assert (await served.client.models.retrieve("Qwen/Qwen3-8B")).id == "Qwen/Qwen3-8B"


async def test_bodies_that_are_none_are_refused(serve: Serve) -> None:
    served = await serve(body_bytes=1000)
    async with httpx.AsyncClient(
        verify=False, headers={"authorization": f"Bearer {served.session.key}"}
    ) as http:
        for body, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400), (b" " * 1001, 413)):
            reply = await http.post(f"{served.gateway.url}/chat/completions", content=body)
            assert reply.status_code == status and reply.json()["error"]["message"]
        assert (await http.get(f"{served.gateway.url}/embeddings")).status_code == 404


async def test_a_key_opens_its_own_session_while_it_lasts(serve: Serve) -> None:
    served = await serve("a", "b")
    other = served.gateway.open(served.session.lease)
    await served.another(other.key).chat.completions.create(model="", messages=USER)
    assert len(other.calls) == 1 and not served.session.calls
    other.close()
    with pytest.raises(openai.APIStatusError) as gone:
        await served.another(other.key).models.list()
    assert gone.value.status_code == 410 and gone.value.code == "session_ended"
    with pytest.raises(openai.AuthenticationError):
        await served.another("another").models.list()
    assert [each.id async for each in served.client.models.list()] == ["policy"]


async def test_a_session_has_limits(serve: Serve) -> None:
    served = await serve("a", "b", calls=1, messages=1)
    assert (await said(served, False))[0] == "a"
    with pytest.raises(openai.RateLimitError) as calls:
        await said(served, False)
    assert calls.value.code == "calls"
    with pytest.raises(openai.BadRequestError, match="messages"):
        await served.client.chat.completions.create(model="", messages=USER * 2)


async def test_a_session_ends_at_its_deadline(serve: Serve) -> None:
    served = await serve("a", deadline_s=0.01)
    await asyncio.sleep(0.02)
    with pytest.raises(openai.APIStatusError, match="has ended"):
        await said(served, False)


async def test_a_result_is_posted_once(serve: Serve) -> None:
    served = await serve()
    headers = {"authorization": f"Bearer {served.session.key}"}
    async with httpx.AsyncClient(verify=False, headers=headers) as http:
        for body, status in (
            ({}, 400),
            ({"answer": "kelu", "reward": 1e300}, 400),
            ({"answer": "kelu", "reward": 0.5}, 200),
            ({"answer": "kelu", "reward": 0.5}, 200),
            ({"answer": "bore"}, 409),
            ({"reward": "much"}, 400),
        ):
            assert (
                await http.post(f"{served.gateway.url}/result", json=body)
            ).status_code == status
    assert served.session.result == Result("kelu", 0.5)


async def test_a_result_that_comes_after_the_end_is_refused(serve: Serve) -> None:
    """Its body may come in late."""
    session = (await serve()).session
    session.close()
    with pytest.raises(Refused, match="has ended"):
        session.post(Result("kelu", None))


async def test_what_no_record_could_hold_is_refused_and_the_session_goes_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve(*"abcdef")
    session, text = served.session, "what is the mayor of bore ?" * 10
    monkeypatch.setattr(merging, "MOST_BYTES", 1800)
    first = await served.client.completions.create(model="", prompt=text)
    assert not session.spent
    with pytest.raises(openai.APIStatusError, match=r"send a conversation back") as full:
        await served.client.completions.create(model="", prompt="now " + text)
    assert full.value.status_code == 413 and full.value.code == "record_bytes"
    assert session.spent and len(session.calls) == session.begun == 1
    goes_on = text + first.choices[0].text + "<|im_end|> and ?"
    await served.client.completions.create(model="", prompt=goes_on)
    session.post(Result("kelu", None))
    (sequence,) = merging.merged(session.calls)
    assert len(sequence.turns) == 2
    free = served.another(served.gateway.open(LEASE, free=True).key)
    for number in range(3):
        await free.completions.create(model="", prompt=f"{number} {text}")


class Waiting:
    """A policy that answers once it is told to; notes calls that were given up."""

    def __init__(self) -> None:
        self.begun, self.go, self.given_up = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def complete(self, tokens: Any, **sampling: Any) -> Completion:
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        raise GenerationFailed("told to")


async def test_a_client_that_leaves_gives_its_call_up(serve: Serve) -> None:
    policy = Waiting()
    served = await serve(policy=policy)
    asking = asyncio.create_task(said(served, False))
    await policy.begun.wait()
    asking.cancel()
    async with asyncio.timeout(5):
        await policy.given_up.wait()
        while served.session.at_work:
            await asyncio.sleep(0.01)
    assert not served.session.calls and served.session.fault is None


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_a_session_ends_its_calls(serve: Serve, stream: bool) -> None:
    policy = Waiting()
    served = await serve(policy=policy, calls_at_once=1)
    asking = asyncio.create_task(said(served, stream))
    await policy.begun.wait()
    with pytest.raises(openai.RateLimitError, match="in flight"):
        await said(served, stream)
    served.session.close()
    with pytest.raises(openai.APIStatusError) as caught:
        await asking
    assert caught.value.status_code == 410 and policy.given_up.is_set()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_policy_s_faults_are_kept(serve: Serve, stream: bool) -> None:
    policy = Waiting()
    policy.go.set()
    served = await serve(policy=policy)
    with pytest.raises(openai.InternalServerError, match="told to") as caught:
        await said(served, stream)
    assert caught.value.status_code == 503 and not served.session.calls
    assert isinstance(served.session.fault, GenerationFailed)


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_unverified_is_served(serve: Serve, stream: bool) -> None:
    async def late(versions: Any) -> None:
        raise UnverifiedWeights(f"versions {sorted(versions)}")

    served = await serve("kelu", verified=late)
    with pytest.raises(openai.InternalServerError, match=r"versions \[0\]") as caught:
        await said(served, stream)
    assert caught.value.response.headers["retry-after"] == "1"
    assert not served.session.calls


class Odd:
    """A policy that fails as nobody foresaw, streamed after a first token."""

    def __init__(self, prompter: Prompter, told: bool) -> None:
        self.prompter, self.told = prompter, told

    async def complete(self, tokens: Any, **sampling: Any) -> Completion:
        raise ValueError("odd")

    async def stream(self, tokens: Any, **sampling: Any) -> Any:
        if self.told:
            ids = self.prompter.text("kelu")[:1]
            yield Delta(ids, np.zeros(1, np.float32), frozenset({0}), None)
        raise ValueError("odd")


@pytest.mark.parametrize(("stream", "told"), [(False, False), (True, False), (True, True)])
async def test_what_nobody_foresaw_is_no_fault_of_the_program_s(
    serve: Serve, prompter: Prompter, stream: bool, told: bool
) -> None:
    served = await serve(policy=Odd(prompter, told))
    with pytest.raises(openai.APIError, match="odd") as caught:
        await said(served, stream)
    assert caught.value.type == "server_error" and caught.value.code == "gateway_failed"
    assert isinstance(served.session.fault, ActorError) and not served.session.calls


class Letters:
    """A policy that streams one token after the other, each once it is let."""

    def __init__(self, completion: Completion) -> None:
        self.completion, self.let = completion, asyncio.Semaphore(1)

    async def complete(self, tokens: Any, **sampling: Any) -> Completion:
        return self.completion

    async def stream(self, tokens: Any, **sampling: Any) -> Any:
        whole = self.completion
        for place in range(last := len(whole.tokens)):
            await self.let.acquire()
            one = slice(place, place + 1)
            done = whole if place + 1 == last else None
            yield Delta(whole.tokens[one], whole.logprobs[one], frozenset({0}), done)


async def test_deltas_come_with_their_tokens(serve: Serve, prompter: Any) -> None:
    ids = prompter.text("what is the mayor<|im_end|>")
    zeros = np.zeros(len(ids))
    whole = Completion(ids, zeros.astype(np.float32), zeros.astype(np.int32), "stop")
    policy = Letters(whole)
    served = await serve(policy=policy)
    stream = await served.client.chat.completions.create(
        model="", messages=USER, stream=True, logprobs=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    content, tokens, usage = "", [], None
    async for chunk in stream:
        if not chunk.choices:
            usage = chunk.usage
            continue
        content += chunk.choices[0].delta.content or ""
        if told := chunk.choices[0].logprobs:
            tokens += [each.token for each in told.content]
        assert len(tokens) == len(ids) or not served.session.calls
        policy.let.release()
    assert content == "what is the mayor" and "".join(tokens) == f"{content}<|im_end|>"
    assert usage.completion_tokens == len(ids)
    assert served.gateway.gauges()["actor/gateway_given_up_total"] == 0
    np.testing.assert_array_equal(served.session.calls[0].completion.tokens, ids)


async def test_a_stream_whose_client_leaves_is_given_up(serve: Serve, prompter: Any) -> None:
    ids = prompter.text("what is the mayor<|im_end|>")
    zeros = np.zeros(len(ids))
    whole = Completion(ids, zeros.astype(np.float32), zeros.astype(np.int32), "stop")
    served = await serve(policy=Letters(whole))
    stream = await served.client.chat.completions.create(model="", messages=USER, stream=True)
    await stream.close()
    async with asyncio.timeout(5):
        while served.session.at_work:
            await asyncio.sleep(0.01)
    assert not served.session.calls and served.session.unanswered
    assert served.gateway.gauges()["actor/gateway_given_up_total"] == 1


async def test_what_ends_a_stream_half_way_is_told(serve: Serve, prompter: Any) -> None:
    ids = prompter.text("what is the mayor<|im_end|>")
    zeros = np.zeros(len(ids))
    whole = Completion(ids, zeros.astype(np.float32), zeros.astype(np.int32), "stop")
    served = await serve(policy=Letters(whole))
    stream = await served.client.chat.completions.create(model="", messages=USER, stream=True)
    assert (await anext(stream)).choices[0].delta.role == "assistant"
    served.session.close()
    with pytest.raises(openai.APIError, match="has ended"):
        await anext(stream)
    assert not served.session.calls and not served.session.at_work


async def ends(_: Any, sockets: Any) -> None:
    raise RuntimeError("told to")


async def hangs(_: Any, sockets: Any) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(("serving", "said"), [(ends, "told to"), (hangs, "within")])
async def test_a_gateway_that_does_not_serve_leaves_nothing(
    prompter: Prompter, monkeypatch: Any, serving: Any, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(server, "_LEAVE_S", 0.05)
    if serving is hangs:
        monkeypatch.setattr(server, "_START_S", 0.05)
    monkeypatch.setattr(server._Server, "serve", serving)
    with pytest.raises(ActorError, match=said):
        await Gateway.start(Said(prompter, str), prompter, config_of(), all_verified, port)
    assert not [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
    socket.create_server(("127.0.0.1", port)).close()
