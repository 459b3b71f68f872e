"""What the algorithms of the learner cost, and what they are worth: `forage bench algorithms`.

Costs are ratios to a baseline that is measured beside, in turn; what they are worth is exact match
on the demo task. Whole runs are files in `--out`, and the same command goes on where it was cut
off: exit code 3 says that runs are left. `--only ablation` takes EMA-PG apart, in hours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table

from configs.runtime.process import REPOSITORY, Exit
from scripts.bench import harness
from scripts.bench.algorithms import ablation, learning, topk
from scripts.bench.staleness.slices import Slice
from scripts.command.options import option

GOALS: dict[str, harness.Goal] = {
    "topk_memory_over_head": harness.at_most(1.2),
    "grpo_em": harness.at_least(0.9),
    "ppo_em": harness.at_least(0.9),
    "lora_em_gap": harness.at_most(0.05),
    "lora_sync_bytes_share": harness.at_most(0.02),
}


@dataclass(frozen=True)
class BenchAlgorithmsOptions(harness.BenchOptions):
    """Options of `forage bench algorithms`."""

    quick: bool = option("fewer pairs of memory runs, one seed of learning", default=False)
    only: Literal["memory", "learning", "ablation"] | None = option("default: memory and learning")
    seeds: tuple[int, ...] = option("of world, start, sampling", default=(), metavar="N", least=0)
    threads: int = option("threads of torch for memory, on the CPU", default=1, least=1)
    minutes: float = option("stop after so long, to go on later", default=30.0, least=0)
    workers: int = option("processes of the ablation", default=2, least=1)
    out: Path = option("finished runs", default=REPOSITORY / "runs" / "bench_algorithms")
    plot: Path | None = option("where to write the ablation's plot", metavar="FILE")

    @property
    def slice(self) -> Slice:
        """Of this run's time."""
        return Slice(self.out, self.workers, self.minutes)


def memory(options: BenchAlgorithmsOptions, report: harness.Report) -> dict[str, Any]:
    """The figures of the KL over candidates. Raises RunFailed."""
    found = topk.compare(3 if options.quick else 5, options.threads, report)
    size = topk.Size()
    return found | {
        "method": {
            "topk_memory_over_head": f"the chunked head with a KL over the {topk.TOP_K} likeliest "
            f"tokens of the anchor over the head alone, vocabulary {size.vocabulary}, "
            f"{size.tokens} tokens, hidden {size.hidden}, fp32; the dearer of the anchor's pass "
            "(finds them) and the pass that makes the gradient (what was found counts too)",
            "peak_bytes": "above weights, gradients and hidden states; a process each, peak "
            + ("torch.cuda.max_memory_allocated" if torch.cuda.is_available() else "resident set"),
            "threads": options.threads,
        },
    }


def passes(found: Mapping[str, Any]) -> Table:
    """Both passes of the head."""
    table = Table("pass", "head alone", "with top-k", "memory", "time", title="Peak of the head")
    for name, told in (("score", "the anchor's"), ("gradient", "gradient")):
        peaks = [found[f"{who}_{name}_peak_bytes"] / 2**20 for who in ("head", "topk")]
        ratios = [found[f"topk_{name}_{what}_over_head"] for what in ("memory", "time")]
        table.add_row(
            told, *(f"{peak:,.0f} MiB" for peak in peaks), *(f"{ratio:.3f}" for ratio in ratios)
        )
    return table


def bench(options: BenchAlgorithmsOptions) -> int:
    """Measure, print the tables, write the JSON; 3 when runs are left. Raises BenchError."""
    found: dict[str, Any] = {"machine": harness.machine()}
    tables: list[Table] = []
    left: list[str] = []
    if options.only in (None, "memory"):
        found |= memory(options, harness.reporter())
        tables.append(passes(found))
    if options.only in (None, "learning"):
        left = _learn(options, found, tables)
    if options.only == "ablation":
        left = _take_apart(options, found, tables)
    goals = [name for name in GOALS if found.get(name) is not None]
    if goals:
        tables.insert(0, harness.goals_table(found, GOALS, goals, title="The learner's algorithms"))
    harness.finish(options, found, tables)
    return Exit.STOPPED if left else Exit.DONE


def _learn(
    options: BenchAlgorithmsOptions, found: dict[str, Any], tables: list[Table]
) -> list[str]:
    """Add the figures of whole runs and their table; the runs that are left. Raises RunFailed."""
    seeds = options.seeds or learning.SEEDS[: 1 if options.quick else None]
    folder = options.out / "demo"
    rows, left = learning.measure(seeds, folder, options.minutes, harness.reporter())
    found |= learning.summary(rows) | {"learning_method": learning.METHOD}
    tables.append(learning.make_table(rows))
    if left:
        print(f"{len(left)} runs left, {left[0]} first: give the same command again to go on")
    return left


def _take_apart(
    options: BenchAlgorithmsOptions, found: dict[str, Any], tables: list[Table]
) -> list[str]:
    """Add the ablation's figures and table, write its plot; the runs that are left."""
    jobs = ablation.plan(options.seeds or ((0,) if options.quick else ablation.SEEDS))
    left = options.slice.run({ablation.label(key): job for key, job in jobs.items()})
    found |= ablation.summary(jobs, options.slice)
    tables.append(ablation.make_table(found["ablation"]))
    plot = options.plot or options.out / "ablation.png"
    ablation.draw(found["ablation"], plot)
    print(f"plot: {plot}")
    return left
