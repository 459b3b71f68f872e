"""Three ways to keep an engine busy with rollouts that search, for `forage bench overlap`.

*continuous*: so many rollouts are in flight; where one ends the next begins, as in our actors.
*sync*: a batch of them starts together, each goes on by itself, and a new batch begins when the
whole batch is done. *lockstep*: a batch that takes its turns together: all generate, then all
search. `Lessor` stands in for replay towards the real runner.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Literal, Unpack

from actors.environments.base import Retriever
from actors.policies.base import Completion, Policy, SamplingParams
from actors.runner import SHUTDOWN
from replay.protocol import Lease
from replay.trajectory import Question, Sampling, Search, Trajectory
from retrieval_server.protocol import Passage

Loop = Literal["continuous", "sync", "lockstep"]


class RolloutFailed(RuntimeError):
    """A rollout died of infrastructure, so nothing is measured; the message is the cause."""


def leases(questions: Sequence[Question], seed: int, first: int) -> Iterator[Lease]:
    """Leases without end, each of another question: siblings would share their searches."""
    chosen = itertools.cycle(questions)
    for group_id in itertools.count(first):
        yield Lease(group_id, 0, "train", next(chosen), Sampling(1.0, seed))


class Lessor:
    """Leases to a runner: `rollouts` in flight always, or, `whole`, one batch after the other."""

    def __init__(self, following: Iterator[Lease], rollouts: int, whole: bool) -> None:
        self.done: list[Trajectory] = []
        self._following, self._rollouts, self._whole = following, rollouts, whole
        self._leased = 0
        self._news = asyncio.Condition()

    async def next(self) -> Lease:
        """The next lease, when there is room for it."""
        async with self._news:
            await self._news.wait_for(self._has_room)
        self._leased += 1
        return next(self._following)

    async def deliver(self, trajectory: Trajectory) -> str:
        """Take a rollout in."""
        async with self._news:
            self.done.append(trajectory)
            self._news.notify_all()
        return "accepted"

    async def fail(self, lease: Lease, cause: str, searches: Sequence[Search] = ()) -> None:
        """Raise RolloutFailed, unless it was ended because all has been measured."""
        if cause != SHUTDOWN:
            raise RolloutFailed(f"question {lease.question.id!r}: {cause}")

    async def settled(self, seconds: float, rollouts: int = 0) -> None:
        """Wait so long, until so many more rollouts have ended, and for the end of a batch."""
        enough = len(self.done) + rollouts
        await asyncio.sleep(seconds)
        if self._whole:  # a batch may be over for some time: the next one's end, then
            enough = max(enough, (len(self.done) // self._rollouts + 1) * self._rollouts)
        async with self._news:
            await self._news.wait_for(lambda: len(self.done) >= enough)

    def _has_room(self) -> bool:
        if self._whole and self._leased % self._rollouts:
            return True
        most = 0 if self._whole else self._rollouts - 1
        return self._leased - len(self.done) <= most


class Seats:
    """A policy that notes how many of its engine's seats have somebody to fill them."""

    def __init__(self, policy: Policy, seats: int) -> None:
        self._policy, self._seats = policy, seats
        self._wanted, self._since_s, self._filled_s = 0, time.monotonic(), 0.0

    async def complete(
        self, tokens: Sequence[int], **sampling: Unpack[SamplingParams]
    ) -> Completion:
        """Complete, in a seat or queueing for one."""
        self.filled_s()
        self._wanted += 1
        try:
            return await self._policy.complete(tokens, **sampling)
        finally:
            self.filled_s()
            self._wanted -= 1

    def filled_s(self) -> float:
        """For how long all seats together have been wanted until now, over their number."""
        now = time.monotonic()
        self._filled_s += (now - self._since_s) * min(self._wanted / self._seats, 1.0)
        self._since_s = now
        return self._filled_s


class LockStep:
    """Policy and retriever of batches of `rollouts` that take their turns together. A turn's
    completions begin when nobody searches any more, its searches when nobody generates any more;
    tell it of each rollout's end by `left`, and of further rollouts before they begin by `join`.
    """

    def __init__(self, policy: Policy, retriever: Retriever, rollouts: int) -> None:
        self._policy, self._retriever = policy, retriever
        self._rollouts = self._members = rollouts
        self._to_complete: list[asyncio.Future[None]] = []
        self._to_search: list[asyncio.Future[None]] = []

    async def complete(
        self, tokens: Sequence[int], **sampling: Unpack[SamplingParams]
    ) -> Completion:
        """Complete when all do."""
        await self._together(self._to_complete)
        return await self._policy.complete(tokens, **sampling)

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Search when all do."""
        await self._together(self._to_search)
        return await self._retriever.retrieve(queries, top_k)

    def join(self, rollouts: int) -> None:
        """So many rollouts more belong to the batch."""
        self._members += rollouts

    def left(self) -> None:
        """A rollout has ended; after the last of a batch comes the next batch."""
        self._members = self._members - 1 or self._rollouts
        self._open()

    async def _together(self, gate: list[asyncio.Future[None]]) -> None:
        gate.append(asyncio.get_running_loop().create_future())
        passed = gate[-1]
        self._open()
        await passed

    def _open(self) -> None:
        if len(self._to_complete) + len(self._to_search) < self._members:
            return
        gate = self._to_search or self._to_complete
        waiting = gate.copy()
        gate.clear()
        for each in waiting:
            if not each.done():  # cancelled, at the end
                each.set_result(None)
