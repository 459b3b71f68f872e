"""The phases of `make wiki`: files, a start, training. Each is kept, so that the same command goes
on where it was, and with what is finished only says what came of it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from configs.load import load
from configs.runtime.files import weights_bytes
from configs.runtime.process import REPOSITORY, Exit
from configs.schema import Config
from scripts.fleet.launch import ResumeOptions, TrainOptions, resume, train
from scripts.setup import preflight
from scripts.setup.resolve import is_run, resolve
from scripts.wiki.packages import WikiError, require_room
from scripts.wiki.pipeline import ending, settings
from scripts.wiki.pipeline.settings import CONFIG, WikiOptions
from scripts.wiki.pipeline.start import Recipe, choose
from scripts.wiki.wiki import WikiFiles, build

CACHE, RUNS = REPOSITORY / ".cache" / "wiki", REPOSITORY / "runs"
CHECKPOINTS = 3  # at once: the newest, the last evaluated, and the one that is being written
PHASES = ("files", "start", "training")


def run(options: WikiOptions, cache: Path = CACHE, recipe: Recipe | None = None) -> int:
    """Go through all phases; the exit code of training. Raises ConfigError before anything is
    fetched where the machine or a setting will not do, WikiError, and KeyboardInterrupt.
    """
    minutes: dict[str, float] = {}
    _check_machine(options)
    with _phase("files", minutes):
        files = build(cache, options.seed, _tell, dense=options.dense)
    of_run, recipe = settings.of_run(options, files), recipe or Recipe()
    of_start = settings.of_start(options, files)
    mark = settings.digest(of_start, recipe)
    config = _named(load(CONFIG, of_run), settings.digest(of_run, mark), options)
    _check_run(config, files)
    with _phase("start", minutes):
        _tell(f"supervised steps until sampled EM is {recipe.least_em} on validation questions")
        folder = cache / f"start-{options.seed}-{mark}"
        model, choice = choose(folder, of_start, files, recipe, _tell)
        _tell(f"the start: {choice.chosen} steps, {model}")
    with _phase("training", minutes):
        code = _train(config, (*of_run, f"model.path={model}"))
    summary = ending.read_summary(Path(config.run_dir))
    if code == Exit.DONE:
        minutes |= {"start": choice.seconds / 60, "training": summary["wall_s"] / 60}
        places = {"run": Path(config.run_dir), "start": model, "held-out questions": files.eval}
        print(*ending.lines(summary, minutes, places), sep="\n", flush=True)
    elif code != Exit.STOPPED:  # by a rule, which holds again
        print("the same command goes on where this was interrupted", flush=True)
    return code


def _check_machine(options: WikiOptions) -> None:
    """Refuse what can be refused before anything is fetched, and say what is slow."""
    config = load(CONFIG, settings.of_run(options))
    if config.run_dir and is_run(Path(config.run_dir)):  # it goes on
        config = msgspec.structs.replace(config, run_dir="")
    preflight.check_machine(resolve(config, "wiki"))
    if settings.is_slow(config):
        print(settings.SLOW, flush=True)


def _named(config: Config, mark: str, options: WikiOptions) -> Config:
    """With the directory of its run: the same one for the same settings, so that it goes on."""
    name = config.run_dir or RUNS / f"wiki-{options.seed}-{mark}"
    return msgspec.structs.replace(config, run_dir=str(Path(name).expanduser().resolve()))


def _check_run(config: Config, files: WikiFiles) -> None:
    """Refuse a run before its start takes minutes. Raises ConfigError, WikiError."""
    folder = Path(config.run_dir)
    if ending.is_complete(ending.read_summary(folder), config.learner.total_steps):
        return
    preflight.check(resolve(config, "wiki"), resumed=is_run(folder))
    weights = weights_bytes(config.model.path) or weights_bytes(str(files.model))
    for place in (folder, files.model):  # the start's are removed before the run's are written
        require_room(place, CHECKPOINTS * config.learner.saved_bytes(weights))


def _train(config: Config, overrides: tuple[str, ...]) -> int:
    folder = Path(config.run_dir)
    given = (*overrides, f"run_dir={folder}")
    if not is_run(folder):
        return train(TrainOptions(config=str(CONFIG), overrides=given))
    if ending.is_complete(ending.read_summary(folder), config.learner.total_steps):
        _tell(f"trained already: {folder}; --steps takes it further, run_dir=… begins another")
        return Exit.DONE
    _tell(f"going on with {folder}")
    return resume(ResumeOptions(run=folder, overrides=given))


@contextmanager
def _phase(name: str, minutes: dict[str, float]) -> Iterator[None]:
    begun = time.monotonic()
    print(f"{PHASES.index(name) + 1} of {len(PHASES)}: {name} ...", flush=True)
    try:
        yield
    except (WikiError, KeyboardInterrupt):
        print(f"  {name}: ended after {time.monotonic() - begun:.1f} s", flush=True)
        raise
    minutes[name] = (time.monotonic() - begun) / 60
    print(f"  {name}: {time.monotonic() - begun:.1f} s", flush=True)


def _tell(line: str) -> None:
    print(f"  {line}", flush=True)
