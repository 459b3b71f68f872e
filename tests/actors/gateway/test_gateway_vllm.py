"""OpenAI's own client against a real engine behind the gateway."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
import pytest_asyncio

from actors.gateway.server import Gateway
from actors.policies.engine import stop_arguments
from actors.policies.vllm import VllmPolicy
from actors.prompt import Prompter
from configs.environment import EnvironmentConfig
from configs.schema import ActorsConfig, Config, ModelConfig
from tests.actors.gateway.conftest import LEASE, Served, all_verified, client_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]
TEMPLATE = (
    "{{ 'My ' if tools }}{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or () %}{{ call.function | tojson }}{% endfor %}"
    "{{ '<|end|>' if message.role == 'assistant' }}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "find"}}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def front(vllm_policy: Any, tagged_tokenizer: Any) -> AsyncIterator[Callable[[], Served]]:
    """front(): a new session of a gateway before the session's engine, greedy."""
    tokenizer = copy.deepcopy(tagged_tokenizer)
    tokenizer.chat_template = TEMPLATE
    config = Config(
        model=ModelConfig(max_model_len=256),
        actors=ActorsConfig(max_action_tokens=120),
        environment=EnvironmentConfig(tool_format="hermes"),
    )
    prompter = Prompter(tokenizer, config.questions, config.actors)
    policy = VllmPolicy(vllm_policy.engine, partial(stop_arguments, tokenizer))
    gateway = await Gateway.start(policy, prompter, config, all_verified)
    greedy = msgspec.structs.replace(LEASE.sampling, temperature=0.0)
    lease, clients = msgspec.structs.replace(LEASE, sampling=greedy), []

    def begin() -> Served:
        session = gateway.open(lease)
        clients.append(client_of(gateway.url, session.key))
        return Served(gateway, session, clients[-1], policy, prompter)

    yield begin
    for client in clients:
        await client.close()
    await gateway.close()


def ask(served: Served, content: str, **more: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return served.client.chat.completions.create(
        **{"model": "", "messages": messages, "max_tokens": 60} | more
    )


async def test_a_chat_its_stop_and_its_logprobs(front: Callable[[], Served]) -> None:
    served = front()
    reply = await ask(served, "what is", stop=["</search>"], logprobs=True)
    (choice,) = reply.choices
    assert choice.message.content == " <search> mayor of bore " and choice.finish_reason == "stop"
    (call,) = served.session.calls
    assert served.prompter.decode(call.completion.tokens) == f"{choice.message.content}</search>"
    told = [each.logprob for each in choice.logprobs.content]
    assert np.allclose(told, call.completion.logprobs) and max(told) < 0.0
    assert call.completion.versions.tolist() == [0] * len(told)
    assert 0.0 < call.started_at <= call.completion.first_token_at <= call.ended_at


async def test_a_stream_is_what_the_whole_is(front: Callable[[], Served]) -> None:
    served = front()
    for asked in ({"stop": ["of bo"]}, {"stop": ["</search>"]}, {"max_tokens": 5}, {}):
        whole = await ask(served, "what is", **asked)
        pieces, reasons = [], []
        async for each in await ask(served, "what is", stream=True, **asked):
            pieces.append(each.choices[0].delta.content or "")
            reasons.append(each.choices[0].finish_reason)
        assert "".join(pieces) == whole.choices[0].message.content
        assert reasons[-1] == whole.choices[0].finish_reason and len(pieces) > 1
        one, other = served.session.calls[-2:]
        for name in ("tokens", "logprobs", "versions"):
            ours, theirs = (getattr(call.completion, name) for call in (one, other))
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_and_answered(front: Callable[[], Served], stream: bool) -> None:
    served = front()
    made = await ask(served, "previous action", tools=[TOOL], stream=stream, max_tokens=110)
    if stream:
        deltas = [each.choices[0].delta async for each in made]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert not any(delta.content for delta in deltas)
    else:
        calls = made.choices[0].message.tool_calls
        assert made.choices[0].finish_reason == "tool_calls"
    (call,) = calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("find", {"it": "bore"})
    made = {"id": call.id, "type": "function", "function": call.function.model_dump()}
    asked = {"role": "user", "content": "previous action"}
    said = {"role": "assistant", "content": None, "tool_calls": [made]}
    answer = {"role": "tool", "tool_call_id": call.id, "content": "try again"}
    await ask(served, "", messages=[asked, said, answer], tools=[TOOL], stop="</search>")
    first, second = served.session.calls
    ids = np.concatenate([first.prompt, first.completion.tokens])
    np.testing.assert_array_equal(second.prompt[: len(ids)], ids)
    assert served.prompter.decode(second.prompt[len(ids) :]) == "try again"


async def test_a_crowd_is_served_and_errors_are_named(front: Callable[[], Served]) -> None:
    crowd = [front() for _ in range(24)]
    texts = await asyncio.gather(*(ask(each, "what is", stop="bore") for each in crowd))
    assert {reply.choices[0].message.content for reply in texts} == {" <search> mayor of "}
    assert all(len(each.session.calls) == 1 for each in crowd)
    with pytest.raises(openai.BadRequestError, match="n: "):
        await ask(crowd[0], "what is", n=2)
    with pytest.raises(openai.BadRequestError) as long:
        await ask(crowd[0], "what is " * 300)
    assert long.value.code == "context_length_exceeded"
