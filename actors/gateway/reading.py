"""Requests become prompts on one thread of their own: to render and tokenise a long one takes
seconds, in which the event loop of an actor must go on.

Each session has one of its requests read at a time, so that many of one delay another's by one.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

import numpy as np

from actors.gateway.chat import Chats
from actors.gateway.completing import Asked
from actors.gateway.protocol import (
    ChatRequest,
    CompletionRequest,
    Refused,
    decoded,
    prompt_of,
    require_room,
    wanted,
)
from actors.gateway.sessions import Session
from actors.prompt import Prompter, Tokens
from configs.schema import Config

Read = Callable[[Session, bytes], Asked]


class Reading:
    """Reads the requests of a gateway's sessions. Consumes bodies; produces what the policy is
    asked. A request waits for those before it; its deadline is the caller's.
    """

    def __init__(self, prompter: Prompter, config: Config) -> None:
        self._prompter = prompter.copy()  # for the thread alone
        vocabulary = self._prompter.tokenizer.get_vocab()
        self._vocabulary = max(vocabulary.values()) + 1
        self._most_tokens = config.model.max_model_len
        self._most_chars = self._most_tokens * max(map(len, vocabulary))
        self._chats = Chats(self._prompter, config, self._most_chars)
        self._thread = ThreadPoolExecutor(1, "gateway-reading")
        self._locks: WeakKeyDictionary[Session, asyncio.Lock] = WeakKeyDictionary()

    async def read(self, session: Session, body: bytes, how: Read) -> Asked:
        """Read a body by `chat` or `text`. Raises Refused."""
        async with self._locks.setdefault(session, asyncio.Lock()):
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, how, session, body
            )

    def chat(self, session: Session, body: bytes) -> Asked:
        """Read the body of a chat's call. Raises Refused."""
        request = decoded(body, ChatRequest)
        asked, conversation = wanted(request), self._chats.conversation(request)
        reader = self._chats.reader(conversation, request.tool_choice != "none")
        prompt = self._chats.prompt(conversation, session.history)
        opened = self._chats.opens_thought(prompt)
        return Asked(asked, prompt, conversation, reader=reader, opened=opened)

    def text(self, session: Session, body: bytes) -> Asked:
        """Read the body of a call in text or ids. Raises Refused."""
        request = decoded(body, CompletionRequest)
        asked, given = wanted(request), prompt_of(request)
        if isinstance(given, str):
            require_room(len(given), self._most_chars, "prompt", self._most_tokens)
            return Asked(asked, self._text_prompt(session, given), text=given)
        if not all(0 <= each < self._vocabulary for each in given):
            raise Refused(
                f"prompt: token ids are 0 to {self._vocabulary - 1}, the model's", param="prompt"
            )
        return Asked(asked, np.asarray(given, np.int32))

    def close(self) -> None:
        """Begin no more; what is being read just now ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _text_prompt(self, session: Session, text: str) -> Tokens:
        """Return int32[P]: a text's ids; where it goes on from an earlier call, that call's."""
        if (read := session.history.text(text)) is not None:
            return np.concatenate([read.ids, self._prompter.text(text[len(read.text) :])])
        prompt = self._prompter.document(text)
        if not len(prompt):
            raise Refused("prompt: it is empty: give at least one token", param="prompt")
        return prompt
