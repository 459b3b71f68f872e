"""The run's evaluations as the learner knows them: asked for, finished, and the best step.

They are kept in `<run_dir>/evaluations.json`: a learner that resumes asks for nothing that is on
record and keeps the best checkpoint.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import msgspec

from configs.runtime.files import write_json
from learner.errors import BadCheckpoint
from replay.protocol import EvalResult, SetResult

FILE_NAME = "evaluations.json"


class Score(msgspec.Struct, frozen=True):
    """What an evaluation came to, greedy and sampled (empty: not asked for), by the names that
    `learner.best` may have: `em` over all questions, SET/em over those of one data set.

    `late`: answered by later weights only, as when a resumed learner asked again; it says nothing
    about this step's checkpoint.
    """

    greedy: dict[str, float]
    sampled: dict[str, float]
    late: bool = False

    @classmethod
    def of(cls, result: EvalResult) -> Self:
        """The score that a result says."""
        greedy, sampled = _named("", result)
        for name, found in result.sets.items():
            of_set = _named(f"{name}/", found)
            greedy, sampled = greedy | of_set[0], sampled | of_set[1]
        return cls(greedy, sampled, result.oldest_version > result.step)


class Evaluations:
    """Scores by step; None until the evaluation is finished."""

    def __init__(
        self, run_dir: str | Path, resumed_after: int | None = None, best: str = "em"
    ) -> None:
        """With `resumed_after`, take over what is known of steps up to it. `best`: the score that
        the best step is best in. Raises BadCheckpoint.
        """
        self._path, self._best = Path(run_dir) / FILE_NAME, best
        self.scores: dict[int, Score | None] = {}
        if resumed_after is not None and self._path.exists():
            known = self._read()
            self.scores = {step: known[step] for step in sorted(known) if step <= resumed_after}

    @property
    def unfinished(self) -> list[int]:
        """Steps whose evaluation was asked for and has no result yet."""
        return [step for step, score in sorted(self.scores.items()) if score is None]

    def finished(self, step: int) -> bool:
        """Return True if the result of this step is in."""
        return self.scores.get(step) is not None

    def ask(self, step: int) -> None:
        """Record that this step's evaluation is asked for."""
        if step not in self.scores:
            self._set(step, None)

    def record(self, result: EvalResult) -> bool:
        """Record a result; return False if it is known already."""
        if self.finished(result.step):
            return False
        self._set(result.step, Score.of(result))
        return True

    def best(self, steps: Iterable[int]) -> int | None:
        """The step with the highest greedy, then sampled score; the earliest of equals. None where
        no evaluation of them told that score.
        """
        told = {
            step: score
            for step in steps
            if (score := self.scores.get(step)) and not score.late and self._best in score.greedy
        }

        def key(step: int) -> tuple[float, float, int]:
            score = told[step]
            return score.greedy[self._best], score.sampled.get(self._best, -math.inf), -step

        return max(told, key=key, default=None)

    def _set(self, step: int, score: Score | None) -> None:
        self.scores[step] = score
        write_json(self._path, self.scores)

    def _read(self) -> dict[int, Score | None]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[int, Score | None])
        except (OSError, msgspec.DecodeError) as error:
            raise BadCheckpoint(
                f"{self._path}: cannot be read: {error}; move it away to have the best "
                "checkpoint chosen from here on"
            ) from error


def _named(
    prefix: str, result: EvalResult | SetResult
) -> tuple[dict[str, float], dict[str, float]]:
    """The greedy and the sampled means of a result, by name."""
    greedy = {"em": result.em, **result.parts}
    sampled = {} if result.sampled_em is None else {"em": result.sampled_em, **result.sampled_parts}
    return (
        {prefix + name: value for name, value in greedy.items()},
        {prefix + name: value for name, value in sampled.items()},
    )
