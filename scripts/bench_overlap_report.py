"""What `scripts/bench_overlap.py` says: the figures by name, and the tables.

Consumes a plan and its units; produces a dictionary for JSON, and rich tables.
"""

import statistics
from typing import Any

from rich.table import Table

from scripts.bench_overlap_search import COMPARED, NO_LATENCY, Plan, Units

GOALS = {"overlap_tail": 0.95, "overlap_1s": 0.90}  # at least
METHOD = {
    "overlap": "tokens/s with this latency over tokens/s of the continuous loop without latency, "
    "each at its own best number of rollouts in flight; the median of the repeats, each cell "
    "between two windows of its reference, whose mean it is divided by",
    "own best": "looked for first, in other windows than those that count",
    "tokens/s": "sampled tokens, counted when their completion ends, over a window that begins "
    "when as many rollouts have ended as are in flight, or twice as many (`plan`: turnovers), and "
    "ends while all go on; of loops in batches: over whole batches, after the first",
    "seats filled": "of the engine's seats, on average, those that a rollout was in or queued for",
    "latency": "put before the real server, drawn for each query apart; a POST waits for the "
    "longest of its queries'; of the tail: log-normal, p50 200 ms, p99 2 s",
    "waited": "by a rollout for one search: coalescing, HTTP and the search itself included; in "
    "lockstep also for the others",
    "searches": "nothing is remembered, and no two questions lead to the same fact; who still "
    "asks what another is asking waits with it (`shared`)",
    "engine": "the demo's policy, taught to search, with silent layers that make the engine what "
    "there is to wait for; cpu: shares of one core, of the engine, of the actor (rollouts, "
    "vLLM's front end, retrieval client), of the retrieval server",
}


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

    def middle(figure: str) -> float:
        return float(statistics.median(unit.figures[figure] for unit in repeats))

    searches = sum(unit.figures["searches"] for unit in repeats)
    return {
        "name": name,
        "rollouts_in_flight": units.best(name).rollouts,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "tokens_per_s": middle("tokens_per_s"),
        "seats_filled": middle("seats_filled"),
        "waited_p50_s": middle("waited_p50_s"),
        "waited_p99_s": middle("waited_p99_s"),
        "searches_per_rollout": searches / max(1, sum(u.figures["rollouts"] for u in repeats)),
        "shared": sum(unit.figures["shared"] for unit in repeats) / max(1, searches),
        "cpu": {
            who: statistics.median(unit.figures["cpu"][who] for unit in repeats)
            for who in repeats[0].figures["cpu"]
        },
    }


def tables(found: dict[str, Any], plan: Plan) -> list[Table]:
    """Every latency and loop, then the search."""
    on = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    rows = Table(
        "measured", "in flight", "tokens/s", "over no latency (min, max)", "goal", "",
        "seats filled", "waited s: p50, p99", "CPU: engine, actor, server",
        title=f"Retrieval latency hidden: {plan.seats} seats (max_num_seqs), "
        f"{found['tokens_per_s_no_latency']:,.0f} tokens/s without latency at "
        f"{found['rollouts_in_flight'][NO_LATENCY]} rollouts in flight",
        caption=f"real vLLM, rollouts, HTTP and index, {plan.layers} layers; {on}",
    )  # fmt: skip
    rows.columns[0].no_wrap = True
    for row in found["rows"]:
        goal = GOALS.get(row["name"])
        verdict = "" if goal is None else "met" if row["ratio"] >= goal else "[bold red]missed[/]"
        rows.add_row(
            row["name"],
            str(row["rollouts_in_flight"]),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['ratio']:.3f} ({row['ratio_min']:.2f}, {row['ratio_max']:.2f})",
            "" if goal is None else f"≥ {goal:g}",
            verdict,
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
