"""How long replay takes to be back, by how much its log holds: `restart_s_at_1m`, `restart_ratio`.

`python -m scripts.bench.stream.restart HISTORY` (JSON of a History) writes a run's log as replay
does, by the same ledger, log and snapshots, until so many small rollouts are in it and the newest
segment is nearly full: the longest tail that a start may have to fold. Then replay is started on
it, as after a kill, and asked how the run stands until it no longer says that it restores.
"""

import os
import shutil
import signal
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import replay.protocol as wire
from configs.keys import Addresses
from configs.load import dump, load
from configs.runtime.files import write_json
from configs.runtime.process import begin
from replay.clients.launcher import Observer
from replay.codec import encode_trajectory
from replay.ledger.events import Event
from replay.log.event_log import SEGMENT_RECORDS
from replay.log.records import ReplayRestarted, RunStarted
from replay.server.keeper import Keeper
from replay.trajectory import StopReason, TokenSequence, Trajectory, Turn
from replay.worker import make_ledger, make_log
from scripts.bench.harness import (
    START_S,
    Processes,
    Report,
    Rows,
    RunFailed,
    digest_of,
    sources,
    status_bytes,
)
from scripts.bench.stream.run import GROUP_SIZE, GROUPS_PER_STEP, configure

FULL_TAIL = int(0.9 * SEGMENT_RECORDS)
STARTS = 3  # at each length: the median counts
SECOND_S = 1000  # rollouts that are written in one, on a busy machine
STEP = GROUP_SIZE * GROUPS_PER_STEP
CODE = ("replay", "scripts.bench.stream")  # of which rows and a log on file are


class History(msgspec.Struct, frozen=True):
    """A log to write, or to go on with, until it has so many rollouts and its newest segment `tail`
    records; `out` gets its figures.
    """

    config: str
    rollouts: int
    tail: int
    out: str


class Writer:
    """Replay without its socket: one actor that delivers at once, one learner that commits."""

    def __init__(self, history: History) -> None:
        config = load(history.config)
        self._history, self._now = history, time.time()
        self._ledger = make_ledger(config)
        self._log, recorded = make_log(config, self._ledger, resume=False, restart=True)
        fresh = recorded is None
        text = dump(config)
        began = RunStarted(self._now, config.seed, text) if fresh else ReplayRestarted(self._now)
        self._keeper = Keeper(self._ledger, self._log)
        self._ledger.restore([began])
        self._log.append([began])
        self._leases: list[wire.Lease] = []
        if fresh:
            self._send(wire.Resume(1, 0))
        self._send(wire.Hello("actor-0", "digest"))
        self._segment, self._first = self._log.segment, self._log.records

    def run(self) -> None:
        """Write until all is there, and end as a process that is killed."""
        state = self._ledger.state
        while state.last_sampled * STEP < self._history.rollouts or not self._full:
            self._send(wire.Ready("actor-0", STEP, 1, state.last_sampled))
            leases, self._leases = self._leases, []
            for lease in leases:
                payload = encode_trajectory(_small(lease, state.last_sampled))
                self._send(wire.Deliver("actor-0", lease.group_id, lease.sibling, payload))
            self._send(wire.Sample(1, state.last_sampled))
            self._send(wire.Report(1, state.last_sampled, {"learner/loss": 0.5}))
            self._send(wire.Committed(1, state.last_sampled))
            self._log.sync()
            self._keeper.look()
            if self._log.segment != self._segment:
                self._segment, self._first = self._log.segment, self._log.records
        self._keeper.wait()
        write_json(Path(self._history.out), {"rollouts": state.last_sampled * STEP,
                                             "records": self._log.records})  # fmt: skip
        os._exit(0)

    @property
    def _full(self) -> bool:
        return self._log.records - self._first >= self._history.tail

    def _send(self, message: wire.Decided) -> None:
        outcome = self._ledger.apply(Event("peer", message), self._now)
        self._log.append(outcome.records)
        for _, reply in outcome.replies:
            if isinstance(reply, wire.Leases):
                self._leases += reply.leases
            elif isinstance(reply, wire.Refused | wire.Wait | wire.Stop):
                raise RuntimeError(f"{type(message).__name__}: {reply}")


def _small(lease: wire.Lease, version: int) -> Trajectory:
    turn = Turn(
        action_tokens=np.array([5, 6, 7], np.int32),
        behaviour_logprobs=np.array([-0.1, -0.2, -0.3], np.float32),
        policy_versions=np.full(3, version, np.int32),
        observation_tokens=np.array([8], np.int32),
    )
    return Trajectory(
        group_id=lease.group_id,
        sibling=lease.sibling,
        question_id=lease.question.id,
        kind=lease.kind,
        actor_id="actor-0",
        sampling=lease.sampling,
        sequences=(TokenSequence(np.array([1, 2], np.int32), (turn,)),),
        stop_reason=StopReason.ANSWERED,
        answer="an answer",
        reward=float(lease.sibling % 2),
    )


def measure_restarts(
    sizes: tuple[int, ...], out: Path, report: Report, tail: int = FULL_TAIL
) -> list[dict[str, Any]]:
    """A row for each number of rollouts, ascending, in one log that grows. Log and rows are kept in
    `out` until all are there: whoever is cut off goes on with them. Raises RunFailed.
    """
    of = digest_of(sources(*CODE))
    kept, folder = Rows(out, of), out / f"log-{of}"
    for other in out.glob("log-*"):
        if other != folder:
            shutil.rmtree(other)
    path = configure(folder)
    rows = []
    for size in sizes:
        report(f"a log of {size:,} rollouts")
        rows.append(kept.get([size, tail], partial(_measure, size, tail, folder, path)))
    shutil.rmtree(folder)
    kept.forget()
    return rows


def _measure(size: int, tail: int, folder: Path, config: Path) -> dict[str, Any]:
    """Go on with the log until it is so long; the row of replay's start on it."""
    out = folder / "history.json"
    plan = msgspec.json.encode(History(str(config), size, tail, str(out))).decode()
    with Processes(folder) as processes:
        limit_s = START_S + (size + tail) / SECOND_S
        processes.run("history", "-m", "scripts.bench.stream.restart", plan, limit_s=limit_s)
    written: dict[str, Any] = msgspec.json.decode(out.read_bytes())
    starts = [_start(folder, config) for _ in range(STARTS)]
    size_bytes = sum(file.stat().st_size for file in folder.glob("events.log*"))
    return written | {
        "restart_s": statistics.median(took_s for took_s, _ in starts),
        "restart_s_each": [took_s for took_s, _ in starts],
        "peak_rss_bytes": max(peak for _, peak in starts),
        "log_bytes": size_bytes,
    }


def _start(folder: Path, config: Path) -> tuple[float, int]:
    """Seconds from a start of replay until it serves, and its peak of memory; it is killed then."""
    with Processes(folder) as processes:
        begin_s = time.monotonic()
        processes.start("server", "-m", "replay.worker", str(config), "--restart")
        _await_restored(Addresses.of(load(config)).replay.endpoint)
        took_s = time.monotonic() - begin_s
        peak = status_bytes("VmHWM", processes.pid("server"))
        os.kill(processes.pid("server"), signal.SIGKILL)  # it would put its stop on record
    return took_s, peak


def _await_restored(endpoint: str) -> None:
    """Ask until replay is back. Raises RunFailed."""
    end_s = time.monotonic() + START_S
    with Observer(endpoint, START_S, restart_deadline_s=START_S) as console:
        while (status := console.status()).restoring:
            if time.monotonic() > end_s:
                raise RunFailed(f"after {START_S:g} s replay still says: {status.phase}")
            time.sleep(0.02)


if __name__ == "__main__":
    history = msgspec.json.decode(sys.argv[1], type=History)
    begin("history")
    Writer(history).run()
