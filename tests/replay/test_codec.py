"""Codec: what goes in comes out, bit for bit; all else is a CodecError naming the field."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from replay import codec, protocol
from replay.protocol import CodecError, Shutdown
from replay.trajectory import (
    Question,
    Sampling,
    Search,
    StopReason,
    TokenSequence,
    Trajectory,
    Turn,
)

TEXT = st.text(max_size=20)
TOKENS = hnp.arrays(np.int32, st.integers(0, 6))
COUNT = st.integers(0, 2**63 - 1)
FLOATS = st.floats(-(2**53), 2**53)
SEARCHES = st.lists(
    st.builds(
        Search,
        query=TEXT,
        passage_ids=st.lists(TEXT, max_size=3).map(tuple),
        seconds=FLOATS,
        status=st.sampled_from(["ok", "empty", "skipped"]),
    ),
    max_size=2,
).map(tuple)


FINITE = st.floats(-1e9, 1e9)
STAMP = st.floats(0.0, 2e9)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    length = draw(st.integers(1, 6))
    bits = draw(hnp.arrays(np.uint32, length))  # every float32 there is, NaN payloads included
    return Turn(
        action_tokens=draw(hnp.arrays(np.int32, length)),
        behaviour_logprobs=bits.view(np.float32),
        policy_versions=draw(hnp.arrays(np.int32, length)),
        observation_tokens=draw(TOKENS),
        searches=draw(SEARCHES),
        malformed=draw(st.booleans()),
        reward=draw(FINITE),
        info=draw(TEXT),
        started_at=draw(STAMP),
        first_token_at=draw(STAMP),
        ended_at=draw(STAMP),
    )


TRAJECTORIES = st.builds(
    Trajectory,
    group_id=COUNT,
    sibling=COUNT,
    question_id=TEXT,
    kind=st.sampled_from(["train", "eval"]),
    actor_id=TEXT,
    sampling=st.builds(Sampling, temperature=st.floats(0.0, 1e3), seed=COUNT),
    sequences=st.lists(
        st.builds(
            TokenSequence,
            hnp.arrays(np.int32, st.integers(1, 6)),
            st.lists(turns(), min_size=1, max_size=3).map(tuple),
            TEXT,
        ),
        min_size=1,
        max_size=2,
    ).map(tuple),
    stop_reason=st.sampled_from(StopReason),
    answer=st.none() | TEXT,
    reward=st.none() | FINITE,
    reward_cause=st.text(min_size=1, max_size=9),
    reward_parts=st.dictionaries(TEXT, FINITE, max_size=2),
    timings=st.dictionaries(TEXT, FLOATS, max_size=2),
    attempt=COUNT,
    reference_tokens=TOKENS,
)


def flat(value: object) -> object:
    """Nested builtins with arrays as (dtype, bytes): equal exactly when the records are."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.tobytes()
    if isinstance(value, tuple):
        return [flat(item) for item in value]
    if isinstance(value, msgspec.Struct):
        return {name: flat(getattr(value, name)) for name in value.__struct_fields__}
    return value


def example(
    prompt_tokens: object = None, turns: tuple[Turn, ...] = (), **changes: object
) -> Trajectory:
    """One turn; `prompt_tokens` and `turns` are those of its one sequence."""
    turn = Turn(
        np.array([5, 6], np.int32),
        np.array([np.nan, -np.inf], np.float32),
        np.array([1, 2], np.int32),
        np.array([], np.int32),
        (Search("who?", ("p1", "p2"), 0.5, "ok"),),
    )
    prompt: Any = np.array([1], np.int32) if prompt_tokens is None else prompt_tokens
    fields: dict[str, object] = {
        "group_id": 3, "sibling": 1, "question_id": "q", "kind": "train", "actor_id": "actor-0",
        "sampling": Sampling(1.0, 7), "sequences": (TokenSequence(prompt, turns or (turn,)),),
        "stop_reason": StopReason.ANSWERED, "answer": "x", "reward": 1.0,
    }  # fmt: skip
    return Trajectory(**(fields | changes))  # type: ignore[arg-type]


def with_info(info: str) -> Turn:
    return msgspec.structs.replace(example().turns[0], info=info)


def example_tokens(count: int) -> object:
    return np.zeros(count, np.int32)


@given(TRAJECTORIES)
@settings(max_examples=60)
def test_round_trip_is_exact(trajectory: Trajectory) -> None:
    again = codec.decode_trajectory(codec.encode_trajectory(trajectory))
    assert flat(again) == flat(trajectory)


def test_arrays_are_little_endian_bytes() -> None:
    payload = codec.encode_trajectory(example(prompt_tokens=np.array([1, 258], np.int32)))
    assert b"prompt_tokens\xc4\x08\x01\x00\x00\x00\x02\x01\x00\x00" in payload


def test_big_endian_arrays_are_converted() -> None:
    swapped = np.array([1, 258], np.int32).astype(">i4")
    assert codec._raw(swapped) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


@pytest.mark.parametrize("seed", range(8))
def test_mutated_bytes_decode_or_raise_codec_error(seed: int) -> None:
    rng = random.Random(seed)
    payload = codec.encode_trajectory(example())
    for _ in range(300):
        data = bytearray(payload)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            codec.decode_trajectory(bytes(data[: rng.randint(1, len(data))]))
        except CodecError:
            continue


@given(st.binary(max_size=200))
@settings(max_examples=100)
def test_any_bytes_are_a_message_or_a_codec_error(data: bytes) -> None:
    payload = b"\x81\xa4type" + data
    for decode in (codec.decode_request, codec.decode_reply, codec.decode_trajectory):
        for message in (payload, codec.sealed(payload)):
            with pytest.raises(CodecError):
                decode(message)  # type: ignore[operator]


@pytest.mark.parametrize(
    "tail",
    [
        b"\xa5cause\xa2\xff\xfe",
        b"\xa1z" + b"\x91" * 100_000 + b"\x90",
        b"\xa1z\xdd\xff\xff\xff\xff",
    ],
    ids=["bad UTF-8", "deep nesting", "length of 4 G"],
)
def test_hostile_messages_are_codec_errors(tail: bytes) -> None:
    with pytest.raises(CodecError, match="Request"):
        codec.decode_request(codec.sealed(b"\x82\xa4type\xa8Shutdown" + tail))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prompt_tokens", {"prompt_tokens": np.zeros(codec.MAX_ARRAY_TOKENS + 1, np.int32)}),
        ("turns", {"turns": example().turns * (codec.MAX_TURNS + 1)}),
        ("sequences", {"sequences": example().sequences * (codec.MAX_SEQUENCES + 1)}),
        ("info", {"turns": (with_info("x" * (codec.MAX_INFO_CHARS + 1)),)}),
        ("reference_tokens", {"reference_tokens": example_tokens(codec.MAX_ARRAY_TOKENS + 1)}),
        ("question_id", {"question_id": "x" * (codec.MAX_ID_CHARS + 1)}),
        ("answer", {"answer": "x" * (codec.MAX_TEXT_CHARS + 1)}),
        ("timings", {"timings": {str(i): 0.0 for i in range(codec.MAX_PARTS + 1)}}),
        ("group_id", {"group_id": -1}),
        ("reward", {"reward": 1e308}),
        ("reward_parts", {"reward_parts": {"em": float("nan")}}),
        ("timings", {"timings": {"total_s": float("inf")}}),
        ("temperature", {"sampling": Sampling(-0.5)}),
        ("temperature", {"sampling": Sampling(float("nan"))}),
        ("temperature", {"sampling": Sampling(1e300)}),
        ("answer", {"answer": 5}),
    ],
)
def test_broken_bounds_name_the_field(field: str, changes: dict[str, object]) -> None:
    with pytest.raises(CodecError, match=field):
        codec.encode_trajectory(example(**changes))


def test_integer_beyond_msgpack_and_lone_surrogate_are_refused() -> None:
    for changes in ({"group_id": 2**70}, {"answer": "\ud800"}):
        with pytest.raises(CodecError, match="Trajectory"):
            codec.encode_trajectory(example(**changes))


def test_trajectory_too_large_is_refused() -> None:
    turn = example().turns[0]
    big = msgspec.structs.replace(turn, observation_tokens=np.zeros(1 << 20, np.int32))
    with pytest.raises(CodecError, match="at most"):
        codec.encode_trajectory(example(turns=(big,) * 5))


def wire(**changes: object) -> bytes:
    tree = msgspec.msgpack.decode(codec.encode_trajectory(example()))
    (sequence,) = tree["sequences"]
    places = {"turn": sequence["turns"][0], "sequence": sequence}
    for name, value in changes.items():
        place, _, field = name.rpartition(".")
        places.get(place, tree)[field] = value
    return msgspec.msgpack.encode(tree)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"turn.policy_versions": b"\0\0\0"}, r"turns\[0\]\.policy_versions: 3 bytes"),
        (
            {"turn.policy_versions": b"\0\0\0\0"},
            r"sequences\[0\]\.turns\[0\].*one version per action token",
        ),
        ({"turn.behaviour_logprobs": [1.0]}, r"turns\[\d*\.*\]\.behaviour_logprobs"),
        ({"turn.reward": float("nan")}, r"turns\[0\]\.reward"),
        ({"turn.ended_at": float("inf")}, r"turns\[0\]\.ended_at"),
        ({"sequence.turns": []}, r"sequences\[0\]: TokenSequence.turns is empty"),
        ({"sequence.prompt_tokens": b""}, r"sequences\[0\]: TokenSequence.prompt_tokens is empty"),
        ({"sequences": []}, "sequences is empty"),
        ({"reference_tokens": b"\0"}, "reference_tokens: 1 bytes"),
        ({"reward": float("nan")}, r"\$\.reward"),
        ({"type": "Trajectory1"}, "Trajectory1"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_inconsistent_bytes_name_the_field(changes: dict[str, object], words: str) -> None:
    with pytest.raises(CodecError, match=words):
        codec.decode_trajectory(wire(**changes))


def test_messages_round_trip() -> None:
    question = Question("q", "who?", ("a",), 2)
    lease = protocol.Lease(3, 1, "train", question, Sampling(1.0, 5))
    batch = protocol.Batch(2, (3,), (1,), ((b"a", b"b"),), {"x": 1.0}, {"actor-0": {}}, ())
    for reply in (protocol.Leases((lease,)), batch, protocol.Alive(), protocol.Wait("why", True)):
        assert codec.decode_reply(codec.encode(reply)) == reply
    hello = protocol.Hello("actor-0", "digest", ((3, 1),))
    assert codec.decode_request(codec.encode(hello)) == hello


def test_numpy_scalars_are_gauges() -> None:
    beat = protocol.Heartbeat("actor-0", {"a": np.float32(0.5), "b": np.float64(0.25)})  # type: ignore[dict-item]
    assert codec.decode_request(codec.encode(beat)) == protocol.Heartbeat(
        "actor-0", {"a": 0.5, "b": 0.25}
    )


def test_a_value_that_cannot_be_encoded_is_a_codec_error() -> None:
    with pytest.raises(CodecError, match=r"Heartbeat.*object"):
        codec.encode(protocol.Heartbeat("actor-0", {"a": object()}))  # type: ignore[dict-item]


def test_bounds_of_requests() -> None:
    with pytest.raises(CodecError, match=r"Shutdown of .* at most"):
        codec.decode_request(codec.encode(Shutdown("x" * codec.MAX_CONTROL_BYTES)))
    with pytest.raises(CodecError, match=r"Ready\.capacity is 65537"):
        codec.decode_request(codec.encode(protocol.Ready("actor-0", 65537, 1, 0)))
    with pytest.raises(CodecError, match=r"Goodbye\.actor_id"):
        codec.decode_request(codec.encode(protocol.Goodbye("")))
    with pytest.raises(CodecError, match=r"Request of .* at most"):
        codec.decode_request(bytes(codec.MAX_REQUEST_BYTES + 1))
