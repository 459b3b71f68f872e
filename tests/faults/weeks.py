"""The demo left alone among strangers, in two halves: `python -m tests.faults.weeks --half 1`, then
`--half 2`, each of `--minutes` (30), in the same `--out`.

In each half the processes of the run are killed one after another for the first sixth, while the
retrieval server is overloaded and strangers connect, which go on to its end; log segments are so
small that snapshots are made and payloads compacted all the time. The first half ends with SIGKILL
of the launcher, the second resumes the run. Judged: the books by the independent audit, and in the
last two thirds of each half memory and descriptors of each process, which nobody kills then. Ray's
raylet and gcs_server may hold a megabyte more, too: a raylet has 11, and half a megabyte of them
comes and goes.
Prints what was done and what broke; `--json` writes the figures. Exit code 1 when a promise is
broken.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from configs.load import load
from configs.runtime.process import REPOSITORY
from replay.log.compaction import is_compacted
from replay.log.event_log import FILE_NAME
from replay.log.segments import segments
from replay.log.snapshots import snapshots
from scripts.runs.books import Audit
from tests.children import carrying
from tests.faults.census import LAUNCHER, Census, Growth, Stretch
from tests.faults.chaos import demo_files, launch, verdict
from tests.faults.pressure import Pressure, Target
from tests.faults.victims import KINDS, Blow, ChaosFailed, Victims, plan
from tests.replay.conftest import free_port

HALVES, MINUTES = (1, 2), 30.0
STEPS = 1_000_000  # more than there is time for
MARK = "FORAGE_WEEKS"
MOST_RISE = 0.02  # of a process's memory
RAY, MOST_OF_RAY = ("raylet", "gcs_server"), 1 << 20  # bytes more
MOST_FURTHER = 8  # descriptors: connections come and go, of strangers by the thousand
LOOK_S, GLANCE_S, TELL_S = 2.0, 1.0, 60.0
END_S = 120.0
MEMBERS = (LAUNCHER, "replay", "retrieval_server", "learner", "actor-0", "actor-1")
JUDGED = (*MEMBERS, "actor-0: engine", "actor-1: engine")
SETTINGS = (
    *("replay.keep=committed", f"replay.segment_bytes={1 << 20}"),
    # It learns next to nothing, so that the second half is like the first.
    *("learner.lr=1e-6", "learner.lr_schedule=constant", "learner.eval_every=50"),
    *("retrieval.cache_queries=0", "retrieval.max_connections=8"),  # every search is sent
)


class Times(msgspec.Struct, frozen=True):
    """When what is due in a half, in seconds since its begin."""

    minutes: float

    @property
    def last_blow_s(self) -> float:
        """No blow begins later: of a half an hour, 5 minutes."""
        return self.minutes * 60.0 * 5 / 30

    @property
    def judged_s(self) -> float:
        """From here on memory and descriptors count: for 20 minutes of half an hour."""
        return self.minutes * 60.0 / 3

    @property
    def end_s(self) -> float:
        """The half is over."""
        return self.minutes * 60.0


class Half(msgspec.Struct, frozen=True):
    """What was done in a half, and what became of the processes that lived through its end."""

    minutes: float
    kills: dict[str, int]
    pressure: dict[str, int]
    snapshots: int
    saved: tuple[int, int]  # the newest checkpoint where judging began, and at the end
    growths: tuple[Growth, ...]
    left: tuple[str, ...]  # processes that outlived the run

    @property
    def broken(self) -> list[str]:
        """The promises that did not hold, in words."""
        found = [f"{who} outlived the run" for who in self.left]
        for each in self.growths:
            if each.rise > MOST_RISE and (each.name not in RAY or each.more > MOST_OF_RAY):
                found.append(f"memory of {each.name} ({each.pid}) rose by {each.rise:.1%}")
            if each.further > MOST_FURTHER:
                found.append(f"{each.name} ({each.pid}) has {each.further} more descriptors")
        lived = {each.name for each in self.growths}
        found += [
            f"{name} did not live through what is judged" for name in JUDGED if name not in lived
        ]
        found += [f"no {kind} was killed" for kind in KINDS if not self.kills.get(kind)]
        if self.saved[1] <= self.saved[0]:
            found.append(f"nothing was trained after step {self.saved[0]}")
        return found + [f"{count} × {name}" for name, count in self.faults.items()] + self.missing

    @property
    def faults(self) -> dict[str, int]:
        """Connections that were held, or answered, though they should not have been."""
        wrong = ("/held", "/answered")
        names = [name for name in self.pressure if not name.startswith("overload/")]
        return {name: self.pressure[name] for name in names if name.endswith(wrong)}

    @property
    def missing(self) -> list[str]:
        """What did not happen, so that nothing is shown by it."""
        due = ("overload/refused", "overload/answered", "loris/head/let go", "loris/body/let go")
        due += ("strangers/replay/let go", "strangers/weight_sync/let go")
        none = [name for name in due if not self.pressure.get(name)]
        return [f"never: {name}" for name in [*none, *["a snapshot"] * (not self.snapshots)]]


class Watch(threading.Thread):
    """Looks at a run's processes and snapshots until told to end."""

    def __init__(self, census: Census, log: Path) -> None:
        super().__init__(daemon=True)
        self._census, self._log = census, log
        self._over = threading.Event()
        self._snapshots: set[tuple[str, int]] = set()

    @property
    def snapshots(self) -> int:
        """How many were made."""
        return len(self._snapshots)

    def run(self) -> None:
        """Look."""
        looked_s = 0.0
        while not self._over.wait(GLANCE_S):
            for _, path in snapshots(self._log):
                with suppress(FileNotFoundError):
                    self._snapshots.add((path.name, path.stat().st_mtime_ns))
            if time.time() - looked_s >= LOOK_S:
                looked_s = time.time()
                self._census.look(looked_s)

    def end(self) -> None:
        """Stop looking. Raises RuntimeError where it had ended by itself."""
        ended = not self.is_alive()
        self._over.set()
        self.join()
        if ended:
            raise RuntimeError("nobody looked at the processes any more")


def settings(token: Path) -> list[str]:
    """Those of the run, with ports of their own; said again when it is resumed."""
    return [
        *SETTINGS,
        f"replay.endpoint={free_port()}",
        f"weight_sync.endpoint={free_port()}",
        f"retrieval.port={free_port().rpartition(':')[2]}",
        f"retrieval.token_file={token}",
    ]


def target(run_dir: Path, queries: Sequence[str]) -> Target:
    """Where the run is reached, as its configuration says."""
    config = load(run_dir / "config.yaml")
    endpoints = {"replay": config.replay.endpoint, "weight_sync": config.weight_sync.endpoint}
    asked = config.retrieval
    return Target(
        (asked.host, asked.port),
        Path(asked.token_file).read_text().strip(),
        asked.request_deadline_s,
        queries,
        {name: _place(endpoint) for name, endpoint in endpoints.items()},
    )


def _place(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def half(number: int, minutes: float, out: Path, seed: int) -> Half:
    """Begin the run, or go on with it, and do all to it that is due."""
    run_dir, mark, began_s = out / "run", uuid4().hex, time.time()
    times = Times(minutes)
    files = demo_files()
    queries = [json.loads(line)["question"] for line in files.train.read_text().splitlines()]
    given = settings(out / "token")
    launcher = launch(run_dir, STEPS, *given, **{MARK: mark, "SPT_NOENV": "1"})
    census = Census(f"{MARK}={mark}", run_dir, launcher.pid)
    victims = Victims(launcher, run_dir, seed + number, since_s=began_s)
    with ExitStack() as stack:
        stack.callback(_end, launcher, number)
        victims.wait_until_training(at_least=len(MEMBERS) - 1)
        _tell(began_s, "every process does its work")
        watch = stack.enter_context(_watching(Watch(census, run_dir / FILE_NAME)))
        pressure = stack.enter_context(Pressure(target(run_dir, queries)))
        kills = _strike(victims, began_s, times, seed + number)
        _last(launcher, began_s, times.judged_s, pressure)
        before = _saved(run_dir)
        _last(launcher, began_s, times.end_s, pressure)
        after = _saved(run_dir)
    left = _gone(f"{MARK}={mark}")
    judged = Stretch(began_s + times.judged_s, began_s + times.end_s)
    return Half(
        minutes,
        dict(Counter(blow.kind for blow in kills)),
        dict(sorted(pressure.counts.items())),
        watch.snapshots,
        (before, after),
        tuple(census.over(judged)),
        tuple(left),
    )


@contextmanager
def _watching(watch: Watch) -> Iterator[Watch]:
    watch.start()
    try:
        yield watch
    finally:
        watch.end()


def _strike(victims: Victims, began_s: float, times: Times, seed: int) -> list[Blow]:
    """Kill one process after another, as long as there is time for it."""
    done: list[Blow] = []
    for kind, how in cycle(plan(len(KINDS), 0, seed)):
        if time.time() - began_s > times.last_blow_s:
            return done
        done.append(blow := victims.strike(kind, how, 0.0))
        _tell(began_s, f"killed {blow.name} ({kind}): back after {blow.recovered_s:.1f} s")
    return done


def _last(
    launcher: "subprocess.Popen[bytes]", began_s: float, until_s: float, pressure: Pressure
) -> None:
    """Let the run go on under pressure. Raises ChaosFailed when it ends by itself."""
    told_s = 0.0
    while (now_s := time.time()) < began_s + until_s:
        if launcher.poll() is not None:
            raise ChaosFailed("the run ended by itself")
        if now_s - told_s >= TELL_S:
            told_s = now_s
            shown = ("overload/answered", "overload/refused")
            _tell(began_s, ", ".join(f"{pressure.counts[name]:,} {name}" for name in shown))
        time.sleep(GLANCE_S)


def _end(launcher: "subprocess.Popen[bytes]", number: int) -> None:
    """The first half ends as by a crash, the second in order."""
    launcher.send_signal(signal.SIGKILL if number == 1 else signal.SIGTERM)
    try:
        launcher.wait(END_S)
    except subprocess.TimeoutExpired as error:
        launcher.kill()
        raise ChaosFailed(f"the launcher has not ended within {END_S:g} s of SIGTERM") from error


def _gone(mark: str) -> list[str]:
    """Who still lives after all should have gone."""
    end_s = time.monotonic() + END_S
    while (left := carrying(mark)) and time.monotonic() < end_s:
        time.sleep(GLANCE_S)
    return [line.replace(b"\0", b" ").decode(errors="replace") for line in left.values()]


def _saved(run_dir: Path) -> int:
    """The step of the newest checkpoint."""
    names = (path.name.removeprefix("step-") for path in (run_dir / "checkpoints").glob("step-*"))
    return max((int(name) for name in names if name.isdigit()), default=0)


def _tell(began_s: float, what: str) -> None:
    print(f"[{(time.time() - began_s) / 60:5.1f} min] {what}", flush=True)


def report(run_dir: Path, halves: Sequence[Half]) -> dict[str, Any]:
    """The figures of the halves so far, and what the run's books come to."""
    books = Audit()
    books.fold(run_dir / FILE_NAME)
    closed = [each for each in segments(run_dir / FILE_NAME) if each.closed]
    compacted = sum(map(is_compacted, closed))
    found = verdict(books)
    broken = [f"half {n}: {each}" for n, one in enumerate(halves, 1) for each in one.broken]
    broken += [f"{found[name]} {name}" for name in ("lost", "trained_twice") if found[name]]
    broken += [f"books: {fault}" for fault in books.faults[:20]]
    return {
        "halves": [msgspec.to_builtins(one) for one in halves],
        **found,
        "steps": books.steps.count,
        "steps_committed": books.committed,
        "replay_restarts": books.replay_restarts,
        "segments": len(closed) + 1,
        "segments_compacted": compacted,
        "payloads": dict(books.payloads),
        "log_bytes": sum(each.path.stat().st_size for each in segments(run_dir / FILE_NAME)),
        "broken": broken + ["no segment was compacted"] * (not compacted),
    }


def show(halves: Sequence[Half], figures: dict[str, Any]) -> None:
    """A table of what each process came to hold in each half, what was done, the verdict."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for number, one in enumerate(halves, 1):
        heads = ("process", "pid", "MB", "rise", "of the median", "descriptors", "more")
        table = Table(*heads, title=f"half {number}")
        for each in one.growths:
            rises = (f"{each.rise:+.2%}", f"{each.median_rise:+.2%}")
            sizes = (f"{each.least[-1] / 1e6:,.1f}", *rises)
            files = (str(each.descriptors[-1]), f"{each.further:+}")
            table.add_row(each.name, str(each.pid), *sizes, *files)
        console.print(table)
        done = {"kills": one.kills, "snapshots": one.snapshots, **one.pressure}
        for name, value in done.items():
            console.print(f"{name}: {value}", markup=False, highlight=False)
    for name, value in figures.items():
        if name not in ("halves", "broken", "faults"):
            console.print(f"{name}: {value}", markup=False, highlight=False)
    for each in figures["broken"]:
        console.print(f"broken: {each}", markup=False, highlight=False)
    console.print("every promise was kept" if not figures["broken"] else "promises were broken")


def main(words: Sequence[str] | None = None) -> int:
    """One half and the report of all so far; exit code 1 when a promise is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--half", type=int, choices=HALVES, required=True, help="1 begins the run, 2 resumes it")
    add("--minutes", type=float, default=MINUTES, help="of this half (30)")
    add("--seed", type=int, default=0, help="of who is killed when")
    add("--out", type=Path, default=REPOSITORY / "runs" / "weeks")
    add("--json", type=Path)
    given = parser.parse_args(words)
    out = given.out.resolve()
    first, record = out / "half-1.json", out / f"half-{given.half}.json"
    if given.half == 1:
        _clear(out)
        _make_token(out / "token")
    elif not first.exists() or record.exists():
        what = "this half has been" if record.exists() else f"{first} is not there"
        print(f"weeks: --half 2: {what}: begin with --half 1", file=sys.stderr)
        return 2
    try:
        one = half(given.half, given.minutes, out, given.seed)
    except ChaosFailed as failure:
        print(f"weeks: {failure}; see {out / 'run.out'}", file=sys.stderr)
        return 1
    record.write_bytes(msgspec.json.encode(one))
    halves = [msgspec.json.decode(first.read_bytes(), type=Half)] if given.half == 2 else []
    figures = report(out / "run", [*halves, one])
    show([*halves, one], figures)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if figures["broken"] else 0


def _clear(out: Path) -> None:
    """Leave nothing of earlier halves."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "run", ignore_errors=True)
    for path in (out / "run.out", out / "token", *out.glob("half-*.json")):
        path.unlink(missing_ok=True)


def _make_token(path: Path) -> None:
    path.touch(mode=0o600)
    path.write_text(f"{uuid4().hex}\n")


if __name__ == "__main__":
    sys.exit(main())
