"""The rate at which trajectories reach the log and the learner: `forage bench stream [--quick]`.

Simulated actors (`load`) deliver rollouts through the real codec and ZeroMQ sockets to one real
replay server, whose event log is forced to the disk before anything is acknowledged; a stand-in for
the learner takes, decodes and commits every batch. The baseline, in the same run, is the same
rollouts through a Ray actor queue, which keeps nothing. At saturation admission never holds back,
so that the server is what there is to wait for.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from configs.runtime.process import REPOSITORY, Exit
from scripts.bench import harness
from scripts.bench.stream.restart import measure_restarts
from scripts.bench.stream.rollouts import TOKENS
from scripts.bench.stream.run import Row, run_row
from scripts.command.options import option

PEERS = (1, 16, 256, 1000)
PACED = 1000  # peers, one trajectory a second each
LEASES = 64  # that each of them holds, and its heartbeats name
RESTARTS = (250_000, 1_000_000)  # rollouts in the log
MORE_RESTARTS = (4_000_000,)  # without --quick
RAY_WAIT_S = 180.0  # for another session to end
RAY_AGAIN_S = 15.0
RAY_DEADLINE_S = 300.0
GOALS = {
    "over_ray_queue": harness.at_least(5.0),
    "ack_p99_s_at_1000": harness.at_most(0.25),
    "heartbeat_p99_s_at_1000": harness.at_most(0.25),
    "restart_s_at_1m": harness.at_most(10.0),
    "restart_ratio": harness.at_most(1.2),
    "restart_memory_ratio": harness.at_most(1.2),
}


@dataclass(frozen=True)
class BenchStreamOptions(harness.BenchOptions):
    """Options of `forage bench stream`; `quick` takes about five minutes."""

    no_ray: bool = option("without the baseline", default=False)
    peers: tuple[int, ...] = option(
        "actors, saturated; 0: none", default=PEERS, metavar="N", least=0
    )
    paced: int = option("actors at one trajectory a second; 0: none", default=PACED, least=0)
    no_restarts: bool = option(
        "without restarts on logs of up to 4,000,000 rollouts", default=False
    )
    out: Path = option(
        "finished restarts and their log", default=REPOSITORY / "runs" / "bench_stream"
    )


class NoRay(harness.BenchError):
    """Ray cannot start here, so there is nothing to compare with; the message says why."""


def ray_queue(seconds: float, report: harness.Report) -> list[dict[str, float]]:
    """Trajectories/s through a Ray queue, a row for each way to feed it. Raises NoRay."""
    give_up_s = time.monotonic() + RAY_WAIT_S
    while True:
        report("Ray queue")
        with harness.scratch() as folder, harness.Processes(folder) as own:
            file = folder / "ray.json"
            run = json.dumps({"file": str(file), "seconds": seconds})
            try:
                own.run("ray", "-m", "scripts.bench.stream.baseline", run, limit_s=RAY_DEADLINE_S)
                return msgspec.json.decode(file.read_bytes(), type=list[dict[str, float]])
            except harness.RunFailed as failed:
                again = time.monotonic() + RAY_AGAIN_S <= give_up_s
                if failed.code != Exit.CONSEQUENCE or not again:
                    raise NoRay(
                        f"the Ray baseline: {failed}\n"
                        "end other Ray sessions on this machine, or leave it out: --no-ray"
                    ) from failed
        report("Ray cannot start, perhaps for another session: trying again soon")
        time.sleep(RAY_AGAIN_S)


def measure(options: BenchStreamOptions, report: harness.Report) -> dict[str, Any]:
    """All figures. Raises NoRay, RunFailed, ReplayError."""
    seconds, warm_up_s = (5.0, 1.0) if options.quick else (15.0, 3.0)
    baseline = [] if options.no_ray else ray_queue(seconds, report)
    plan = [Row(peers, seconds, warm_up_s) for peers in options.peers if peers]
    if options.paced:
        plan.append(Row(options.paced, 2 * seconds, warm_up_s, every_s=1.0, leases=LEASES))
    rows = []
    for row in plan:
        with harness.scratch() as folder:
            load = "one trajectory a second each" if row.every_s else "saturated"
            report(f"{row.peers:,} actors, {load}")
            rows.append(run_row(row, folder))
    if not options.no_ray and not options.quick:
        baseline += ray_queue(seconds, report)  # the machine may have changed
    sizes = RESTARTS + (() if options.quick else MORE_RESTARTS)
    restarts = [] if options.no_restarts else measure_restarts(sizes, options.out, report)
    return summary(rows, baseline, restarts)


def summary(
    rows: list[dict[str, Any]], baseline: list[dict[str, float]], restarts: list[dict[str, Any]]
) -> dict[str, Any]:
    """The figures by name: best against best; what was not measured is None."""
    saturated = [row["trajectories_per_s"] for row in rows if not row["every_s"]]
    best = max(saturated, default=None)
    ray = max((row["trajectories_per_s"] for row in baseline), default=None)
    for row in rows:
        row["over_ray_queue"] = row["trajectories_per_s"] / ray if ray else None
    return {
        "trajectories_per_s": best,
        "over_ray_queue": best / ray if best and ray else None,
        "ack_p99_s_at_1000": next((r["ack_p99_s"] for r in rows if r["every_s"]), None),
        "heartbeat_p99_s_at_1000": next((r["heartbeat_p99_s"] for r in rows if r["every_s"]), None),
        "restart_s_at_1m": restarts[1]["restart_s"] if restarts else None,
        "restart_ratio": _over_first(restarts, "restart_s"),
        "restart_memory_ratio": _over_first(restarts, "peak_rss_bytes"),
        "restarts": restarts,
        "peak_rss_bytes": max((row["peak_rss_bytes"] for row in rows), default=0),
        "rows": rows,
        "ray_queue": baseline,
        "method": {
            "trajectory": f"{TOKENS} tokens, 4 turns, 3 searches",
            "saturated": "1,024 deliveries under way (1,000 at 1,000 actors), rates by "
            "acknowledgements within the window, after each actor's first group",
            "beat p99": "s from when a heartbeat was due to its answer",
            "acknowledge time": "from the delivery; at one a second, from when it was due",
            "over_ray_queue": "best number of actors over the best way to feed the queue",
            "heartbeats": f"each names all that its actor holds: {LEASES} leases at one a second",
            "restart": "from the start of replay's process until it serves, the median of three, "
            "on a log whose newest segment is nearly full; ratios: the most of any longer log over "
            "that of 250,000",
            "MB/s": "of the event log",
            "cpu": "shares of one core within the window; all processes share the machine",
            "per_server_cpu_s": "trajectories per second of the server's processor time, both "
            "threads: what other work on the machine changes least",
        },
    }


def _over_first(rows: list[dict[str, Any]], name: str) -> float | None:
    """The most of any longer log over that of the shortest; None where none was measured."""
    return max(row[name] for row in rows[1:]) / float(rows[0][name]) if rows else None


def tables(found: dict[str, Any]) -> list[Table]:
    """Every row, the baseline, and the goals."""
    title = "Into the durable log (MiB: server's peak; CPU: server, learner, actors)"
    rows = Table("actors", "traj/s", "MB/s", "× Ray", "ack s: p50, p99", "beat p99", "MiB", "CPU",
                 "per CPU s", title=title)  # fmt: skip
    for row in found["rows"]:
        over = row["over_ray_queue"]
        rows.add_row(
            f"{row['peers']:,}" + (" at 1/s" if row["every_s"] else ""),
            f"{row['trajectories_per_s']:,.0f}",
            f"{row['mb_per_s']:.1f}",
            f"{over:.1f}" if over and not row["every_s"] else "",
            f"{row['ack_p50_s']:.3f}, {row['ack_p99_s']:.3f}",
            f"{row['heartbeat_p99_s']:.3f}" if row["heartbeat_p99_s"] is not None else "–",
            f"{row['peak_rss_bytes'] / 2**20:,.0f}",
            " ".join(f"{share:.2f}" for share in row["cpu"].values()),
            f"{row['per_server_cpu_s']:,.0f}",
        )
    ray = Table("producers", "puts under way each", "traj/s", title="Ray actor queue")
    for row in found["ray_queue"]:
        rate = f"{row['trajectories_per_s']:,.0f}"
        ray.add_row(str(row["producers"]), str(row["under_way"]), rate)
    back = Table("rollouts", "records", "log MB", "back after s", "MiB", title="Replay's restart")
    for row in found["restarts"]:
        back.add_row(
            f"{row['rollouts']:,}",
            f"{row['records']:,}",
            f"{row['log_bytes'] / 1e6:,.0f}",
            f"{row['restart_s']:.1f}",
            f"{row['peak_rss_bytes'] / 2**20:,.0f}",
        )
    return [rows, ray, back, harness.goals_table(found, GOALS)]


def bench(options: BenchStreamOptions) -> None:
    """Measure, print the tables, write the JSON. Raises NoRay, RunFailed, ReplayError."""
    found = measure(options, harness.reporter())
    harness.finish(options, found, tables(found))
