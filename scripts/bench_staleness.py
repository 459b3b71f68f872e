"""What each off-policy correction is worth at each staleness, on the demo task.

`scripts/bench_staleness.py` trains every variant on trajectories exactly k updates old, with three
seeds each (world, starting policy and sampling). Every finished run is a file in `--out`; the same
command goes on where it was cut off. `--minutes 30` stops in time and says what is left; overrides
(`learner.lr_schedule=constant`) hold for every variant. Then: table, plot, `--json`.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.load import ConfigError
from configs.process import die_with_parent

if TYPE_CHECKING:  # it imports torch
    from scripts.bench_staleness_run import Job

REPOSITORY = Path(__file__).resolve().parent.parent
AGES, SEEDS, UPDATES, EVAL_EVERY = (0, 8, 16, 4, 2, 1), (0, 1, 2), 60, 10
QUICK_AGES, QUICK_VARIANTS, QUICK_UPDATES = (0, 8, 16), ("default", "clip", "none"), 50
_PLAIN = (
    *("learner.objective=grpo", "learner.proximal=ema", "learner.proximal_decay=0.8"),
    *("learner.behaviour_weight=truncate", "learner.behaviour_level=token"),
    *("learner.behaviour_cap=2.0", "learner.kl_coef=0.0", "learner.anchor=none"),
)
_UNCORRECTED = (
    *_PLAIN,
    *("learner.objective=reinforce", "learner.proximal=start_of_update"),
    "learner.behaviour_weight=none",
)
_ANCHORED = (
    *("learner.kl_coef=0.1", "learner.anchor=ema"),
    *("learner.anchor_tau=0.9", "learner.anchor_period=10"),
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "default": (),  # configs/demo.yaml over the schema's defaults, as they stand
    "clip": (*_PLAIN, "learner.proximal=behaviour"),
    "none": _UNCORRECTED,
    "ema.5": (*_PLAIN, "learner.proximal_decay=0.5"),
    "ema.8": _PLAIN,
    "ema.9": (*_PLAIN, "learner.proximal_decay=0.9"),
    "dppo_tv": (*_PLAIN, "learner.objective=dppo_tv", "learner.proximal=behaviour"),
    "start_of_update": (*_PLAIN, "learner.proximal=start_of_update"),
    "none+kl": (*_UNCORRECTED, *_ANCHORED),
}


def plan(arguments: argparse.Namespace) -> dict[tuple[str, int, int], "Job"]:
    """Every (variant, staleness, seed) with its job; equal jobs are run once. Makes the demo's
    files where they are missing."""
    from scripts.bench_staleness_run import Job
    from scripts.demo_task import prepare

    jobs = {}
    for seed in arguments.seeds:
        files = prepare(REPOSITORY / ".cache", seed, lambda line: print(f"  {line}", flush=True))
        common = (
            f"model.path={files.model}",
            f"questions.train={files.train}",
            f"questions.eval={files.eval}",
            f"retrieval.corpus={files.corpus}",
            f"learner.total_steps={arguments.updates}",
            *([f"learner.lr_schedule={arguments.schedule}"] if arguments.schedule else []),
        )
        for age in arguments.staleness:
            for name in arguments.variants:
                overrides = (*common, *arguments.known[name], *arguments.overrides)
                jobs[name, age, seed] = Job(overrides, age, seed, arguments.eval_every)
    return jobs


def run_all(
    todo: dict[str, tuple[str, "Job"]], arguments: argparse.Namespace, deadline: float
) -> None:
    """Run what is to do, in so many processes, until `deadline` (time.time())."""
    from scripts.bench_staleness_run import work

    folder = str(arguments.out)
    with ProcessPoolExecutor(
        arguments.workers, mp_context=get_context("spawn"), initializer=die_with_parent
    ) as pool:
        tasks = [pool.submit(work, job, label, deadline, folder) for label, job in todo.values()]
        try:
            for number, task in enumerate(as_completed(tasks), 1):
                if line := task.result():
                    print(f"[{number}/{len(tasks)}] {line}", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True, wait=False)
            raise


def _label(variant: str, age: int, seed: int) -> str:
    return f"{variant} k={age} seed={seed}"


def rows(
    jobs: dict[tuple[str, int, int], "Job"], folder: Path, updates: int
) -> Iterator[dict[str, Any]]:
    """One row per variant and staleness of which a run is finished."""
    from scripts.bench_staleness_report import make_row

    for variant, age in dict.fromkeys((variant, age) for variant, age, _ in jobs):
        paths = [
            folder / f"{job.name}.json" for key, job in jobs.items() if key[:2] == (variant, age)
        ]
        records = [json.loads(path.read_text()) for path in paths if path.is_file()]
        if records:
            yield make_row(variant, age, records, updates)


def report(jobs: dict[tuple[str, int, int], "Job"], arguments: argparse.Namespace) -> None:
    """Table, plot and JSON of what is finished."""
    from rich.console import Console

    from scripts.bench_staleness_report import draw, make_table, summarise

    made = list(rows(jobs, arguments.out, arguments.updates))
    if not made:
        return
    kept = {path.stem for path in arguments.out.glob("*.json")}
    summary = summarise(made, [_label(*key) for key, job in jobs.items() if job.name not in kept])
    Console(width=140).print(make_table(made))
    for name, value in summary.items():
        if name != "rows":
            print(f"{name}: {value}")
    plot = arguments.plot or arguments.out / "staleness.png"
    draw(made, plot)
    print(f"plot: {plot}")
    if arguments.json:
        arguments.json.write_text(json.dumps(summary, indent=2) + "\n")


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with `known`: all variants by name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="k 0, 8, 16 of default, clip, none; one seed")
    add("--variants", nargs="+", metavar="NAME", help=", ".join(VARIANTS))
    add("--add", nargs=2, action="append", default=[], metavar=("NAME", "OVERRIDES"),
        help="another variant: 'ema.95' 'learner.proximal_decay=0.95 …'")  # fmt: skip
    add("--staleness", nargs="+", type=int, metavar="K")
    add("--seeds", nargs="+", type=int, metavar="N")
    add("--updates", type=int, help=f"per run ({UPDATES}; quick: {QUICK_UPDATES})")
    add("--eval-every", type=int, default=EVAL_EVERY)
    add("--schedule", choices=("constant", "linear", "cosine"), help="default: the demo's own")
    add("--minutes", type=float, help="stop after so long (30; quick: 12); call again to go on")
    add("--workers", type=int, default=2)
    add("--out", type=Path, default=REPOSITORY / "runs" / "bench_staleness")
    add("--plot", type=Path)
    add("--json", type=Path)
    add("--overrides", nargs="*", default=[], metavar="a.b=c", help="for every variant")
    arguments = parser.parse_args(words)
    quick = arguments.quick
    arguments.known = VARIANTS | {name: tuple(shlex.split(text)) for name, text in arguments.add}
    added = [name for name, _ in arguments.add]
    arguments.variants = arguments.variants or [*(QUICK_VARIANTS if quick else VARIANTS), *added]
    arguments.staleness = arguments.staleness or (QUICK_AGES if quick else AGES)
    arguments.seeds = arguments.seeds or ((0,) if quick else SEEDS)
    if arguments.updates is None:
        arguments.updates = QUICK_UPDATES if quick else UPDATES
    arguments.minutes = arguments.minutes or (12.0 if quick else 30.0)
    for name in ("updates", "eval_every", "workers"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)}: at least 1")
    if min(arguments.staleness) < 0:
        parser.error(f"--staleness {min(arguments.staleness)}: at least 0")
    unknown = [name for name in arguments.variants if name not in arguments.known]
    if unknown:
        parser.error(f"--variants {unknown[0]!r}: one of {', '.join(arguments.known)}")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Run what is not finished, then report; exit code 3 when something is left."""
    arguments = parse(words)
    deadline = time.time() + 60.0 * arguments.minutes
    os.environ["OMP_NUM_THREADS"] = "1"  # one thread per process: more of them spin
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        jobs = plan(arguments)
        names = {key: job.name for key, job in jobs.items()}
    except ConfigError as error:
        print(f"bench_staleness: {error}", file=sys.stderr)
        return 2
    todo = {
        names[key]: (_label(*key), job)
        for key, job in reversed(jobs.items())
        if not (arguments.out / f"{job.name}.json").is_file()
    }
    todo = dict(reversed(todo.items()))  # by the first variant of those that share a run
    if todo:
        print(f"{len(todo)} runs to do in {arguments.out}", flush=True)
        run_all(todo, arguments, deadline)
    report(jobs, arguments)
    left = [
        label for name, (label, _) in todo.items() if not (arguments.out / f"{name}.json").is_file()
    ]
    if left:
        print(f"{len(left)} runs left, {left[0]} first: give the same command again to go on")
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
