"""The demos: the whole loop on two cores, on a task that is prepared first and cached."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from configs.load import ConfigError, load
from configs.runtime.process import REPOSITORY
from scripts.command.options import Options, argument, option
from scripts.command.terminal import Bars, above
from scripts.setup.resolve import resolve

DEMO, WIKI = TASKS = ("demo", "wiki")


class DemoFailed(Exception):
    """The demo's task could not be prepared; the message names the remedy."""


@dataclass(frozen=True)
class DemoOptions(Options):
    """Options of `forage demo`. Raises ConfigError for those of another task."""

    words: tuple[str, ...] = argument(
        "demo, a made-up world (default), or wiki, a real model and real text; fields to override",
        default=(),
        metavar="TASK|a.b=c",
    )
    seed: int = option("seed of the task, its start and the run (default 0)", default=0, least=0)
    retrieval: Literal["bm25", "dense"] = option(
        "find passages by words, or by an encoder's vectors; demo trains one first", default="bm25"
    )
    quick: bool = option("wiki: 6 steps and 64 held-out questions, not 36, 128", default=False)
    steps: int | None = option(
        "wiki: steps of training (default 36; with --quick 6)", metavar="N", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (given := self._tasks) and (len(given) > 1 or given[0] not in TASKS):
            raise ConfigError(
                f"TASK = {' '.join(given)!r}: name {' or '.join(TASKS)}; fields are section.field=…"
            )
        for name in ("quick", "steps") if self.task == DEMO else ():
            if getattr(self, name):
                raise ConfigError(
                    f"--{name} is for forage demo {WIKI}: here say learner.total_steps=N"
                )

    @property
    def task(self) -> str:
        """One of TASKS."""
        return self._tasks[0] if self._tasks else DEMO

    @property
    def overrides(self) -> tuple[str, ...]:
        """The words that override fields, or are meant to."""
        return tuple(word for word in self.words if "=" in word)

    @property
    def _tasks(self) -> list[str]:
        return [word for word in self.words if "=" not in word]


def demo(options: DemoOptions) -> int:
    """Prepare, launch, and print where everything is; the run's exit code. Raises ConfigError
    before anything is prepared, and DemoFailed.
    """
    begun = time.monotonic()
    code = _wiki(options) if options.task == WIKI else _demo(options)
    seconds = time.monotonic() - begun
    took = f"{seconds:.0f} s" if options.task == DEMO else f"{seconds / 60:.1f} minutes"
    print(f"make {options.task} took {took} (installation not included)")
    return code


def _wiki(options: DemoOptions) -> int:
    from scripts.wiki.packages import WikiError
    from scripts.wiki.pipeline.pipeline import run
    from scripts.wiki.pipeline.settings import WikiOptions

    wanted = WikiOptions(
        seed=options.seed,
        dense=options.retrieval == "dense",
        quick=options.quick,
        steps=options.steps,
        overrides=options.overrides,
    )
    try:
        return run(wanted)
    except WikiError as error:
        raise DemoFailed(str(error)) from error
    except KeyboardInterrupt:
        print("the same command goes on where this was interrupted", flush=True)
        raise


def _demo(options: DemoOptions) -> int:
    from scripts.setup.preflight import check_machine  # late: it takes seconds

    begun, config = time.monotonic(), str(REPOSITORY / "configs" / "demo.yaml")
    seeded = (f"seed={options.seed}", *options.overrides)
    check_machine(resolve(load(config, seeded), "demo"))
    print(f"preparing the demo task (seed {options.seed}) ...", flush=True)
    with _bars() as bars:
        bars.add_task("preparing the demo task", total=None)
        settings = _prepare(options.seed, options.retrieval == "dense")
    print(f"  demo task ready: {time.monotonic() - begun:.1f} s", flush=True)

    from scripts.fleet.launch import TrainOptions, train

    return train(TrainOptions(config=config, overrides=(*settings, *seeded)))


def _prepare(seed: int, dense: bool) -> list[str]:
    from retrieval_server.protocol import BadIndex
    from scripts.demo.errors import TaskFailed
    from scripts.demo.task import prepare

    cache = REPOSITORY / ".cache"
    try:
        files = prepare(cache, seed, _tell)
        index = _index(cache, seed, files.corpus) if dense else None
    except TaskFailed as error:
        raise DemoFailed(f"{error}; try another SEED") from error
    except BadIndex as error:
        raise DemoFailed(str(error)) from error
    settings = [
        f"model.path={files.model}",
        f"questions.train={files.train}",
        f"questions.eval={files.eval}",
        f"retrieval.corpus={files.corpus}",
    ]
    return [*settings, f"retrieval.index={index}"] if index else settings


def _index(cache: Path, seed: int, corpus: Path) -> Path:
    from scripts.demo.encoder import prepare_index  # late: it imports torch

    return prepare_index(cache, seed, corpus, _tell)


def _bars() -> Bars:
    return Bars(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())


def _tell(line: str) -> None:
    above(f"  {line}")
