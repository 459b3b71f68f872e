"""The reward of a finished rollout: weighted parts, each recorded by name, or Search-R1's score.

The judge, the encoder and the user's own function are asked where they have a weight, each with a
deadline of its own. A part that cannot be told, through no fault of the policy's, makes the rollout
unscorable (reward None, and a cause), never a 0; the run goes on.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import msgspec

from actors.errors import Unscorable, recordable
from actors.rewards import search_r1
from actors.rewards.custom import UserReward
from actors.rewards.judge import Judge
from actors.rewards.parts import OF_ANSWER, OF_TRANSCRIPT, em, f1, substring
from actors.rewards.similarity import Similarity
from actors.rewards.transcript import Transcript, made_up
from actors.user_code import load_entry_point
from configs.rewards import RewardsConfig, SearchR1Config
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Question

ASKED = ("custom", "similarity", "judge")  # parts that others tell, each with a deadline
_WINDOW = 256  # train rollouts that the parts' means look back on
_NO_GOLD = "the question has no accepted answer"

logger = logging.getLogger(__name__)


class Score(NamedTuple):
    """A rollout's reward, or None with a cause. `parts`: each known value by name, unweighted."""

    reward: float | None
    cause: str
    parts: dict[str, float]


class Rewards:
    """Scores rollouts; use as `async with`, from one event loop. One for each process."""

    def __init__(
        self,
        config: RewardsConfig,
        *,
        judge: Judge | None = None,
        similarity: Similarity | None = None,
        custom: UserReward | None = None,
    ) -> None:
        self._config = config
        self._weights = msgspec.structs.asdict(config.weights)
        self._judge, self._similarity, self._custom = judge, similarity, custom
        self._recent: dict[str, deque[float]] = {}
        self._unscorable: Counter[str] = Counter()

    @classmethod
    def open(cls, config: Config) -> Self:
        """Make it with the configured judge, encoder and function. Raises ConfigError."""
        asked = config.rewards
        return cls(
            asked,
            judge=Judge(asked.judge) if asked.judge.url else None,
            similarity=Similarity.open(asked.similarity) if asked.similarity.model else None,
            custom=_own(asked) if asked.custom else None,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in (self._judge, self._similarity):
            if each is not None:
                await each.close()

    async def score(
        self, lease: Lease, answer: str | None, transcribe: Callable[[], Transcript]
    ) -> Score:
        """Score the lease's rollout with this answer; `transcribe` is called at most once, and only
        where a part reads more than the answer.

        Evaluations are scored by exact match in every mode; F1, sub-string match and what
        `rewards.evaluated` names stand beside it, each that can be told.
        """
        parts: dict[str, float] = {}
        try:
            if lease.kind == "eval":
                golds = lease.question.answers
                if not golds:
                    raise Unscorable("question", _NO_GOLD)
                parts |= evaluated(answer, golds)
                await self._tell(lease, answer, transcribe, parts)
                return Score(parts["em"], "", parts)
            score = self._search_r1 if self._config.mode == "search_r1" else self._strict
            reward = await score(lease, answer, transcribe, parts)
        except Unscorable as error:
            return Score(None, self._count(lease, error), parts)
        finally:
            if lease.kind == "train":
                for name, value in parts.items():
                    self._recent.setdefault(name, deque(maxlen=_WINDOW)).append(value)
        return Score(reward, "", parts)

    def gauges(self) -> dict[str, float]:
        """Return each part's mean over recent train rollouts, and counts since the start."""
        means = {f"actor/reward/{name}": sum(of) / len(of) for name, of in self._recent.items()}
        causes = {f"actor/unscorable_{whose}_count": n for whose, n in self._unscorable.items()}
        counts = {"actor/unscorable_count": self._unscorable.total(), **causes}
        judge = self._judge.gauges() if self._judge else {}
        return means | {name: float(n) for name, n in counts.items()} | judge

    async def _tell(
        self,
        lease: Lease,
        answer: str | None,
        transcribe: Callable[[], Transcript],
        parts: dict[str, float],
    ) -> None:
        """Add the further parts of an evaluation; what cannot be told is counted and left out."""
        asked = self._config.evaluated
        own = any(name in OF_TRANSCRIPT or name == "custom" for name in asked)
        transcript = transcribe() if own else None
        for name in asked:
            try:
                if name in OF_ANSWER:
                    parts[name] = OF_ANSWER[name](answer, lease.question.answers)
                elif transcript and name in OF_TRANSCRIPT:
                    parts[name] = OF_TRANSCRIPT[name](transcript)
                else:
                    parts[name] = await self._asked(name, lease, answer, transcript)
            except Unscorable as error:
                self._count(lease, error)

    async def _asked(
        self, name: str, lease: Lease, answer: str | None, transcript: Transcript | None
    ) -> float:
        """Return what judge, encoder or the user's function say of it. Raises Unscorable."""
        golds = lease.question.answers
        if name == "custom" and self._custom and transcript:
            return await self._custom.of(transcript)
        if name == "judge" and self._judge:
            return await self._judge.verdict(lease.question.text, golds, answer) if answer else 0.0
        if name == "similarity" and self._similarity:
            return await self._similarity.best(answer, golds) if answer else 0.0
        raise Unscorable(name, "nothing is there that could tell it")

    async def _strict(
        self,
        lease: Lease,
        answer: str | None,
        transcribe: Callable[[], Transcript],
        parts: dict[str, float],
    ) -> float:
        golds, weights = lease.question.answers, self._weights
        if not golds and self._config.need_answers:
            raise Unscorable("question", _NO_GOLD)
        for name, of_answer in OF_ANSWER.items():
            if weights[name] or (name == "em" and golds):
                parts[name] = of_answer(answer, golds)
        transcript = None
        if any(weights[name] for name in ("custom", *OF_TRANSCRIPT)):
            transcript = transcribe()
            for name, of_transcript in OF_TRANSCRIPT.items():
                if weights[name]:
                    parts[name] = of_transcript(transcript)
        for name in ASKED:
            if weights[name]:
                parts[name] = await self._asked(name, lease, answer, transcript)
        reward = sum((weights[name] * value for name, value in parts.items()), 0.0)
        if not math.isfinite(reward):
            raise Unscorable("sum", f"the weighted parts add up to {reward!r}: {parts!r}")
        return reward

    async def _search_r1(
        self,
        lease: Lease,
        answer: str | None,
        transcribe: Callable[[], Transcript],
        parts: dict[str, float],
    ) -> float:
        golds = lease.question.answers
        if not golds:
            raise Unscorable("question", _NO_GOLD)
        parts["em"] = em(answer, golds)  # what it would have earned by its own words
        parts["search_r1"] = reward = search_r1_score(transcribe(), self._config.search_r1)
        return reward

    def _count(self, lease: Lease, error: Unscorable) -> str:
        """Count and return the cause; the first, second, fourth, eighth … of a kind are logged."""
        cause = recordable(f"{error.whose}: {error}")
        self._unscorable[error.whose] += 1
        if (count := self._unscorable[error.whose]).bit_count() == 1:
            logger.warning("unscorable (%d so far), %r: %s", count, lease.question.id, cause)
        return cause


def evaluated(answer: str | None, golds: Sequence[str]) -> dict[str, float]:
    """Return exact match, F1 and sub-string match of an answer, as training scores them."""
    return {"em": em(answer, golds), "f1": f1(answer, golds), "substring": substring(answer, golds)}


async def try_own(asked: RewardsConfig, question: Question) -> None:
    """Score a made-up rollout by `rewards.custom`. Raises ConfigError, or Unscorable."""
    await _own(asked).of(made_up(question))


def _own(asked: RewardsConfig) -> UserReward:
    function = load_entry_point("rewards.custom", asked.custom)
    return UserReward(asked.custom, function, asked.custom_timeout_s, asked.custom_at_once)


def search_r1_score(transcript: Transcript, asked: SearchR1Config) -> float:
    """Return Search-R1's score of the whole decoded text, prompt and passages included."""
    text = search_r1.whole_text(transcript.prompt, transcript.texts, transcript.observations)
    golds = transcript.question.answers
    if asked.version == "v0.2":
        return search_r1.score_em(text, golds, asked.final or 0.0)
    given = {"structure": asked.structure, "final": asked.final, "retrieval": asked.retrieval}
    return search_r1.score_format(
        text, golds, **{name: value for name, value in given.items() if value is not None}
    )
