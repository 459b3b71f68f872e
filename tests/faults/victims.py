"""The kills and stops of processes of a run that another process launched, and their recovery.

`fleet.jsonl` of the run says which pids there are, which processes ended and which are ready; they
are signalled by pid. Every wait has a deadline and ends early when the run does.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from scripts.runs.fleet_log import read_fleet_log

KINDS = ("actor", "engine", "replay", "retrieval_server", "learner")
DETECTION_S, RECOVERY_S, START_S = 60.0, 300.0, 400.0


class ChaosFailed(RuntimeError):
    """The run ended, or did not recover, before everything planned was done to it."""


class RunCompleted(RuntimeError):
    """The run came to its end, as it should, before everything planned was done to it."""


@dataclass(frozen=True)
class Blow:
    """One kill or stop: seconds until it was on record, and until its process did its work again.

    `cold_s` is how long the same process took at the start of the run. `growth`, of a stop: by how
    much of itself the memory of any process of the run grew in the last three quarters of it.
    """

    kind: str
    name: str
    how: str  # "kill" or "stop"
    detected_s: float
    recovered_s: float
    cold_s: float
    growth: float = 0.0


class Victims:
    """The processes of one launched run. `launcher` runs it, `run_dir` is its directory; what is on
    record from before `since_s` is of processes that are no more.
    """

    def __init__(
        self, launcher: "subprocess.Popen[bytes]", run_dir: Path, seed: int, since_s: float = 0.0
    ) -> None:
        self._launcher, self._run_dir, self._since_s = launcher, run_dir, since_s
        self._chance = random.Random(seed)

    def follow(self, launcher: "subprocess.Popen[bytes]") -> None:
        """Go on with the same run, launched again."""
        self._launcher = launcher

    def see_it_end(self, limit_s: float) -> None:
        """Wait for the run to end by itself; end it with SIGTERM when it does not."""
        try:
            self._launcher.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._launcher.terminate()
            self._launcher.wait(RECOVERY_S)

    def wait_until_training(self, at_least: int = 1) -> None:
        """Wait for every process, and so many, to do its work."""
        end = time.monotonic() + START_S
        while not self._all_ready(at_least):
            self._go_on(end, "every process to be ready")

    def strike(self, kind: str, how: str, hold_s: float) -> Blow:
        """Kill a process of this kind, or stop it for `hold_s`; wait until all is well again."""
        name = self._name(kind)
        pid, at_s = self._signal(kind, name, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        seen = self._wait("ended" if how == "kill" else "stopped", name, at_s, DETECTION_S)
        growth = 0.0
        if how == "stop":
            growth = self._growth(at_s + hold_s / 4, at_s + hold_s)
            at_s = time.time()  # from here on it may recover
            os.kill(pid, signal.SIGCONT)
        back = self._wait("ready" if how == "kill" else "continued", name, at_s, RECOVERY_S)
        detected_s = seen - (at_s if how == "kill" else at_s - hold_s)
        self.wait_until_training()
        time.sleep(self._chance.uniform(0.5, 4.0))
        return Blow(kind, name, how, max(0.0, detected_s), back - at_s, self._cold_s(name), growth)

    def _signal(self, kind: str, name: str, number: signal.Signals) -> tuple[int, float]:
        """Send it to the process; returns its pid and when that was."""
        end = time.monotonic() + DETECTION_S
        while True:
            pid = self._pid(name)
            try:
                pid = _engine_of(pid) if kind == "engine" else pid
                at_s = time.time()
                os.kill(pid, number)
            except (psutil.NoSuchProcess, ProcessLookupError):  # the run comes to its end
                self._go_on(end, f"{name} to be there")
            else:
                return pid, at_s

    def _growth(self, from_s: float, until_s: float) -> float:
        """Largest relative growth of the resident memory of one process between two times."""
        seen: dict[int, list[int]] = {}
        while time.time() < until_s:
            time.sleep(0.5)
            for process in self._processes() if time.time() >= from_s else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    seen.setdefault(process.pid, []).append(process.memory_info().rss)
        return max((max(sizes) / min(sizes) - 1.0 for sizes in seen.values()), default=0.0)

    def _processes(self) -> Iterator[psutil.Process]:
        """Those of the run that live, and their children."""
        for name in {event["name"] for event in self._events()}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(self._pid(name))
                yield from (process, *process.children(recursive=True))

    def _name(self, kind: str) -> str:
        if kind not in ("actor", "engine"):
            return kind
        names: set[str] = {e["name"] for e in self._events() if e["name"].startswith("actor-")}
        return self._chance.choice(sorted(names))

    def _events(self) -> list[dict[str, Any]]:
        return [e for e in read_fleet_log(self._run_dir) if e["at_s"] >= self._since_s]

    def _pid(self, name: str) -> int:
        started = [e for e in self._events() if (e["event"], e["name"]) == ("started", name)]
        return int(started[-1]["pid"])

    def _cold_s(self, name: str) -> float:
        """From the first start of a process until it was ready."""
        first: dict[str, float] = {}
        for event in self._events():
            if event["name"] == name:
                first.setdefault(event["event"], event["at_s"])
        return float(first["ready"] - first["started"])

    def _all_ready(self, at_least: int) -> bool:
        state: dict[str, str] = {}
        for event in self._events():
            state[event["name"]] = event["event"]
        return len(state) >= at_least and set(state.values()) <= {"ready", "continued"}

    def _wait(self, event: str, name: str, after_s: float, limit_s: float) -> float:
        """When this event came, in seconds since the epoch."""
        end = time.monotonic() + limit_s
        while True:
            for each in self._events():
                if (each["event"], each["name"]) == (event, name) and each["at_s"] >= after_s:
                    return float(each["at_s"])
            self._go_on(end, f"{name} to be {event}")

    def _go_on(self, end: float, what: str) -> None:
        code = self._launcher.poll()
        if code == 0:
            raise RunCompleted(f"the run was complete while chaos waited for {what}")
        if code is not None:
            raise ChaosFailed(f"the run ended while chaos waited for {what}")
        if time.monotonic() > end:
            raise ChaosFailed(f"chaos waited in vain for {what}")
        time.sleep(0.1)


def plan(kills: int, stops: int, seed: int) -> Sequence[tuple[str, str]]:
    """(kind, how) in random order; every kind as often as the others, as far as it goes."""
    chance = random.Random(seed)
    blows = [(KINDS[i % len(KINDS)], "kill") for i in range(kills)]
    order = chance.sample(KINDS, len(KINDS))
    blows += [(order[i % len(KINDS)], "stop") for i in range(stops)]
    chance.shuffle(blows)
    return blows


def _engine_of(actor: int) -> int:
    children = psutil.Process(actor).children()
    engines: list[int] = [
        c.pid for c in children if "resource_tracker" not in " ".join(c.cmdline())
    ]
    if not engines:
        raise psutil.NoSuchProcess(actor, msg="the actor has no engine")
    return int(engines[0])
