"""What an actor states to replay: the version that serves, and how many rollouts it can hold.

Consumes the verified versions, the engine's load and the runner's counts; produces `Ready`, after
each version and each change of capacity. Waits for the first version; unblocked by the subscriber,
then by a clock.
"""

import asyncio
import contextlib
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
    failed: int

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
        self._looked = 0, 0  # rollouts delivered and failed, at the last look

    def gauges(self) -> dict[str, float]:
        """Return the rollouts that may be in flight here."""
        return {"actor/capacity": float(self._capacity.now)}

    async def run(self) -> None:
        """State each version that is verified, and each change of capacity."""
        serving = await self._versions.get()
        if self.on_first is not None:
            self.on_first()
        await self._state(serving)
        clock = asyncio.get_running_loop()
        look_at = clock.time() + LOOK_S
        while True:
            news = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(look_at):
                    serving, news = await self._versions.get(), True
            if clock.time() >= look_at:  # also where versions come without a pause
                look_at = clock.time() + LOOK_S
                news |= self._changed()
            if news:
                await self._state(serving)

    def _changed(self) -> bool:
        before, counts = self._capacity.now, (self._rollouts.delivered, self._rollouts.failed)
        delivered, failed = (now - then for now, then in zip(counts, self._looked, strict=True))
        self._looked = counts
        load, in_flight = self._engine.take_load(), self._rollouts.in_flight
        if not self._capacity.observe(load, delivered, in_flight, failed=failed):
            return False
        logger.info("capacity %d after %d: %s", self._capacity.now, before, load)
        return True

    async def _state(self, serving: tuple[int, int]) -> None:
        incarnation, version = serving
        logger.info("serving version %d of incarnation %d", version, incarnation)
        await self._writer.ready(self._capacity.now, incarnation, version)
