"""What a session's calls have read and sampled, by what a program knows of it: messages, or text.

A conversation that goes on from an earlier call finds the ids of that call, so that nothing sampled
is ever rendered or tokenised again.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.prompt import Tokens

Key = bytes  # of a conversation up to one of its messages


@dataclass(frozen=True, eq=False)
class Read:
    """A call's prompt int32[P] and what was sampled then, int32[A]: the record's own arrays, not
    copies; `text`: both as text, where it was asked in text.
    """

    prompt: Tokens
    sampled: Tokens
    text: str = ""

    @property
    def ids(self) -> Tokens:
        """int32[P + A]."""
        return np.concatenate([self.prompt, self.sampled])


class History:
    """The completed calls of one session, the latest `most` of each kind. Of equal ones the latest
    counts.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._conversations: dict[Key, Read] = {}
        self._texts: list[Read] = []

    def keep_conversation(self, key: Key, prompt: Tokens, sampled: Tokens) -> None:
        """Keep a call by its messages and the reply to them."""
        self._conversations[key] = Read(prompt, sampled)
        if len(self._conversations) > self._most:
            del self._conversations[next(iter(self._conversations))]

    def conversation(self, keys: Sequence[Key]) -> tuple[int, Read] | None:
        """Return the longest beginning of a conversation that a call ended with: how many of its
        messages, and the call.
        """
        for count in range(len(keys), 0, -1):
            if (read := self._conversations.get(keys[count - 1])) is not None:
                return count, read
        return None

    def keep_text(self, text: str, prompt: Tokens, sampled: Tokens) -> None:
        """Keep a call by its prompt's text and that of all that was sampled."""
        self._texts.append(Read(prompt, sampled, text))
        del self._texts[: -self._most]

    def text(self, prompt: str) -> Read | None:
        """Return the call with the longest text that the prompt begins with."""
        found = [each for each in self._texts if prompt.startswith(each.text)]
        return max(reversed(found), key=lambda each: len(each.text), default=None)


def keys_of(messages: Sequence[object], before: object) -> list[Key]:
    """Return the key of a conversation up to each of its messages; `before`: its tools."""
    key, keys = _digest(b"", before), []
    for message in messages:
        key = _digest(key, message)
        keys.append(key)
    return keys


def key_after(keys: Sequence[Key], message: object) -> Key:
    """Return the key of a conversation and one more message."""
    return _digest(keys[-1], message)


def _digest(before: bytes, value: object) -> bytes:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()
