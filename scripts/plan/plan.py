"""`forage plan`: a run's pace, reckoned before it is started, on GPUs that need not be here.

The configuration is simulated (scripts/plan/simulation.py), by constants of the GPUs and the model
or, on a CPU, by what a core was measured to do; then the best split of the GPUs is looked for.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.load import ConfigError, load
from configs.runtime.files import write_json
from configs.runtime.process import Exit
from configs.schema import Config
from scripts.command.options import Options, argument, option, overrides
from scripts.command.terminal import status
from scripts.plan import build
from scripts.plan.build import Asked, Cores, cache_block, workload_of
from scripts.plan.figures import Planned
from scripts.plan.hardware import GPUS, Gpu, gpu_of
from scripts.plan.past import workload_of_run
from scripts.plan.report import shown
from scripts.plan.simulation import simulate, unheld
from scripts.plan.split import best_split, length
from scripts.plan.workload import Latency, Workload
from scripts.setup.machine import gpus_wanted
from scripts.setup.memory import MemoryOptions, Reckoned, reckon

MOST_ROLLOUTS = 200_000  # of a simulation, unless --steps asks for more


@dataclass(frozen=True)
class PlanOptions(Options):
    """The options of `forage plan`."""

    config: str = argument("a YAML file, for example configs/search_r1_7b_grpo.yaml")
    overrides: tuple[str, ...] = overrides()
    gpus: int | None = option(
        "so many GPUs; 0: a CPU (default: as many as the configuration is for)",
        metavar="N",
        least=0,
    )
    gpu: str = option(f"their kind: {', '.join(GPUS)}", default="H100", metavar="NAME")
    cores: int = option("cores of a CPU that all processes share", default=2, metavar="N", least=1)
    searches: float | None = option("searches of a rollout, on average", metavar="X", least=0)
    completion_tokens: float | None = option(
        "tokens of a turn's completion, on average", metavar="X", least=1
    )
    observation_tokens: int | None = option("tokens that a search shows", metavar="N", least=0)
    prompt_tokens: int | None = option("tokens of a prompt", metavar="N", least=1)
    latency: tuple[float, ...] = option(
        "seconds of a search: the median and the p99 (default .2 2)", default=(), metavar="S"
    )
    no_signal: float | None = option(
        "share of groups whose rewards are all alike (default .5)", metavar="X", least=0
    )
    like: Path | None = option("take rollouts and latency from this run", metavar="RUN")
    measured: Path | None = option("a CPU's constants, from forage bench plan", metavar="FILE")
    steps: int | None = option("steps that are counted (default 20)", metavar="N", least=1)
    seed: int = option("of what is drawn", default=0, metavar="N", least=0)
    plot: Path | None = option("draw it there", metavar="FILE")
    json: Path | None = option("write the figures there", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        gpu_of(self.gpu)
        if self.latency and len(self.latency) != 2:
            given = " ".join(f"{each:g}" for each in self.latency)
            raise ConfigError(f"--latency {given}: give two numbers, the median and the p99")
        if self.no_signal is not None and self.no_signal >= 1:
            raise ConfigError(f"--no-signal {self.no_signal:g}: below 1, or nothing is trained")
        if self.like is not None and any(self._said):
            raise ConfigError("--like takes rollouts from a run: drop what else says how they are")

    @property
    def _said(self) -> tuple[object, ...]:
        return (self.searches, self.completion_tokens, self.observation_tokens,
                self.prompt_tokens, self.latency)  # fmt: skip

    @property
    def asked(self) -> Asked:
        """What is said of the rollouts."""
        return Asked(
            self.searches,
            self.completion_tokens,
            self.observation_tokens,
            self.prompt_tokens,
            Latency(*self.latency) if self.latency else None,
            self.no_signal,
        )


def plan(options: PlanOptions) -> int:
    """Print it; failed where a GPU cannot hold what it must. Raises ConfigError."""
    planned = planned_of(options)
    for each in shown(planned):
        print(each)
    if options.json:
        write_json(options.json, planned.tree())
    if options.plot:
        from scripts.plan.draw import draw  # late: matplotlib takes a second

        print(f"plot: {draw(planned, options.plot)}")
    return Exit.DONE if planned.fits else Exit.FAILED


def planned_of(options: PlanOptions) -> Planned:
    """All of it, for GPUs or for a CPU. Raises ConfigError."""
    gpus = _gpus(options)
    gpu = gpu_of(options.gpu) if gpus else None
    where = gpu.gib if gpu else 1.0
    found = reckon(MemoryOptions(options.config, options.overrides, gpus, where))
    workload = _workload(options, found.config)
    scenario = _scenario(options, found, gpu, gpus, workload)
    lasts = length(scenario, MOST_ROLLOUTS, options.steps or 20)
    if options.steps:
        lasts["steps"] = options.steps
    with status("simulating the run"):
        outcome = simulate(scenario, **lasts, seed=options.seed)
        free = unheld(scenario, steps=max(2, lasts["steps"] // 2), seed=options.seed)
    split = None
    if gpu is not None and gpus > found.config.actors.tensor_parallel:
        with status("looking for the best split"):
            split = best_split(found.config, found.model, gpu, gpus, workload, seed=options.seed)
    return Planned(
        name=options.gpu if gpu else f"{options.cores} cores",
        gpus=gpus,
        found=found,
        scenario=scenario,
        outcome=outcome,
        unheld_per_s=free.rollouts_per_s,
        split=split,
    )


def _gpus(options: PlanOptions) -> int:
    if options.gpus is not None:
        return options.gpus
    return gpus_wanted(load(options.config, options.overrides))


def _workload(options: PlanOptions, config: Config) -> Workload:
    workload = workload_of(config, options.asked, options.seed)
    if options.like is None:
        return workload
    return workload_of_run(options.like, workload.no_signal, cache_block(config))


def _scenario(
    options: PlanOptions, found: Reckoned, gpu: Gpu | None, gpus: int, workload: Workload
) -> Any:
    if gpu is not None:
        if options.measured:
            raise ConfigError("--measured holds a CPU's constants: give --gpus 0 with it")
        return build.on_gpus(found.config, found.model, gpu, gpus, workload)
    costs = Cores.of_size(found.config, found.model)
    if options.measured:
        costs = _measured(options.measured, found.model.parameters)
    return build.on_cores(found.config, found.model, options.cores, costs, workload)


def _measured(path: Path, parameters: int) -> Cores:
    """A model's constants, by its size, in what `forage bench plan` wrote. Raises ConfigError."""
    try:
        constants = json.loads(path.read_text(encoding="utf-8"))["constants"].values()
        known = {each["parameters"]: each for each in constants}
        if found := known.get(parameters):
            return Cores.measured(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--measured {str(path)!r} is no JSON of forage bench plan ({error!r})"
        ) from error
    raise ConfigError(
        f"--measured {str(path)!r} has constants of {', '.join(map('{:,}'.format, known))} "
        f"parameters, and model.path has {parameters:,}: leave --measured out"
    )
