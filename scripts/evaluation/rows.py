"""The rows of an evaluation: `OUT/rows.jsonl`, one line for each finished rollout, append-only.

A line cut short by a kill is removed when the file is opened. Of two rows of one rollout (it failed
and was tried again) the later one counts. One process writes at a time.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from actors.rewards.scorer import evaluated
from configs.load import ConfigError
from configs.runtime.files import Locked, open_locked
from replay.trajectory import Question, Search, Trajectory

FILE_NAME = "rows.jsonl"
# Failures of the question or its search itself: no server, setting or file could be put right, so
# trying again changes nothing.
FINAL = ("PromptTooLong", "BadQuery")


@dataclass(frozen=True)
class QuestionSet:
    """Questions that are scored together; ids are unique within the set."""

    name: str
    path: Path
    questions: tuple[Question, ...]


class Asked(msgspec.Struct, frozen=True):
    """One rollout to make: `sample` counts from 0. Equal ones are the same rollout."""

    environment: str
    set: str
    id: str
    sample: int


def asked_of(
    sets: Sequence[QuestionSet], environments: Sequence[str], samples: int
) -> dict[str, list[Asked]]:
    """Every rollout of each environment, in the order of the sets, their questions and samples."""
    return {
        environment: [
            Asked(environment, each.name, question.id, sample)
            for each in sets
            for question in each.questions
            for sample in range(samples)
        ]
        for environment in environments
    }


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout as it ended, or, where `failure` says why, as it was given up. `gold`: the
    accepted answers. `answer` None: the policy gave none. Scores are of the answer, 0 without one.
    Token counts: prompt, sampled and observed tokens. `seconds`: the whole rollout. `stop` is empty
    for a failure; `attempts` includes failed ones.
    """

    set: str
    id: str
    environment: str
    sample: int
    question: str
    gold: tuple[str, ...]
    hops: int = 0
    answer: str | None = None
    em: float = 0.0
    f1: float = 0.0
    substring: float = 0.0
    searches: tuple[Search, ...] = ()
    turns: int = 0
    malformed: int = 0
    prompt_tokens: int = 0
    action_tokens: int = 0
    observation_tokens: int = 0
    seconds: float = 0.0
    stop: str = ""
    attempts: int = 1
    failure: str = ""

    @property
    def asked(self) -> Asked:
        """The rollout of this row."""
        return Asked(self.environment, self.set, self.id, self.sample)

    @property
    def open(self) -> bool:
        """True where another start should try this rollout again."""
        return bool(self.failure) and self.failure.partition(":")[0] not in FINAL


def row_of(asked: Asked, question: Question, rollout: Trajectory, attempts: int) -> Row:
    """The row of a finished rollout, scored by exact match, F1 and sub-EM; not by its reward."""
    scores = evaluated(rollout.answer, question.answers)
    return msgspec.structs.replace(
        failed_row(asked, question, "", attempts),
        answer=rollout.answer,
        **scores,
        searches=tuple(search for turn in rollout.turns for search in turn.searches),
        turns=len(rollout.turns),
        malformed=sum(turn.malformed for turn in rollout.turns),
        prompt_tokens=sum(len(sequence.prompt_tokens) for sequence in rollout.sequences),
        action_tokens=rollout.action_count,
        observation_tokens=sum(len(turn.observation_tokens) for turn in rollout.turns),
        seconds=round(rollout.timings.get("total_s", 0.0), 6),
        stop=rollout.stop_reason.value,
    )


def failed_row(asked: Asked, question: Question, failure: str, attempts: int) -> Row:
    """The row of a rollout that was given up."""
    return Row(
        **msgspec.structs.asdict(asked),
        question=question.text,
        gold=question.answers,
        hops=question.hops,
        attempts=attempts,
        failure=failure,
    )


class Rows:
    """The file, open for appending; a context manager. `by_rollout`: the rows it holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_rollout: dict[Asked, Row] = {}
        self._file = -1

    def __enter__(self) -> Self:
        """Open, lock and read the file. Raises ConfigError where that cannot be."""
        out, flags = f"--out {str(self.path.parent)!r}", os.O_RDWR | os.O_CREAT | os.O_APPEND
        try:
            self._file = open_locked(self.path, "another evaluation", flags)
        except Locked as error:
            raise ConfigError(
                f"{out}: another evaluation is writing there: wait for it, or name another folder"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{out}: {self.path.name}: {error.strerror}: name a folder that can be written"
            ) from error
        try:
            self._read()
        except ConfigError:
            os.close(self._file)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file)
        os.close(self._file)

    def add(self, row: Row) -> None:
        """Append a row, in one write: a kill afterwards loses nothing. Raises OSError."""
        os.write(self._file, msgspec.json.encode(row) + b"\n")
        self.by_rollout[row.asked] = row

    def _read(self) -> None:
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._file, whole)
        decoder = msgspec.json.Decoder(Row)
        for number, line in enumerate(content[:whole].split(b"\n")[:-1], 1):
            try:
                row = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{self.path}:{number}: no row of an evaluation ({error}): take the line out, "
                    "and its rollout is made again, or name another --out"
                ) from error
            self.by_rollout[row.asked] = row
