"""The record, byte for byte: what is written now can be read for good, or its version is another.

`tests/vectors/records.json` holds in hex the header and a frame of a log, every field of a
trajectory, and a message. Where a change here is meant, the format's or the protocol's version goes
up with it.
"""

import json

import msgspec
import numpy as np

from configs.runtime.process import REPOSITORY
from replay import codec
from replay.log import format as log_format
from replay.log.records import ActorJoined, Leased, Record, decoded
from replay.protocol import PROTOCOL, Hello
from replay.trajectory import Sampling, Search, StopReason, TokenSequence, Trajectory, Turn

VECTORS = json.loads((REPOSITORY / "tests" / "vectors" / "records.json").read_text())
RECORDS: tuple[Record, ...] = (
    ActorJoined(1.5, "actor-0", "digest", "node-1"),
    Leased(2.5, "actor-0", 7, (0, 1), (0, 2), "node-1"),
)


def turn(number: int) -> Turn:
    return Turn(
        np.array([number, 2], np.int32),
        np.array([-0.5, -np.inf], np.float32),
        np.array([3, 4], np.int32),
        np.array([5] * number, np.int32),
        (Search("who ?", ("p1", "p2"), 0.25, "ok"),) * number,
        malformed=not number,
        reward=0.5 * number,
        info='{"n":1}' * number,
        started_at=1000.25,
        first_token_at=1000.5,
        ended_at=1001.0,
    )


TRAJECTORY = Trajectory(
    group_id=7,
    sibling=1,
    question_id="q-1",
    kind="train",
    actor_id="actor-0",
    sampling=Sampling(0.5, 11),
    sequences=(
        TokenSequence(np.array([9, 8], np.int32), (turn(1), turn(0))),
        TokenSequence(np.array([7], np.int32), (turn(0),), "summary"),
    ),
    stop_reason=StopReason.ANSWERED,
    answer="x",
    reward=None,
    reward_cause="judge: down",
    reward_parts={"em": 1.0},
    timings={"total_s": 2.0},
    attempt=2,
    reference_tokens=np.array([6], np.int32),
)


def made() -> dict[str, str | int]:
    encode, log = msgspec.msgpack.Encoder().encode, bytes(range(16))
    return {
        "format": log_format.FORMAT_VERSION,
        "header": log_format.header(2, 41, log).hex(),
        "frames": "".join(
            log_format.framed(encode(r), 41 + n).hex() for n, r in enumerate(RECORDS)
        ),
        "trajectory": codec.encode_trajectory(TRAJECTORY).hex(),
        "protocol": PROTOCOL,
        "hello": codec.encode(Hello("actor-0", "digest", ((7, 1),), node="node-1")).hex(),
    }


def test_the_bytes_are_those_of_their_versions() -> None:
    assert made() == VECTORS


def test_the_bytes_are_read() -> None:
    again = codec.decode_trajectory(bytes.fromhex(VECTORS["trajectory"]))
    assert codec.encode_trajectory(again) == bytes.fromhex(VECTORS["trajectory"])
    assert [s.name for s in again.sequences] == ["", "summary"] and len(again.turns) == 3
    frames, found = bytes.fromhex(VECTORS["frames"]), []
    while frames:
        length = log_format.FRAME.unpack_from(frames)[0]
        end = log_format.FRAME.size + length
        found.append(decoded(REPOSITORY, 0, frames[log_format.FRAME.size : end]))
        frames = frames[end:]
    assert tuple(found) == RECORDS
