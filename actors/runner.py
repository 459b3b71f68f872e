"""The runner of rollouts: each lease becomes one delivered trajectory or one failed lease.

Consumes leases (or Stop) and the verified versions; produces trajectories, and failed leases with
the searches made; waits for the next lease, for rollouts (each bounded by `rollout_deadline_s`)
and, before a delivery, for verified weights to serve (bounded by `publish_deadline_s`). Unblocked
by replay's messages, by the policy and by the subscriber.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, Unpack

from actors.environments import toolbox
from actors.environments.base import Retriever, search_records
from actors.errors import ActorError, EngineDead, PolicyError, UnverifiedWeights, recordable
from actors.policies.base import Completion, Delta, Policy, SamplingParams, deltas
from configs.runtime.files import weights_bytes
from configs.schema import Config
from replay.protocol import CodecError, Lease, Stop
from replay.trajectory import Search, Trajectory
from retrieval_server.protocol import Passage, RetrievalError

SHUTDOWN = "shutdown"
logger = logging.getLogger(__name__)


class Writer(Protocol):
    """An actor's side of replay."""

    async def next(self) -> Lease | Stop:
        """Wait for a lease or for the end."""
        ...

    async def deliver(self, trajectory: Trajectory) -> str:
        """Deliver a trajectory; returns once it is on record."""
        ...

    async def fail(self, lease: Lease, cause: str, searches: Sequence[Search] = ()) -> None:
        """Give a lease back, with the searches of its rollout."""
        ...


class NotedSearches:
    """A retriever that records one rollout's searches: a delivered rollout has them in its
    trajectory, a failed one has only these. `made`: those that were answered, their passages best
    first.
    """

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self.made: list[Search] = []

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Search and record. Raises RetrievalError."""
        started = time.perf_counter()
        found = await self._retriever.retrieve(queries, top_k)
        seconds = time.perf_counter() - started
        self.made += search_records(queries, found, seconds)
        return found


class MeteredPolicy:
    """A policy that counts its tokens; `lost` counts the completions that the engine gave up."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.tokens = 0
        self.lost = 0

    async def complete(
        self, tokens: Sequence[int], **sampling: Unpack[SamplingParams]
    ) -> Completion:
        """Complete and count. Raises PolicyError."""
        try:
            completion = await self._policy.complete(tokens, **sampling)
        except PolicyError:
            self.lost += 1
            raise
        self.tokens += len(completion.tokens)
        return completion

    async def stream(
        self, tokens: Sequence[int], **sampling: Unpack[SamplingParams]
    ) -> AsyncGenerator[Delta, None]:
        """Stream and count. Raises PolicyError."""
        parts = deltas(self._policy, tokens, **sampling)
        try:
            async with aclosing(parts):
                async for delta in parts:
                    self.tokens += len(delta.tokens)
                    yield delta
        except PolicyError:
            self.lost += 1
            raise


class VerifiedVersions:
    """The versions whose probe passed here; `serving` is set while verified weights serve."""

    def __init__(self, serving: asyncio.Event) -> None:
        self.loads = 0
        self._serving = serving
        self._passed: set[int] = set()
        self._doubtful: dict[int, int] = {}  # number → its latest load after one in doubt
        self.announcements: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self._waiting: dict[asyncio.Future[None], set[int]] = {}  # for these to pass

    def add(self, incarnation: int, version: int) -> None:
        """Record that this version passed its probe, and announce it."""
        self._passed.add(version)
        for passed in [each for each, of in self._waiting.items() if of <= self._passed]:
            del self._waiting[passed]
            if not passed.done():
                passed.set_result(None)
        self.announcements.put_nowait((incarnation, version))

    def forget(self, version: int, in_doubt: bool) -> None:
        """Withdraw a version that is about to be loaded, perhaps with other weights.

        `in_doubt`: it has been loaded before and did not verify, so that nobody can say which
        weights sampled the earlier tokens of that version.
        """
        self.loads += 1
        if in_doubt:
            self._doubtful[version] = self.loads
        self._passed.discard(version)
        for lost in [each for each, of in self._waiting.items() if in_doubt and version in of]:
            del self._waiting[lost]
            if not lost.done():
                lost.set_exception(UnverifiedWeights(f"version {version} was loaded again"))

    async def passed(self, versions: Collection[int], deadline_s: float) -> None:
        """Wait until all of these have passed. Raises UnverifiedWeights where they have not within
        `deadline_s`, or one that has not is loaded again.
        """
        asked = {int(each) for each in versions}
        if asked <= self._passed:
            return
        passing = asyncio.get_running_loop().create_future()
        self._waiting[passing] = asked
        try:
            async with asyncio.timeout(deadline_s):
                await passing
        except TimeoutError as error:
            unverified = sorted(asked - self._passed)
            raise UnverifiedWeights(
                f"versions {unverified} have not passed their probe for {deadline_s:g} s"
            ) from error
        finally:
            self._waiting.pop(passing, None)

    async def check(self, trajectory: Trajectory, begun: int, deadline_s: float) -> None:
        """Wait until verified weights serve. `begun`: `loads` when its rollout began.

        Raises UnverifiedWeights where none do within `deadline_s`, or where the trajectory holds
        tokens of a version that never passed, or that was loaded again meanwhile.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self._serving.wait()
        except TimeoutError as error:
            raise UnverifiedWeights(f"no verified weights for {deadline_s:g} s") from error
        seen = {int(version) for turn in trajectory.turns for version in turn.policy_versions}
        if not seen <= self._passed:
            raise UnverifiedWeights(f"holds tokens of unverified versions {seen - self._passed!r}")
        self.require_steady(seen, begun)

    def require_steady(self, versions: Collection[int], begun: int) -> None:
        """Raise UnverifiedWeights where one of them was loaded again, in doubt, since there were so
        many `loads`: that it has passed says nothing of tokens from before.
        """
        again = {version for version in versions if self._doubtful.get(version, 0) > begun}
        if again:
            raise UnverifiedWeights(f"holds tokens of versions that were loaded again: {again!r}")


class SteadyPolicy:
    """A policy that gives no tokens of a version that was loaded again, in doubt, since their call
    began: of those that it gives, `VerifiedVersions.passed` speaks.
    """

    def __init__(self, policy: Policy, versions: VerifiedVersions) -> None:
        self._policy, self._versions = policy, versions

    async def complete(self, tokens: Sequence[int], **sampling: Any) -> Completion:
        """Complete. Raises PolicyError, UnverifiedWeights."""
        begun = self._versions.loads
        completion = await self._policy.complete(tokens, **sampling)
        self._versions.require_steady(set(completion.versions.tolist()), begun)
        return completion

    async def stream(self, tokens: Sequence[int], **sampling: Any) -> AsyncGenerator[Delta, None]:
        """Stream. Raises PolicyError, UnverifiedWeights."""
        begun = self._versions.loads
        async with aclosing(deltas(self._policy, tokens, **sampling)) as parts:
            async for delta in parts:
                sampled_by = set(delta.done.versions.tolist()) if delta.done else delta.versions
                self._versions.require_steady(sampled_by, begun)
                yield delta


def verifying_s(config: Config) -> float:
    """Return how long is waited for verified weights."""
    size = 2 * weights_bytes(config.model.path)  # an engine may hold fp32
    return config.weight_sync.deadline_s(size)


class Runner:
    """Turns leases into trajectories. `await run()` until Stop or `stop()`, then drain, until
    `make_way()` at most.

    `delivered`: rollouts on record; `failed`: leases given back.
    """

    def __init__(
        self,
        rollout: Callable[[Lease, Retriever], Awaitable[Trajectory]],
        *,
        retriever: Retriever,
        writer: Writer,
        versions: VerifiedVersions,
        meter: MeteredPolicy,
        config: Config,
    ) -> None:
        self._rollout, self._retriever = rollout, retriever
        self._writer, self._versions = writer, versions
        self._meter, self._actors = meter, config.actors
        self._verify_s = verifying_s(config)
        self._rollouts: dict[asyncio.Task[None], Lease] = {}
        self._stopping, self._late = asyncio.Event(), asyncio.Event()
        self._cause = ""
        self._draining = False
        self.delivered = self.failed = 0
        self._polled = time.monotonic(), 0

    @property
    def in_flight(self) -> int:
        """Rollouts under way."""
        return len(self._rollouts)

    def stop(self, cause: str) -> None:
        """Take no more leases and drain. Call on the event loop."""
        self._cause = self._cause or cause
        self._stopping.set()

    def make_way(self, cause: str) -> None:
        """Stop, and give back at once what is not done. Call on the event loop."""
        self.stop(cause)
        self._late.set()

    async def run(self) -> str:
        """Run until told to stop; every lease taken is answered. Returns the cause of the stop.

        Raises an ExceptionGroup of EngineDead, or of the writer's errors, after cancelling all
        rollouts.
        """
        async with asyncio.TaskGroup() as group:
            stopping = asyncio.create_task(self._stopping.wait())
            try:
                while (lease := await self._next(stopping)) is not None:
                    task = group.create_task(self._serve(lease))
                    self._rollouts[task] = lease
                    task.add_done_callback(self._rollouts.pop)
            finally:
                stopping.cancel()
            await self._drain()
        return self._cause

    def gauges(self) -> dict[str, float]:
        """Return this actor's numbers; tokens per second are since the last call."""
        now, tokens = time.monotonic(), self._meter.tokens
        then, before = self._polled
        self._polled = now, tokens
        return {
            "actor/tokens_per_s": (tokens - before) / max(now - then, 1e-6),
            "actor/action_tokens": float(tokens),
            "actor/rollouts_in_flight": float(self.in_flight),
            "actor/failed_leases": float(self.failed),
            "actor/lost_requests": float(self._meter.lost),
            **toolbox.gauges(),
        }

    async def _next(self, stopping: "asyncio.Task[bool]") -> Lease | None:
        """Return the next lease; None once replay or `stop` ended the run."""
        following = asyncio.create_task(self._writer.next())
        try:
            await asyncio.wait((following, stopping), return_when=asyncio.FIRST_COMPLETED)
            item = following.result() if following.done() else Stop(self._cause)
        finally:
            following.cancel()
        if isinstance(item, Lease):
            return item
        self.stop(item.cause)
        return None

    async def _drain(self) -> None:
        self._draining = True
        logger.info("draining %d rollouts: %s", len(self._rollouts), self._cause)
        if self._rollouts:
            await self._finished_or_late()
        left = dict(self._rollouts)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    async def _finished_or_late(self) -> None:
        late = asyncio.create_task(self._late.wait())
        done = asyncio.create_task(asyncio.wait(self._rollouts))
        limit_s = self._actors.drain_deadline_s
        try:
            await asyncio.wait((done, late), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            done.cancel()
            late.cancel()

    async def _serve(self, lease: Lease) -> None:
        """Serve one lease, from its first token to its acknowledgement."""
        begun, noted = self._versions.loads, NotedSearches(self._retriever)
        fail = partial(self._fail, lease, noted)
        try:
            async with asyncio.timeout(self._actors.rollout_deadline_s):
                trajectory = await self._rollout(lease, noted)
            await self._versions.check(trajectory, begun, self._verify_s)
        except TimeoutError:
            await fail(f"rollout took over {self._actors.rollout_deadline_s:g} s")
        except (ActorError, RetrievalError) as error:
            await fail(f"{type(error).__name__}: {error}")
            if isinstance(error, EngineDead):
                raise
        except asyncio.CancelledError:
            if not self._draining:
                raise
            await fail(SHUTDOWN)
        else:
            try:
                await self._writer.deliver(trajectory)
            except CodecError as error:  # before anything was sent: no record could hold it
                await fail(f"{type(error).__name__}: {error}")
            else:
                self.delivered += 1

    async def _fail(self, lease: Lease, noted: NotedSearches, cause: str) -> None:
        self.failed += 1
        cause = recordable(cause)
        logger.warning("group %d sibling %d: %s", lease.group_id, lease.sibling, cause)
        await self._writer.fail(lease, cause, noted.made)
