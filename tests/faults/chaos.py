"""The demo under fire: `python -m tests.faults.chaos` kills and stops its processes one after
another, the next one once the last has recovered, and shows that nothing is lost, repeated or hung.

Runs the demo task twice with the same settings, undisturbed and disturbed, each in `--out`; what is
finished there is not run again. Prints every blow with its detection and recovery, then the books'
verdict; `--json` writes the figures. Exit code 0 when the books close and every blow was survived.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.runtime.process import REPOSITORY, die_with_parent
from replay.log.event_log import FILE_NAME
from scripts.runs.books import Audit
from tests.faults.victims import KINDS, Blow, ChaosFailed, RunCompleted, Victims, plan

if TYPE_CHECKING:
    from scripts.demo.task import DemoFiles

END_S = 1500.0
HOLD_S = 12.0  # longer than replay.dead_after_s: a stopped actor is given up and comes back
LEARNER_HOLD_S = 120.0  # nothing may pile up while nobody trains
# One may be killed, or leave, while the other serves.
TWO_ACTORS = ("actors.count=2", "actors.rollouts_in_flight=64", "actors.max_num_seqs=64")
SETTINGS = (
    *("fleet.restarts=1000", "fleet.first_pause_s=0.1", "learner.checkpoint_every=5"),
    *TWO_ACTORS,
)


def demo_files() -> "DemoFiles":
    """The demo's own files, made where they are not there yet."""
    from scripts.demo.task import prepare

    return prepare(REPOSITORY / ".cache", 0, lambda line: print(f"  {line}", flush=True))


def launch(run_dir: Path, steps: int, *more: str, **marks: str) -> "subprocess.Popen[bytes]":
    """Start the demo task on `run_dir`, or go on with it, with these settings and variables too;
    its output goes to `<run_dir>.out`.
    """
    files = demo_files()
    paths = [
        f"run_dir={run_dir}",
        f"model.path={files.model}",
        f"questions.train={files.train}",
        f"questions.eval={files.eval}",
        f"retrieval.corpus={files.corpus}",
        *SETTINGS,
    ]
    what = ["train", "configs/demo.yaml", *paths]
    if run_dir.exists():
        what = ["resume", str(run_dir)]
    with run_dir.with_suffix(".out").open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "scripts.cli", *what, *more, f"learner.total_steps={steps}"],
            cwd=REPOSITORY,
            env=os.environ | marks,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )


def _discard(run_dir: Path) -> None:
    """A run that was cut off."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.with_suffix(".out").unlink(missing_ok=True)


def undisturbed(run_dir: Path, steps: int) -> dict[str, Any]:
    """The summary of a run that nobody disturbs."""
    if not (run_dir / "summary.json").exists():
        _discard(run_dir)
        print("the run without chaos ...", flush=True)
        launch(run_dir, steps).wait(END_S)
    return _summary(run_dir)


def disturbed(
    run_dir: Path, steps: int, blows: Sequence[tuple[str, str]], seed: int, learner_hold_s: float
) -> list[Blow]:
    """Strike a run as planned and let it end; what was done is kept beside it.

    A run that completes before it has had all its blows goes on for half as many steps again.
    """
    record = run_dir.with_suffix(".blows.json")
    if record.exists():
        return [Blow(**each) for each in json.loads(record.read_text())]
    _discard(run_dir)
    print("the run under fire ...", flush=True)
    victims = Victims(launch(run_dir, steps), run_dir, seed)
    done: list[Blow] = []
    try:
        while len(done) < len(blows):
            try:
                victims.wait_until_training()
                kind, how = blows[len(done)]
                hold_s = learner_hold_s if kind == "learner" else HOLD_S
                done.append(victims.strike(kind, how, hold_s))
            except RunCompleted:
                steps += max(1, steps // 2)
                print(f"the run was over too soon: it goes on to step {steps}", flush=True)
                victims.follow(launch(run_dir, steps))
            else:
                _print(done[-1], len(done), len(blows))
    except ChaosFailed as failure:
        print(f"chaos: {failure}; see {run_dir.with_suffix('.out')}", file=sys.stderr)
    victims.see_it_end(END_S)
    record.write_text(json.dumps([asdict(blow) for blow in done]))
    return done


def _print(blow: Blow, number: int, of: int) -> None:
    print(
        f"[{number}/{of}] {blow.how} {blow.name} ({blow.kind}): on record after "
        f"{blow.detected_s:.1f} s, back after {blow.recovered_s:.1f} s (its start took "
        f"{blow.cold_s:.1f} s)",
        flush=True,
    )


def report(run_dir: Path, blows: Sequence[Blow], quiet: dict[str, Any] | None) -> dict[str, Any]:
    """The figures of both runs, or of the disturbed one alone."""
    quiet = quiet or {"em_final": None, "wall_s": None}
    books = Audit()
    books.fold(run_dir / FILE_NAME)
    summary = _summary(run_dir)
    kills = [blow for blow in blows if blow.how == "kill"]
    ratios = [blow.recovered_s / blow.cold_s for blow in kills]
    final, still = summary["em_final"], quiet["em_final"]
    return {
        "kills": len(kills),
        "kills_by_kind": dict(Counter(blow.kind for blow in kills)),
        "stops": len(blows) - len(kills),
        "growth_while_the_learner_stood": max(
            (b.growth for b in blows if (b.kind, b.how) == ("learner", "stop")), default=None
        ),
        **verdict(books),
        "status": summary["status"],
        "cause": summary["cause"].splitlines()[0],
        "steps": summary["steps"],
        "em_final": final,
        "em_undisturbed": still,
        "em_gap": None if final is None or still is None else still - final,
        "wall_s": summary["wall_s"],
        "wall_undisturbed_s": quiet["wall_s"],
        "detection_max_s": max((blow.detected_s for blow in blows), default=None),
        "recovery_s": _recoveries(kills),
        "recovery_over_cold_start_max": max(ratios, default=None),
        "recovery_over_cold_start_p50": statistics.median(ratios) if ratios else None,
    }


def verdict(books: Audit) -> dict[str, Any]:
    """What the books of a run come to: groups lost, groups trained twice, faults."""
    audit = books.summary()
    groups = audit["train_groups"]
    dropped = sum(count for name, count in groups.items() if name.startswith("dropped"))
    ended = groups["committed"] + groups["sampled"] + groups["unfinished"] + dropped
    return {
        "lost": groups["opened"] - ended,
        "trained_twice": sum("was trained at" in fault for fault in books.faults),
        "books_close": audit["books_close"],
        "faults": books.faults,
    }


def _recoveries(kills: Sequence[Blow]) -> dict[str, dict[str, float]]:
    found = {}
    for kind in KINDS:
        if times := [blow.recovered_s for blow in kills if blow.kind == kind]:
            cold_s = statistics.median(blow.cold_s for blow in kills if blow.kind == kind)
            found[kind] = {"p50": statistics.median(times), "max": max(times), "cold_start": cold_s}
    return found


def _summary(run_dir: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    except OSError as error:
        raise ChaosFailed(f"{run_dir}: no summary: see {run_dir.with_suffix('.out')}") from error
    return found


def show(figures: dict[str, Any]) -> None:
    """A table of recoveries and the verdict."""
    from rich.console import Console
    from rich.table import Table

    table = Table("killed", "times", "back: p50 s", "max s", "its cold start s", title="recovery")
    for kind, times in figures["recovery_s"].items():
        count = str(figures["kills_by_kind"][kind])
        table.add_row(kind, count, *(f"{times[name]:.1f}" for name in ("p50", "max", "cold_start")))
    console = Console()
    console.print(table)
    for name, value in figures.items():
        if name != "recovery_s":
            console.print(f"{name}: {value}", markup=False, highlight=False)


def main(words: Sequence[str] | None = None) -> int:
    """Both runs and their report; exit code 1 when not all was survived, or the books are open."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="3 kills and 1 stop in a shorter run")
    add("--kills", type=int, help="15 (quick: 3)")
    add("--stops", type=int, help="5 (quick: 1)")
    add("--steps", type=int, help="learner.total_steps of both runs, at least (150; quick: 60)")
    add("--seed", type=int, default=0, help="of who is struck when")
    add("--out", type=Path, default=REPOSITORY / "runs" / "chaos")
    add("--alone", action="store_true", help="without the undisturbed run")
    add("--json", type=Path)
    given = parser.parse_args(words)
    kills = given.kills if given.kills is not None else 3 if given.quick else 15
    stops = given.stops if given.stops is not None else 1 if given.quick else 5
    steps = given.steps or (60 if given.quick else 150)
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        struck = given.out / f"struck-{kills}-{stops}-{steps}-{given.seed}"
        hold_s = HOLD_S if given.quick else LEARNER_HOLD_S
        blows = disturbed(struck, steps, plan(kills, stops, given.seed), given.seed, hold_s)
        steps = _summary(struck)["steps"]  # more, if it was over too soon
        quiet = None if given.alone else undisturbed(given.out / f"quiet-{steps}", steps)
        figures = report(struck, blows, quiet)
    except ChaosFailed as failure:
        print(f"chaos: {failure}", file=sys.stderr)
        return 1
    show(figures)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    whole = figures["books_close"] and figures["status"] == "completed" and not figures["lost"]
    return 0 if whole and len(blows) == kills + stops else 1


if __name__ == "__main__":
    sys.exit(main())
