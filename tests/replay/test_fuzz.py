"""Frames that were changed on the way: each is refused, none is believed, and memory is bounded.
Sealed anew, so that no checksum tells, none makes anything but a refusal or a message.
"""

import random
import tracemalloc
import zlib
from collections import Counter

import numpy as np
import pytest

from configs.schema import Config
from replay import codec, protocol
from replay.ledger.events import Event
from replay.protocol import CodecError
from replay.trajectory import Sampling, StopReason, TokenSequence, Trajectory, Turn
from tests.replay.conftest import new_ledger
from tests.replay.mutations import changed

COUNTS = [5_000, pytest.param(100_000, marks=pytest.mark.soak("examples"))]


def trajectory(tokens: int) -> Trajectory:
    row = np.arange(tokens, dtype=np.int32)
    turn = Turn(row, -row.astype(np.float32), row, row)
    return Trajectory(
        group_id=1, sibling=0, question_id="q", kind="train", actor_id="actor-0",
        sampling=Sampling(1.0), sequences=(TokenSequence(row, (turn,)),),
        stop_reason=StopReason.ANSWERED, answer="x", reward=1.0,
    )  # fmt: skip


def mutated(frame: bytes, rng: random.Random) -> bytes:
    """The frame with a few bytes changed, dropped, doubled or put in."""
    data = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(data) + 1), rng.randint(1, 8)
        how = rng.randrange(4)
        if how == 0:
            data[at : at + length] = rng.randbytes(len(data[at : at + length]))
        elif how == 1:
            del data[at : at + length]
        elif how == 2:
            data[at:at] = rng.randbytes(length)
        else:
            data[at:at] = data[at : at + length]
    return bytes(data)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", COUNTS)
def test_no_mutated_frame_is_believed(count: int) -> None:
    rng = random.Random(0)
    payload = codec.encode_trajectory(trajectory(40))
    requests = [
        codec.encode(message)
        for message in (
            protocol.Deliver("actor-0", 1, 0, payload),
            protocol.Hello("actor-0", "digest", ((3, 1),)),
            protocol.Ready("actor-0", 64, 1, 3),
            protocol.Sample(1, 4),
            protocol.Heartbeat("actor-0", {"actor/tokens_per_s": 1.0}),
        )
    ]
    causes: Counter[str] = Counter()
    tracemalloc.start()
    for number in range(count):
        frame = requests[number % len(requests)]
        other = mutated(frame, rng)
        if other == frame:
            continue
        with pytest.raises(CodecError) as refusal:
            codec.decode_request(other)
        causes["checksum" if "checksum" in str(refusal.value) else "size"] += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert causes["checksum"] > 0.99 * count and peak < 1 << 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", COUNTS)
def test_no_message_that_was_mutated_and_sealed_anew_crashes_the_decoder_or_the_ledger(
    count: int,
) -> None:
    rng = random.Random(2)
    ledger = new_ledger(Config())
    ledger.apply(Event(b"learner", protocol.Resume(1, 0)), 1.0)
    requests = [
        codec.encode(message)[:-4]
        for message in (
            protocol.Deliver("actor-0", 1, 0, codec.encode_trajectory(trajectory(4))),
            protocol.Hello("actor-0", "digest", ((3, 1),)),
            protocol.Ready("actor-0", 64, 1, 0),
            protocol.LeaseFailed("actor-0", 1, 0, "cause"),
            protocol.Sample(1, 0),
            protocol.SamplePart(1, 1, 0),
            protocol.Resume(1, 0, "learner"),
            protocol.Evaluate(1, 0),
            protocol.Report(1, 0, {"learner/loss": 1.0}),
            protocol.Observe(0, 0),
            protocol.Heartbeat("actor-0", {"actor/tokens_per_s": 1.0}, None, ((1, 0),), ((1, 1),)),
        )
    ]
    came: Counter[str] = Counter()
    for number in range(count):
        how = mutated if number % 4 == 0 else changed
        body = how(requests[number % len(requests)], rng)
        try:
            request = codec.decode_request(body + zlib.crc32(body).to_bytes(4, "little"))
        except CodecError as refusal:
            assert "checksum" not in str(refusal)
            came["refused"] += 1
            continue
        came["decoded"] += 1
        if isinstance(request, protocol.Decided):
            try:
                ledger.apply(Event(b"peer", request), 2.0)
            except CodecError:
                came["refused by the ledger"] += 1
    assert came["refused"] > count // 4 and came["decoded"] > count // 4, came


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", COUNTS)
def test_no_mutated_payload_crashes_the_decoder_or_takes_memory(count: int) -> None:
    rng = random.Random(1)
    payload = codec.encode_trajectory(trajectory(40))
    refused = 0
    tracemalloc.start()
    for _ in range(count):
        try:
            codec.decode_trajectory(mutated(payload, rng))
        except CodecError:
            refused += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused > count // 2 and peak < 1 << 20
