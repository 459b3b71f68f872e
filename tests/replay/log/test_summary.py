"""A delivery's summary from its bytes is that of the whole trajectory, sound or not."""

import random

import msgspec
import numpy as np
import pytest

from replay import codec
from replay.log.summary import Sampled, Summary, summarise, summarise_payload
from replay.protocol import CodecError
from replay.trajectory import Sampling, Search, StopReason, TokenSequence, Trajectory, Turn
from tests.replay.test_fuzz import mutated


def encoded(seed: int) -> bytes:
    """Two sequences of two turns and a search."""
    row = np.arange(seed, 12 + seed, dtype=np.int32)
    search = Search("a query", ("p-1",), 0.1, "ok")
    turns = tuple(Turn(row, -row.astype(np.float32), row, row, found) for found in ((search,), ()))
    return codec.encode_trajectory(
        Trajectory(
            group_id=1, sibling=0, question_id="q", kind="train", actor_id="actor-0",
            sampling=Sampling(), sequences=(TokenSequence(row, turns),) * 2, answer="x", reward=1.0,
            stop_reason=StopReason.ANSWERED,
        )
    )  # fmt: skip


def of_the_whole(payload: bytes) -> Summary | str:
    try:
        return summarise(codec.decode_trajectory(payload))
    except CodecError as error:
        return str(error)


def summarised(payload: bytes) -> Summary | str:
    try:
        return summarise_payload(payload)
    except CodecError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_or_not_it_is_the_same(seed: int) -> None:
    rng, told = random.Random(seed), {Summary: 0, str: 0}
    payload = encoded(seed)
    assert isinstance(summarised(payload), Summary)
    for _ in range(1500):
        other = mutated(payload, rng)
        assert summarised(other) == of_the_whole(other)
        told[type(summarised(other))] += 1
    assert min(told.values()) > 10, "of both kinds"


CHANGES = {
    "an array is no whole number of items": {"action_tokens": b"\0\0\0"},
    "no actions": dict.fromkeys(("action_tokens", "behaviour_logprobs", "policy_versions"), b""),
    "fewer log-probs": {"behaviour_logprobs": b"\0\0\0\0"},
    "fewer versions": {"policy_versions": b"\0\0\0\0"},
    "an observation is cut": {"observation_tokens": b"\0"},
    "a turn's reward is not finite": {"reward": float("inf")},
    "a stamp is not finite": {"first_token_at": float("nan")},
}
OF_A_SEQUENCE = {
    "no turns": {"turns": ()},
    "no prompt": {"prompt_tokens": b""},
    "a prompt is cut": {"prompt_tokens": b"\0"},
}
WHOLE = {
    "no sequences": {"sequences": ()},
    "a reference answer is cut": {"reference_tokens": b"\0\0"},
    "the reward is not finite": {"reward": float("nan")},
    "unscorable without a cause": {"reward": None, "reward_cause": ""},
}


@pytest.mark.parametrize("change", [*CHANGES, *OF_A_SEQUENCE, *WHOLE])
def test_what_is_unsound_is_refused_in_the_same_words(change: str) -> None:
    wire = codec.decode_wire(encoded(0))
    replace, last = msgspec.structs.replace, wire.sequences[-1]
    if change in CHANGES:
        turn = replace(last.turns[0], **CHANGES[change])
        last = replace(last, turns=(turn, *last.turns[1:]))
        wire = replace(wire, sequences=(*wire.sequences[:-1], last))
    elif change in OF_A_SEQUENCE:
        last = replace(last, **OF_A_SEQUENCE[change])
        wire = replace(wire, sequences=(*wire.sequences[:-1], last))
    else:
        wire = msgspec.structs.replace(wire, **WHOLE[change])
    payload = msgspec.msgpack.encode(wire)
    assert isinstance(summarised(payload), str) and summarised(payload) == of_the_whole(payload)


def test_it_counts_sequences_and_leaves_out_that_there_is_one() -> None:
    several = summarised(encoded(0))
    assert isinstance(several, Summary) and (several.sequences, several.turns) == (2, 4)
    assert b"sequences" in msgspec.msgpack.encode(several)
    one = msgspec.structs.replace(several, sequences=1)
    assert b"sequences" not in msgspec.msgpack.encode(one)


def test_unscorable_with_a_cause_is_sound() -> None:
    wire = codec.decode_wire(encoded(0))
    payload = msgspec.msgpack.encode(msgspec.structs.replace(wire, reward=None, reward_cause="x"))
    found = summarised(payload)
    assert isinstance(found, Summary) and found == of_the_whole(payload)
    assert (found.reward, found.reward_cause) == (None, "x")


TOKENS = ("action_tokens", "observation_tokens")


@pytest.mark.parametrize("field", [*TOKENS, "prompt_tokens", "reference_tokens"])
@pytest.mark.parametrize("token", [-1, 64, 2**31 - 1])
def test_ids_beyond_the_vocabulary_are_refused(field: str, token: int) -> None:
    wire, replace = codec.decode_wire(encoded(0)), msgspec.structs.replace
    ids = np.full(12, 63, np.int32)
    for last in 63, token:
        ids[-1] = last
        first, *rest = wire.sequences
        if field in TOKENS:
            turn = replace(first.turns[0], **{field: ids.tobytes()})
            first = replace(first, turns=(turn, *first.turns[1:]))
        elif field == "prompt_tokens":
            first = replace(first, prompt_tokens=ids.tobytes())
        answer = ids.tobytes() if field == "reference_tokens" else b""
        changed = replace(wire, sequences=(first, *rest), reference_tokens=answer)
        payload = msgspec.msgpack.encode(changed)
        if last == 63:
            assert summarise_payload(payload, Sampled(64, 1.0)).group_id == 1
    with pytest.raises(CodecError, match=f"token id {token}: the model's vocabulary has 64"):
        summarise_payload(payload, Sampled(64, 1.0))


def test_what_is_trained_was_sampled_at_the_temperature_of_its_leases() -> None:
    wire = codec.decode_wire(encoded(0))
    with pytest.raises(CodecError, match=r"temperature is 1.0: train leases of this run say 0.7"):
        summarise_payload(encoded(0), Sampled(64, 0.7))
    evaluated = msgspec.msgpack.encode(msgspec.structs.replace(wire, kind="eval"))
    assert summarise_payload(evaluated, Sampled(64, 0.7)).kind == "eval"
