"""Subscribers killed at random moments: the learner never waits long, nobody serves unverified."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.children import ends_with_us
from weight_sync.publisher import Publisher

LONGEST_S = 10.0
ACTOR = Path(__file__).with_name("vllm_actor.py")
PROBE = tuple(range(3, 20))


async def wait_for_peers(publisher: Publisher, count: int, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while len(publisher._channel.joined) < count:
        assert time.monotonic() < deadline, "it joins again"
        publisher.check()
        await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.soak("sync"))])
async def test_the_survivor_always_gets_the_newest_version(fleet, start, kills: int) -> None:
    """The learner goes on publishing."""
    fleet.add("actor-0")
    chance, version, longest_s = random.Random(0), 0, 0.0
    with fleet.publisher(2) as publisher:
        other = start("actor-1")
        await asyncio.to_thread(publisher.wait_for_actors, 60)
        fleet.publish(publisher, 0)
        await asyncio.to_thread(publisher.wait_applied, 0, 20.0)
        for _ in range(kills):
            end = time.monotonic() + chance.random() * 0.2
            while time.monotonic() < end:
                version += 1
                fleet.publish(publisher, version)
                await asyncio.sleep(0.005)
            os.kill(other.pid, signal.SIGKILL)
            version += 1
            begun = time.monotonic()
            fleet.publish(publisher, version)
            await asyncio.to_thread(publisher.wait_applied, version, LONGEST_S)
            longest_s = max(longest_s, time.monotonic() - begun)
            other.wait()
            assert fleet.subscribers[0].verified == (7, version)
            other = start("actor-1")
            await wait_for_peers(publisher, 2)
    print(f"longest wait {longest_s:.2f} s")


class RealActors:
    """vLLM actors in processes of their own; all are ended with the block."""

    def __init__(self, folder: Path, endpoint: str, model: Path) -> None:
        self.folder, self.endpoint, self.model = folder, endpoint, model
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, actor_id: str) -> int:
        """Its number; what it says goes to a file of that number."""
        number = len(self.started)
        command = [sys.executable, str(ACTOR), actor_id, self.endpoint, str(self.model)]
        with (self.folder / f"said-{number}").open("wb") as said:
            process = subprocess.Popen(command, stdout=said, process_group=0, env=ends_with_us())
            self.started.append(process)
        return number

    def kill(self, number: int) -> None:
        """It and its engine."""
        if self.started[number].poll() is None:
            os.killpg(self.started[number].pid, signal.SIGKILL)
            self.started[number].wait()

    def said(self, number: int) -> list[tuple[str, list[int]]]:
        """The versions it verified, and those it sampled from, in order."""
        lines = (self.folder / f"said-{number}").read_text().splitlines(keepends=True)
        words = [line.split() for line in lines if line.endswith("\n")]
        return [
            (kind, list(map(int, versions)))
            for kind, *versions in words
            if kind in ("verified", "sampled")
        ]


@pytest.fixture
def actors(tmp_path: Path, endpoint: str, tiny_model_path: Path) -> Iterator[RealActors]:
    built = RealActors(tmp_path, endpoint, tiny_model_path)
    yield built
    for number in range(len(built.started)):
        built.kill(number)


@torch.no_grad()
def publish(publisher: Publisher, model: Any, version: int) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.999)
    row = torch.tensor([PROBE])
    scores = model(row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
    publisher.publish(version, model.named_parameters(), PROBE, scores.tolist())


def only_of_verified(said: list[tuple[str, list[int]]]) -> bool:
    """True where all versions sampled from were verified: before the completion began, or after it
    for one that came meanwhile; except the last version of an actor killed before it could.
    """
    verified = [versions[0] for kind, versions in said if kind == "verified"]
    sampled = {version for kind, versions in said if kind == "sampled" for version in versions}
    first = next((kind for kind, _ in said), "verified")
    return first == "verified" and sampled - set(verified) <= {max(sampled, default=0)}


@pytest.mark.soak("sync")
@pytest.mark.vllm
@pytest.mark.timeout(1200)
async def test_real_actors_are_killed(actors: RealActors, fleet, tiny_model_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32).eval()
    chance, version = random.Random(1), 0
    config = fleet.config.__class__(probe_tolerance=1e-4, publish_deadline_s=8.0)
    with fleet.publisher(2, config) as publisher:
        survivor, doomed = actors.start("actor-0"), actors.start("actor-1")
        await asyncio.to_thread(publisher.wait_for_actors, 300)
        publish(publisher, model, 0)
        await asyncio.to_thread(publisher.wait_applied, 0, 120.0)
        for _ in range(3):
            end = time.monotonic() + 0.5 + chance.random()
            while time.monotonic() < end:
                version += 1
                publish(publisher, model, version)
                await asyncio.sleep(0.02)
            actors.kill(doomed)
            version += 1
            publish(publisher, model, version)
            await asyncio.to_thread(publisher.wait_applied, version, LONGEST_S)
            assert ("verified", [version]) in actors.said(survivor)
            doomed = actors.start("actor-1")
            await wait_for_peers(publisher, 2, 300.0)
            await asyncio.to_thread(publisher.wait_applied, version, 120.0)
    for number in range(len(actors.started)):
        said = actors.said(number)
        assert ("verified" in dict(said)) or number == doomed
        assert only_of_verified(said), said[:20]
