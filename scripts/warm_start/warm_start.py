"""Supervised fine-tuning on demonstrations, or (`--from-run`) on what a run's actors did.

It uses the learner's engine, packing, settings and checkpoints; the loss is −log p of what the
policy writes. `OUT/model`, for `model.path`, is the checkpoint with the lowest held-out loss, or
the last. SIGINT and SIGTERM finish the step, save it and leave. The same command goes on from the
newest checkpoint, bit for bit. Exit code 3: a deadline of the learner passed, or a rank was lost
where nothing else would notice.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from rich.console import Console

from configs import hints
from configs.algorithm.critic import CriticConfig
from configs.load import ConfigError, load
from configs.runtime.process import Exit, begin
from configs.runtime.signals import on_stop
from configs.runtime.watchdog import phase
from configs.schema import Config
from learner import checkpoint
from learner.errors import BadCheckpoint, BadModel
from replay.protocol import LogError
from scripts.command.options import Options, argument, option, overrides
from scripts.command.terminal import Bars, above, clean, status
from scripts.setup import preflight
from scripts.setup.fit import fitted
from scripts.setup.hub import with_hub_paths
from scripts.setup.resolve import with_absolute_paths
from scripts.warm_start.curriculum import Curriculum, OutputFolder
from scripts.warm_start.demonstrations import Demonstration, read_files, read_run
from scripts.warm_start.ranks import joining, other_ranks

if TYPE_CHECKING:  # heavy imports wait until the number of threads is set
    from learner.metrics.metrics import Metrics
    from learner.trainer import Trainer

MOST_EPOCHS = 1_000_000
READING = "reading the demonstrations"


@dataclass(frozen=True)
class WarmStartOptions(Options):
    """Options of `forage warm-start`. Raises ConfigError for a value out of its range."""

    config: str = argument("a YAML file, for example configs/base.yaml")
    overrides: tuple[str, ...] = overrides()
    demonstrations: tuple[Path, ...] = option("JSONL files", default=(), metavar="FILE")
    from_run: Path | None = option("what this run's actors were rewarded for", metavar="RUN")
    reward: float = option("with --from-run: the least (default 1)", default=1.0)
    out: Path | None = option("default: runs/warm-start-<config>-<time>", metavar="FOLDER")
    epochs: float = option("passes over the demonstrations", default=1.0)
    steps: int = option("optimiser steps, instead of --epochs", default=0)
    rows: int = option("demonstrations of a step (default 32)", default=32, least=1)
    held_out: float = option("share of the questions (default 0.05)", default=0.05)
    skip_bad: bool = option("go on without rows that cannot be used", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.demonstrations) == bool(self.from_run):
            raise ConfigError("give one of --demonstrations FILE and --from-run RUN")
        if not math.isfinite(self.reward):
            raise ConfigError(f"--reward {self.reward!r}: give a finite number")
        if not 0 < self.epochs <= MOST_EPOCHS:
            raise ConfigError(
                f"--epochs {self.epochs!r}: give a number above 0, and {MOST_EPOCHS} at most"
            )
        if self.steps < 0:
            raise ConfigError(f"--steps {self.steps}: give 0 (by --epochs) or more")
        if not 0 <= self.held_out < 1:
            raise ConfigError(f"--held-out {self.held_out!r}: give a share, from 0 to below 1")


@dataclass(frozen=True)
class Plan:
    """The curriculum of a warm start, its settings and tokenizer."""

    config: Config
    curriculum: Curriculum
    tokenizer: Any


def warm_start(options: WarmStartOptions) -> int:
    """Check, learn, deliver; the exit code. Raises ConfigError, LearnerError."""
    console = Console()
    try:
        config = settings(options)
        begin("warm_start", config.learner.threads)
        on_stop(_leave)
        return run(prepare(options, config, console), console, _listen)
    except (LogError, BadCheckpoint, BadModel) as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        console.print("interrupted before it took a step")
        return Exit.INTERRUPTED


def settings(options: WarmStartOptions) -> Config:
    """The configuration, with OUT as its run directory. Raises ConfigError."""
    config = with_hub_paths(load(options.config, options.overrides), ("model.path",))
    config = fitted(with_absolute_paths(without_critic(config)))
    name = f"warm-start-{Path(options.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    out = options.out or Path(config.run_dir or Path("runs") / name)
    config = msgspec.structs.replace(config, run_dir=str(out.resolve()))
    preflight.check_model(config)
    require_files(options.demonstrations)
    return config


def without_critic(config: Config) -> Config:
    """The same without a critic: demonstrations need no credit."""
    learner = msgspec.structs.replace(config.learner, baseline="mean", critic=CriticConfig())
    return msgspec.structs.replace(config, learner=learner)


def require_files(paths: Iterable[Path]) -> None:
    """Raise ConfigError for a missing or empty file, before anything takes time."""
    for path in paths:
        shown = f"--demonstrations {str(path)!r}"
        if not path.exists():
            remedy = hints.did_you_mean(path) or "name a JSONL file of demonstrations"
            raise ConfigError(f"{shown}: no file there: {remedy}")
        if path.is_file() and not path.stat().st_size:
            raise ConfigError(f"{shown}: it is empty: write one demonstration a line")


def prepare(options: WarmStartOptions, config: Config, console: Console) -> Plan:
    """Read and check everything but the folder. Raises ConfigError, LogError."""
    tokenizer = _tokenizer(config)
    rows = demonstrations(options, config, tokenizer, console)
    curriculum = Curriculum.of(rows, options.held_out, options.rows, config.seed)
    steps = options.steps or curriculum.steps(options.epochs)
    learner = msgspec.structs.replace(config.learner, total_steps=steps)
    config = msgspec.structs.replace(config, learner=learner)
    tokens = sum(map(len, (*curriculum.learnt, *curriculum.held_out)))
    learnt, held_out = len(curriculum.learnt), len(curriculum.held_out)
    console.print(
        f"{learnt} demonstrations to learn from, {held_out} held out, {tokens} tokens; {steps} "
        f"steps of {curriculum.rows} rows",
        highlight=False,
    )
    return Plan(config, curriculum, tokenizer)


def _tokenizer(config: Config) -> Any:
    """The model's. Raises ConfigError."""
    with status("loading the tokenizer"):  # and what it comes with, for seconds
        from actors.prompt import load_tokenizer

        try:
            return load_tokenizer(config.model.path, config.model.trust_remote_code)
        except (OSError, ValueError, KeyError) as error:  # of transformers, for broken files
            where = f"model.path = {config.model.path!r}"
            raise ConfigError(f"{where}: its tokenizer cannot be loaded: {error}") from error


def demonstrations(
    options: WarmStartOptions, config: Config, tokenizer: Any, console: Console
) -> list[Demonstration]:
    """The demonstrations; what is left out is printed."""
    from actors.prompt import Prompter, tokenizer_digest

    if options.from_run:
        digest = tokenizer_digest(tokenizer)
        with status(READING):
            rows, left_out = read_run(options.from_run, options.reward, digest, config)
        for cause, count in left_out.items():
            said = clean(f"left out: {count} trajectories {cause}")
            console.print(said, highlight=False, markup=False)
        return rows
    prompter = Prompter(tokenizer, config.questions, config.actors)
    with status(READING):
        rows, bad = read_files(options.demonstrations, prompter, config, options.skip_bad)
    for problem in bad:
        said = clean(f"left out: {problem}")
        console.print(said, highlight=False, soft_wrap=True, markup=False)
    return rows


class Learning:
    """A warm start in progress: steps, held-out losses, checkpoints, and a line on each."""

    def __init__(
        self,
        plan: Plan,
        out: OutputFolder,
        trainer: "Trainer",
        metrics: "Metrics",
        console: Console,
    ) -> None:
        from learner.imitation import share_out  # it imports torch

        self._plan, self._out, self._console = plan, out, console
        self._trainer, self._metrics = trainer, metrics
        self._share_out, self.saved = share_out, out.done

    def begin(self) -> None:
        """Measure the held-out loss before the first step."""
        if self._out.done:
            return
        if rows := len(self._plan.curriculum.held_out):
            self._console.print(f"measuring the loss of {rows} held out", highlight=False)
        with status("measuring the loss"):
            loss = self._held_out_loss(0)
        if loss is not None:
            self._console.print(f"held-out loss before the first step: {loss:.4f}")

    def steps(self) -> Iterator[int]:
        """Take each step that is left; yield its number once everything due after it is done."""
        learner = self._plan.config.learner
        for step in range(self._out.done + 1, learner.total_steps + 1):
            last = step == learner.total_steps
            gauges = self._step(step)
            if last or step % learner.eval_every == 0:
                self._say(gauges, step, self._held_out_loss(step))
            if last or step % learner.checkpoint_every == 0:
                self.save(step)
            yield step

    def save(self, step: int) -> None:
        """Save a durable checkpoint, unless there is one."""
        if step == self.saved:
            return
        config = self._plan.config
        with checkpoint.saving(config, f"checkpoint of step {step}"):
            self._metrics.flush()
            checkpoint.save(config, step, self._trainer, self._plan.tokenizer)
        self.saved = step
        keep, best = config.learner.keep_checkpoints, self._out.best
        checkpoint.retain(config.run_dir, keep, best)

    def _step(self, step: int) -> dict[str, float]:
        learner, begun = self._plan.config.learner, time.perf_counter()
        with phase(f"step {step}", learner.step_deadline_s):
            shares = self._share_out(self._plan.curriculum.batch(step), step, learner)
            gauges = self._trainer.imitate(shares)
        seconds = time.perf_counter() - begun
        self._metrics.write(step, gauges | {"learner/update_s": seconds})
        return gauges

    def _held_out_loss(self, step: int) -> float | None:
        rows = [each.segments for each in self._plan.curriculum.held_out]
        if not rows:
            return None
        learner = self._plan.config.learner
        with phase(f"held-out loss after step {step}", learner.eval_deadline_s):
            loss = self._trainer.measure(self._share_out(rows, step, learner))
        self._metrics.write(step, {"learner/held_out_loss": loss})
        self._out.measured(step, loss)
        return loss

    def _say(self, gauges: dict[str, float], step: int, held_out: float | None) -> None:
        line = f"step {step}/{self._plan.config.learner.total_steps}"
        line += f"  loss {gauges['learner/loss']:.4f}"
        line += "" if held_out is None else f"  held-out loss {held_out:.4f}"
        above(f"{line}  lr {gauges['learner/lr']:.3g}")


def run(plan: Plan, console: Console, listen: Callable[[], Sequence[str]]) -> int:
    """Learn until the end or a cause in `listen()`; the exit code. Raises LearnerError."""
    total = plan.config.learner.total_steps
    with OutputFolder.held(plan.config, plan.curriculum) as out:
        with contextlib.ExitStack() as stack:
            with status("loading the model"):
                learning = start(plan, out, stack, console)
            learning.begin()
            stops, left = listen(), max(total - out.done, 0)
            with Bars() as bars:
                for step in bars.track(learning.steps(), left, description="learning"):
                    if stops:
                        learning.save(step)
                        break
        if learning.saved < total:
            again = f"the same command, with --out {out.path}, goes on from there"
            console.print(f"{stops[0]}: saved after step {learning.saved}; {again}", soft_wrap=True)
            return Exit.INTERRUPTED
        with status("writing the model"):
            model, which = out.deliver(learning.saved)
    console.print(f"the model of {which}", soft_wrap=True, highlight=False)
    console.print(f"model.path={model}", soft_wrap=True)
    return Exit.DONE


def start(plan: Plan, out: OutputFolder, stack: contextlib.ExitStack, console: Console) -> Learning:
    """Start the other ranks, and load the model on all of them."""
    import torch

    from learner.metrics.metrics import Metrics
    from learner.ranks.leader import lead

    config, folder = plan.config, out.path
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.seed)
    ranks = stack.enter_context(other_ranks(config, console))
    begins = out.done + 1 if out.done else 0  # a loss is measured before step 1
    again = (folder / "tensorboard").exists()
    metrics = stack.enter_context(Metrics(folder, begins if again else None))
    with joining(ranks):
        trainer = lead(config)
    stack.callback(trainer.close)
    if out.found:
        trainer.restore(out.found.folder)
    return Learning(plan=plan, out=out, trainer=trainer, metrics=metrics, console=console)


def _leave(cause: str) -> NoReturn:
    """Before the first step there is nothing to save, whatever is under way."""
    raise KeyboardInterrupt(cause)


def _listen() -> list[str]:
    """From here on a step is finished, and saved."""
    stops = list[str]()
    on_stop(stops.append)
    return stops
