"""Offline learning from a run's recorded batches.

The run's own learner, from its starting weights, on its batches in recorded order, under the
recorded or another objective. Under the recorded settings, on the same kind of machine, the losses
of a run with one learner rank are its own, bit for bit. `RUN/relearn-<name>` keeps what was learnt,
however it ends.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from configs import trust
from configs.load import ConfigError, save
from configs.runtime.files import vocabulary_of, write_durably
from configs.runtime.process import begin
from configs.schema import Config
from learner.errors import BadModel
from replay.log.history import Recording
from replay.protocol import ReplayError
from scripts.command.options import Options, argument, option, refusing
from scripts.command.terminal import Bars, Split, clean, status
from scripts.runs.log import log_of, reading
from scripts.runs.plot import plain
from scripts.runs.plot import save as save_plot
from scripts.setup.overrides import fields_of, get_field

HOW_IT_RAN = ("ranks", "threads", "rendezvous")
WITHOUT_EFFECT = (
    "eval_every",
    "checkpoint_every",
    "keep_checkpoints",
    "batch_deadline_s",
    "eval_deadline_s",
    "step_deadline_s",
)
PANELS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "ess": "ESS (fraction)",
    "clip_fraction": "clipped fraction",
    "behaviour_kl": "KL to the behaviour",
    "anchor_kl": "KL to the anchor",
}
GAUGES = {name: f"learner/{name}" for name in PANELS}
Row = dict[str, Any]  # step, recorded_loss and GAUGES' names; None: not measured


@dataclass(frozen=True)
class RelearnOptions(Options):
    run: Path = argument("a run directory, for example runs/latest")
    overrides: tuple[str, ...] = argument("another setting", default=(), metavar="learner.x=y")
    trust: bool = option(trust.TRUSTING, default=False)
    steps: int | None = option("at most this many steps", metavar="N", least=1)
    every: int | None = option("show every n-th step (default: 20 rows)", metavar="N", least=1)
    out: Path | None = option("where to write (default RUN/relearn-<name>)", metavar="DIR")
    json: Path | None = option("write the steps to this file too", metavar="FILE")


def relearn(options: RelearnOptions) -> None:
    """Check, learn, report. Raises ConfigError, LearnerError."""
    check_overrides(options.overrides)
    with refusing(ReplayError):
        with status(reading(log_of(options.run))):
            recording = Recording.of(options.run)
        config = recording.config(1, options.overrides)
        check_trust(recording, options.trust)
    if options.out is None:
        trust.require_inside(options.run, trust=options.trust)
    out = make_places(options)
    begin("relearn", config.learner.threads)
    learn_and_report(options, out, recording, config)


def check_trust(recording: Recording, trusted: bool) -> None:
    """Raise ConfigError where a configuration on record would run code that is not `trusted`."""
    for first in recording.texts:
        trust.require(
            recording.config(first),
            source=str(recording.path),
            trust=trusted,
            of=trust.LEARNING,
            settable=False,
        )


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigError naming the first field that cannot be another one offline."""
    for override in overrides:
        section, _, field = override.partition("=")[0].strip().partition(".")
        if section != "learner":
            raise ConfigError(
                f"override {override!r}: only learner.* can be changed: the rollouts are on record"
            )
        if field in HOW_IT_RAN:
            raise ConfigError(
                f"override {override!r}: learner.{field} is how the run was computed, not what: "
                "leave it out"
            )
        if field in WITHOUT_EFFECT:
            raise ConfigError(
                f"override {override!r}: learner.{field} has no effect offline: leave it out"
            )


def learn(recording: Recording, overrides: Sequence[str], steps: int) -> Iterator[Row]:
    """Train `steps` recorded batches, yielding a row each. Raises BadModel, LearnerError."""
    # Heavy imports come after `begin` has set the number of threads.
    import torch

    from learner.batch import build
    from learner.trainer import Trainer

    @lru_cache(maxsize=1)
    def learner_config(first: int) -> Config:
        config = recording.config(first, overrides)
        learner = msgspec.structs.replace(config.learner, ranks=1, rendezvous="")
        return msgspec.structs.replace(config, learner=learner)

    config = learner_config(1)
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.seed)
    trainer, vocabulary = Trainer(config), vocabulary_of(config.model.path)
    try:
        for batch in itertools.islice(recording.batches(), steps):
            trainer.config = learner_config(recording.in_force(batch.step))
            turn_weight = trainer.config.rewards.weights.environment
            built = build(batch, trainer.config.learner, vocabulary, turn_weight)
            gauges = trainer.learn([built])
            reported = recording.reports.get(batch.step, {}).get("learner/loss")
            named = {name: gauges.get(gauge) for name, gauge in GAUGES.items()}
            yield {"step": batch.step, "recorded_loss": reported, **named}
    finally:
        trainer.close()


def table(rows: Sequence[Row], every: int, title: str) -> Table:
    """Every `every`-th row, the first and the last."""
    made = Table(title=title, title_justify="left")
    for name in rows[0]:
        made.add_column(name.replace("_", " "), justify="right")
    for number, row in enumerate(rows):
        if number % every == 0 or number == len(rows) - 1:
            made.add_row(*("-" if v is None else f"{v:.5g}" for v in row.values()))
    return made


def changed(recording: Recording, overrides: Sequence[str]) -> list[str]:
    """The overridden fields whose values are not the run's."""
    recorded, config = recording.config(1, ()), recording.config(1, overrides)
    fields = sorted(fields_of(overrides))
    return [field for field in fields if get_field(config, field) != get_field(recorded, field)]


def report(
    rows: list[Row], out: Path, name: str, changed: Sequence[str], every: int, console: Console
) -> None:
    """Print the table, say how the losses compare with the run's, and draw the plot."""
    console.print(Split(table(rows, every, name)))
    console.print(_comparison(rows, changed))
    plot = draw(rows, out / "relearn.png", name)
    where = clean(f"plot: {plot}\nsteps: {out / 'steps.json'}")
    console.print(where, soft_wrap=True, markup=False)


def _comparison(rows: Sequence[Row], changed: Sequence[str]) -> str:
    if changed:
        verb = "is" if len(changed) == 1 else "are"
        return f"losses are not compared: {', '.join(changed)} {verb} not the run's"
    known = [row for row in rows if row["recorded_loss"] is not None]
    equal = sum(row["loss"] == row["recorded_loss"] for row in known)
    apart = max((abs(row["loss"] - row["recorded_loss"]) for row in known), default=0.0)
    return (
        f"{equal} of {len(known)} losses are those that the run reported, bit for bit; "
        f"the largest difference is {apart:.2g}"
    )


def folder_name(overrides: Sequence[str]) -> str:
    """`relearn-recorded`, or `relearn-` and what is different."""
    different = "_".join(override.partition(".")[2] for override in overrides) or "recorded"
    return "relearn-" + re.sub(r"[^\w.=+-]", "-", different)[:120]


def draw(rows: Sequence[dict[str, Any]], path: Path, title: str) -> Path:
    """Write the plot and return where; the run's own loss is drawn beneath the relearnt one."""
    shown = [name for name in PANELS if any(row[name] is not None for row in rows)]
    figure, panels = pyplot.subplots(
        len(shown), 1, figsize=(8, 2 * len(shown)), sharex=True, squeeze=False
    )
    steps = [row["step"] for row in rows]
    for name, axes in zip(shown, panels[:, 0], strict=True):
        if name == "loss" and any(row["recorded_loss"] is not None for row in rows):
            recorded = [_number(row["recorded_loss"]) for row in rows]
            axes.plot(steps, recorded, color="#d9a441", linewidth=4, alpha=0.5, label="recorded")
            axes.plot(steps, [row["loss"] for row in rows], color="#1b6ca8", label="relearnt")
            axes.legend(frameon=False)
        else:
            axes.plot(steps, [_number(row[name]) for row in rows], color="#1b6ca8")
        axes.set_ylabel(PANELS[name])
    panels[0, 0].set_title(plain(title))
    panels[-1, 0].set_xlabel("step")
    return save_plot(figure, panels[:, 0], path)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def make_places(options: RelearnOptions) -> Path:
    """The folder to write to, made before anything is learnt. Raises ConfigError."""
    out = options.out or options.run / folder_name(options.overrides)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {str(out)!r} cannot be made ({error.strerror})") from error
    return out


def learn_and_report(
    options: RelearnOptions, out: Path, recording: Recording, config: Config
) -> None:
    """Learn; however that ends, leave what was learnt. Raises ConfigError, LearnerError."""
    total = min(options.steps or len(recording.places), len(recording.places))
    every = options.every or -(-total // 20)
    name = folder_name(options.overrides)
    console = Console()
    rows: list[Row] = []
    try:
        steps = learn(recording, options.overrides, total)
        with Bars() as bars:
            for row in bars.track(steps, total, description="learning"):
                rows.append(row)
    except BadModel as error:
        raise ConfigError(f"BadModel: {error}") from error
    finally:
        if rows:
            save(config, out / "config.yaml")
            summary = {"run": str(options.run), "overrides": options.overrides, "steps": rows}
            text = json.dumps(summary, indent=2) + "\n"
            write_durably(out / "steps.json", text)
            if options.json:
                options.json.write_text(text)
            title = f"{options.run.resolve().name}: {name}"
            others = changed(recording, options.overrides)
            report(rows, out, title, others, every, console)
