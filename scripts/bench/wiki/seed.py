"""One seed of `forage bench wiki`: its models, their evaluations, and what of them is there.

    supervised/             the supervised baseline (scripts/bench/wiki/supervised.py)
    MODEL-HOW-DIGEST        `forage evaluate` of a model on held-out questions; of its weights
    seconds.json            what each piece took, over all slices
    code.json               digests of the code that made each piece, over all slices
    commands.log            what the commands printed, but for training

Start and run are those of `forage demo wiki` with the same settings, and lie where that has them.
"""

import functools
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from configs.load import ConfigError
from configs.runtime.files import folder_bytes, write_json
from configs.runtime.process import REPOSITORY
from scripts.bench import harness
from scripts.bench.wiki import supervised
from scripts.bench.wiki.supervised import BEST, Schedule, is_learnt, teach
from scripts.evaluation.model_files import digest
from scripts.evaluation.rows import FILE_NAME, Row, Rows
from scripts.fleet.launch import ResumeOptions, TrainOptions
from scripts.wiki.packages import WikiError, require_room
from scripts.wiki.pipeline import start
from scripts.wiki.pipeline.commands import Run
from scripts.wiki.pipeline.ending import NEVER
from scripts.wiki.pipeline.pipeline import Plan, check_run, checkpoints_bytes, training
from scripts.wiki.pipeline.start import SET, WARM, Tell, choose, evaluate, failures_of

SECONDS, CODE = "seconds.json", "code.json"
SOURCES = (  # what a piece depends on
    "actors", "learner", "replay", "weight_sync", "retrieval_server", "configs", "scripts.wiki",
    "scripts.warm_start", "scripts.evaluation", "scripts.fleet", "scripts.setup",
    "scripts.bench.wiki.seed", "scripts.bench.wiki.supervised",
)  # fmt: skip
START, TRAINING, SUPERVISED = "start", "training", "supervised"
BASE, TRAINED = "base", "trained"
TRAINED_AT_ONCE = "trained_at_once"  # asked under the environments of one turn
SAMPLINGS = {"greedy": 0.0, "sampled": 1.0}  # temperatures
# Of environments with one turn: more room than taught rollouts need for all their turns together.
LONGER = ("actors.max_action_tokens=256",)
BY_DEMO = "made by forage demo wiki"  # in place of a digest of code


class Method(NamedTuple):
    """A model asked under an environment; '': that of its training."""

    model: str
    environment: str = ""


METHODS = {
    "no_search": Method(BASE, "no_search"),
    "rag": Method(BASE, "rag"),
    "no_search_trained": Method(TRAINED_AT_ONCE, "no_search"),
    "rag_trained": Method(TRAINED_AT_ONCE, "rag"),
    START: Method(START),
    SUPERVISED: Method(SUPERVISED),
    TRAINED: Method(TRAINED),
}
MODELS = dict.fromkeys(method.model for method in METHODS.values())
EVALUATIONS = {f"{model}, {how}": (model, how) for model in MODELS for how in SAMPLINGS}
PIECES = (START, TRAINING, SUPERVISED, *EVALUATIONS)


@functools.cache
def code_digest() -> str:
    """A digest of the code and the locked packages that make the pieces."""
    locks = sorted((REPOSITORY / "requirements").glob("*.lock"))
    return harness.digest_of([*harness.sources(*SOURCES), *locks])


class Fact(msgspec.Struct, frozen=True):
    """What the task's own file says of a question."""

    id: str
    kind: str
    hops: int


class Seed:
    """One seed's pieces. `questions`: how many held-out ones are asked, from the first on."""

    def __init__(
        self, number: int, plan: Plan, out: Path, questions: int, schedule: Schedule
    ) -> None:
        self.number, self.plan, self._questions, self._schedule = number, plan, questions, schedule
        self.folder = out / f"seed-{number}-{plan.settings_digest}"
        self.folder.mkdir(parents=True, exist_ok=True)
        few = f"-{schedule.questions}" if schedule.questions else ""
        self._taught = self.folder / f"{SUPERVISED}{few}"

    @property
    def left(self) -> list[str]:
        """The pieces that are not there, in the order in which they can be made."""
        return [piece for piece in PIECES if not self.is_done(piece)]

    @property
    def steps(self) -> int:
        """The steps that the run has taken; 0 before it is there."""
        return int(self.plan.summary.get("steps", 0))

    @property
    def lacking(self) -> int:
        """How many of the held-out questions that are asked for its file does not have."""
        return self._questions - len(self.facts)

    @property
    def made_otherwise(self) -> list[str]:
        """The pieces that are there, and were not made by today's code alone, or not here."""
        there = (piece for piece in PIECES if self.is_done(piece))
        return [piece for piece in there if self._made_by.get(piece) != [code_digest()]]

    @property
    def faults(self) -> dict[str, int]:
        """What of the run should never be above 0."""
        return {name: int(self.plan.summary[name]) for name in NEVER}

    def check_length(self) -> None:
        """Refuse a run that has gone further than is asked for. Raises ConfigError."""
        wanted = self.plan.config.learner.total_steps
        if self.steps > wanted:
            raise ConfigError(
                f"seed {self.number}: its run has {self.steps} steps, {wanted} are wanted: give "
                f"--steps {self.steps}, which takes every seed as far, or remove {self.plan.run}"
            )

    @property
    def choice(self) -> start.Choice:
        """What is known of the start. Raises WikiError."""
        return start.read(self.plan.start)

    @property
    def learnt(self) -> supervised.Learnt:
        """What is known of the supervised baseline. Raises WikiError."""
        return supervised.read(self._taught)

    @property
    def facts(self) -> dict[str, Fact]:
        """Kind and hops of each question that is asked, by its id, in their order."""
        known = {fact.id: fact for fact in _lines(self.plan.files.kinds, Fact)}
        asked = (json.loads(line) for line in self.plan.files.eval.read_text().splitlines())
        ids = [each["id"] for each in asked][: self._questions]
        return {id: known[id] for id in ids}

    @property
    def seconds(self) -> dict[str, float]:
        """What each piece took: start and training by their own records, which others make too."""
        path = self.folder / SECONDS
        spent: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        known = {START: self.choice.seconds, TRAINING: self.plan.summary.get("wall_s", 0.0)}
        return spent | {name: max(taken, spent.get(name, 0.0)) for name, taken in known.items()}

    def is_done(self, piece: str) -> bool:
        """True where a piece is there."""
        if piece == START:
            return start.is_chosen(self.plan.start)
        if piece == TRAINING:
            return self.plan.is_trained
        if piece == SUPERVISED:
            return is_learnt(self._taught, self.plan, self._schedule)
        model, how = EVALUATIONS[piece]
        of_run = model in (TRAINED, TRAINED_AT_ONCE)
        if (of_run and not self.plan.is_trained) or not self._home(model).is_dir():
            return False
        path = self._place(model, how) / "report.json"
        if not path.exists():
            return False
        report = json.loads(path.read_text())
        return _asked(report) >= len(self.facts) and not failures_of(report)

    def do(self, piece: str, run: Run, tell: Tell) -> None:
        """Make a piece, or go on with it. Raises ConfigError, WikiError, and what `run` raises."""
        begun, made_by = time.monotonic(), self._made_by
        places = {START: self.plan.start, TRAINING: self.plan.run}
        by_demo = piece in places and piece not in made_by and places[piece].exists()
        digests = {*made_by.get(piece, ()), code_digest()} | ({BY_DEMO} if by_demo else set())
        write_json(self.folder / CODE, made_by | {piece: sorted(digests)})
        try:
            self._do(piece, run, tell)
        finally:
            path = self.folder / SECONDS
            spent = json.loads(path.read_text()) if path.exists() else {}
            taken = spent.get(piece, 0.0) + time.monotonic() - begun
            write_json(path, spent | {piece: round(taken, 1)})

    def rows(self, name: str, how: str) -> dict[str, Row]:
        """The rows of a method, by question; empty before its evaluation is there."""
        method = METHODS[name]
        if not self.is_done(f"{method.model}, {how}"):
            return {}
        environment = method.environment or self.plan.config.environment.name
        with Rows(self._place(method.model, how) / FILE_NAME) as rows:
            found = rows.by_rollout.values()
            by_id = {row.id: row for row in found if row.environment == environment}
        return {id: by_id[id] for id in self.facts}

    @property
    def _made_by(self) -> dict[str, list[str]]:
        return start.read_record(self.folder / CODE, dict[str, list[str]])

    def _do(self, piece: str, run: Run, tell: Tell) -> None:
        plan = self.plan
        if piece == START:
            check_run(plan)
            choose(plan.start, plan.of_start, plan.files, plan.recipe, tell, run)
        elif piece == TRAINING:
            self._train(run)
        elif piece == SUPERVISED:
            held = folder_bytes(self._taught)
            require_room(self.folder, max(0, checkpoints_bytes(plan) - held))
            teach(self._taught, plan, self._schedule, run, tell)
        else:
            self._evaluate(piece, run)

    def _train(self, run: Run) -> None:
        check_run(self.plan)
        match training(self.plan, self._model(START)):
            case TrainOptions(config=config, overrides=given):
                run(["train", config, *given], None)
            case ResumeOptions(run=folder, overrides=given):
                run(["resume", str(folder), *given], None)
            case None:
                pass

    def _evaluate(self, piece: str, run: Run) -> None:
        model, how = EVALUATIONS[piece]
        own = self.plan.config.environment.name
        asked = [each.environment or own for each in METHODS.values() if each.model == model]
        evaluate(
            self._model(model),
            self.plan.files.eval,
            self._place(model, how),
            limit=len(self.facts),
            temperature=SAMPLINGS[how],
            config=self.plan.start / WARM / supervised.CONFIG_FILE if model == BASE else None,
            environments=asked,
            overrides=() if own in asked else LONGER,
            run=run,
        )

    def _place(self, model: str, how: str) -> Path:
        return self.folder / f"{model}-{how}-{weights_of(self._home(model))}"

    def _home(self, model: str) -> Path:
        trained = self.plan.run / "checkpoints" / f"step-{self.steps}"
        places: Mapping[str, Path] = {
            BASE: self.plan.files.model,
            START: self.plan.start / WARM / "model",
            SUPERVISED: self._taught / BEST,
            TRAINED: trained,
            TRAINED_AT_ONCE: trained,
        }
        return places[model]

    def _model(self, model: str) -> Path:
        """The folder of a model. Raises WikiError."""
        home = self._home(model)
        if not home.is_dir():
            made_with = {
                START: self.plan.start,
                SUPERVISED: self._taught,
                TRAINED: self.plan.run,
                TRAINED_AT_ONCE: self.plan.run,
            }
            remedy = "the same command makes it again"
            if model in made_with:
                remedy = f"remove {made_with[model]} and it is made again"
            raise WikiError(f"the model {home} is gone: {remedy}")
        return home


def weights_of(folder: Path) -> str:
    """A short digest of a model's files, or a checkpoint's; reckoned anew where they differ in size
    or time.
    """
    inner = folder / "model"
    home = inner if inner.is_dir() else folder
    stats = ((each.name, each.stat()) for each in sorted(home.iterdir()))
    return _weights_of(home, tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))


@functools.cache
def _weights_of(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> str:
    return digest(folder)[:8]


def _asked(report: Mapping[str, Any]) -> int:
    return min(int(sets[SET]["questions"]) for sets in report["methods"].values())


def _lines(path: Path, kind: type[Fact]) -> Iterator[Fact]:
    decoder = msgspec.json.Decoder(kind)
    return (decoder.decode(line) for line in path.read_bytes().splitlines())
