"""One row of `scripts/bench_stream.py`: a real replay server, its learner and N simulated actors.

Each is a process of its own; all of them, their sockets and the event log live in one folder, which
the caller removes. Whatever happens, the processes are ended, by their ids; every wait has a
deadline, and names what it waited for.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import yaml

from configs.keys import Addresses
from configs.load import load
from configs.process import socket_dir
from replay.launcher_client import Observer
from replay.log import FILE_NAME
from replay.segments import segments
from scripts.bench_stream_load import Plan

GROUP_SIZE = 8
GROUPS_PER_STEP = 64
MAX_STALENESS = 47  # what may stand before admission holds back: 48 steps of 512
VERSION_LAG = 16
UNDER_WAY = 1024  # deliveries, over all peers, that keep the server busy
PROCESSES = 2  # that deliver
QUESTIONS = 1000
START_S, LEAVE_S, POLL_S = 120.0, 30.0, 0.2


class RunFailed(RuntimeError):
    """A process of the benchmark ended or fell silent; the message holds its last words."""


class Row(msgspec.Struct, frozen=True):
    """What is measured: `peers` at saturation, or each delivering every `every_s` seconds."""

    peers: int
    seconds: float
    warm_up_s: float
    every_s: float = 0.0

    def plans(self, endpoint: str, folder: Path) -> list[Plan]:
        """One for each process that delivers."""
        processes = min(PROCESSES, self.peers)
        window = max(1, UNDER_WAY // self.peers)
        bounds = [self.peers * i // processes for i in range(processes + 1)]
        return [
            Plan(
                endpoint=endpoint,
                step_file=str(folder / "step"),
                out=str(folder / f"load-{i}"),
                first=bounds[i],
                peers=bounds[i + 1] - bounds[i],
                capacity=max(GROUP_SIZE, 2 * window),
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


class Processes:
    """The processes of one row, by name; all of them are gone when the block is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._cpu: dict[str, list[tuple[float, float]]] = {}  # time, processor seconds
        self.peak_rss_bytes: dict[str, int] = {}

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            if process.poll() is None:
                process.kill()
            process.wait(LEAVE_S)

    def start(self, name: str, *command: str) -> None:
        """Start `python COMMAND`; what it says goes to `NAME.log`."""
        with (self._folder / f"{name}.log").open("wb") as file:
            self._running[name] = subprocess.Popen(
                [sys.executable, *command],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"FORAGE_PARENT": str(os.getpid())},
            )

    def wait(self, names: list[str], limit_s: float, until: Callable[[], bool]) -> None:
        """Until `until()`, or until these have all ended. Raises RunFailed when any process fails,
        when one ends that is not among them, and at the limit.
        """
        end_s = time.monotonic() + limit_s
        while not until() and not (names and all(self._ended(name) for name in names)):
            for name in self._running:
                if self._ended(name) and name not in names:
                    raise RunFailed(f"{name} ended too early: {self._last_words(name)}")
            if time.monotonic() > end_s:
                words = "; ".join(f"{name}: {self._last_words(name)}" for name in self._running)
                raise RunFailed(f"waited {limit_s:g} s for {names or 'the server'}: {words}")
            self._look()
            time.sleep(POLL_S)
        for name in names:
            self._running.pop(name)

    def cpu_share(self, name: str, begin_s: float, end_s: float) -> float:
        """Of one core, over this time."""
        at_s, used_s = np.array(self._cpu[name]).T
        used = np.interp([begin_s, end_s], at_s, used_s)
        return float(used[1] - used[0]) / (end_s - begin_s)

    def _look(self) -> None:
        for name, process in self._running.items():
            with contextlib.suppress(psutil.NoSuchProcess, OSError, StopIteration):
                used = psutil.Process(process.pid).cpu_times()
                self._cpu.setdefault(name, []).append((time.monotonic(), used.user + used.system))
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                peak = next(line for line in lines if line.startswith("VmHWM"))
                self.peak_rss_bytes[name] = int(peak.split()[1]) << 10

    def _ended(self, name: str) -> bool:
        code = self._running[name].poll()
        if code:
            raise RunFailed(f"{name} ended with {code}: {self._last_words(name)}")
        return code is not None

    def _last_words(self, name: str) -> str:
        text = (self._folder / f"{name}.log").read_text(errors="replace")
        return " | ".join(text.splitlines()[-6:]) or "(it said nothing)"


def run_row(row: Row, folder: Path, server: tuple[str, ...] = ("-m", "replay.worker")) -> Any:
    """Measure one row; its figures. `server` are python's arguments before the configuration.

    The event log is left in `folder`. Raises RunFailed.
    """
    config_path = _configure(folder)
    config = load(config_path)
    endpoint = Addresses.of(config).replay.endpoint
    plans = row.plans(endpoint, folder)
    loads = [f"load-{i}" for i in range(len(plans))]
    socket_file = Path(endpoint.removeprefix("ipc://"))
    try:
        with Processes(folder) as processes:
            processes.start("server", *server, str(config_path))
            processes.wait([], START_S, socket_file.exists)
            processes.start(
                "learner", "-m", "scripts.bench_stream_drain", endpoint, str(folder / "step")
            )
            for name, plan in zip(loads, plans, strict=True):
                text = msgspec.json.encode(plan).decode()
                processes.start(name, "-m", "scripts.bench_stream_load", text)
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


def _configure(folder: Path) -> Path:
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
            "max_staleness": MAX_STALENESS,
        },
        "learner": {"total_steps": 10**6},
    }
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def _figures(row: Row, plans: list[Plan], processes: Processes, folder: Path) -> dict[str, Any]:
    found = [json.loads(Path(plan.out + ".json").read_text()) for plan in plans]
    begin_s = max(part["begin_s"] for part in found)
    end_s = min(part["end_s"] for part in found)
    pairs = [np.fromfile(plan.out + ".f64").reshape(2, -1) for plan in plans]
    at_s, took_s = np.concatenate(pairs, axis=1)
    took_s = took_s[(at_s >= begin_s) & (at_s < end_s)]
    if end_s <= begin_s or not len(took_s):
        raise RunFailed(f"nothing was acknowledged in the window of {row}: measure for longer")
    statuses: dict[str, int] = {}
    for part in found:
        for status, count in part["statuses"].items():
            statuses[status] = statuses.get(status, 0) + count
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
