"""The start of the wiki task: as few supervised steps as give reinforcement something to work with.

    warm/            the warm start, which takes a few steps more for each candidate
    step-N/          the evaluation of its model after N steps, on validation questions
    choice.json      what each candidate reached, and which was chosen

Validation asks about training's countries: the held-out questions have no say.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from configs.runtime.files import is_removed, remove_folder, write_json
from scripts.evaluation.rows import FINAL
from scripts.wiki.packages import WikiError
from scripts.wiki.pipeline.commands import Run, forage
from scripts.wiki.pipeline.settings import CONFIG
from scripts.wiki.wiki import WikiFiles

CHOICE, WARM, LOG, SET = "choice.json", "warm", "commands.log", "asked"
CHECKPOINTS = "checkpoints"  # of a warm start
ATTEMPTS = 3  # of an evaluation some of whose rollouts fail
Tell = Callable[[str], None]
Figures = dict[str, Any]
Record = TypeVar("Record")


@dataclass(frozen=True)
class Recipe:
    """Candidates have `first`, `first` + `every`, … `last` steps of `rows` demonstrations; the
    first whose exact match at T = 1 on so many `questions` is `least_em` is chosen.
    """

    first: int = 6
    every: int = 2
    last: int = 16
    rows: int = 8
    questions: int = 64
    least_em: float = 0.2


class Candidate(msgspec.Struct, frozen=True):
    """A warm start after so many steps; `seconds`: of its steps and its evaluation."""

    steps: int
    sampled_em: float
    seconds: float


class Choice(msgspec.Struct):
    """What is known of the candidates; `chosen`: the steps of the start, 0 before there is one."""

    chosen: int = 0
    candidates: list[Candidate] = msgspec.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """What it took so far."""
        return sum(each.seconds for each in self.candidates)


def choose(
    folder: Path,
    overrides: Sequence[str],
    files: WikiFiles,
    recipe: Recipe,
    tell: Tell,
    run: Run = forage,
) -> tuple[Path, Choice]:
    """The model of the chosen start, made in `folder` where it is not there. Raises WikiError
    where no candidate will do, and what `run` raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    choice, warm = read(folder), folder / WARM
    known = {each.steps: each for each in choice.candidates}
    for steps in range(recipe.first, recipe.last + 1, recipe.every):
        if choice.chosen:
            break
        if not (found := known.get(steps)):
            found = candidate(
                folder, overrides, files, steps, recipe.rows, limit=recipe.questions, run=run
            )
            choice.candidates.append(found)
        tell(f"{steps} steps: sampled EM {found.sampled_em:.3f} on validation questions")
        choice.chosen = steps if found.sampled_em >= recipe.least_em else 0
        write_json(folder / CHOICE, choice)
    if not choice.chosen:
        best = max(choice.candidates, key=lambda each: each.sampled_em)
        raise WikiError(
            f"no start of at most {recipe.last} steps reaches a sampled EM of {recipe.least_em}: "
            f"the best had {best.sampled_em:.3f} after {best.steps}: take another seed "
            "(--seed; make: SEED; bench: --seeds)"
        )
    if not (model := warm / "model").is_dir():
        raise WikiError(f"the start's model {model} is gone: remove {folder} and it is made again")
    remove_folder(warm / CHECKPOINTS)  # gigabytes of an optimiser that has done its work
    return model, choice


def candidate(
    folder: Path,
    overrides: Sequence[str],
    files: WikiFiles,
    steps: int,
    rows: int,
    *,
    limit: int,
    run: Run = forage,
) -> Candidate:
    """The warm start of `folder` taken to so many steps of so many rows, and its exact match on
    the first `limit` validation questions (0: all). Raises WikiError, and what `run` raises.
    """
    begun = time.monotonic()
    model = learn(folder / WARM, overrides, files.demonstrations, steps, rows=rows, run=run)
    em = measure(model, files.validation, folder / f"step-{steps}", limit=limit, run=run)
    return Candidate(steps, round(em, 4), round(time.monotonic() - begun, 1))


def chosen(folder: Path) -> Path | None:
    """The model of the chosen start; None before there is one. Raises WikiError."""
    model = folder / WARM / "model"
    return model if read(folder).chosen and model.is_dir() else None


def is_chosen(folder: Path) -> bool:
    """True where a start is chosen, and nothing is left to remove. Raises WikiError."""
    return read(folder).chosen > 0 and is_removed(folder / WARM / CHECKPOINTS)


def read(folder: Path) -> Choice:
    """What is on record. Raises WikiError."""
    return read_record(folder / CHOICE, Choice)


def read_record(path: Path, kind: type[Record]) -> Record:
    """What a file holds; `kind()` where there is none. Raises WikiError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind) if path.exists() else kind()
    except msgspec.DecodeError as error:
        raise WikiError(f"{path} cannot be read ({error}): remove {path.parent}") from error


def learn(
    out: Path,
    overrides: Sequence[str],
    demonstrations: Path,
    steps: int,
    *,
    rows: int,
    run: Run = forage,
) -> Path:
    """A warm start's model after so many steps in all, going on with what `out` holds. Raises
    what `run` raises.
    """
    given = ["--demonstrations", str(demonstrations), "--out", str(out), "--held-out", "0"]
    given += ["--rows", str(rows), "--steps", str(steps)]
    run(["warm-start", str(CONFIG), *given, *overrides], out.parent / LOG)
    return out / "model"


def evaluate(
    model: Path,
    questions: Path,
    out: Path,
    *,
    limit: int = 0,
    temperature: float = 1.0,
    config: Path | None = None,
    environments: Sequence[str] = (),
    overrides: Sequence[str] = (),
    run: Run = forage,
) -> Figures:
    """The report of `forage evaluate` on a file of questions, a set called SET; goes on with what
    `out` holds, and asks again where rollouts failed. `config`: where the model has none on record.
    Raises WikiError where some fail each time, and what `run` raises.
    """
    given = ["--sets", f"{SET}={questions}", "--out", str(out), "--limit", str(limit)]
    given += ["--temperature", str(temperature)]
    given += [] if config is None else ["--config", str(config)]
    given += ["--environment", *environments] if environments else []
    for _ in range(ATTEMPTS):
        run(["evaluate", str(model), *overrides, *given], out.parent / LOG)
        report: Figures = json.loads((out / "report.json").read_text())
        if not (failures := failures_of(report)):
            return report
    said = ", ".join(f"{count} by {name}" for name, count in failures.items())
    raise WikiError(
        f"rollouts fail each of {ATTEMPTS} times ({said}): {out} names them; once that is mended, "
        "the same command asks them again"
    )


def measure(model: Path, questions: Path, out: Path, *, limit: int, run: Run = forage) -> float:
    """Exact match at T = 1 of a warm start's model. Raises what `run` raises."""
    report = evaluate(model, questions, out, limit=limit, run=run)
    (of_environment,) = report["methods"].values()
    return float(of_environment[SET]["scores"]["em"]["mean"])


def failures_of(report: Figures) -> Counter[str]:
    """What failed rollouts that may do better another time: how many, by the names of errors."""
    found = Counter[str]()
    for sets in report["methods"].values():
        found.update(sets[SET]["failures"])
    return Counter({name: count for name, count in found.items() if name not in FINAL})
