"""Programs that chat at random: what the engine reads is what the chat template renders, and what
goes on from an earlier call begins with its ids, however they were sampled.
"""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.gateway.completing import Completer
from actors.gateway.reading import Reading
from actors.gateway.replies import Replies
from actors.gateway.sessions import Session, Sessions
from actors.policies.base import Completion
from actors.prompt import Prompter, Tokens
from configs.environment import GatewayConfig
from tests.actors.environments.test_templates import model, prompter_of
from tests.actors.gateway.conftest import LEASE, all_verified, config_of
from tests.actors.gateway.test_chat import TOOL, real

assert model  # the fixture: a tokenizer with a real template

WORDS = ("what is the mayor", "of bore ?", "kelu", "a b\n\nc", "北京 é", "it is .")
SPECIAL = ("<|im_end|>", "<|eot_id|>")
CALL = '<tool_call>\n{"name": "search", "arguments": {"query_list": ["kelu"]}}\n</tool_call>'
THOUGHT = "<think>\nit is kelu\n</think>\n\n"
Message = dict[str, Any]


@dataclass
class Chatting:
    """A program, its session, and a policy that spells its words anyhow. `told`: conversations,
    each with the ids that its last call has read and sampled."""

    model: Any
    random: random.Random
    tools: bool
    told: list[tuple[list[Message], Tokens]] = field(default_factory=list)
    went_on: int = 0

    def __post_init__(self) -> None:
        self.prompter: Prompter = prompter_of(self.model)
        config = config_of()
        self.reading = Reading(self.prompter, config)
        self.completer = Completer(self, self.prompter, config, all_verified)
        self.session: Session = Sessions(GatewayConfig()).open(LEASE)

    async def complete(self, tokens: Any, **sampling: Any) -> Completion:
        opened = self.prompter.decode(tokens[-12:]).rstrip().endswith("<think>")
        said, ids = self._said(opened), [np.empty(0, np.int32)]
        while said:
            cut = self.random.randint(1, 5)
            ids.append(self.prompter.plain(said[:cut]))
            said = said[cut:]
        sampled = np.concatenate([*ids, [self.model.eos_token_id]]).astype(np.int32)
        return Completion(sampled, np.zeros(len(sampled), np.float32), sampled * 0, "stop")

    async def play(self, calls: int) -> None:
        for _ in range(calls):
            messages, ids = self.random.choice([*self.told, ([], None)])
            if messages and self.random.random() < 0.25:
                place = self.random.randrange(len(messages))
                edited = messages[place] | {"content": "something else"}
                messages, ids = [*messages[:place], edited, *messages[place + 1 :]], None
            await self._ask([*messages, self._next(messages)], ids)

    async def _ask(self, messages: list[Message], before: Tokens | None) -> None:
        body = {"messages": messages} | ({"tools": [TOOL]} if self.tools else {})
        asked = self.reading.chat(self.session, json.dumps(body).encode())
        replies = Replies(asked, self.prompter.decode)
        reply = json.loads(await self.completer.complete(self.session, asked, replies.whole))
        said = {name: each for name, each in reply["choices"][0]["message"].items() if each}
        read, sampled = asked.prompt, self.session.calls[-1].completion.tokens
        self._check(messages, read)
        if before is not None and not any("</think>" in (m.get("content") or "") for m in messages):
            np.testing.assert_array_equal(read[: len(before)], before)
            self.went_on += 1
        self.told.append(([*messages, {"content": "", **said}], np.concatenate([read, sampled])))

    def _check(self, messages: list[Message], read: Tokens) -> None:
        rendered = self._rendered(messages)
        assert _squeezed(self.prompter.decode(read)) == _squeezed(rendered)
        for word in SPECIAL:
            messages = json.loads(json.dumps(messages).replace(word, "x"))
        ids, special = self.model.encode(self._rendered(messages)), {*self.model.all_special_ids}
        assert sum(each in special for each in read.tolist()) == sum(
            each in special for each in ids
        )

    def _rendered(self, messages: list[Message]) -> str:
        shown = json.loads(json.dumps(messages))
        for call in (call for each in shown for call in each.get("tool_calls", ())):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        tools = [TOOL] if self.tools else None
        return self.model.apply_chat_template(
            shown, tools=tools, tokenize=False, add_generation_prompt=True
        )

    def _next(self, messages: list[Message]) -> Message:
        words = self._words((*WORDS, *SPECIAL))
        if messages and (calls := messages[-1].get("tool_calls")):
            return {"role": "tool", "content": words, "tool_call_id": calls[0]["id"]}
        return {"role": "user", "content": words}

    def _said(self, opened: bool) -> str:
        said = self._words(WORDS)
        if opened:
            return THOUGHT.removeprefix("<think>") + said
        if self.random.random() < 0.2:
            return THOUGHT + said
        return f"{said}\n{CALL}" if self.tools and self.random.random() < 0.3 else said

    def _words(self, words: tuple[str, ...]) -> str:
        return " ".join(self.random.choices(words, k=self.random.randint(1, 4)))


def _squeezed(text: str) -> str:
    return "".join(text.split())


@real
async def test_what_is_read_is_what_the_template_renders(model: Any, request: Any) -> None:
    name = request.node.callspec.params["model"]
    chats = [Chatting(model, random.Random(seed), name == "qwen2_5") for seed in range(3)]
    for each in chats:
        await each.play(10)
        each.reading.close()
    always_thinks = name == "qwen3_5_think"  # and its template drops thoughts
    assert always_thinks or sum(each.went_on for each in chats) > 5


async def test_a_text_is_read_as_it_stands(bpe_tokenizer: Any, prompter: Prompter) -> None:
    chat = Chatting(prompter.tokenizer, random.Random(3), False)
    told: list[tuple[str, Tokens | None]] = [("", None)]
    for _ in range(30):
        text, before = chat.random.choice(told)
        if before is not None and chat.random.random() < 0.3:
            text, before = text[: chat.random.randint(1, len(text))], None
        text += chat._words((*WORDS, *SPECIAL))
        body = json.dumps({"prompt": text}).encode()
        asked = chat.reading.text(chat.session, body)
        assert prompter.decode(asked.prompt) == text
        if before is not None:
            np.testing.assert_array_equal(asked.prompt[: len(before)], before)
        replies = Replies(asked, prompter.decode)
        reply = json.loads(await chat.completer.complete(chat.session, asked, replies.whole))
        sampled = chat.session.calls[-1].completion.tokens
        whole = text + reply["choices"][0]["text"] + prompter.decode(sampled[-1:])
        told.append((whole, np.concatenate([asked.prompt, sampled])))
    chat.reading.close()
