"""A user's own reward: a function of a Transcript, sync or async, that returns a number.

`rewards.custom_timeout_s` bounds a call. A sync function runs in threads, `rewards.custom_at_once`
calls at a time, and the wait for its turn is bounded by as long again. Any error, a result that is
no finite number, and a call while as many abandoned ones still run, are Unscorable.
"""

import asyncio
import inspect
import math
import numbers
import reprlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from actors.errors import Unscorable
from actors.rewards.transcript import Transcript
from actors.user_code import FAULTS, StillRunning, Threads, raise_if_cancelled, raised_at


class UserReward:
    """Calls one function; `name` is its name in the configuration."""

    def __init__(
        self,
        name: str,
        function: Callable[[Transcript], Any],
        timeout_s: float,
        at_once: int = 1,
    ) -> None:
        """`at_once`: the calls of a plain function that may run beside one another."""
        self._name, self._function, self._timeout_s = name, function, timeout_s
        self._is_async = inspect.iscoroutinefunction(function)
        self._turns = asyncio.Semaphore(at_once)  # of a plain function
        self._threads = Threads("rewards.custom", at_once)

    async def of(self, transcript: Transcript) -> float:
        """Return the function's reward of this rollout. Raises Unscorable (`custom`)."""
        async with self._turn(transcript):
            try:
                async with asyncio.timeout(self._timeout_s) as deadline:
                    value = await self._threads.run(self._function, transcript)
            except StillRunning as error:
                what = "was not called: an earlier call is still running"
                raise self._fault(transcript, what) from error
            except FAULTS as error:
                raise_if_cancelled(error)
                late = isinstance(error, TimeoutError) and deadline.expired()
                at = raised_at(self._name, error)
                raised = f"raised {type(error).__name__}: {error}{at}"
                what = f"took over {self._timeout_s:g} s" if late else raised
                raise self._fault(transcript, what) from error
        if (number := _finite(value)) is None:
            shown = reprlib.repr(value)
            raise self._fault(transcript, f"returned {shown}, which is no finite number")
        return number

    @asynccontextmanager
    async def _turn(self, transcript: Transcript) -> AsyncIterator[None]:
        if self._is_async:
            yield
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._turns.acquire()
        except TimeoutError as error:
            what = f"had no turn within {self._timeout_s:g} s: earlier calls take too long"
            raise self._fault(transcript, what) from error
        try:
            yield
        finally:
            self._turns.release()

    def _fault(self, transcript: Transcript, what: str) -> Unscorable:
        return Unscorable("custom", f"{self._name} {what} (question {transcript.question.id!r})")


def _finite(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, numbers.Real | np.bool_) else math.nan
    except (OverflowError, TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
