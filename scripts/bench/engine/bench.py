"""The engine's scheduling, and the cost of rollouts on top of it: `forage bench engine [--quick]`.

vLLM's own scheduler in simulated time (`simulator`): our priorities beside first come, first
served, and the capacity that is found beside fixed ones. Then real engines: the probe of weight
sync in bf16 (`probe`), and tokens/s of whole rollouts over those of their bare requests (`stack`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from configs.runtime.process import REPOSITORY
from scripts.bench import harness
from scripts.command.terminal import chatter_to

LOG = REPOSITORY / ".cache" / "bench-engine.log"
SEEDS = (0, 1, 2)
UPDATE_S = 20.0
CACHES = {"quarter": 187_000 // 8, "half": 375_000 // 8, "whole": 749_000 // 8}  # tokens
QUICK_VERSIONS = 5
FIXED = (0.8, 1.0, 1.25, 1.55, 1.95)  # of the first capacity
GOALS = {
    "probe_wait_s": harness.at_most(0.3),
    "oversubscribed_over_fcfs": harness.at_least(1.7),
    "oversubscribed_over_fcfs_updates": harness.at_least(1.5),
    "capacity_over_best_fixed_low": harness.at_least(0.85),
    "capacity_over_best_fixed_high": harness.at_most(1.15),
    "preemptions_per_1000": harness.at_most(1.0),
    "probe_mean_bf16": harness.at_most(0.1),
    "rollouts_over_bare_vllm": harness.at_least(0.9),
}
SHOWN = (*GOALS, "probe_largest_bf16")
METHOD = {
    "simulated": "vLLM's Scheduler and KV cache, slots, cache and load an eighth of "
    "configs/search_r1_7b_grpo.yaml's; a step takes max(12 ms, 10 ms + 240 us a token)",
    "probe_wait_s": "the longest from an update to its probe's answer, 2.5 rollouts in flight a "
    "slot, an update every 20 s",
    "oversubscribed_over_fcfs": "rollouts/s by priority over those first come, first served, "
    "2.5 in flight a slot, over 200 s behind 60; the median of seeds; _updates: one every 20 s",
    "capacity_over_best_fixed": "the mean of the capacity found, over the best of five fixed ones, "
    "by rollouts/s; the one furthest from 1. With the whole cache slots are short, not room: "
    "rates are nearly flat there, and say more (rate_over_best_fixed)",
    "preemptions_per_1000": "rollouts, without those of updates, after 200 s to settle",
    "probe_mean_bf16": "|difference of log-probs| between learner and engine over the probe's 63 "
    "tokens, in nats, the demo's model in bf16 on both sides: the mean over verified versions, "
    "each a step of the learner; probe_largest_bf16: the largest of any",
    "rollouts_over_bare_vllm": "sampled tokens/s of whole rollouts over those of the same prompts "
    "and token counts asked of AsyncLLM, as many in flight; "
    "each window between two bare ones, the median; _cpu: tokens "
    "in a second that the engine's process has a core, which others' work changes less",
}


@dataclass(frozen=True)
class BenchEngineOptions(harness.BenchOptions):
    """Options of `forage bench engine`; `quick`: one seed, one cache, fewer versions, windows."""


def scheduling(options: BenchEngineOptions, report: harness.Report) -> dict[str, Any]:
    """Priority beside first come, first served, with too many rollouts in flight."""
    from scripts.bench.engine.simulation import Plan, simulate

    seeds = SEEDS[:1] if options.quick else SEEDS
    rows, waits = [], []
    for seed in seeds:
        row: dict[str, float] = {}
        for name, every_s in (("", 0.0), ("_updates", UPDATE_S)):
            plan = Plan(update_every_s=every_s, seed=seed).crowded()
            ours, theirs = simulate(plan), simulate(replace(plan, by_priority=False))
            row[f"oversubscribed_over_fcfs{name}"] = ours.rollouts_per_s / theirs.rollouts_per_s
            waits.append(ours.probe_wait_s)
            report(f"seed {seed}{name}: {ours.rollouts_per_s:.2f} rollouts/s by priority, "
                   f"{theirs.rollouts_per_s:.2f} first come, first served")  # fmt: skip
        rows.append(row)
    return {"probe_wait_s": max(waits)} | harness.medians(rows)


def capacity(options: BenchEngineOptions, report: harness.Report) -> dict[str, Any]:
    """The capacity that is found, beside fixed ones."""
    from scripts.bench.engine.simulation import Plan, fixed_beside_found

    found = {}
    for name in ("half",) if options.quick else CACHES:
        plan = Plan().on(CACHES[name])
        row = fixed_beside_found(plan, FIXED)
        report(f"cache of {CACHES[name]:,} tokens: {row}")
        found[name] = row
    ratios = [row["capacity"] / row["best_fixed"] for row in found.values()]
    preempted = sum(row["preemptions"] for row in found.values())
    return {
        "capacity_over_best_fixed": max(ratios, key=lambda ratio: abs(ratio - 1.0)),
        "capacity_over_best_fixed_low": min(ratios),
        "capacity_over_best_fixed_high": max(ratios),
        "rate_over_best_fixed": min(row["rate_over_best"] for row in found.values()),
        "preemptions_per_1000": 1000 * preempted / sum(row["rollouts"] for row in found.values()),
        "caches": found,
    }


def probe(options: BenchEngineOptions, report: harness.Report) -> dict[str, Any]:
    """The probe of weight sync where learner and engine compute in bf16."""
    from scripts.bench.engine.probe import VERSIONS, probe_figures
    from scripts.bench.engine.stack import demo_files

    versions = QUICK_VERSIONS if options.quick else VERSIONS
    report(f"following a learner over {versions} versions in bf16")
    figures = probe_figures(str(demo_files(report).model), versions)
    report(", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    return figures


def rollouts(options: BenchEngineOptions, report: harness.Report) -> dict[str, Any]:
    """Whole rollouts beside their bare requests."""
    from scripts.bench.engine.stack import Sizes, measure

    return measure(Sizes(120, 4) if options.quick else Sizes(400, 6), report)


# Each yields figures by name; those in GOALS are shown.
PARTS: tuple[Callable[[BenchEngineOptions, harness.Report], dict[str, Any]], ...] = (
    scheduling,
    capacity,
    probe,
    rollouts,
)


def bench(options: BenchEngineOptions) -> None:
    """Measure, print, write the JSON. Raises BenchError, PolicyError."""
    found: dict[str, Any] = {"machine": harness.machine(), "method": METHOD}
    LOG.parent.mkdir(exist_ok=True)
    with chatter_to(LOG) as terminal:
        report = harness.reporter(terminal)
        report(f"what the engines say goes to {LOG}")
        for part in PARTS:
            found |= part(options, report)
    harness.finish(options, found, tables(found))


def tables(found: dict[str, Any]) -> list[Table]:
    """The goals, and each cache's fixed numbers."""
    shown = [name for name in SHOWN if name in found]
    rows = Table("cache, tokens", "found", "best fixed", "rate over best", "rollouts/s by number",
                 title="rollouts in flight")  # fmt: skip
    for name, row in found["caches"].items():
        rates = " ".join(f"{number}: {rate:.2f}" for number, rate in row["rates"].items())
        rows.add_row(f"{CACHES[name]:,}", f"{row['capacity']:.1f}", str(row["best_fixed"]),
                     f"{row['rate_over_best']:.2f}", rates)  # fmt: skip
    return [harness.goals_table(found, GOALS, shown, "the engine"), rows]
