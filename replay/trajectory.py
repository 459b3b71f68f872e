"""The boundary types: what an actor produces, replay keeps and the learner consumes.

A leaf module: it imports nothing of ours. Facts are recorded once, by the actor; loss masks,
staleness and advantages are derived by the learner and never stored, so they cannot disagree.
Action and observation segments *are* the mask. Shape invariants are checked here, once, at
construction.
"""

import math
from enum import StrEnum
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Kind = Literal["train", "eval"]


class StopReason(StrEnum):
    """The reason why a rollout ended. Every ending of a delivered rollout has a name."""

    ANSWERED = "answered"
    UNANSWERED = "unanswered"  # the policy ended without an answer, though it might have gone on
    TURN_LIMIT = "turn_limit"  # the last completion held no answer
    CONTEXT_LIMIT = "context_limit"  # the next completion would not fit the model


class Question(msgspec.Struct, frozen=True):
    """A question and its accepted answers; `hops` is 0 when unknown."""

    id: str
    text: str
    answers: tuple[str, ...]
    hops: int = 0


class Sampling(msgspec.Struct, frozen=True):
    """The sampling settings of the actions; temperature 0 is greedy."""

    temperature: float = 1.0
    seed: int = 0  # the run's seed; each turn's own from (seed, group, sibling, turn, attempt)


class Search(msgspec.Struct, frozen=True):
    """One search of a turn: the query as sent, the passages as shown, and how long it took."""

    query: str
    passage_ids: tuple[str, ...]
    seconds: float
    status: Literal["ok", "empty", "skipped"]  # skipped: top_k 0, nothing was asked


class Turn(msgspec.Struct, frozen=True, eq=False):
    """One completion and the observation that followed it.

    action_tokens int32[A]: sampled by the policy, stop tag included. behaviour_logprobs float32[A]:
    the engine's own numbers for those tokens, after temperature (may be non-finite: a recorded
    fact). policy_versions int32[A]: which weights sampled each. observation_tokens int32[O]:
    retrieved or corrective text, never trained on. Raises ValueError when lengths or dtypes
    disagree.
    """

    action_tokens: NDArray[np.int32]
    behaviour_logprobs: NDArray[np.float32]
    policy_versions: NDArray[np.int32]
    observation_tokens: NDArray[np.int32]
    searches: tuple[Search, ...] = ()
    malformed: bool = False

    def __post_init__(self) -> None:
        for name, dtype in _TURN_ARRAYS.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1:
                raise ValueError(
                    f"Turn.{name} must be {dtype}[n], got {array.dtype}{list(array.shape)!r}"
                )
        actions = len(self.action_tokens)
        if not actions == len(self.behaviour_logprobs) == len(self.policy_versions):
            lengths = {name: len(getattr(self, name)) for name in list(_TURN_ARRAYS)[:3]}
            raise ValueError(
                f"Turn: one log-prob and one version per action token, got lengths {lengths!r}"
            )
        if actions == 0:
            raise ValueError("Turn.action_tokens is empty: a completion has at least one token")


_TURN_ARRAYS = {  # compared once for each array of each turn: dtypes, not types to be converted
    "action_tokens": np.dtype(np.int32),
    "behaviour_logprobs": np.dtype(np.float32),
    "policy_versions": np.dtype(np.int32),
    "observation_tokens": np.dtype(np.int32),
}


class Trajectory(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The record of one rollout: the exact ids that went through the engine, and everything known
    about them.

    `reward` None means unscorable, with its cause in `reward_cause`. `timings` are seconds by name
    (`total_s`, `generate_s`, `retrieve_s`). Raises ValueError on an inconsistent record.
    """

    group_id: int
    sibling: int
    question_id: str
    kind: Kind
    actor_id: str
    sampling: Sampling
    prompt_tokens: NDArray[np.int32]
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    answer: str | None
    reward: float | None
    reward_cause: str = ""
    reward_parts: dict[str, float] = {}
    timings: dict[str, float] = {}

    def __post_init__(self) -> None:
        if (
            self.prompt_tokens.dtype != np.int32
            or self.prompt_tokens.ndim != 1
            or len(self.prompt_tokens) == 0
        ):
            raise ValueError(
                f"Trajectory.prompt_tokens must be a non-empty int32[P], got {self.prompt_tokens!r}"
            )
        if not self.turns:
            raise ValueError(
                "Trajectory.turns is empty: a rollout that dies before its first "
                "turn is a LeaseFailed"
            )
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"Trajectory.reward must be finite or None, got {self.reward!r}")
        if self.reward is None and not self.reward_cause:
            raise ValueError("Trajectory.reward None needs a reward_cause")

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32[P + sum(A + O)]: prompt, then each turn's action and observation."""
        parts = [self.prompt_tokens]
        for turn in self.turns:
            parts += [turn.action_tokens, turn.observation_tokens]
        return np.concatenate(parts)

    @property
    def action_count(self) -> int:
        """The count of tokens that the policy sampled."""
        return sum(len(turn.action_tokens) for turn in self.turns)

    @property
    def search_count(self) -> int:
        """The count of searches that the rollout made."""
        return sum(len(turn.searches) for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the sampled tokens."""
        return self.version_span[0]

    @property
    def newest_version(self) -> int:
        """The newest policy version among the sampled tokens."""
        return self.version_span[1]

    @property
    def version_span(self) -> tuple[int, int]:
        """The oldest and the newest policy version among the sampled tokens."""
        versions = np.concatenate([turn.policy_versions for turn in self.turns])
        return int(versions.min()), int(versions.max())
