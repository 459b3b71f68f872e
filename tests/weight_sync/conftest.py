"""An engine whose model is two bare tensors.

Run as a script, this file is one actor process around it: `python conftest.py ACTOR_ID ENDPOINT
[ROWS]`, with so many rows in each tensor.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.runtime.process import die_with_parent
from configs.schema import WeightSyncConfig
from weight_sync.buckets import Layout, NamedTensors, digest, dtype_name
from weight_sync.publisher import Publisher
from weight_sync.receiver import Receiver
from weight_sync.subscriber import Subscriber

PROBE = (3, 1, 4, 1, 5)
CONFIG = WeightSyncConfig(
    probe_tolerance=1e-4, bucket_bytes=256, join_deadline_s=60.0, publish_deadline_s=5.0
)


def make_weights(seed: int, rows: int = 8) -> dict[str, torch.Tensor]:
    """A model of two tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, 4, generator=generator) for name in ("embed", "head")}


def score(weights: dict[str, torch.Tensor], tokens: Sequence[int]) -> list[float]:
    """Log-probs of tokens[1:], each given the token before it."""
    before, after = torch.tensor(tokens[:-1]), torch.tensor(tokens[1:])
    logits = weights["embed"][before] @ weights["head"].T
    return logits.log_softmax(-1).gather(1, after[:, None])[:, 0].tolist()


Start = Callable[..., "subprocess.Popen[bytes]"]


class BareEngine:
    """A ServingEngine; `scored` stands between the weights and what `score` answers."""

    def __init__(self, rows: int = 8) -> None:
        self.weights = make_weights(-1, rows)
        self.scored: Callable[[list[float]], list[float]] = lambda values: values
        self.calls: list[str] = []
        self.version = -1
        self.receiver = Receiver(self._layout, self._load, self._checksum)

    async def pause(self) -> None:
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def set_policy_version(self, version: int) -> None:
        self.calls.append(f"version {version}")
        self.version = version

    async def call_workers(self, method: str, *args: bytes | int | str | float) -> list[bytes]:
        name = method.removeprefix("weight_sync_")
        if name not in ("device", "arrived", "checksum"):  # how often is a matter of time
            self.calls.append(name)
        return [await asyncio.to_thread(getattr(self.receiver, name), *args)]

    async def score(self, tokens: Sequence[int]) -> tuple[np.ndarray, int]:
        self.calls.append("score")
        return np.asarray(self.scored(score(self.weights, tokens)), np.float32), self.version

    def _layout(self) -> Layout:
        return {n: (tuple(t.shape), dtype_name(t.dtype)) for n, t in self.weights.items()}

    def _load(self, named_tensors: NamedTensors) -> None:
        for name, tensor in named_tensors:
            self.weights[name].copy_(tensor)

    def _checksum(self, _: NamedTensors) -> str:
        return digest(tensor.view(torch.uint8).flatten() for tensor in self.weights.values())


class Fleet:
    """A publisher's actors around bare engines, all in this process."""

    config = CONFIG
    script = Path(__file__)

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.keys = endpoint, None
        self.subscribers: list[Subscriber] = []
        self.tasks: list[asyncio.Task[None]] = []

    def add(self, actor_id: str, config: WeightSyncConfig = CONFIG, rows: int = 8) -> BareEngine:
        engine = BareEngine(rows)
        self.subscribers.append(Subscriber(actor_id, self.endpoint, engine, config, keys=self.keys))
        self.tasks.append(asyncio.create_task(self.subscribers[-1].run()))
        return engine

    def publisher(self, actors: int, config: WeightSyncConfig = CONFIG, **told: Any) -> Publisher:
        return Publisher(config, actors, 7, self.endpoint, self.keys, **told)

    def publish(self, publisher: Publisher, version: int, rows: int = 8) -> dict[str, torch.Tensor]:
        weights = make_weights(version, rows)
        publisher.publish(version, weights.items(), PROBE, score(weights, PROBE))
        return weights

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/weights"


@pytest.fixture
async def fleet(endpoint: str) -> AsyncIterator[Fleet]:
    built = Fleet(endpoint)
    yield built
    await built.stop()


@pytest.fixture
def start(fleet) -> Iterator[Start]:
    """start("actor-0"): an actor in a process of its own, perhaps of another `node` and with so
    many `rows`; `inside` is the command that starts it, as `ip netns exec NAME`.
    """
    from tests.children import ends_with_us  # as a script, this file does not see the tests

    started: list[subprocess.Popen[bytes]] = []

    def begin(
        actor_id: str, node: str = "", rows: int = 8, inside: Sequence[str] = ()
    ) -> "subprocess.Popen[bytes]":
        command = [sys.executable, str(fleet.script), actor_id, fleet.endpoint, str(rows)]
        environment = ends_with_us(**({"FORAGE_NODE": node} if node else {}))
        started.append(subprocess.Popen([*inside, *command], env=environment))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


if __name__ == "__main__":
    die_with_parent()
    engine = BareEngine(int(sys.argv[3]))
    asyncio.run(Subscriber(sys.argv[1], sys.argv[2], engine, CONFIG).run())
