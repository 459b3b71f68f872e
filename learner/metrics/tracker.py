"""A tracker that is somebody else's, Weights & Biases or trackio, as its child process sees it.

Each has one file, which alone imports it, with a function `open_run(Opening) -> Tracker`.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec


class Opening(msgspec.Struct, frozen=True):
    """What a tracker is told of the run. `id`: the same in every process of it; `deadline_s`: in
    which it must end once there is no more.
    """

    project: str
    name: str
    id: str
    folder: str
    config: dict[str, Any]
    deadline_s: float


class Point(msgspec.Struct, frozen=True):
    """Numbers by name at a step; a step may come again, or after a later one."""

    step: int
    gauges: dict[str, float]


class Tracker(Protocol):
    """Somebody else's client, open for one run."""

    def write(self, step: int, gauges: Mapping[str, float]) -> None:
        """Take numbers by name at a step."""
        ...

    def close(self) -> None:
        """Hand on what is left, and end the run."""
        ...
