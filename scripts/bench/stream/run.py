"""One row of `forage bench stream`: a real replay server, its learner and N simulated actors."""

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from numpy.typing import NDArray

from configs.keys import Addresses
from configs.load import load
from configs.runtime.process import socket_dir
from replay.clients.launcher import Observer
from replay.log.event_log import FILE_NAME
from replay.log.segments import segments
from scripts.bench.harness import LEAVE_S, START_S, Processes, RunFailed
from scripts.bench.stream.load import BEATS, TIMES, Drain, LoadPlan

GROUP_SIZE = 8
GROUPS_PER_STEP = 64
MAX_STALENESS = 47  # what may stand before admission holds back: 48 steps of 512
VERSION_LAG = 16
UNDER_WAY = 1024  # deliveries, over all peers, that keep the server busy
PROCESSES = 2  # that deliver
QUESTIONS = 1000
LOAD = ("-m", "scripts.bench.stream.load")


class Row(msgspec.Struct, frozen=True):
    """A load to measure: `peers` at saturation, or each delivering every `every_s` seconds."""

    peers: int
    seconds: float
    warm_up_s: float
    every_s: float = 0.0
    leases: int = 0  # that each holds; 0: twice its deliveries under way

    def plans(self, endpoint: str, folder: Path) -> list[LoadPlan]:
        """One for each process that delivers."""
        processes = min(PROCESSES, self.peers)
        window = max(1, UNDER_WAY // self.peers)
        bounds = [self.peers * i // processes for i in range(processes + 1)]
        return [
            LoadPlan(
                endpoint=endpoint,
                step_file=str(folder / "step"),
                out=str(folder / f"load-{i}"),
                first=bounds[i],
                peers=bounds[i + 1] - bounds[i],
                capacity=self.leases or max(GROUP_SIZE, 2 * window),
                window=window,
                every_s=self.every_s,
                round=1 if self.every_s else GROUP_SIZE,
                version_lag=VERSION_LAG,
                warm_up_s=self.warm_up_s,
                seconds=self.seconds,
                deadline_s=START_S + self.warm_up_s + self.seconds + LEAVE_S,
            )
            for i in range(processes)
        ]


def run_row(
    row: Row, folder: Path, server: tuple[str, ...] = ("-m", "replay.worker")
) -> dict[str, Any]:
    """A row's figures; `server`: python's arguments before the configuration. Raises RunFailed."""
    config_path = configure(folder, row.peers * row.leases)
    config = load(config_path)
    endpoint = Addresses.of(config).replay.endpoint
    plans = row.plans(endpoint, folder)
    loads = [f"load-{i}" for i in range(len(plans))]
    socket_file = Path(endpoint.removeprefix("ipc://"))
    try:
        with Processes(folder) as processes:
            processes.start("server", *server, str(config_path))
            processes.wait([], START_S, socket_file.exists)
            drain = Drain(endpoint, str(folder / "step"))
            for name, work in zip(["learner", *loads], [drain, *plans], strict=True):
                processes.start(name, *LOAD, msgspec.json.encode(work).decode())
            told = [Path(plan.out + ".json") for plan in plans]
            processes.wait([], plans[0].deadline_s, lambda: all(path.exists() for path in told))
            with Observer(endpoint, LEAVE_S) as console:
                console.shutdown("measured")
            processes.wait([*loads, "learner", "server"], LEAVE_S, lambda: False)
            return _figures(row, plans, processes, folder)
    finally:
        socket_file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            socket_dir(config.run_dir).rmdir()


def configure(folder: Path, leases: int = 0) -> Path:
    """Write the questions and the configuration of a run in which so many leases may be out."""
    folder.mkdir(parents=True, exist_ok=True)
    questions = [
        json.dumps({"id": f"q-{i}", "question": f"what is {i}?", "answers": [str(i)]})
        for i in range(QUESTIONS)
    ]
    (folder / "questions.jsonl").write_text("\n".join(questions) + "\n", encoding="utf-8")
    (folder / "step").write_text("0", encoding="ascii")
    tree = {
        "run_dir": str(folder),
        "questions": {"train": str(folder / "questions.jsonl")},
        "replay": {
            "groups_per_step": GROUPS_PER_STEP,
            "group_size": GROUP_SIZE,
            "max_staleness": max(MAX_STALENESS, 2 * leases // (GROUPS_PER_STEP * GROUP_SIZE)),
        },
        "learner": {"total_steps": 10**6},
    }
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def _figures(row: Row, plans: list[LoadPlan], processes: Processes, folder: Path) -> dict[str, Any]:
    found = [json.loads(Path(plan.out + ".json").read_text()) for plan in plans]
    begin_s = max(part["begin_s"] for part in found)
    end_s = min(part["end_s"] for part in found)
    took_s = _times(plans, TIMES, begin_s, end_s)
    beats_s = _times(plans, BEATS, begin_s, end_s)
    if end_s <= begin_s or not len(took_s):
        raise RunFailed(f"nothing was acknowledged in the window of {row}: measure for longer")
    statuses = Counter[str]()
    for part in found:
        statuses.update(part["statuses"])
    per_s = len(took_s) / (end_s - begin_s)
    server = processes.cpu_share("server", begin_s, end_s)
    log_bytes = sum(each.path.stat().st_size for each in segments(folder / FILE_NAME))
    return {
        "peers": row.peers,
        "every_s": row.every_s,
        "trajectories_per_s": per_s,
        "per_server_cpu_s": per_s / server,
        "mb_per_s": per_s * log_bytes / sum(statuses.values()) / 1e6,
        "ack_p50_s": float(np.quantile(took_s, 0.5)),
        "ack_p99_s": float(np.quantile(took_s, 0.99)),
        "heartbeat_p99_s": float(np.quantile(beats_s, 0.99)) if len(beats_s) else None,
        "peak_rss_bytes": processes.peak_rss_bytes["server"],
        "acknowledged": statuses,
        "log_bytes": log_bytes,
        "steps": int((folder / "step").read_text()),
        "cpu": {
            "server": server,
            "learner": processes.cpu_share("learner", begin_s, end_s),
            "actors": sum(
                processes.cpu_share(f"load-{i}", begin_s, end_s) for i in range(len(plans))
            ),
        },
    }


def _times(plans: list[LoadPlan], suffix: str, begin_s: float, end_s: float) -> NDArray[np.float64]:
    """How long each took of what all plans have on file and came in the window."""
    pairs = [np.fromfile(plan.out + suffix).reshape(2, -1) for plan in plans]
    at_s, took_s = np.concatenate(pairs, axis=1)
    found: NDArray[np.float64] = took_s[(at_s >= begin_s) & (at_s < end_s)]
    return found
