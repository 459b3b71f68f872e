"""What an actor states: each verified version, and each change of its capacity."""

import asyncio
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
    in_flight: int = 100


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
