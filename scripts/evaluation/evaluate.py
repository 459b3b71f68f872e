"""The evaluation of a model: every question of every set, asked under each environment.

MODEL is a run, a checkpoint or a Hugging Face folder with `--config`. `OUT/rows.jsonl` keeps what
is done, so that the same command goes on after a kill; `OUT/report.json` holds all figures.
"""

import asyncio
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.runtime.files import write_durably
from configs.runtime.signals import Interrupt
from replay.trajectory import Sampling
from scripts.command.terminal import chatter_to, clean
from scripts.evaluation import engine
from scripts.evaluation.against import Other, other_of, unlike
from scripts.evaluation.engine import Evaluation, RollOut, Stopped, spread
from scripts.evaluation.paired import compared
from scripts.evaluation.plan import EvaluateOptions, Plan, agree, check_rows, planned
from scripts.evaluation.report import figures_of
from scripts.evaluation.rows import FILE_NAME, Asked, Row, Rows
from scripts.evaluation.tables import Bars, details_table, paired_table, scores_table

REPORT = "report.json"
_WIDTH = 180  # of tables that go into a file


def evaluate(options: EvaluateOptions) -> None:
    """Check, make what is left, report. Raises ConfigError, Stopped, OSError, KeyboardInterrupt."""
    plan = planned(options)
    other = other_of(options, plan)
    for each in (plan, *([other.plan] if other and other.plan else ())):
        agree(each.folder, each.settings)
    rows = finished(plan, options)
    report = reported(plan, rows)
    if other:
        theirs = other.rows
        if other.plan:
            theirs = finished(other.plan, options)
            _write(other.plan.folder / REPORT, reported(other.plan, theirs))
        report["against"] = against(plan, other, rows, theirs)
    for path in filter(None, (plan.folder / REPORT, options.json)):
        _write(path, report)
    console = Console()
    wide = console if console.is_terminal else Console(width=_WIDTH)
    wide.print(scores_table(report), "", details_table(report), sep="\n")
    if other:
        wide.print("", paired_table(report), sep="\n")
    console.print(clean(f"rows, report, {engine.LOG}: {plan.folder}"), soft_wrap=True, markup=False)


def _write(path: Path, report: dict[str, Any]) -> None:
    write_durably(path, json.dumps(report, indent=1).encode() + b"\n")


def finished(plan: Plan, options: EvaluateOptions) -> dict[Asked, Row]:
    """Every row of a plan, made where it is not there yet. Raises what `evaluate` does."""
    with Rows(plan.folder / FILE_NAME) as rows:
        check_rows(plan, rows)
        try:
            make(plan, rows)
        except (Stopped, OSError, KeyboardInterrupt) as error:
            cause = f"{error}: " if isinstance(error, KeyboardInterrupt) else ""
            print(f"{cause}{_progress(plan, rows)}; to go on: {command_of(options)}", flush=True)
            raise
        return rows.by_rollout


def against(
    plan: Plan, other: Other, rows: Mapping[Asked, Row], theirs: Mapping[Asked, Row]
) -> dict[str, Any]:
    """The comparison with another evaluation, as the report has it."""
    return {
        "name": other.name,
        "model": other.settings.model,
        "weights": other.settings.weights,
        "unlike": unlike(plan, other),
        "methods": compared(plan.sets, list(plan.configs), plan.samples, rows, theirs),
    }


def make(plan: Plan, rows: Rows) -> None:
    """Make every rollout without a final row. Raises Stopped, OSError, KeyboardInterrupt."""
    todo = {
        name: [each for each in asked if (row := rows.by_rollout.get(each)) is None or row.open]
        for name, asked in plan.asked.items()
    }
    if not any(todo.values()):
        return
    log = plan.folder / engine.LOG
    with Interrupt(polled=True) as interrupt, chatter_to(log) as terminal, Bars(terminal) as bars:
        try:
            ask = asking(plan, rows, todo, bars)
            asyncio.run(engine.run(plan.configs, todo, ask, plan.folder, interrupt, plan.engines))
        except (Stopped, asyncio.CancelledError, KeyboardInterrupt) as error:
            if interrupt.cause:
                raise KeyboardInterrupt(f"interrupted by {interrupt.cause}") from error
            raise


def asking(plan: Plan, rows: Rows, todo: Mapping[str, Sequence[Asked]], bars: Bars) -> engine.Ask:
    """A function that makes one environment's rollouts, under a bar of its own."""
    questions = {(each.name, q.id): q for each in plan.sets for q in each.questions}
    actors, sampling = plan.config.actors, Sampling(plan.temperature, plan.config.seed)

    async def ask(name: str, roll_outs: Sequence[RollOut]) -> None:
        asked, missing = plan.asked[name], set(todo[name])
        done = [rows.by_rollout[each] for each in asked if each not in missing]
        evaluation = Evaluation(
            spread(roll_outs),
            questions,
            rows,
            sampling,
            in_flight=len(roll_outs) * (1 if plan.exact else actors.slots),
            deadline_s=actors.rollout_deadline_s,
        )
        await evaluation.run(todo[name], bars.begin(name, len(asked), done))

    return ask


def reported(plan: Plan, rows: Mapping[Asked, Row]) -> dict[str, Any]:
    """The report of a finished evaluation."""
    return {
        "name": plan.name,
        "model": plan.settings.model,
        "weights": plan.settings.weights,
        "temperature": plan.temperature,
        "samples": plan.samples,
        "exact": plan.exact,
        "seed": plan.config.seed,
        "sets": {each.name: str(each.path) for each in plan.sets},
        "methods": figures_of(plan.sets, list(plan.configs), plan.samples, rows),
        "settings": plan.settings.values,
    }


def command_of(options: EvaluateOptions) -> str:
    """The command line that gives these options."""
    words = ["forage", "evaluate"]
    for field in fields(options):
        value = getattr(options, field.name)
        if value in (None, False) or value == field.default:
            continue
        if not field.metadata["positional"]:
            words.append(f"--{field.name}")
        if value is not True:
            words += map(str, value) if isinstance(value, tuple) else [str(value)]
    return shlex.join(words)


def _progress(plan: Plan, rows: Rows) -> str:
    asked = [each for every in plan.asked.values() for each in every]
    done = sum(each in rows.by_rollout and not rows.by_rollout[each].open for each in asked)
    return f"{done} of {len(asked)} rollouts are in {plan.folder}"
