"""The rollouts of `forage bench stream`: 2,048 tokens each, as its simulated actors deliver them.

`Template` is a rollout, encoded once by the real codec, into which the ids of a lease are put: the
bytes of `encode_trajectory` for a tenth of the time, so that those who deliver do not hold up who
is measured.
"""

from functools import cache

import msgspec
import numpy as np

from replay.codec import encode_trajectory
from replay.protocol import Lease
from replay.trajectory import Sampling, Search, StopReason, TokenSequence, Trajectory, Turn

PROMPT_TOKENS, ACTION_TOKENS, TURNS = 128, 224, 4
OBSERVATION_TOKENS = (342, 341, 341, 0)
TOKENS = PROMPT_TOKENS + TURNS * ACTION_TOKENS + sum(OBSERVATION_TOKENS)  # 2,048
VOCABULARY = 151_936
_AFTER_IDS = b"\xa8sampling"  # the first key behind the ids, as msgpack writes it


@cache
def _turns(version: int) -> tuple[np.ndarray, tuple[Turn, ...]]:
    rng = np.random.default_rng(0)

    def draw(count: int) -> np.ndarray:
        return rng.integers(0, VOCABULARY, count, np.int32)

    turns = tuple(
        Turn(
            action_tokens=draw(ACTION_TOKENS),
            behaviour_logprobs=-rng.random(ACTION_TOKENS, np.float32),
            policy_versions=np.full(ACTION_TOKENS, version, np.int32),
            observation_tokens=draw(count),
            searches=(Search(f"query {i} of some words", ("p-1", "p-2", "p-3"), 0.1, "ok"),)
            if count
            else (),
        )
        for i, count in enumerate(OBSERVATION_TOKENS)
    )
    return draw(PROMPT_TOKENS), turns


def rollout(
    group_id: int, sibling: int, question_id: str, actor_id: str, version: int, sampling: Sampling
) -> Trajectory:
    """A rollout of 4 turns and 3 searches, all of its actions sampled under `version`."""
    prompt, turns = _turns(version)
    return Trajectory(
        group_id=group_id,
        sibling=sibling,
        question_id=question_id,
        kind="train",
        actor_id=actor_id,
        sampling=sampling,
        sequences=(TokenSequence(prompt, turns),),
        stop_reason=StopReason.ANSWERED,
        answer="an answer",
        reward=1.0,
        reward_parts={"em": 1.0},
        timings={"total_s": 3.0, "generate_s": 2.5, "retrieve_s": 0.4},
    )


class Template:
    """An encoded rollout of one version; `payload` makes it that of a lease."""

    def __init__(self, version: int, sampling: Sampling) -> None:
        encoded = encode_trajectory(rollout(0, 0, "", "", version, sampling))
        self._encode = msgspec.msgpack.Encoder().encode
        self._key = {
            name: self._encode(name)
            for name in ("group_id", "sibling", "question_id", "kind", "actor_id")
        }
        self._start = encoded[: encoded.index(self._key["group_id"])]
        self._rest = encoded[encoded.index(_AFTER_IDS) :]

    def payload(self, lease: Lease, actor_id: str) -> bytes:
        """The bytes that `actor_id` delivers for `lease`."""
        values = (lease.group_id, lease.sibling, lease.question.id, lease.kind, actor_id)
        parts = [self._start]
        for key, value in zip(self._key.values(), values, strict=True):
            parts += [key, self._encode(value)]
        return b"".join([*parts, self._rest])
