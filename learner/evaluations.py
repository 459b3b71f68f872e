"""The run's evaluations as the learner knows them: asked for, finished, and the best step.

They are kept in `<run_dir>/evaluations.json`: a learner that resumes asks for nothing that is on
record and keeps the best checkpoint.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from configs.runtime.files import write_json
from learner.errors import BadCheckpoint
from replay.protocol import EvalResult

FILE_NAME = "evaluations.json"


class Score(msgspec.Struct, frozen=True):
    """Exact match over all questions, greedy and sampled (None: not asked for).

    `late`: answered by later weights only, as when a resumed learner asked again; it says nothing
    about this step's checkpoint.
    """

    em: float
    sampled_em: float | None
    late: bool = False


class Evaluations:
    """Scores by step; None until the evaluation is finished."""

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
        late = result.oldest_version > result.step
        self._set(result.step, Score(result.em, result.sampled_em, late))
        return True

    def best(self, steps: Iterable[int]) -> int | None:
        """The step with the highest greedy, then sampled exact match; the earliest of equals."""
        found = [(self.scores.get(step), step) for step in steps]
        scored = [(score, step) for score, step in found if score is not None and not score.late]
        best = max(scored, key=lambda s: (s[0].em, s[0].sampled_em or 0.0, -s[1]), default=None)
        return best[1] if best else None

    def _set(self, step: int, score: Score | None) -> None:
        self.scores[step] = score
        write_json(self._path, self.scores)

    def _read(self) -> dict[int, Score | None]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[int, Score | None])
        except (OSError, msgspec.DecodeError) as error:
            raise BadCheckpoint(
                f"{self._path}: cannot be read: {error}; remove it to have the best checkpoint "
                "chosen from here on"
            ) from error
