"""The rollout that a delivery's payload holds, recomputed from its tokens."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from scripts.runs.record.facts import PARTS, Kind, Summary

_VERSION = np.dtype("<i4")
_TOKEN_BYTES = 4
_MOST_SEQUENCES, _MOST_TURNS = 256, 1024


class _Search(msgspec.Struct, forbid_unknown_fields=True):
    query: str
    passage_ids: list[str]
    seconds: float
    status: Literal["ok", "empty", "skipped"]


class _Turn(msgspec.Struct, forbid_unknown_fields=True):
    action_tokens: bytes
    behaviour_logprobs: bytes
    policy_versions: bytes
    observation_tokens: bytes
    searches: list[_Search]
    malformed: bool
    reward: float
    info: str
    started_at: float
    first_token_at: float
    ended_at: float


class _Sequence(msgspec.Struct, forbid_unknown_fields=True):
    prompt_tokens: bytes
    turns: list[_Turn]
    name: str


class _Sampling(msgspec.Struct, forbid_unknown_fields=True):
    temperature: float
    seed: int


class _Payload(msgspec.Struct, forbid_unknown_fields=True, tag="Trajectory2"):
    group_id: int
    sibling: int
    question_id: str
    kind: Kind
    actor_id: str
    sampling: _Sampling
    sequences: list[_Sequence]
    stop_reason: Literal["answered", "unanswered", "turn_limit", "context_limit"]
    answer: str | None
    reward: float | None
    reward_cause: str
    reward_parts: dict[str, float]
    timings: dict[str, float]
    attempt: int
    reference_tokens: bytes


_DECODER = msgspec.msgpack.Decoder(_Payload)


@dataclass(frozen=True)
class Rollout:
    """What a payload says of itself; `summary` is what its record should have claimed, `spans` the
    oldest and newest version of each sequence.
    """

    summary: Summary
    spans: tuple[tuple[int, int], ...]
    actor_id: str
    attempt: int
    temperature: float
    seed: int
    reference: bytes


def rollout_of(payload: bytes) -> Rollout:
    """Decode a payload. Raises ValueError with all that is wrong within it."""
    try:
        found = _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if wrong := "; ".join(_faults(found)):
        raise ValueError(wrong)
    turns = [turn for sequence in found.sequences for turn in sequence.turns]
    versions = [_versions(sequence) for sequence in found.sequences]
    spans = tuple((int(each.min()), int(each.max())) for each in versions)
    summary = Summary(
        group_id=found.group_id,
        sibling=found.sibling,
        question_id=found.question_id,
        kind=found.kind,
        reward=found.reward,
        searches=sum([len(turn.searches) for turn in turns]),
        malformed=sum([turn.malformed for turn in turns]),
        turns=len(turns),
        action_tokens=sum(map(len, versions)),
        oldest_version=min(oldest for oldest, _ in spans),
        newest_version=max(newest for _, newest in spans),
        reward_cause=found.reward_cause if found.reward is None else "",
        sequences=len(found.sequences),
        parts=_parts_of(found) if found.kind == "eval" else {},
    )
    sampling = found.sampling
    return Rollout(
        summary=summary,
        spans=spans,
        actor_id=found.actor_id,
        attempt=found.attempt,
        temperature=sampling.temperature,
        seed=sampling.seed,
        reference=found.reference_tokens,
    )


def _versions(sequence: _Sequence) -> NDArray[np.int32]:
    return np.frombuffer(b"".join([turn.policy_versions for turn in sequence.turns]), _VERSION)


def _parts_of(found: _Payload) -> dict[str, float]:
    parts = found.reward_parts
    return {name: parts[name] for name in PARTS if name in parts and math.isfinite(parts[name])}


def _faults(found: _Payload) -> Iterator[str]:
    if found.reward is None and not found.reward_cause:
        yield "no reward, and no reward_cause"
    if found.reward is not None and not math.isfinite(found.reward):
        yield f"a reward of {found.reward}"
    if len(found.reference_tokens) % _TOKEN_BYTES:
        yield f"reference_tokens of {len(found.reference_tokens)} bytes"
    if not 0 < len(found.sequences) <= _MOST_SEQUENCES:
        yield f"{len(found.sequences)} sequences: 1 to {_MOST_SEQUENCES}"
    yield from _order_faults(found.sequences)
    for place, sequence in enumerate(found.sequences):
        size = len(sequence.prompt_tokens)
        if not size or size % _TOKEN_BYTES:
            yield f"sequences[{place}]: prompt_tokens of {size} bytes"
        if not 0 < len(sequence.turns) <= _MOST_TURNS:
            yield f"sequences[{place}]: {len(sequence.turns)} turns: 1 to {_MOST_TURNS}"
        for n, turn in enumerate(sequence.turns):
            if wrong := _turn_fault(turn):
                yield f"sequences[{place}].turns[{n}]: {wrong}"


def _order_faults(sequences: list[_Sequence]) -> Iterator[str]:
    """What is wrong with their names, and with the order of their first calls."""
    asked = -math.inf
    for place, sequence in enumerate(sequences):
        name = str(place + 1) if place else ""
        if sequence.name != name:
            yield f"sequences[{place}]: it is named {sequence.name!r}, not {name!r}"
        began = sequence.turns[0].started_at if sequence.turns else asked
        if began < asked:
            yield f"sequences[{place}]: asked for at {began}, before the one that it follows"
        asked = max(asked, began)


def _turn_fault(turn: _Turn) -> str:
    size = len(turn.action_tokens)
    if not size or size % _TOKEN_BYTES or len(turn.observation_tokens) % _TOKEN_BYTES:
        return f"tokens of {size} and {len(turn.observation_tokens)} bytes"
    lengths = size, len(turn.behaviour_logprobs), len(turn.policy_versions)
    if not size == lengths[1] == lengths[2]:
        counts = [length / _TOKEN_BYTES for length in lengths]
        return "{:g} action tokens, {:g} log-probs, {:g} policy versions".format(*counts)
    start, first, end = turn.started_at, turn.first_token_at, turn.ended_at
    if not math.isfinite(turn.reward + start + first + end):
        return "a reward, or a stamp, that is no number"
    if start > end or (first and not start <= first <= end):
        return f"started at {start}, first token at {first}, ended at {end}"
    return ""
