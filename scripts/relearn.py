"""Learn again, offline, from what a run has recorded: `scripts/relearn.py RUN [learner.x=y …]`.

The run's own learner, from its starting weights, on its batches in recorded order, under the
recorded or another objective. Under the recorded settings, on the same kind of machine, the losses
of a run with one learner rank are its own, bit for bit. Leaves a table, a plot and `steps.json` in
`RUN/relearn-<name>`.
Exit codes: 0 done, 1 the learner gave up, 130 interrupted (what was done until then is left all the
same), 2 bad input.
"""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from configs.load import ConfigError, save
from configs.process import begin
from configs.schema import Config
from learner.errors import BadModel, LearnerError
from replay.protocol import ReplayError
from scripts.recorded import Recording
from scripts.relearn_plot import draw

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
HOW_IT_RAN = ("ranks", "threads", "rendezvous")
WITHOUT_EFFECT = (
    *("eval_every", "checkpoint_every", "keep_checkpoints"),
    *("batch_deadline_s", "eval_deadline_s", "step_deadline_s"),
)
GAUGES = {
    "loss": "learner/loss",
    "grad_norm": "learner/grad_norm",
    "ess": "learner/ess",
    "clip_fraction": "learner/clip_fraction",
    "behaviour_kl": "learner/behaviour_kl",
    "anchor_kl": "learner/anchor_kl",
}
Row = dict[str, Any]  # step, recorded_loss and GAUGES' names; None: not measured


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


def relearn(recording: Recording, overrides: Sequence[str], steps: int) -> Iterator[Row]:
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
    trainer = Trainer(config)
    try:
        for batch in itertools.islice(recording.batches(), steps):
            trainer.config = learner_config(recording.in_force(batch.step))
            gauges = trainer.learn([build(batch, trainer.config.learner)])
            reported = recording.reports.get(batch.step, {}).get("learner/loss")
            named = {name: gauges.get(gauge) for name, gauge in GAUGES.items()}
            yield {"step": batch.step, "recorded_loss": reported, **named}
    finally:
        trainer.close()


def table(rows: Sequence[Row], every: int, title: str) -> Table:
    """Every `every`-th row, the first and the last."""
    made = Table(title=title)
    for name in rows[0]:
        made.add_column(name.replace("_", " "), justify="right")
    for number, row in enumerate(rows):
        if number % every == 0 or number == len(rows) - 1:
            made.add_row(*("-" if v is None else f"{v:.5g}" for v in row.values()))
    return made


def report(rows: list[Row], out: Path, name: str, every: int, console: Console) -> None:
    """Print the table, say how the losses compare with the run's, and draw the plot."""
    console.print(table(rows, every, name))
    known = [row for row in rows if row["recorded_loss"] is not None]
    equal = sum(row["loss"] == row["recorded_loss"] for row in known)
    apart = max((abs(row["loss"] - row["recorded_loss"]) for row in known), default=0.0)
    console.print(
        f"{equal} of {len(known)} losses are those that the run reported, bit for bit; "
        f"the largest difference is {apart:.2g}"
    )
    plot = draw(rows, out / "relearn.png", name)
    console.print(f"plot: {plot}\nsteps: {out / 'steps.json'}", soft_wrap=True)


def folder_name(overrides: Sequence[str]) -> str:
    """`relearn-recorded`, or `relearn-` and what is different."""
    different = "_".join(override.partition(".")[2] for override in overrides) or "recorded"
    return "relearn-" + re.sub(r"[^\w.=+-]", "-", different)[:120]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Learn offline from a run's recorded batches.")
    parser.add_argument("run", type=Path, help="a run directory, for example runs/latest")
    parser.add_argument("overrides", nargs="*", metavar="learner.x=y", help="another setting")
    parser.add_argument("--steps", type=_positive, help="at most this many steps")
    parser.add_argument("--every", type=_positive, help="show every n-th step (default: 20 rows)")
    parser.add_argument("--out", type=Path, help="where to write (default RUN/relearn-<name>)")
    parser.add_argument("--json", type=Path, help="write the steps to this file too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Check, learn, report."""
    given = parse(argv)
    try:
        check_overrides(given.overrides)
        recording = Recording.of(given.run)
        config = recording.config(1, given.overrides)
        out = make_places(given)
    except (ConfigError, ReplayError) as error:
        print(f"relearn: {error}", file=sys.stderr)
        return BAD_INPUT
    begin("relearn", config.learner.threads)
    return learn_and_report(given, out, recording, config)


def make_places(given: argparse.Namespace) -> Path:
    """The folder to write to, made before anything is learnt. Raises ConfigError."""
    out: Path = given.out or given.run / folder_name(given.overrides)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {str(out)!r} cannot be made ({error.strerror})") from error
    if given.json and not given.json.resolve().parent.is_dir():
        raise ConfigError(f"--json {str(given.json)!r}: there is no such folder to write it in")
    return out


def learn_and_report(
    given: argparse.Namespace, out: Path, recording: Recording, config: Config
) -> int:
    """Do what was asked for; the exit code."""
    total = min(given.steps or len(recording.places), len(recording.places))
    every = given.every or -(-total // 20)
    name = folder_name(given.overrides)
    console, code = Console(), 0
    rows: list[Row] = []
    try:
        steps = relearn(recording, given.overrides, total)
        for row in track(steps, "learning", total, console=Console(stderr=True)):
            rows.append(row)
            if not console.is_terminal and row["step"] % every == 0:
                console.print(f"step {row['step']}/{total}  loss {row['loss']:+.4f}")
    except (LearnerError, ReplayError) as error:
        print(f"relearn: {type(error).__name__}: {error}", file=sys.stderr)
        code = BAD_INPUT if isinstance(error, BadModel) else FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    if rows:
        save(config, out / "config.yaml")
        summary = {"run": str(given.run), "overrides": given.overrides, "steps": rows}
        for path in filter(None, (out / "steps.json", given.json)):
            path.write_text(json.dumps(summary, indent=2) + "\n")
        report(rows, out, f"{given.run.resolve().name}: {name}", every, console)
    return code


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
