"""Supervised fine-tuning on demonstrations: `scripts/warm_start.py CONFIG --demonstrations FILE`.

Or `--from-run RUN`, rejection sampling: what a run's actors were rewarded for, token for token. The
learner's own engine, packing, settings (lr, lr_schedule, warmup_steps, betas, eval_every,
checkpoint_every, …) and checkpoints; the loss is −log p of what the policy writes. Leaves
`OUT/model`, which `model.path` takes: the checkpoint with the lowest held-out loss, or the last.
SIGINT and SIGTERM have it finish the step, save it and leave. What was interrupted, or killed, goes
on from its newest checkpoint, bit for bit, when the same command is given again. Exit codes: 0
done, 1 the learner gave up, 2 bad input, 3 one of its deadlines passed or a rank was lost where
nothing else would notice, 130 interrupted.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from rich.console import Console
from rich.progress import track

from configs.load import ConfigError, load
from configs.process import begin, on_stop
from configs.schema import Config
from learner import checkpoint
from learner.errors import BadCheckpoint, BadModel, LearnerError
from learner.watchdog import phase
from replay.protocol import LogError
from scripts import preflight
from scripts.course import Course, Place
from scripts.demonstrations import BadDemonstrations, Demonstration, read_files, read_run
from scripts.resolve import with_absolute_paths
from scripts.warm_start_options import parse, require_files
from scripts.warm_start_ranks import joining, other_ranks

if TYPE_CHECKING:  # heavy imports wait until the number of threads is set
    from learner.metrics import Metrics
    from learner.trainer import Trainer

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True)
class Plan:
    """What is to be learnt, and by which settings."""

    config: Config
    course: Course
    tokenizer: Any


def settings(given: argparse.Namespace) -> Config:
    """The configuration asked for, its run directory where all is left. Raises ConfigError."""
    config = with_absolute_paths(load(given.config, given.overrides))
    name = f"warm-start-{Path(given.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    out = given.out or Path(config.run_dir or Path("runs") / name)
    config = msgspec.structs.replace(config, run_dir=str(out.resolve()))
    preflight.check_model(config)
    require_files(given.demonstrations or ())
    return config


def prepare(given: argparse.Namespace, config: Config, console: Console) -> Plan:
    """Read and check everything but the folder, which others may still change. Raises ConfigError,
    BadDemonstrations, LogError.
    """
    from actors.prompt import load_tokenizer

    try:
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:  # what transformers raises for broken files
        where = f"model.path = {config.model.path!r}"
        raise ConfigError(f"{where}: its tokenizer cannot be loaded: {error}") from error
    rows = demonstrations(given, config, tokenizer, console)
    course = Course.of(rows, given.held_out, given.rows, config.seed)
    steps = given.steps or course.steps(given.epochs)
    learner = msgspec.structs.replace(config.learner, total_steps=steps)
    config = msgspec.structs.replace(config, learner=learner)
    tokens = sum(map(len, (*course.learnt, *course.held_out)))
    console.print(
        f"{len(course.learnt)} demonstrations to learn from, {len(course.held_out)} held out, "
        f"{tokens} tokens; {steps} steps of {course.rows} rows",
        highlight=False,
    )
    return Plan(config, course, tokenizer)


def demonstrations(
    given: argparse.Namespace, config: Config, tokenizer: Any, console: Console
) -> list[Demonstration]:
    """What was asked for, with a word on whatever is left out."""
    from actors.prompt import Prompter, tokenizer_digest

    if given.from_run:
        digest = tokenizer_digest(tokenizer)
        rows, left_out = read_run(given.from_run, given.reward, digest, config)
        for cause, count in left_out.items():
            console.print(f"left out: {count} trajectories {cause}", highlight=False)
        return rows
    prompter = Prompter(tokenizer, config.questions, config.actors)
    rows, bad = read_files(given.demonstrations, prompter, config, given.skip_bad)
    for problem in bad:
        console.print(f"left out: {problem}", highlight=False, soft_wrap=True, markup=False)
    return rows


class Learning:
    """A warm start under way: its steps, held-out losses and checkpoints, and what is said."""

    def __init__(
        self, plan: Plan, place: Place, trainer: "Trainer", metrics: "Metrics", console: Console
    ) -> None:
        from learner.imitation import share_out  # it imports torch

        self._plan, self._place, self._console = plan, place, console
        self._trainer, self._metrics = trainer, metrics
        self._share_out, self.saved = share_out, place.done

    def begin(self) -> None:
        """Measure the held-out loss of a course that begins: nothing is lost without it."""
        if self._place.done:
            return
        if rows := len(self._plan.course.held_out):
            self._console.print(f"measuring the loss of {rows} held out", highlight=False)
        if (loss := self._held_out_loss(0)) is not None:
            self._console.print(f"held-out loss before the first step: {loss:.4f}")

    def steps(self) -> Iterator[int]:
        """Take each step that is left; yields its number once everything due after it is done."""
        learner = self._plan.config.learner
        for step in range(self._place.done + 1, learner.total_steps + 1):
            last = step == learner.total_steps
            gauges = self._step(step)
            if last or step % learner.eval_every == 0:
                self._say(gauges, step, self._held_out_loss(step))
            if last or step % learner.checkpoint_every == 0:
                self.save(step)
            yield step

    def save(self, step: int) -> None:
        """A durable checkpoint, unless there is one."""
        if step == self.saved:
            return
        config = self._plan.config
        with phase(f"checkpoint of step {step}", config.learner.step_deadline_s):
            self._metrics.flush()
            checkpoint.save(config, step, self._trainer, self._plan.tokenizer)
        self.saved = step
        keep, best = config.learner.keep_checkpoints, self._place.best
        checkpoint.retain(config.run_dir, keep, best)

    def _step(self, step: int) -> dict[str, float]:
        learner, begun = self._plan.config.learner, time.perf_counter()
        with phase(f"step {step}", learner.step_deadline_s):
            shares = self._share_out(self._plan.course.batch(step), step, learner)
            gauges = self._trainer.imitate(shares)
        seconds = time.perf_counter() - begun
        self._metrics.write(step, gauges | {"learner/update_s": seconds})
        return gauges

    def _held_out_loss(self, step: int) -> float | None:
        rows = [each.segments for each in self._plan.course.held_out]
        if not rows:
            return None
        learner = self._plan.config.learner
        with phase(f"held-out loss after step {step}", learner.eval_deadline_s):
            loss = self._trainer.measure(self._share_out(rows, step, learner))
        self._metrics.write(step, {"learner/held_out_loss": loss})
        self._place.measured(step, loss)
        return loss

    def _say(self, gauges: dict[str, float], step: int, held_out: float | None) -> None:
        line = f"step {step}/{self._plan.config.learner.total_steps}"
        line += f"  loss {gauges['learner/loss']:.4f}"
        line += "" if held_out is None else f"  held-out loss {held_out:.4f}"
        self._console.print(f"{line}  lr {gauges['learner/lr']:.3g}", highlight=False)


def run(plan: Plan, console: Console, listen: Callable[[], Sequence[str]]) -> int:
    """Learn until the end, or until a cause is in what `listen` gives, which is called when only
    steps are left to do; the exit code. Raises LearnerError, and what `Place.held` raises.
    """
    total = plan.config.learner.total_steps
    with Place.held(plan.config, plan.course) as place:
        with contextlib.ExitStack() as stack:
            learning = Learning(plan, place, *start(plan, place, stack, console), console)
            learning.begin()
            stops, left = listen(), max(total - place.done, 0)
            for step in track(learning.steps(), "learning", left, console=Console(stderr=True)):
                if stops:
                    learning.save(step)
                    break
        if learning.saved < total:
            again = f"the same command, with --out {place.folder}, goes on from there"
            console.print(f"{stops[0]}: saved after step {learning.saved}; {again}", soft_wrap=True)
            return INTERRUPTED
        folder, which = place.deliver(learning.saved)
    console.print(f"the model of {which}", soft_wrap=True, highlight=False)
    console.print(f"model.path={folder}", soft_wrap=True)
    return 0


def start(
    plan: Plan, place: Place, stack: contextlib.ExitStack, console: Console
) -> tuple["Trainer", "Metrics"]:
    """Start the other ranks, and load the model on all of them."""
    import torch
    from transformers.utils import logging as transformers_logging

    from learner.metrics import Metrics
    from learner.ranks import lead

    config, folder = plan.config, place.folder
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.seed)
    transformers_logging.disable_progress_bar()
    ranks = stack.enter_context(other_ranks(config, console))
    begins = place.done + 1 if place.done else 0  # a loss is measured before step 1
    again = (folder / "tensorboard").exists()
    metrics = stack.enter_context(Metrics(folder, begins if again else None))
    with joining(ranks):
        trainer = lead(config)
    stack.callback(trainer.close)
    if place.found:
        trainer.restore(place.found.folder)
    return trainer, metrics


def main(argv: Sequence[str] | None = None) -> int:
    """Check, learn, deliver."""
    given, console = parse(argv), Console()
    try:
        config = settings(given)
        begin("warm_start", config.learner.threads)
        on_stop(_leave)
        return run(prepare(given, config, console), console, _listen)
    except (ConfigError, BadDemonstrations, LogError, BadCheckpoint, BadModel) as error:
        print(f"warm_start: {error}", file=sys.stderr)
        return BAD_INPUT
    except LearnerError as error:
        print(f"warm_start: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("warm_start: interrupted before it took a step", file=sys.stderr)
        return INTERRUPTED


def _leave(cause: str) -> NoReturn:
    """Before the first step there is nothing to save, whatever is under way."""
    raise KeyboardInterrupt(cause)


def _listen() -> list[str]:
    """From here on a step is finished, and saved."""
    stops = list[str]()
    on_stop(stops.append)
    return stops


if __name__ == "__main__":
    sys.exit(main())
