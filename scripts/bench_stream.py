"""How fast trajectories reach the log and the learner: `scripts/bench_stream.py [--quick]`.

Simulated actors (1, 16, 256, 1,000; `scripts.bench_stream_load`) deliver rollouts of 2,048 tokens
through the real codec and ZeroMQ sockets (ipc) to one real replay server, whose event log is forced
to the disk before anything is acknowledged, and a stand-in for the learner takes, decodes and
commits every batch (`scripts.bench_stream_drain`). The baseline, in the same run, is the same
rollouts through a Ray actor queue (`scripts.bench_stream_ray`), which keeps nothing. At saturation
1,024 deliveries are under way and admission never holds back (`scripts.bench_stream_run`), so that
the server is what there is to wait for; all processes share the machine's cores.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from replay.protocol import ReplayError
from scripts.bench_stream_rollouts import TOKENS
from scripts.bench_stream_run import Row, RunFailed, run_row

PEERS = (1, 16, 256, 1000)
PACED = 1000  # peers, one trajectory a second each
RAY_WAIT_S = 180.0  # for another session to end
RAY_AGAIN_S = 15.0
RAY_DEADLINE_S = 300.0
RAY_CANNOT_START = 3  # exit code of scripts.bench_stream_ray
GOALS = {  # name: (limit, whether more is better)
    "over_ray_queue": (5.0, True),
    "ack_p99_s_at_1000": (0.25, False),
}
Report = Callable[[str], None]


class NoRay(RuntimeError):
    """Ray cannot start here, so there is nothing to compare with; the message says why."""


def ray_queue(seconds: float, report: Report) -> list[dict[str, float]]:
    """Trajectories/s through a Ray queue, a row for each way to feed it. Raises NoRay."""
    give_up_s = time.monotonic() + RAY_WAIT_S
    with TemporaryDirectory(prefix="forage-bench-") as folder:
        file = Path(folder) / "ray.json"
        command = [sys.executable, "-m", "scripts.bench_stream_ray", str(file)]
        while True:
            report("Ray queue")
            done = subprocess.run(
                [*command, "--seconds", str(seconds)],
                env=os.environ | {"FORAGE_PARENT": str(os.getpid())},
                capture_output=True,
                text=True,
                timeout=RAY_DEADLINE_S,
                check=False,
            )
            if not done.returncode:
                rows: list[dict[str, float]] = json.loads(file.read_text(encoding="utf-8"))
                return rows
            words = done.stderr[-600:]
            if done.returncode != RAY_CANNOT_START or time.monotonic() + RAY_AGAIN_S > give_up_s:
                raise NoRay(
                    f"the Ray baseline ended with {done.returncode}: {words}\n"
                    "end other Ray sessions on this machine, or leave it out: --no-ray"
                )
            report("Ray cannot start, perhaps for another session: trying again soon")
            time.sleep(RAY_AGAIN_S)


def measure(given: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Everything. Raises NoRay, RunFailed, ReplayError, subprocess.TimeoutExpired."""
    seconds, warm_up_s = (5.0, 1.0) if given.quick else (15.0, 3.0)
    baseline = [] if given.no_ray else ray_queue(seconds, report)
    plan = [Row(peers, seconds, warm_up_s) for peers in given.peers]
    if given.paced:
        plan.append(Row(given.paced, 2 * seconds, warm_up_s, every_s=1.0))
    rows = []
    for row in plan:
        with TemporaryDirectory(prefix="forage-bench-") as folder:
            load = "one trajectory a second each" if row.every_s else "saturated"
            report(f"{row.peers:,} actors, {load}")
            rows.append(run_row(row, Path(folder)))
    if not given.no_ray and not given.quick:
        baseline += ray_queue(seconds, report)  # the machine may have changed
    return summary(rows, baseline)


def summary(rows: list[dict[str, Any]], baseline: list[dict[str, float]]) -> dict[str, Any]:
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
        "peak_rss_bytes": max(row["peak_rss_bytes"] for row in rows),
        "rows": rows,
        "ray_queue": baseline,
        "method": {
            "trajectory": f"{TOKENS} tokens, 4 turns, 3 searches",
            "saturated": "1,024 deliveries under way (1,000 at 1,000 actors), rates by "
            "acknowledgements within the window, after each actor's first group",
            "acknowledge time": "from the delivery; at one a second, from when it was due",
            "over_ray_queue": "best number of actors over the best way to feed the queue",
            "MB/s": "of the event log",
            "cpu": "shares of one core within the window; all processes share the machine",
            "per_server_cpu_s": "trajectories per second of the server's processor time, both "
            "threads: what other work on the machine changes least",
        },
    }


def tables(found: dict[str, Any]) -> list[Table]:
    """Every row, the baseline, and the goals."""
    title = "Into the durable log (MiB: server's peak; CPU: server, learner, actors)"
    rows = Table("actors", "traj/s", "MB/s", "× Ray", "ack s: p50, p99", "MiB", "CPU", "per CPU s",
                 title=title)  # fmt: skip
    for row in found["rows"]:
        over = row["over_ray_queue"]
        rows.add_row(
            f"{row['peers']:,}" + (" at 1/s" if row["every_s"] else ""),
            f"{row['trajectories_per_s']:,.0f}",
            f"{row['mb_per_s']:.1f}",
            f"{over:.1f}" if over and not row["every_s"] else "",
            f"{row['ack_p50_s']:.3f}, {row['ack_p99_s']:.3f}",
            f"{row['peak_rss_bytes'] / 2**20:,.0f}",
            " ".join(f"{share:.2f}" for share in row["cpu"].values()),
            f"{row['per_server_cpu_s']:,.0f}",
        )
    ray = Table("producers", "puts under way each", "traj/s", title="Ray actor queue")
    for row in found["ray_queue"]:
        rate = f"{row['trajectories_per_s']:,.0f}"
        ray.add_row(str(row["producers"]), str(row["under_way"]), rate)
    goals = Table("measured", "value", "goal", "")
    for name, (limit, more) in GOALS.items():
        if (value := found[name]) is not None:
            met = value >= limit if more else value <= limit
            goal = f"{'≥' if more else '≤'} {limit:g}"
            goals.add_row(name, f"{value:.3g}", goal, "met" if met else "[bold red]missed[/]")
    return [rows, ray, goals]


def main(words: list[str] | None = None) -> int:
    """Measure, print the tables, write the JSON; exit code 1 where something could not be run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter, at most three minutes")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--no-ray", action="store_true", help="without the baseline")
    parser.add_argument("--peers", type=int, nargs="*", default=PEERS, help="actors, saturated")
    parser.add_argument("--paced", type=int, default=PACED, help="actors at 1/s; 0: leave out")
    given = parser.parse_args(words)
    notes, start_s = Console(stderr=True), time.monotonic()
    try:
        found = measure(given, lambda s: notes.print(f"{time.monotonic() - start_s:5.0f} s  {s}"))
    except (NoRay, RunFailed, ReplayError, subprocess.TimeoutExpired) as error:
        print(f"bench_stream: {error}", file=sys.stderr)
        return 1
    Console(width=None if sys.stdout.isatty() else 100).print(*tables(found))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
