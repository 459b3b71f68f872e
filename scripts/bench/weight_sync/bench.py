"""The cost of bringing new weights to the actors: `forage bench weight-sync [--quick]`.

Bare models go over gloo on the loopback to receivers, each a process of its own, through the real
publisher and subscriber; in the same run and in turn, the same bytes by one plain
`torch.distributed.broadcast`, by a broadcast for each parameter, and by one copy in memory. Then a
real vLLM engine at work is brought version after version of the demo's model.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import astuple
from rich.table import Table

from configs.runtime.process import REPOSITORY
from scripts.bench import harness
from scripts.bench.weight_sync.run import Row, run_row
from scripts.command.options import option

MB = 1_000_000
LARGE = Row(500 * MB, 300, 2)
SMALL = Row(20 * MB, 5000, 2)
FULL = (
    *(Row(size * MB, 300, receivers) for size in (1, 10, 100) for receivers in (1, 2, 3)),
    *(Row(500 * MB, 300, receivers) for receivers in (1, 2, 3)),
    *(Row(size * MB, 5000, 2) for size in (20, 100, 500)),
)
QUICK = (Row(1 * MB, 300, 1), Row(100 * MB, 300, 2), SMALL, LARGE)
GOALS = {
    "over_raw_broadcast": harness.at_least(0.8),
    "over_per_parameter": harness.at_least(3.0),
    "trainer_pause_over_memcpy": harness.at_most(1.2),
    "lost_requests": harness.at_most(0),
    "verification_failures": harness.at_most(0),
    "logprob_error_max": harness.at_most(1e-4),
}


@dataclass(frozen=True)
class BenchWeightSyncOptions(harness.BenchOptions):
    """Options of `forage bench weight-sync`; `quick`: four rows, 100 updates."""

    updates: int | None = option("under load (1,000; quick: 100); 0: none", least=0)


def measure(options: BenchWeightSyncOptions, report: harness.Report) -> dict[str, Any]:
    """All figures. Raises RunFailed."""
    from scripts.bench.weight_sync.load import under_load
    from scripts.demo.task import prepare

    rows = []
    for row in QUICK if options.quick else FULL:
        report(f"{row.nbytes // MB} MB, {row.tensors:,} tensors, {row.receivers} receivers")
        with harness.scratch() as folder:
            rows.append(run_row(row, 3 if options.quick else 7, folder))
    updates = options.updates
    if updates is None:
        updates = 100 if options.quick else 1000
    found = summary(rows)
    if updates:
        model = prepare(REPOSITORY / ".cache", 0, report).model
        with harness.scratch() as folder:
            found |= asyncio.run(under_load(model, updates, folder, report))
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures by name."""
    of = {(row["nbytes"], row["tensors"], row["receivers"]): row for row in rows}
    large = [row for row in rows if row["nbytes"] >= 100 * MB]
    return {
        "over_raw_broadcast": of[astuple(LARGE)]["over_raw_broadcast"],
        "over_per_parameter": of[astuple(SMALL)]["over_per_parameter"],
        "trainer_pause_over_memcpy": max(
            row["trainer_pause_over_memcpy"] for row in large if row["tensors"] == LARGE.tensors
        ),
        "trainer_pause_over_copies": max(row["trainer_pause_over_copies"] for row in large),
        "rows": rows,
        "method": {
            "over_raw_broadcast": "rank 0's time in one plain broadcast of one tensor of the same "
            "size over its time in ours, to 2 receivers that wait; 500 MB in 300 tensors",
            "over_per_parameter": "rank 0's time in a broadcast for each of 5,000 tensors (20 MB) "
            "over ours, the copy into staging included",
            "trainer_pause_over_memcpy": "time in Publisher.publish over one copy of the same "
            "bytes, one thread; the worst row of at least 100 MB in 300 tensors",
            "trainer_pause_over_copies": "over copying each tensor to one like it, which with "
            "thousands of small ones takes longer than one copy; the worst row of at least 100 MB",
            "apply, pause": "writing the weights into a receiver's model; and how long it stands "
            "still for it: bytes and digest are waited for, and the checksum made, while it works",
            "whole": "from publish until every receiver has checked the digest, applied the "
            "weights, passed the probe and made the checksum",
        },
    }


def tables(found: dict[str, Any]) -> list[Table]:
    """Every row, and the goals."""
    rows = Table("MB", "tensors", "to", "whole s", "transfer s", "GB/s", "× plain", "× each",
                 "trainer s", "× copy", "× copies", "apply s", "pause s",
                 title="a version, published")  # fmt: skip
    for row in found["rows"]:
        rows.add_row(
            f"{row['nbytes'] / MB:g}",
            f"{row['tensors']:,}",
            str(row["receivers"]),
            f"{row['whole_s']:.3f}",
            f"{row['broadcast_s']:.3f}",
            f"{row['transfer_gb_per_s']:.2f}",
            f"{row['over_raw_broadcast']:.2f}",
            f"{row['over_per_parameter']:.1f}",
            f"{row['publish_s']:.4f}",
            f"{row['trainer_pause_over_memcpy']:.2f}",
            f"{row['trainer_pause_over_copies']:.2f}",
            f"{row['apply_s']:.3f}",
            f"{row['generation_pause_s']:.3f}",
        )
    names = [name for name in found if name not in ("rows", "method")]
    return [rows, harness.goals_table(found, GOALS, names)]


def bench(options: BenchWeightSyncOptions) -> None:
    """Measure, print the tables, write the JSON."""
    torch.set_num_threads(1)
    found = measure(options, harness.reporter())
    harness.finish(options, found, tables(found))
