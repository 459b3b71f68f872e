"""The section `rewards`: weighted parts of the policy's own tokens, or Search-R1's score.

The parts are described in docs/rewards.md. Penalties are parts whose values are 0 or less, so no
weight is ever negative. Every section refuses what would act on nothing.
"""

import math
import re
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

import msgspec

from configs.prompts import JUDGE_PROMPT
from configs.section import (
    NAMES_SECRET,
    OF_THE_MACHINE,
    ONE_OR_MORE,
    REACHES_OUT,
    RUNS_CODE,
    InputPath,
    ModelPath,
    NonNegative,
    NonNegativeFloat,
    Positive,
    Seconds,
    Section,
)

_PENALTIES = ("search_cost", "avoidance")
ALWAYS_EVALUATED = ("em", "f1", "substring")  # each costs nothing
FurtherPart = Literal[
    "format", "retrieval_hit", "search_cost", "avoidance", "environment", "similarity", "judge",
    "custom",
]  # fmt: skip
EVALUATED = (*ALWAYS_EVALUATED, *get_args(FurtherPart))  # every part that evaluations may tell
_OF_ANSWERS = ("em", "substring", "f1", "retrieval_hit", "similarity")
_ENTRY_POINT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class RewardWeights(Section, frozen=True):
    """The weight of each part; a part of weight 0 is not computed, except `em`."""

    em: NonNegativeFloat = 1.0  # the answer equals an accepted one
    substring: NonNegativeFloat = 0.0  # the answer holds an accepted one
    f1: NonNegativeFloat = 0.0  # of the words of both
    format: NonNegativeFloat = 0.0  # each turn is a thought and one action
    retrieval_hit: NonNegativeFloat = 0.0  # a passage that was shown holds an accepted answer
    search_cost: NonNegativeFloat = 0.0  # taken off for each search
    avoidance: NonNegativeFloat = 0.0  # taken off where there is no answer, or an evasive one
    similarity: NonNegativeFloat = 0.0  # of the sentences' embeddings
    judge: NonNegativeFloat = 0.0  # what a language model says of the answer
    environment: NonNegativeFloat = 0.0  # of what the environment gave, turn by turn
    custom: NonNegativeFloat = 0.0  # what a function of yours returns

    def __post_init__(self) -> None:
        weights = msgspec.structs.asdict(self)
        for name, weight in weights.items():
            if not math.isfinite(weight):
                raise ValueError(f"rewards.weights.{name} = {weight!r}: give a finite number")
        earning = {name: weight for name, weight in weights.items() if name not in _PENALTIES}
        if not any(earning.values()):
            raise ValueError(
                f"rewards.weights: {', '.join(earning)} are all 0, so nothing would ever be "
                "rewarded: give one of them a weight"
            )


class SearchR1Config(Section, frozen=True):
    """The numbers of mode `search_r1`; None: those of that version's own scripts."""

    version: Literal["v0.2", "v0.3"] = "v0.2"  # v0.3 is the one with format rewards
    final: NonNegativeFloat | None = None  # of a wrong answer; in v0.3, of one out of form
    structure: NonNegativeFloat | None = None  # v0.3: of a valid sequence
    retrieval: NonNegativeFloat | None = None  # v0.3: where that holds a gold answer in a passage

    def __post_init__(self) -> None:
        for name in ("structure", "retrieval"):
            if self.version == "v0.2" and (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"rewards.search_r1.{name} = {value!r} acts on nothing with "
                    "rewards.search_r1.version = 'v0.2': set it to null, or the version to 'v0.3'"
                )


class JudgeConfig(Section, frozen=True):
    """The language model that judges answers: any OpenAI-compatible endpoint."""

    # http://host:8000/v1, or that of its chat/completions
    url: Annotated[str, OF_THE_MACHINE, REACHES_OUT] = ""
    model: str = ""  # its name there
    # 0600; holds the key to show, if any
    key_file: Annotated[InputPath, OF_THE_MACHINE, NAMES_SECRET] = ""
    prompt: str = JUDGE_PROMPT  # with {question} and {answer}, and {gold} where it may be known
    temperature: NonNegativeFloat | None = 0.0  # null: not sent
    max_tokens: NonNegative = 256  # of a verdict; 0: not sent
    timeout_s: Seconds = 60.0  # of a verdict, waiting for its turn and all retries included
    retries: NonNegative = 3  # of requests that failed, and of broken replies
    concurrency: Positive = 16  # requests of one actor under way at once
    cache_verdicts: NonNegative = 8192  # that each actor remembers

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if self.url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError(
                f"rewards.judge.url = {self.url!r}: give the base URL of an OpenAI-compatible "
                "server, such as http://127.0.0.1:8000/v1"
            )
        for field in ("{question}", "{answer}"):
            if field not in self.prompt:
                raise ValueError(f"rewards.judge.prompt = {self.prompt!r}: it must hold {field}")


class SimilarityConfig(Section, frozen=True):
    """The encoder whose sentence embeddings are compared, on the CPU."""

    model: ModelPath = ""  # a folder that transformers loads
    threads: Positive = 1  # of the encoder
    timeout_s: Seconds = 30.0  # of one comparison, waiting for the batch before included


class RewardsConfig(Section, frozen=True):
    """The reward of a train rollout; evaluations are always scored by exact match, and tell F1,
    sub-string match and what `evaluated` names beside it.

    Raises ValueError where two fields contradict each other.
    """

    mode: Literal["strict", "search_r1"] = "strict"  # strict: only the policy's own tokens count
    weights: RewardWeights = RewardWeights()  # of mode strict
    search_r1: SearchR1Config = SearchR1Config()  # of mode search_r1
    judge: JudgeConfig = JudgeConfig()
    similarity: SimilarityConfig = SimilarityConfig()
    custom: Annotated[str, RUNS_CODE] = ""  # the user's own: package.module:function
    custom_timeout_s: Seconds = 30.0  # of one call
    custom_at_once: Positive = 1  # calls of a plain function, in threads that it must bear
    evaluated: Annotated[tuple[FurtherPart, ...], ONE_OR_MORE] = ()  # parts of evaluations, too

    @property
    def reads_passages(self) -> bool:
        """True where a part reads the passages that were shown."""
        weighed = (self.weights.retrieval_hit, self.weights.custom)
        strict = self.mode == "strict" and any(weighed)
        return strict or not {"retrieval_hit", "custom"}.isdisjoint(self.evaluated)

    @property
    def need_answers(self) -> bool:
        """True where a train question without accepted answers could not be rewarded."""
        if self.mode == "search_r1" or any(getattr(self.weights, name) for name in _OF_ANSWERS):
            return True
        return bool(self.weights.judge) and "{gold}" in self.judge.prompt

    def __post_init__(self) -> None:
        if self.custom and not _ENTRY_POINT.fullmatch(self.custom):
            raise ValueError(
                f"rewards.custom = {self.custom!r}: name a function as package.module:function"
            )
        if self.mode == "search_r1":
            for name, weight in _differing(self.weights):
                raise ValueError(
                    f"rewards.weights.{name} = {weight!r} with rewards.mode = 'search_r1': that "
                    "mode's reward is Search-R1's score alone: leave rewards.weights out, or set "
                    "rewards.mode to 'strict'"
                )
        for name, value in _differing(self.search_r1) if self.mode == "strict" else ():
            raise ValueError(
                f"rewards.search_r1.{name} = {value!r} acts on nothing with rewards.mode = "
                "'strict': set rewards.mode to 'search_r1', or leave it out"
            )
        for name, field, value in self._requirements():
            weight, told = getattr(self.weights, name), name in self.evaluated
            if weight and not value:
                raise ValueError(
                    f"rewards.weights.{name} = {weight!r} needs {field}: name one, or set the "
                    "weight to 0"
                )
            if told and not value:
                raise ValueError(
                    f"rewards.evaluated = {list(self.evaluated)!r} needs {field} for {name}: name "
                    "one, or leave the part out"
                )
            if value and not weight and not told:
                raise ValueError(
                    f"{field} = {value!r} acts on nothing with rewards.weights.{name} = 0: give "
                    "it a weight, name the part in rewards.evaluated, or leave it empty"
                )

    def _requirements(self) -> tuple[tuple[str, str, str], ...]:
        """(part, field, value) of every field that a part cannot do without."""
        return (
            ("judge", "rewards.judge.url", self.judge.url),
            ("judge", "rewards.judge.model", self.judge.model),
            ("similarity", "rewards.similarity.model", self.similarity.model),
            ("custom", "rewards.custom", self.custom),
        )


def _differing(section: Section) -> list[tuple[str, object]]:
    """The fields of a section that are not at their defaults."""
    given, plain = (msgspec.structs.asdict(each) for each in (section, type(section)()))
    return [(name, value) for name, value in given.items() if value != plain[name]]
