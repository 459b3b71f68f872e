"""A batch that no message can hold comes in parts; what cannot be sent at all ends nobody but its
asker.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from replay import codec, parts
from replay.clients.actor import TrajectoryWriter
from replay.clients.launcher import Observer
from replay.clients.learner import BatchReader
from replay.codec import decode_trajectory
from replay.ledger import learner
from replay.protocol import Batch, Hello, Lease, RefusedByReplay, SamplePart
from replay.trajectory import TokenSequence, Trajectory, Turn


def long(trajectory: Trajectory, tokens: int) -> Trajectory:
    """The same of so many action tokens."""
    turn = Turn(
        action_tokens=np.arange(tokens, dtype=np.int32),
        behaviour_logprobs=np.full(tokens, -trajectory.sibling - 1.0, np.float32),
        policy_versions=np.zeros(tokens, np.int32),
        observation_tokens=np.zeros(0, np.int32),
    )
    sequence = TokenSequence(trajectory.prompt_tokens, (turn,))
    return msgspec.structs.replace(trajectory, sequences=(sequence,))


async def delivered(running: Any, rollout: Callable[..., Trajectory], tokens: int) -> None:
    """All siblings of one group, of so many tokens."""
    hello = Hello("actor-0", "digest")
    async with TrajectoryWriter(running.endpoint, hello, 0.05, 20.0) as actor:
        await actor.ready(3, 1, 0)
        for _ in range(3):
            lease = await asyncio.wait_for(actor.next(), 20.0)
            assert isinstance(lease, Lease)
            assert await actor.deliver(long(rollout(lease), tokens)) == "accepted"


@pytest.mark.timeout(120)
async def test_a_batch_that_no_message_holds_comes_whole(serve, rollout, monkeypatch) -> None:
    monkeypatch.setattr(learner, "PART_BYTES", 2 << 20)
    monkeypatch.setattr(codec, "MAX_REPLY_BYTES", 3 << 20)
    running = serve(group_size=3, max_staleness=0)
    with BatchReader(running.endpoint, 1, 20.0) as reader:
        reader.resume(0)
        await delivered(running, rollout, 100_000)  # 1.2 MB each
        batch = await asyncio.to_thread(reader.sample, 0)
        assert isinstance(batch, Batch) and (batch.parts, batch.sizes) == (0, ())
        found = [decode_trajectory(payload) for group in batch.groups for payload in group]
        assert [(t.sibling, t.action_count) for t in found] == [(i, 100_000) for i in range(3)]
        for request, why in ((SamplePart(1, 1, 9), "no part 9"), (SamplePart(1, 2, 0), "step 2")):
            with pytest.raises(RefusedByReplay, match=why):
                reader._call(request, Batch, "a part")


@pytest.mark.timeout(120)
async def test_an_answer_that_cannot_be_sent_is_a_refusal(serve, rollout, monkeypatch) -> None:
    monkeypatch.setattr(codec, "MAX_REPLY_BYTES", 2 << 20)
    running = serve(group_size=3, max_staleness=0)
    with BatchReader(running.endpoint, 1, 20.0) as reader:
        reader.resume(0)
        await delivered(running, rollout, 100_000)
        with pytest.raises(RefusedByReplay, match="the answer cannot be sent: Batch of 36"):
            await asyncio.to_thread(reader.sample, 0)
    with Observer(running.endpoint, 20.0) as console:
        assert console.status().gauges["replay/refused_messages"] == 1
    assert parts.PART_BYTES + codec.MAX_TRAJECTORY_BYTES < 1 << 30
