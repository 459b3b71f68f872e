"""The supervised baseline: a warm start on all demonstrations until validation stops rising.

warm/         the warm start, which takes a few steps more for each measurement
step-N/       the evaluation of its model after N steps, on validation questions
best/         the model that reached most, with its configuration
learnt.json   what each measurement reached
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from configs.runtime.files import making, remove_folder, write_json
from scripts.wiki.packages import WikiError
from scripts.wiki.pipeline.commands import Run
from scripts.wiki.pipeline.pipeline import Plan
from scripts.wiki.pipeline.start import WARM, Candidate, Tell, learn, measure

RECORD, BEST, SETTINGS = "learnt.json", "best", "config.yaml"


@dataclass(frozen=True)
class Schedule:
    """Exact match at T = 1 on so many validation `questions` is measured `every` so many steps; it
    has stopped rising when `patience` measurements in a row do not exceed the best.
    """

    every: int = 16
    patience: int = 2
    questions: int = 128


class Learnt(msgspec.Struct):
    """What is known of one supervised start."""

    measured: list[Candidate] = msgspec.field(default_factory=list)

    @property
    def ems(self) -> list[float]:
        """Exact match, by measurement."""
        return [each.sampled_em for each in self.measured]

    @property
    def best(self) -> Candidate | None:
        """The first of the best."""
        return max(self.measured, key=lambda each: each.sampled_em, default=None)


def has_stopped(ems: Sequence[float], patience: int) -> bool:
    """True where the last `patience` of these do not exceed the best before them."""
    return bool(ems) and len(ems) - 1 - ems.index(max(ems)) >= patience


def read(folder: Path) -> Learnt:
    """What is on record. Raises WikiError."""
    path = folder / RECORD
    try:
        return msgspec.json.decode(path.read_bytes(), type=Learnt) if path.exists() else Learnt()
    except msgspec.DecodeError as error:
        raise WikiError(f"{path} cannot be read ({error}): remove {folder}") from error


def teach(folder: Path, plan: Plan, schedule: Schedule, run: Run, tell: Tell) -> None:
    """Go on until validation stops rising; `folder/best` is then the model. Raises WikiError, and
    what `run` raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    learnt, warm = read(folder), folder / WARM
    while not has_stopped(learnt.ems, schedule.patience):
        found = _measure(folder, plan, schedule, len(learnt.measured) + 1, run)
        if not learnt.measured or found.sampled_em > max(learnt.ems):
            _keep(warm, folder / BEST)
        learnt.measured.append(found)
        write_json(folder / RECORD, learnt)
        tell(f"{found.steps} steps: sampled EM {found.sampled_em:.3f} on validation questions")
    if warm.exists():
        remove_folder(warm)  # gigabytes of an optimiser that has done its work


def _measure(folder: Path, plan: Plan, schedule: Schedule, number: int, run: Run) -> Candidate:
    begun, steps, files = time.monotonic(), schedule.every * number, plan.files
    model = learn(
        folder / WARM, plan.of_start, files.demonstrations, steps, rows=plan.recipe.rows, run=run
    )
    out = folder / f"step-{steps}"
    em = measure(model, files.validation, out, limit=schedule.questions, run=run)
    return Candidate(steps, round(em, 4), round(time.monotonic() - begun, 1))


def _keep(warm: Path, best: Path) -> None:
    with making(best, replaces=True) as draft:
        shutil.copytree(warm / "model", draft / "model")
        shutil.copyfile(warm / SETTINGS, draft / SETTINGS)
