"""What an actor states to replay: the version that serves, and how many rollouts it can hold.

Consumes the verified versions, the engine's load and the runner's counts; produces `Ready`, after
each version and each change of capacity. Waits for the first version; unblocked by the subscriber,
then by a clock.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from actors.policies.capacity import Capacity, Load

LOOK_S = 1.0
logger = logging.getLogger(__name__)


class Writer(Protocol):
    """An actor's side of replay."""

    async def ready(self, capacity: int, incarnation: int, version: int) -> None:
        """State what this actor can hold in all, and the version that it has verified."""
        ...


class Rollouts(Protocol):
    """The runner's counts."""

    delivered: int

    @property
    def in_flight(self) -> int:
        """Rollouts under way."""
        ...


class Loads(Protocol):
    """The engine's statistics."""

    def take_load(self) -> Load:
        """Return the load since the last call."""
        ...


class Statement:
    """States to replay until cancelled; `on_first`, if set, is called before the first time."""

    def __init__(
        self,
        writer: Writer,
        versions: "asyncio.Queue[tuple[int, int]]",
        capacity: Capacity,
        engine: Loads,
        rollouts: Rollouts,
    ) -> None:
        self.on_first: Callable[[], None] | None = None
        self._writer, self._versions, self._capacity = writer, versions, capacity
        self._engine, self._rollouts = engine, rollouts
        self._looked = 0  # rollouts delivered at the last look

    def gauges(self) -> dict[str, float]:
        """Return the rollouts that may be in flight here."""
        return {"actor/capacity": float(self._capacity.now)}

    async def run(self) -> None:
        """State each version that is verified, and each change of capacity."""
        serving = await self._versions.get()
        if self.on_first is not None:
            self.on_first()
        await self._state(serving)
        while True:
            try:
                serving = await asyncio.wait_for(self._versions.get(), LOOK_S)
            except TimeoutError:
                if not self._changed():
                    continue
            await self._state(serving)

    def _changed(self) -> bool:
        delivered, before = self._rollouts.delivered, self._capacity.now
        ended, self._looked = delivered - self._looked, delivered
        load, in_flight = self._engine.take_load(), self._rollouts.in_flight
        if not self._capacity.observe(load, ended, in_flight):
            return False
        logger.info("capacity %d after %d: %s", self._capacity.now, before, load)
        return True

    async def _state(self, serving: tuple[int, int]) -> None:
        incarnation, version = serving
        logger.info("serving version %d of incarnation %d", version, incarnation)
        await self._writer.ready(self._capacity.now, incarnation, version)
