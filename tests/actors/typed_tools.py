"""Typed tools: several arguments, defaults, descriptions; tools that share a rollout's state."""

import asyncio
import threading
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from replay.protocol import Lease


@dataclass
class Place:
    """A place."""

    city: str
    country: str = "Eldria"


def weather(place: Place, days: Annotated[int, "how many"] = 1, unit: Literal["C", "F"] = "C"):
    """It tells the weather."""
    return {"city": place.city, "days": days, "unit": unit}


async def note(text: str, *, times: int = 1) -> str:
    """It repeats a text."""
    await asyncio.sleep(0)
    return text * times


class Notebook:
    """Keeps notes of one rollout."""

    closed: list[list[str]] = []

    def __init__(self, lease: Lease) -> None:
        self.question, self.notes = lease.question.text, list[str]()

    def write(self, text: str) -> str:
        """It keeps a note."""
        notes = [*self.notes, text]
        threading.Event().wait(0.01)
        self.notes = notes
        return f"{len(self.notes)} of {self.question}"

    async def read(self) -> list[str]:
        """It shows the notes."""
        return self.notes

    def hang(self) -> None:
        """It hangs."""
        threading.Event().wait()

    def close(self) -> None:
        self.closed.append(self.notes)


class Hanging:
    """Its `close` hangs."""

    def look(self) -> str:
        """It looks."""
        return "open"

    async def close(self) -> None:
        await asyncio.Event().wait()


class Slow:
    """Is made once that is allowed."""

    free, closed = threading.Event(), list[bool]()

    def __init__(self) -> None:
        assert self.free.wait(60)

    def look(self) -> str:
        """It looks."""
        return "open"

    async def close(self) -> None:
        self.closed.append(True)


class Broken:
    """Cannot be made."""

    def __init__(self) -> None:
        raise ValueError("no disk")

    def look(self) -> str:
        """It looks."""
        return ""


class Bare:
    """Has no method for the policy."""

    def _hidden(self) -> str:
        return ""


class Wanting:
    """Wants what nobody gives it."""

    def __init__(self, lease: Lease, folder: str) -> None: ...

    def look(self) -> str:
        """It looks."""
        return ""


def untyped(text):
    """It takes anything."""
    return text


def many(*texts: str) -> str:
    """It takes many."""
    return "".join(texts)


def array(values: np.ndarray) -> str:
    """It takes an array."""
    return str(values)


def positional(text: str, /) -> str:
    """It cannot be called by name."""
    return text


def missing(text: "Nowhere") -> str:  # type: ignore[name-defined]  # noqa: F821
    """Its type is none."""
    return str(text)


@dataclass
class Tree:
    """A tree."""

    under: list["Tree"]


def recursive(tree: Tree) -> str:
    """It takes a tree."""
    return str(tree)


def unspeakable(text: str) -> Any:
    """It gives what JSON cannot hold."""
    return object()
