"""What an actor states: each verified version, and each change of its capacity."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from actors import statement
from actors.policies.capacity import Capacity, Load
from actors.statement import Statement


@dataclass
class Heard:
    """A replay that notes what it is told."""

    told: list[tuple[int, int, int]] = field(default_factory=list)

    async def ready(self, capacity: int, incarnation: int, version: int) -> None:
        self.told.append((capacity, incarnation, version))


@dataclass
class Counts:
    """A runner whose rollouts end as fast as it is looked at."""

    delivered: int = 0
    failed: int = 0
    in_flight: int = 100


class Loaded:
    """An engine whose load is always the same; `ends`: what ends between two looks."""

    def __init__(self, load: Load, ends: Callable[[], None]) -> None:
        self._load, self._ends = load, ends

    def take_load(self) -> Load:
        self._ends()
        return self._load


async def test_versions_and_changes_of_capacity_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement, "LOOK_S", 0.01)
    heard, counts, served = Heard(), Counts(), list[bool]()
    versions: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

    class Engine:
        def take_load(self) -> Load:
            counts.delivered += 50
            return Load(0.85, 0, 10, 0) if len(heard.told) < 3 else Load(0.95, 0, 10, 0)

    stated = Statement(heard, versions, Capacity(100, 8, 512), Engine(), counts)
    stated.on_first = lambda: served.append(True)
    running = asyncio.create_task(stated.run())
    await asyncio.sleep(0.05)
    assert not heard.told and not served  # nothing is verified yet
    versions.put_nowait((1, 0))
    versions.put_nowait((1, 1))
    async with asyncio.timeout(10):
        while len(heard.told) < 3:
            await asyncio.sleep(0.01)
    running.cancel()
    assert heard.told == [(100, 1, 0), (100, 1, 1), (110, 1, 1)] and served == [True]
    assert stated.gauges() == {"actor/capacity": 110.0}


async def test_capacity_falls_where_every_rollout_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statement, "LOOK_S", 0.01)
    heard, counts = Heard(), Counts()

    def time_out() -> None:
        counts.failed += 60

    engine, versions = Loaded(Load(0.99, 0, 10, 0), time_out), asyncio.Queue[tuple[int, int]]()
    running = asyncio.create_task(
        Statement(heard, versions, Capacity(100, 8, 512), engine, counts).run()
    )
    versions.put_nowait((1, 0))
    async with asyncio.timeout(10):
        while len(heard.told) < 2:
            await asyncio.sleep(0.01)
    running.cancel()
    assert heard.told[1] == (94, 1, 0)


async def test_capacity_is_looked_at_where_versions_come_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statement, "LOOK_S", 0.1)
    heard, counts = Heard(), Counts()

    def deliver() -> None:
        counts.delivered += 100

    engine, versions = Loaded(Load(0.99, 0, 10, 0), deliver), asyncio.Queue[tuple[int, int]]()
    running = asyncio.create_task(
        Statement(heard, versions, Capacity(100, 8, 512), engine, counts).run()
    )
    for version in range(200):
        versions.put_nowait((1, version))
        await asyncio.sleep(0.005)
        if heard.told and heard.told[-1][0] < 100:
            break
    running.cancel()
    assert heard.told[-1][0] < 100 and heard.told[-1][2] > 0
