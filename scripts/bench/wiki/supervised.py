"""The supervised baseline: a warm start on all demonstrations until validation stops rising, or
for an epoch.

warm/         the warm start, which takes a few steps more for each measurement
step-N/       the evaluation of its model after N steps, on validation questions
best/         the model that reached most, with its configuration
learnt.json   what each measurement reached

It is done once the warm start, with gigabytes of an optimiser, is removed.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from configs.runtime.files import OLD_SUFFIX, is_removed, making, remove_folder, write_json
from scripts.wiki.pipeline.commands import Run
from scripts.wiki.pipeline.pipeline import Plan
from scripts.wiki.pipeline.start import WARM, Candidate, Tell, candidate, read_record

RECORD, BEST, CONFIG_FILE = "learnt.json", "best", "config.yaml"


@dataclass(frozen=True)
class Schedule:
    """Exact match at T = 1 on so many validation `questions` (0: all) is measured `every` so many
    steps; it has stopped rising when `patience` measurements in a row, all of them once every
    demonstration has been seen, do not exceed the best. Of a `patience` of 0 it stops at the first
    measurement after every demonstration has been seen, rising or not.
    """

    every: int = 24
    patience: int = 2
    questions: int = 0


class Learnt(msgspec.Struct):
    """What is known of one supervised start."""

    measured: list[Candidate] = msgspec.field(default_factory=list)

    @property
    def best(self) -> Candidate | None:
        """The first of the best."""
        return max(self.measured, key=lambda each: each.sampled_em, default=None)


def has_stopped(learnt: Learnt, schedule: Schedule, epoch: int) -> bool:
    """True where the schedule's last `patience` measurements, each after `epoch` steps or more, do
    not exceed the best before them, and there is one.
    """
    seen, best = [each for each in learnt.measured if each.steps >= epoch], learnt.best
    late = [each for each in seen if best and each.steps > best.steps]
    return bool(seen) and len(late) >= schedule.patience


def epoch_of(plan: Plan) -> int:
    """The steps that show every demonstration once."""
    lines = plan.files.demonstrations.read_bytes().splitlines()
    return math.ceil(len(lines) / plan.recipe.rows)


def is_learnt(folder: Path, plan: Plan, schedule: Schedule) -> bool:
    """True where its schedule has stopped, and nothing is left to remove. Raises WikiError."""
    stopped = has_stopped(read(folder), schedule, epoch_of(plan))
    return stopped and all(is_removed(each) for each in _passing(folder))


def read(folder: Path) -> Learnt:
    """What is on record. Raises WikiError."""
    return read_record(folder / RECORD, Learnt)


def teach(folder: Path, plan: Plan, schedule: Schedule, run: Run, tell: Tell) -> None:
    """Go on until the schedule stops; `folder/best` is then the model. Raises WikiError, and
    what `run` raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    learnt, warm, epoch = read(folder), folder / WARM, epoch_of(plan)
    while not has_stopped(learnt, schedule, epoch):
        steps, best = schedule.every * (len(learnt.measured) + 1), learnt.best
        found = candidate(
            folder,
            plan.of_start,
            plan.files,
            steps,
            plan.recipe.rows,
            limit=schedule.questions,
            run=run,
        )
        if best is None or found.sampled_em > best.sampled_em:
            _keep(warm, folder / BEST)
        learnt.measured.append(found)
        write_json(folder / RECORD, learnt)
        tell(f"{found.steps} steps: sampled EM {found.sampled_em:.3f} on validation questions")
    for each in _passing(folder):
        remove_folder(each)


def _passing(folder: Path) -> list[Path]:
    """What is of no use once it is done: the warm start, and a model that was not the best."""
    return [folder / WARM, folder / f"{BEST}{OLD_SUFFIX}"]


def _keep(warm: Path, best: Path) -> None:
    with making(best, replaces=True) as draft:
        shutil.copytree(warm / "model", draft / "model")
        shutil.copyfile(warm / CONFIG_FILE, draft / CONFIG_FILE)
