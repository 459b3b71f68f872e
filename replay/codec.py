"""The codec: trajectories, requests and replies ⇄ msgpack. Never pickle.

Arrays are raw little-endian bytes. `decode(encode(x))` is exact, bit for bit, non-finite log-probs
included. Every bound below is checked on both sides; a CodecError names the field that breaks one.
A message ends with the crc32 of what comes before, so that no byte changed on the way is believed.
"""

import struct
import zlib
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from replay.bounds import (
    MAX_ID_CHARS,
    MAX_NUMBER,
    MAX_REWARD,
    MAX_TEMPERATURE,
    check_request,
)
from replay.protocol import CodecError, Deliver, Garbled, Reply, Request
from replay.trajectory import Sampling, Search, StopReason, TokenSequence, Trajectory, Turn

MAX_REPLY_BYTES = 1 << 30
MAX_TRAJECTORY_BYTES = 16 << 20
MAX_REQUEST_BYTES = MAX_TRAJECTORY_BYTES + (64 << 10)  # a Deliver and its envelope
MAX_CONTROL_BYTES = 1 << 20  # every request but Deliver
MAX_ARRAY_TOKENS = 1 << 20
MAX_SEQUENCES = 256  # per rollout
MAX_TURNS = 1024  # per sequence
MAX_SEARCHES = 64  # per turn
MAX_PASSAGES = 1024  # per search
MAX_PARTS = 256  # entries of `reward_parts` and of `timings`
MAX_TEXT_CHARS = 1 << 20
MAX_INFO_CHARS = 1 << 16  # of a turn

_CHECKSUM = struct.Struct("<I")
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")

_Id = Annotated[str, Meta(max_length=MAX_ID_CHARS)]
_Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
_Info = Annotated[str, Meta(max_length=MAX_INFO_CHARS)]
_Array = Annotated[bytes, Meta(max_length=4 * MAX_ARRAY_TOKENS)]
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Reward = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]  # which NaN is not
_Seconds = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
_Parts = Annotated[dict[_Id, _Reward], Meta(max_length=MAX_PARTS)]
_Timings = Annotated[dict[_Id, _Seconds], Meta(max_length=MAX_PARTS)]


class _WireSearch(msgspec.Struct, forbid_unknown_fields=True):
    query: _Text
    passage_ids: Annotated[tuple[_Id, ...], Meta(max_length=MAX_PASSAGES)]
    seconds: _Seconds
    status: Literal["ok", "empty", "skipped"]


class _WireTurn(msgspec.Struct, forbid_unknown_fields=True):
    action_tokens: _Array  # int32
    behaviour_logprobs: _Array  # float32
    policy_versions: _Array  # int32
    observation_tokens: _Array  # int32
    searches: Annotated[tuple[_WireSearch, ...], Meta(max_length=MAX_SEARCHES)]
    malformed: bool
    reward: _Reward
    info: _Info
    started_at: _Seconds
    first_token_at: _Seconds
    ended_at: _Seconds


class _WireSequence(msgspec.Struct, forbid_unknown_fields=True):
    prompt_tokens: _Array  # int32
    turns: Annotated[tuple[_WireTurn, ...], Meta(max_length=MAX_TURNS)]
    name: _Id


class _WireSampling(msgspec.Struct, forbid_unknown_fields=True):
    temperature: Annotated[float, Meta(ge=0.0, le=MAX_TEMPERATURE)]
    seed: _Count


class WireTrajectory(msgspec.Struct, forbid_unknown_fields=True, tag="Trajectory2"):
    """A trajectory as it travels: arrays are raw bytes, whose lengths nobody has compared yet."""

    group_id: _Count
    sibling: _Count
    question_id: _Id
    kind: Literal["train", "eval"]
    actor_id: _Id
    sampling: _WireSampling
    sequences: Annotated[tuple[_WireSequence, ...], Meta(max_length=MAX_SEQUENCES)]
    stop_reason: StopReason
    answer: _Text | None
    reward: _Reward | None
    reward_cause: _Text
    reward_parts: _Parts
    timings: _Timings
    attempt: _Count
    reference_tokens: _Array  # int32

    @property
    def turns(self) -> list[_WireTurn]:
        """Every turn, sequence after sequence."""
        return [turn for sequence in self.sequences for turn in sequence.turns]


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()  # gauges are often NumPy scalars
    raise TypeError(f"{type(value).__name__} {value!r} cannot be encoded")


_T = TypeVar("_T")
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_TRAJECTORY: msgspec.msgpack.Decoder[WireTrajectory] = msgspec.msgpack.Decoder(WireTrajectory)
_REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Encode a trajectory. Raises CodecError naming the field when a bound is exceeded."""
    payload = _encode(_to_wire(trajectory), "Trajectory", MAX_TRAJECTORY_BYTES)
    _decode(_TRAJECTORY, payload, "Trajectory")  # the sender learns it first
    return payload


def decode_trajectory(payload: bytes) -> Trajectory:
    """Decode a trajectory; its arrays are read-only views of `payload`. Raises CodecError."""
    wire = decode_wire(payload)
    fields = msgspec.structs.asdict(wire) | {
        "sampling": Sampling(wire.sampling.temperature, wire.sampling.seed),
        "sequences": tuple(_from_wire_sequence(each, i) for i, each in enumerate(wire.sequences)),
        "reference_tokens": _array(wire.reference_tokens, _INT32, "reference_tokens"),
    }
    try:
        return Trajectory(**fields)
    except ValueError as error:
        raise CodecError(str(error)) from error


def decode_wire(payload: bytes) -> WireTrajectory:
    """Decode all but the arrays, checking every bound. Raises CodecError."""
    _check_size(payload, "Trajectory", MAX_TRAJECTORY_BYTES)
    return _decode(_TRAJECTORY, payload, "Trajectory")


def encode(message: Request | Reply) -> bytes:
    """Encode a protocol message. Raises CodecError on size or a value msgpack cannot hold."""
    return sealed(_encode(message, type(message).__name__, MAX_REPLY_BYTES))


def sealed(payload: bytes) -> bytes:
    """Return an encoded message with its checksum."""
    return payload + _CHECKSUM.pack(zlib.crc32(payload))


def decode_request(payload: bytes) -> Request:
    """Decode a request. Raises CodecError naming the field, Garbled where bytes were changed."""
    request = _decode(_REQUEST, _opened(payload, "Request", MAX_REQUEST_BYTES), "Request")
    if len(payload) > MAX_CONTROL_BYTES and not isinstance(request, Deliver):
        raise CodecError(
            f"{type(request).__name__} of {len(payload)} bytes: at most {MAX_CONTROL_BYTES}"
        )
    check_request(request)
    return request


def decode_reply(payload: bytes) -> Reply:
    """Decode a reply. Raises CodecError naming the field, Garbled where bytes were changed."""
    return _decode(_REPLY, _opened(payload, "Reply", MAX_REPLY_BYTES), "Reply")


def _encode(value: Any, name: str, limit: int) -> bytes:
    try:
        payload = _ENCODER.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"{name}: {error}") from error
    _check_size(payload, name, limit)
    return payload


def _opened(message: bytes, name: str, limit: int) -> memoryview:
    """Return a message without its checksum, which must agree."""
    _check_size(message, name, limit)
    payload, checksum = memoryview(message)[: -_CHECKSUM.size], message[-_CHECKSUM.size :]
    if checksum != _CHECKSUM.pack(zlib.crc32(payload)):
        raise Garbled(f"{name} of {len(message)} bytes: the checksum does not agree")
    return payload


def _check_size(payload: bytes, name: str, limit: int) -> None:
    if len(payload) > limit:
        raise CodecError(f"{name} of {len(payload)} bytes: at most {limit}")


def _decode(decoder: msgspec.msgpack.Decoder[_T], payload: bytes | memoryview, name: str) -> _T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"{name}: {error}") from error


def _to_wire(trajectory: Trajectory) -> WireTrajectory:
    fields = {name: getattr(trajectory, name) for name in trajectory.__struct_fields__}
    sampling = trajectory.sampling
    return WireTrajectory(
        **fields
        | {
            "sampling": _WireSampling(sampling.temperature, sampling.seed),
            "sequences": tuple(_to_wire_sequence(each) for each in trajectory.sequences),
            "reference_tokens": _raw(trajectory.reference_tokens),
        }
    )


def _to_wire_sequence(sequence: TokenSequence) -> _WireSequence:
    turns = tuple(_to_wire_turn(turn) for turn in sequence.turns)
    return _WireSequence(_raw(sequence.prompt_tokens), turns, sequence.name)


def _to_wire_turn(turn: Turn) -> _WireTurn:
    return _WireTurn(
        action_tokens=_raw(turn.action_tokens),
        behaviour_logprobs=_raw(turn.behaviour_logprobs),
        policy_versions=_raw(turn.policy_versions),
        observation_tokens=_raw(turn.observation_tokens),
        searches=tuple(
            _WireSearch(search.query, search.passage_ids, search.seconds, search.status)
            for search in turn.searches
        ),
        malformed=turn.malformed,
        reward=turn.reward,
        info=turn.info,
        started_at=turn.started_at,
        first_token_at=turn.first_token_at,
        ended_at=turn.ended_at,
    )


def _from_wire_sequence(wire: _WireSequence, index: int) -> TokenSequence:
    try:
        prompt = _array(wire.prompt_tokens, _INT32, "prompt_tokens")
        turns = tuple(_from_wire_turn(turn, i) for i, turn in enumerate(wire.turns))
        return TokenSequence(prompt, turns, wire.name)
    except CodecError as error:
        raise CodecError(f"sequences[{index}].{error}") from error
    except ValueError as error:
        raise CodecError(f"sequences[{index}]: {error}") from error


def _from_wire_turn(wire: _WireTurn, index: int) -> Turn:
    try:
        return Turn(
            action_tokens=_array(wire.action_tokens, _INT32, "action_tokens"),
            behaviour_logprobs=_array(wire.behaviour_logprobs, _FLOAT32, "behaviour_logprobs"),
            policy_versions=_array(wire.policy_versions, _INT32, "policy_versions"),
            observation_tokens=_array(wire.observation_tokens, _INT32, "observation_tokens"),
            searches=tuple(
                Search(search.query, search.passage_ids, search.seconds, search.status)
                for search in wire.searches
            ),
            malformed=wire.malformed,
            reward=wire.reward,
            info=wire.info,
            started_at=wire.started_at,
            first_token_at=wire.first_token_at,
            ended_at=wire.ended_at,
        )
    except CodecError as error:
        raise CodecError(f"turns[{index}].{error}") from error
    except ValueError as error:
        raise CodecError(f"turns[{index}]: {error}") from error


def _raw(array: NDArray[Any]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _array(raw: bytes, wire_dtype: np.dtype[Any], field: str) -> NDArray[Any]:
    if len(raw) % 4:
        raise CodecError(f"{field}: {len(raw)} bytes are not a whole number of 4-byte items")
    array = np.frombuffer(raw, wire_dtype)
    return array if wire_dtype.isnative else array.astype(wire_dtype.newbyteorder("="))
