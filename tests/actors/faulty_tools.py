"""Tools and environments that their owners should have tested."""

import asyncio
import threading

from actors.environments.base import NOTHING, Outcome
from replay.trajectory import StopReason

released = threading.Event()


def raising(text: str) -> str:
    """It raises."""
    raise RuntimeError(f"the secret of {text}")


def leaving(text: str) -> str:
    """It ends the program."""
    raise SystemExit(3)


def timing_out(text: str) -> str:
    """It waits for somebody else for too long."""
    raise TimeoutError("slow disk")


async def cancelling(text: str) -> str:
    """It cancels a task of its own."""
    task = asyncio.create_task(asyncio.Event().wait())
    asyncio.get_running_loop().call_soon(task.cancel)
    await task
    return text


async def endless(text: str) -> str:
    """It never answers."""
    await asyncio.Event().wait()
    return text


def blocking(text: str) -> str:
    """It holds its thread up until the test lets it go."""
    released.wait()
    return text


def number(text: str) -> int:
    """It gives no text."""
    return len(text)


async def later(text: str) -> str:
    """It answers after others had their turn."""
    await asyncio.sleep(0)
    return f" {text} \ud800"


def search(text: str) -> str:
    """It is named like another."""
    return text


def silent(text: str) -> str:
    return text


def two(first: str, second: str) -> str:
    """It takes two texts."""
    return first + second


NO_TOOL = "text"


class Raising:
    """Raises at its first step."""

    passages = ()

    def __init__(self, lease, *, retriever, prompter, config):
        self.prompt = prompter.question(lease.question)

    def budget(self, context_tokens):
        return 16

    async def step(self, action_tokens, context_tokens):
        raise KeyError("turn")


class Wordy(Raising):
    """Answers by a text."""

    async def step(self, action_tokens, context_tokens):
        return "more"


class Odd(Raising):
    """Answers as the question's text says: an Outcome that no trajectory could hold."""

    odd = {
        "number": {"answer": 42},
        "surrogate": {"answer": "\ud800"},
        "reason": {"stop": "answered"},
        "list": {"passages": ["p"]},
        "text": {"passages": ("p",)},
        "query": {"searches": ("q",)},
        "maybe": {"malformed": "no"},
    }

    def __init__(self, lease, **parts):
        super().__init__(lease, **parts)
        self.fields = self.odd[lease.question.text]

    async def step(self, action_tokens, context_tokens):
        return Outcome(NOTHING, **({"stop": StopReason.ANSWERED} | self.fields))


class Leaving(Raising):
    """Ends the program at its first step."""

    async def step(self, action_tokens, context_tokens):
        raise SystemExit(3)


class Cancelling(Raising):
    """Cancels a task of its own, and waits for it."""

    async def step(self, action_tokens, context_tokens):
        await cancelling("now")


class Spelt(Raising):
    """Names its stops by one text."""

    stops = "</done>"


async def speechless(lease, **parts):
    """Has an empty prompt."""
    made = Raising(lease, **parts)
    made.prompt = NOTHING
    return made


async def promptless(lease, **parts):
    """Has no prompt of token ids."""
    made = Raising(lease, **parts)
    made.prompt = "who?"
    return made
