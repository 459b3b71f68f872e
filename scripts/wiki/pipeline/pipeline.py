"""The phases of `make wiki`: files, a start, training. Each is kept, so that the same command goes
on where it was, and with what is finished only says what came of it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from configs.load import ConfigError, load
from configs.runtime.files import folder_bytes, weights_bytes
from configs.runtime.process import REPOSITORY, Exit
from configs.schema import Config
from scripts.fleet.launch import ResumeOptions, TrainOptions, resume, train
from scripts.setup import preflight
from scripts.setup.hub import with_hub_paths
from scripts.setup.resolve import is_run, resolve, run_config, with_absolute_paths
from scripts.wiki.packages import require_room
from scripts.wiki.pipeline import ending, settings
from scripts.wiki.pipeline.settings import CONFIG, WikiOptions
from scripts.wiki.pipeline.start import WARM, Choice, Recipe, choose, chosen, read
from scripts.wiki.wiki import WikiFiles, build, phase

CACHE, RUNS = REPOSITORY / ".cache" / "wiki", REPOSITORY / "runs"
CHECKPOINTS_AT_ONCE = 3  # the newest, the last evaluated, and the one that is being written
PHASES = ("files", "start", "training")
FAILED = "training failed, see above: once that is mended, the same command goes on"


@dataclass(frozen=True)
class Plan:
    """One wiki task: its files, the settings of start and run, and where both are.
    `settings_digest`: of the run's; `config`: the run's, with its directory.
    """

    files: WikiFiles
    recipe: Recipe
    of_start: tuple[str, ...]
    of_run: tuple[str, ...]
    settings_digest: str
    start: Path
    config: Config

    @property
    def run(self) -> Path:
        """The run's directory."""
        return Path(self.config.run_dir)

    @property
    def summary(self) -> dict[str, Any]:
        """The run's summary; empty before there is one."""
        return ending.read_summary(self.run)

    @property
    def is_trained(self) -> bool:
        """True where the run has taken all of its steps."""
        return ending.is_complete(self.summary, self.config.learner.total_steps)


def run(options: WikiOptions, cache: Path = CACHE, recipe: Recipe | None = None) -> int:
    """Go through all phases; the exit code of training, 1 after faults. Raises ConfigError
    before anything is fetched where the machine or a setting will not do, WikiError, and
    KeyboardInterrupt.
    """
    minutes: dict[str, float] = {}
    check_machine(options)
    with _phase("files", minutes):
        files = build(cache, options.seed, _tell, dense=options.dense)
    plan = planned(options, files, cache, recipe or Recipe())
    check_run(plan)
    if plan.is_trained:
        _tell(f"trained already: {plan.run}; --steps takes it further, run_dir=… begins another")
        return _ended(plan, read(plan.start), chosen(plan.start), minutes)
    with _phase("start", minutes):
        least = plan.recipe.least_em
        _tell(f"supervised steps until sampled EM is {least} on validation questions")
        model, choice = choose(plan.start, plan.of_start, files, plan.recipe, _tell)
        _tell(f"the start: {choice.chosen} steps, {model}")
    with _phase("training", minutes):
        code = _train(plan, model)
    if code == Exit.DONE:
        return _ended(plan, choice, model, minutes)
    if code == Exit.INTERRUPTED:
        print("the same command goes on where this was interrupted", flush=True)
    elif code != Exit.STOPPED:  # by a rule, which holds again
        print(FAILED, flush=True)
    return code


def _ended(plan: Plan, choice: Choice, model: Path | None, minutes: dict[str, float]) -> int:
    """Say what came of it; the exit code, 1 after faults. `model`: the start's, if it is there."""
    summary = plan.summary
    minutes |= {"start": choice.seconds / 60, "training": summary["wall_s"] / 60}
    places = {"run": plan.run, "held-out questions": plan.files.eval}
    places |= {"start": model} if model else {}
    print(*ending.lines(summary, minutes, places), sep="\n", flush=True)
    if faults := ending.faults(summary):
        print(f"not as it should be: {faults}, where 0 are due: see {plan.run}", flush=True)
        return Exit.FAILED
    return Exit.DONE


def planned(options: WikiOptions, files: WikiFiles, cache: Path, recipe: Recipe) -> Plan:
    """The plan; the same settings have the same start and the same run. Raises ConfigError."""
    of_run, of_start = settings.of_run(options, files), settings.of_start(options, files)
    digest_of_start = settings.digest(of_start, recipe)
    digest = settings.digest(of_run, digest_of_start)
    config = load(CONFIG, of_run)
    run_dir = Path(config.run_dir or RUNS / f"wiki-{options.seed}-{digest}").expanduser().resolve()
    plan = Plan(
        files=files,
        recipe=recipe,
        of_start=of_start,
        of_run=of_run,
        settings_digest=digest,
        start=cache / f"start-{options.seed}-{digest_of_start}",
        config=msgspec.structs.replace(config, run_dir=str(run_dir)),
    )
    if config.run_dir:
        check_own(plan)
    return plan


def check_own(plan: Plan) -> None:
    """Refuse the folder of a run of other settings, or of another task. Raises ConfigError."""
    if not is_run(plan.run):
        return
    model = msgspec.structs.replace(plan.config.model, path=str(plan.start / WARM / "model"))
    wanted = with_absolute_paths(
        with_hub_paths(msgspec.structs.replace(plan.config, model=model))  # as on record
    )
    for field, its, value in settings.differing(load(run_config(plan.run)), wanted):
        made = field in settings.OF_TASK  # no override changes it
        remedy = "" if made else ", or give what that run was given"
        raise ConfigError(
            f"run_dir = {str(plan.run)!r}: the run there has {field} = {its!r}, this one has "
            f"{value!r}{': other code, or another task' if made else ''}: name another "
            f"folder{remedy}"
        )


def check_machine(options: WikiOptions) -> None:
    """Refuse what can be refused before anything is fetched, and say what is slow."""
    config = load(CONFIG, settings.of_run(options))
    settings.refuse_other_files(options.overrides)
    if config.run_dir and is_run(Path(config.run_dir)):  # it goes on
        config = msgspec.structs.replace(config, run_dir="")
    preflight.check_machine(resolve(config, "wiki"))
    if settings.is_slow(config):
        print(settings.SLOW, flush=True)


def check_run(plan: Plan) -> None:
    """Refuse a run before its start takes minutes. Raises ConfigError, WikiError."""
    if plan.is_trained:
        return
    config, model = plan.config, plan.files.model
    preflight.check(resolve(config, "wiki"), resumed=is_run(plan.run))
    held = sum(folder_bytes(each) for each in (plan.run / "checkpoints", plan.start / WARM))
    for place in (plan.run, model):  # the start's are removed before the run's are written
        require_room(place, max(0, checkpoints_bytes(plan) - held))


def checkpoints_bytes(plan: Plan) -> int:
    """All checkpoints that are there at once, of the start or of the run."""
    weights = weights_bytes(plan.config.model.path) or weights_bytes(str(plan.files.model))
    return int(CHECKPOINTS_AT_ONCE * plan.config.learner.saved_bytes(weights))


def training(plan: Plan, model: Path) -> TrainOptions | ResumeOptions | None:
    """The command that trains from this start, or goes on with it; None where it is done."""
    given = (*plan.of_run, f"model.path={model}", f"run_dir={plan.run}")
    if not is_run(plan.run):
        return TrainOptions(config=str(CONFIG), overrides=given)
    return None if plan.is_trained else ResumeOptions(run=plan.run, overrides=given)


def _train(plan: Plan, model: Path) -> int:
    match training(plan, model):
        case TrainOptions() as options:
            return train(options)
        case ResumeOptions() as options:
            _tell(f"going on with {plan.run}")
            return resume(options)
        case None:
            return Exit.DONE


@contextmanager
def _phase(name: str, minutes: dict[str, float]) -> Iterator[None]:
    begun = time.monotonic()
    print(f"{PHASES.index(name) + 1} of {len(PHASES)}: {name} ...", flush=True)
    with phase(name, _tell):
        yield
    minutes[name] = (time.monotonic() - begun) / 60


def _tell(line: str) -> None:
    print(f"  {line}", flush=True)
