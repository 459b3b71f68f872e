"""The run's evaluations as the learner knows them: asked for, finished, and which step was best.

Consumes results; produces what is still to be asked and the best step; kept in
`<run_dir>/evaluations.json`, so that a learner that resumes asks for nothing that is on record and
forgets no best checkpoint.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from configs.files import write_durably
from learner.errors import BadCheckpoint
from replay.results import EvalResult

FILE_NAME = "evaluations.json"


class Score(msgspec.Struct, frozen=True):
    """Exact match over all questions, greedy and at T = 1."""

    em: float
    sampled_em: float


class Evaluations:
    """`scores`: step → its score, None until it is finished."""

    def __init__(self, run_dir: str | Path, resumed_after: int | None = None) -> None:
        """With `resumed_after`, take over what is known of steps up to it. Raises BadCheckpoint."""
        self._path = Path(run_dir) / FILE_NAME
        self.scores: dict[int, Score | None] = {}
        if resumed_after is not None and self._path.exists():
            known = self._read()
            self.scores = {step: known[step] for step in sorted(known) if step <= resumed_after}

    @property
    def unfinished(self) -> list[int]:
        """Steps whose evaluation was asked for and has no result yet."""
        return [step for step, score in sorted(self.scores.items()) if score is None]

    def finished(self, step: int) -> bool:
        """Whether the result of this step is in."""
        return self.scores.get(step) is not None

    def ask(self, step: int) -> None:
        """Note that this step's evaluation is asked for."""
        if step not in self.scores:
            self._set(step, None)

    def take(self, result: EvalResult) -> bool:
        """Note a result; False when it is known already."""
        if self.finished(result.step):
            return False
        self._set(result.step, Score(result.em, result.sampled_em))
        return True

    def best(self, steps: Iterable[int]) -> int | None:
        """Of these steps the one with the highest greedy, then sampled exact match; the earliest of
        equals.
        """
        scored = [(score, step) for step in steps if (score := self.scores.get(step)) is not None]
        return max(scored, key=lambda s: (s[0].em, s[0].sampled_em, -s[1]))[1] if scored else None

    def _set(self, step: int, score: Score | None) -> None:
        self.scores[step] = score
        write_durably(self._path, msgspec.json.format(msgspec.json.encode(self.scores)))

    def _read(self) -> dict[int, Score | None]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[int, Score | None])
        except (OSError, msgspec.DecodeError) as error:
            raise BadCheckpoint(
                f"{self._path}: cannot be read: {error}; remove it to have the best checkpoint "
                "chosen from here on"
            ) from error
