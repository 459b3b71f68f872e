"""The summary of a delivered trajectory: all that replay looks at of it.

Decoding a delivery whole is the dearest thing that replay can do for it. So a sound payload is
summarised from the lengths of its arrays; any other is decoded, which says what is wrong with it.
"""

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from configs.rewards import EVALUATED
from replay.codec import WireTrajectory, decode_trajectory, decode_wire
from replay.protocol import CodecError
from replay.trajectory import Kind, Trajectory

_VERSION = np.dtype("<i4")
_ID = np.dtype("<u4")  # a negative one is higher than any


class Summary(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that replay needs to know of a trajectory without decoding it again.

    `reward` None means unscorable, by `reward_cause`; `malformed` of `turns` actions were
    malformed; versions are those of the sampled tokens. `parts`: what an evaluation's rollout was
    scored by, each that is a finite number.
    """

    group_id: int
    sibling: int
    question_id: str
    kind: Kind
    reward: float | None
    searches: int
    malformed: int
    turns: int
    action_tokens: int
    oldest_version: int
    newest_version: int
    reward_cause: str = ""
    parts: dict[str, float] = {}


class Sampled(msgspec.Struct, frozen=True):
    """What a run's own actors can have sampled: ids of a `vocabulary` of so many, and what is
    trained at one `temperature`.
    """

    vocabulary: int
    temperature: float


def summarise(trajectory: Trajectory) -> Summary:
    """Return the summary of a decoded trajectory."""
    oldest_version, newest_version = trajectory.version_span
    return Summary(
        group_id=trajectory.group_id,
        sibling=trajectory.sibling,
        question_id=trajectory.question_id,
        kind=trajectory.kind,
        reward=trajectory.reward,
        searches=trajectory.search_count,
        malformed=sum(turn.malformed for turn in trajectory.turns),
        turns=len(trajectory.turns),
        action_tokens=trajectory.action_count,
        oldest_version=oldest_version,
        newest_version=newest_version,
        reward_cause=trajectory.reward_cause,
        parts=_parts(trajectory.kind, trajectory.reward_parts),
    )


def summarise_payload(payload: bytes, sampled: Sampled | None = None) -> Summary:
    """Return `summarise(decode_trajectory(payload))` in a third of the time. Raises CodecError,
    also where it was not `sampled` so: the learner could not train on it.
    """
    wire = decode_wire(payload)
    summary = _summarise(wire) if _sound(wire) else summarise(decode_trajectory(payload))
    if sampled is not None:
        _check(wire, sampled)
    return summary


def _summarise(wire: WireTrajectory) -> Summary:
    turns = wire.turns
    versions = b"".join([turn.policy_versions for turn in turns])
    oldest, newest = _span(versions)
    return Summary(
        group_id=wire.group_id,
        sibling=wire.sibling,
        question_id=wire.question_id,
        kind=wire.kind,
        reward=wire.reward,
        searches=sum([len(turn.searches) for turn in turns]),
        malformed=sum([turn.malformed for turn in turns]),
        turns=len(turns),
        action_tokens=len(versions) // _VERSION.itemsize,
        oldest_version=oldest,
        newest_version=newest,
        parts=_parts(wire.kind, wire.reward_parts),
    )


def _parts(kind: Kind, parts: Mapping[str, float]) -> dict[str, float]:
    if kind == "train":
        return {}
    return {name: parts[name] for name in EVALUATED if math.isfinite(parts.get(name, math.nan))}


def _span(versions: bytes) -> tuple[int, int]:
    """The least and the largest of the versions in these bytes; mostly they are all alike."""
    first = versions[: _VERSION.itemsize]
    if versions == first * (len(versions) // _VERSION.itemsize):
        alike = int.from_bytes(first, "little", signed=True)
        return alike, alike
    found = np.frombuffer(versions, _VERSION)
    return int(found.min()), int(found.max())


def _check(wire: WireTrajectory, sampled: Sampled) -> None:
    temperature = wire.sampling.temperature
    if wire.kind == "train" and temperature != sampled.temperature:
        raise CodecError(
            f"Trajectory.sampling.temperature is {temperature}: train leases of this run say "
            f"{sampled.temperature}"
        )
    parts = [wire.reference_tokens, *(sequence.prompt_tokens for sequence in wire.sequences)]
    parts += [part for turn in wire.turns for part in (turn.action_tokens, turn.observation_tokens)]
    ids = np.frombuffer(b"".join(parts), _ID)
    if (most := ids.max()) >= sampled.vocabulary:
        raise CodecError(
            f"Trajectory: token id {most.astype(np.int32)}: the model's vocabulary has "
            f"{sampled.vocabulary}, from 0"
        )


def _sound(wire: WireTrajectory) -> bool:
    """Return True if `decode_trajectory` would plainly find nothing wrong."""
    if wire.reward is None or not math.isfinite(wire.reward):
        return False
    if not wire.sequences or len(wire.reference_tokens) % 4:
        return False
    for sequence in wire.sequences:
        prompt = len(sequence.prompt_tokens)
        if not sequence.turns or not prompt or prompt % 4:
            return False
        for turn in sequence.turns:
            size = len(turn.action_tokens)
            if not size or size % 4 or len(turn.observation_tokens) % 4:
                return False
            if not size == len(turn.behaviour_logprobs) == len(turn.policy_versions):
                return False
            stamps = turn.started_at + turn.first_token_at + turn.ended_at
            if not math.isfinite(turn.reward + stamps):
                return False
    return True
