"""`python scripts/evaluate.py MODEL --sets FILE… [--environment NAME…]`: how good it is.

MODEL is a run (its best checkpoint, else its newest), a checkpoint (`--weights ema`: its average)
or a Hugging Face folder with `--config`. Every question of every set is asked under each
environment, greedily unless `--temperature` says otherwise; every one counts. What is done stands
in `OUT/rows.jsonl`, so that the same command goes on after a kill; `OUT/report.json` has all the
numbers. Exit codes: 0 done, 1 an engine or server failed, 2 bad input, 130 interrupted.
"""

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.files import write_durably
from configs.load import ConfigError
from configs.process import assert_packages, die_with_parent
from replay.trajectory import Sampling
from scripts import eval_engine
from scripts.eval_plan import Plan, check_rows, planned
from scripts.eval_progress import Bars
from scripts.eval_report import figures_of
from scripts.eval_rollouts import Evaluation, RollOut
from scripts.eval_rows import FILE_NAME, Asked, Rows
from scripts.eval_settings import agree
from scripts.eval_tables import details_table, scores_table
from scripts.found_model import MODEL, WEIGHTS
from scripts.overrides import is_override

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
REPORT = "report.json"
_WIDTH = 180  # of tables that go into a file


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; overrides may stand anywhere."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", metavar="MODEL", help="a run, a checkpoint or a Hugging Face folder")
    add("overrides", nargs="*", default=[], metavar="a.b=c", help="fields to override")
    add("--sets", nargs="+", required=True, metavar="FILE", help="JSONL or parquet, or NAME=FILE")
    add("--weights", choices=WEIGHTS, default=MODEL)
    add("--config", metavar="FILE", help="instead of the run's or checkpoint's own")
    add("--environment", nargs="+", default=[], metavar="NAME", help="default: the configuration's")
    add("--temperature", type=float, default=0.0, help="default 0: greedy")
    add("--samples", type=int, default=1, metavar="N", help="of each question: Avg@k and Pass@k")
    add("--limit", type=int, default=0, metavar="N", help="only the first N questions of each set")
    add("--exact", action="store_true", help="one rollout at a time: the same numbers to the bit")
    add("--out", type=Path, metavar="FOLDER", help="default: one in evaluations/, by the settings")
    add("--json", type=Path, metavar="FILE", help="write the report there too")
    given = parser.parse_intermixed_args(words)
    for option in ("sets", "environment"):
        listed = getattr(given, option)
        given.overrides += filter(is_override, listed)
        setattr(given, option, [word for word in listed if not is_override(word)])
    return given


def make(plan: Plan, rows: Rows) -> tuple[int, str]:
    """Make every rollout that has no row yet, or whose failure may pass; the exit code, and what
    ended it early.
    """
    todo = {
        name: [each for each in asked if (row := rows.by_rollout.get(each)) is None or row.open]
        for name, asked in plan.asked.items()
    }
    if not any(todo.values()):
        return DONE, ""
    with eval_engine.Interrupt() as interrupt, Bars() as bars:
        try:
            ask = asking(plan, rows, todo, bars)
            asyncio.run(eval_engine.run(plan.configs, todo, ask, plan.folder, interrupt))
        except (eval_engine.Stopped, asyncio.CancelledError, KeyboardInterrupt) as error:
            if interrupt.cause:
                return INTERRUPTED, f"interrupted by {interrupt.cause}"
            return FAILED, str(error)
    return DONE, ""


def asking(
    plan: Plan, rows: Rows, todo: Mapping[str, Sequence[Asked]], bars: Bars
) -> eval_engine.Ask:
    """What goes through one environment's rollouts, under a bar of its own."""
    questions = {(each.name, q.id): q for each in plan.sets for q in each.questions}
    actors, sampling = plan.config.actors, Sampling(plan.temperature, plan.config.seed)
    in_flight = 1 if plan.exact else actors.rollouts_in_flight

    async def ask(name: str, roll_out: RollOut) -> None:
        asked, missing = plan.asked[name], set(todo[name])
        done = [rows.by_rollout[each] for each in asked if each not in missing]
        evaluation = Evaluation(
            *(roll_out, questions, rows, sampling),
            in_flight=in_flight,
            deadline_s=actors.rollout_deadline_s,
        )
        await evaluation.run(todo[name], bars.begin(name, len(asked), done))

    return ask


def reported(plan: Plan, rows: Rows) -> dict[str, Any]:
    """Everything that there is to say of a finished evaluation."""
    return {
        "name": plan.name,
        "model": plan.settings.model,
        "weights": plan.settings.weights,
        "temperature": plan.temperature,
        "samples": plan.samples,
        "exact": plan.exact,
        "seed": plan.config.seed,
        "sets": {each.name: str(each.path) for each in plan.sets},
        "methods": figures_of(plan.sets, list(plan.configs), plan.samples, rows.by_rollout),
        "settings": plan.settings.values,
    }


def show(report: Mapping[str, Any], console: Console) -> None:
    """Both tables."""
    console.print(scores_table(report), "", details_table(report), sep="\n")


def main(words: Sequence[str] | None = None) -> int:
    """Check, go on, report; the exit code."""
    given = parse(words)
    try:
        return _evaluated(given, sys.argv[1:] if words is None else words)
    except ConfigError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("evaluate: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        print(f"evaluate: {error}: the same command goes on", file=sys.stderr)
        return FAILED


def _evaluated(given: argparse.Namespace, words: Sequence[str]) -> int:
    plan = planned(given)
    agree(plan.folder, plan.settings)
    with Rows(plan.folder / FILE_NAME) as rows:
        check_rows(plan, rows)
        code, cause = make(plan, rows)
        if code != DONE:
            _say_how_to_go_on(plan, rows, cause, words)
            return code
        report = reported(plan, rows)
    for path in filter(None, (plan.folder / REPORT, given.json)):
        write_durably(path, json.dumps(report, indent=1).encode() + b"\n")
    console = Console()
    show(report, console if console.is_terminal else Console(width=_WIDTH))
    console.print(f"rows and report: {plan.folder}", soft_wrap=True)
    return DONE


def _say_how_to_go_on(plan: Plan, rows: Rows, cause: str, words: Sequence[str]) -> None:
    asked = [each for every in plan.asked.values() for each in every]
    done = sum(each in rows.by_rollout and not rows.by_rollout[each].open for each in asked)
    command = shlex.join(["python", "scripts/evaluate.py", *words])
    print(f"evaluate: {cause}", file=sys.stderr)
    print(f"{done} of {len(asked)} rollouts are in {plan.folder}; to go on: {command}")


if __name__ == "__mp_main__":
    die_with_parent()  # vLLM's engine child imports this file under that name
if __name__ == "__main__":
    assert_packages()
    sys.exit(main())
