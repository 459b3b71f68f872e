"""The boundary types: what an actor produces, replay keeps and the learner consumes.

A leaf module: it imports nothing of ours. Facts are recorded once, by the actor; loss masks,
staleness and advantages are derived by the learner and never stored, so they cannot disagree.
Action and observation segments *are* the mask. Shape invariants are checked here, once, at
construction. docs/records.md describes the record field by field.
"""

import math
from enum import StrEnum
from typing import Any, Literal

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
    """A question and its accepted answers, the reference first; none where the environment, a judge
    or the user's own function rewards without them. `hops` is 0 when unknown.

    `extra`: the fields of its data set that `questions.columns.extra` names, as the text of a JSON
    object; empty: none. `source`: the name of that data set; empty: the file does not say.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    hops: int = 0
    extra: str = ""
    source: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """The object that `extra` holds, decoded."""
        found: dict[str, Any] = msgspec.json.decode(self.extra, type=dict) if self.extra else {}
        return found


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
    retrieved or corrective text, never trained on.

    `reward`: what the environment gave for this turn; 0 where it gives none. `info`: what else it
    told of it, as the text of a JSON object; empty: nothing. Seconds since the epoch: `started_at`,
    when the completion was asked for; `first_token_at`, when its first token was there (0: the
    policy does not tell); `ended_at`, when its last one was.

    Raises ValueError when lengths or dtypes disagree, and for a number that is not finite.
    """

    action_tokens: NDArray[np.int32]
    behaviour_logprobs: NDArray[np.float32]
    policy_versions: NDArray[np.int32]
    observation_tokens: NDArray[np.int32]
    searches: tuple[Search, ...] = ()
    malformed: bool = False
    reward: float = 0.0
    info: str = ""
    started_at: float = 0.0
    first_token_at: float = 0.0
    ended_at: float = 0.0

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
        # One sum for all: this runs for every turn of every batch.
        if not math.isfinite(self.reward + self.started_at + self.first_token_at + self.ended_at):
            numbers = {name: getattr(self, name) for name in _TURN_NUMBERS}
            raise ValueError(f"Turn: its numbers must be finite, got {numbers!r}")


_TURN_ARRAYS = {  # compared once for each array of each turn: dtypes, not types to be converted
    "action_tokens": np.dtype(np.int32),
    "behaviour_logprobs": np.dtype(np.float32),
    "policy_versions": np.dtype(np.int32),
    "observation_tokens": np.dtype(np.int32),
}
_TURN_NUMBERS = ("reward", "started_at", "first_token_at", "ended_at")


class TokenSequence(msgspec.Struct, frozen=True, eq=False):
    """One stream of tokens through the policy: a prompt, int32[P], and the turns that continue it,
    each exactly what came before it and more. `name`: whose it is, where a rollout has several.

    Raises ValueError where either is empty, or the prompt has another dtype.
    """

    prompt_tokens: NDArray[np.int32]
    turns: tuple[Turn, ...]
    name: str = ""

    def __post_init__(self) -> None:
        _require_ids("TokenSequence.prompt_tokens", self.prompt_tokens)
        if not len(self.prompt_tokens):
            raise ValueError("TokenSequence.prompt_tokens is empty: give at least one token")
        if not self.turns:
            raise ValueError(
                "TokenSequence.turns is empty: a rollout that dies before its first "
                "turn is a LeaseFailed"
            )

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32[P + sum(A + O)]: prompt, then each turn's action and observation."""
        parts = [self.prompt_tokens]
        for turn in self.turns:
            parts += [turn.action_tokens, turn.observation_tokens]
        return np.concatenate(parts)


_NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)
_NO_TOKENS.setflags(write=False)


class Trajectory(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The record of one rollout: the exact ids that went through the engine, and everything known
    about them.

    `sequences`: its streams of tokens, one or more; a rollout earns one reward and one advantage,
    which all of them share. `attempt`: how many rollouts of this sibling had failed by themselves;
    the turns' seeds depend on it. `reference_tokens`: the ids of the reference answer, as the
    model's tokenizer writes it alone; empty where the question has none.

    `reward` None means unscorable, with its cause in `reward_cause`. `timings` are seconds by name
    (`total_s`, `generate_s`, `retrieve_s`). Raises ValueError on an inconsistent record.
    """

    group_id: int
    sibling: int
    question_id: str
    kind: Kind
    actor_id: str
    sampling: Sampling
    sequences: tuple[TokenSequence, ...]
    stop_reason: StopReason
    answer: str | None
    reward: float | None
    reward_cause: str = ""
    reward_parts: dict[str, float] = {}
    timings: dict[str, float] = {}
    attempt: int = 0
    reference_tokens: NDArray[np.int32] = _NO_TOKENS

    def __post_init__(self) -> None:
        if not self.sequences:
            raise ValueError("Trajectory.sequences is empty: a rollout has at least one")
        _require_ids("Trajectory.reference_tokens", self.reference_tokens)
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"Trajectory.reward must be finite or None, got {self.reward!r}")
        if self.reward is None and not self.reward_cause:
            raise ValueError("Trajectory.reward None needs a reward_cause")

    @property
    def prompt_tokens(self) -> NDArray[np.int32]:
        """int32[P]: the prompt of the first sequence, which is the question's own."""
        return self.sequences[0].prompt_tokens

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Every turn, sequence after sequence."""
        if len(self.sequences) == 1:
            return self.sequences[0].turns
        return tuple(turn for sequence in self.sequences for turn in sequence.turns)

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


def _require_ids(name: str, tokens: NDArray[np.int32]) -> None:
    if tokens.dtype != _TURN_ARRAYS["action_tokens"] or tokens.ndim != 1:
        raise ValueError(f"{name} must be int32[n], got {tokens.dtype}{list(tokens.shape)!r}")
