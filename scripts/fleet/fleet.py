"""The processes of a run: every long-lived process runs under one Ray host actor of its own.

Ray only *places*: a host starts one `python -m <package>.worker` in its own group and reports its
exit code. The worker asks the kernel to die with its parent, so a host (or Ray, or the launcher)
that is killed takes its worker along. Every wait has a deadline. Where hosts run is a `Place`
(scripts/fleet/place.py).
"""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from scripts.fleet import guardian
from scripts.fleet.host import CALL_DEADLINE_S, FleetError, Host, time_to_drain
from scripts.fleet.kinds import is_actor
from scripts.fleet.place import UNTOLD, Here, NodeGone, Place, Seat

PLACE_DEADLINE_S = 60.0  # of a host: Ray starts a process for it
log = logging.getLogger(__name__)


_GONE = (ray.exceptions.RayError, NodeGone)


def _answer(seat: Seat, method: Any, *arguments: object) -> Any:
    """A host's answer. Raises Ray's errors, and NodeGone as soon as its machine is."""
    reference, end = method.remote(*arguments), time.monotonic() + CALL_DEADLINE_S
    while True:
        if seat.gone:
            raise NodeGone(seat.gone)
        try:
            return ray.get(reference, timeout=min(seat.look_s, CALL_DEADLINE_S))
        except ray.exceptions.GetTimeoutError:
            if time.monotonic() >= end:
                raise


def _started(name: str, seat: Seat, start: Any) -> tuple[int, float, int]:
    """What the start of a host's process returns; of one whose node has gone meanwhile, who counts
    as killed, pid 0. Raises FleetError.
    """
    end = time.monotonic() + PLACE_DEADLINE_S
    while not seat.gone:
        try:
            found: tuple[int, float, int] = ray.get(
                start, timeout=min(seat.look_s, PLACE_DEADLINE_S)
            )
            return found
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError) as error:
            if time.monotonic() >= end:
                why = seat.why_not() or f"no answer in {PLACE_DEADLINE_S:g} s"
                raise FleetError(f"could not place {name}: {why}") from error
            time.sleep(0.05)
        except (ray.exceptions.RayError, FleetError) as error:
            if seat.node_id and isinstance(error, ray.exceptions.ActorDiedError):
                break
            raise FleetError(f"could not place {name}: {error}") from error
    return 0, time.time(), 0


class Member:
    """One placed process: its name, log and pid, the command that started it, and when."""

    def __init__(
        self,
        name: str,
        host: Any,
        started: tuple[int, float, int],
        log_path: Path,
        command: list[str],
        seat: Seat,
    ) -> None:
        """`command` is without the words of its seat."""
        self.name, self.log_path, self.command, self.host = name, log_path, command, host
        self.pid, self.started_at, self._log_from = started
        self.seat, self.words = seat, list(seat.words)
        self.exit_code: int | None = None
        self._end = host.wait.remote()  # asked once: to ask again and again costs each host

    def ready_at(self) -> float | None:
        """The time, since the epoch, at which the process said that it works; None before."""
        with contextlib.suppress(*_GONE):  # `poll` says what has become of it
            found: float | None = _answer(self.seat, self.host.ready_at)
            return found
        return None

    def awaits_others(self) -> bool:
        """True where the process said that its own start is done, and it waits for others."""
        with contextlib.suppress(*_GONE):
            return bool(_answer(self.seat, self.host.awaits_others))
        return False

    def stopped(self) -> list[int]:
        """The pids that are stopped (SIGSTOP) of it and its own processes. Raises FleetError for a
        host that does not answer.
        """
        try:
            return list(_answer(self.seat, self.host.stopped))
        except ray.exceptions.GetTimeoutError as error:
            raise FleetError(
                f"the host of {self.name} did not answer in {CALL_DEADLINE_S} s"
            ) from error
        except _GONE:  # `poll` says what has become of it
            return []

    def host_lives(self) -> bool:
        """True where the host answers, so that it may start the process again."""
        with contextlib.suppress(*_GONE):
            _answer(self.seat, self.host.poll)
            return True
        return False

    def poll(self) -> int | None:
        """The exit code, or None while it runs; a host that is gone counts as killed (-9)."""
        if self.exit_code is None and self.seat.gone:
            self.exit_code = -signal.SIGKILL
        if self.exit_code is None and ray.wait([self._end], timeout=0)[0]:
            try:
                self.exit_code = ray.get(self._end)
            except ray.exceptions.RayError:
                self.exit_code = -signal.SIGKILL
        return self.exit_code

    def signal(self, number: int) -> None:
        """Send a signal to the process if it still runs."""
        try:
            _answer(self.seat, self.host.kill, number)
        except _GONE:
            log.warning("the host of %s is gone", self.name)

    def drain(self) -> None:
        """Have an actor drain, within what its node has left where that is known."""
        left_s = time_to_drain(self.seat.leaves_at, time.time())
        if left_s is None:
            self.signal(signal.SIGTERM)
            return
        with contextlib.suppress(*_GONE):  # `poll` says what has become of it
            _answer(self.seat, self.host.drain, left_s)

    def last_words(self, lines: int = 12) -> str:
        """The end of its log, since its last start."""
        return "\n".join(self.seat.tail(self.log_path, self._log_from).splitlines()[-lines:])


class Fleet:
    """Every process of a run, by name; `with Fleet(...)` ends them all, whatever happens."""

    def __init__(
        self,
        log_dir: Path,
        directory: Path,
        environment: dict[str, str],
        place: Place | None = None,
    ) -> None:
        """`directory` is the run's own 0700 directory under /tmp: sockets, and Ray's session inside
        it. `environment` is added to that of every process.
        """
        self.log_dir, self.directory, self._environment = log_dir, directory, environment
        self.members: dict[str, Member] = {}
        self._place: Place = place or Here()

    def __enter__(self) -> "Fleet":
        token = f"{self.directory.name}-{os.getpid()}"
        self._guardian = guardian.start(token, self.directory)
        os.environ[guardian.TOKEN] = token
        self._place.open(token, self.directory)
        return self

    def __exit__(self, *_: object) -> None:
        self.end(list(self.members), deadline_s=5.0)
        self._place.close()
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        self._guardian.wait(CALL_DEADLINE_S)

    def start(self, commands: dict[str, list[str]]) -> list[str]:
        """Place the processes all at once; one that has ended is replaced. Returns their names, and
        of others that they need beside them. Raises FleetError, and NoRoom.
        """
        others = self._place.beside(list(commands))
        lost = [n for n in others if n not in self.members or self.members[n].seat.gone]
        commands = {name: others[name] for name in lost} | commands  # the others are told of them
        # All have a seat before any is placed: a node that goes meanwhile leaves none half-started.
        seats = {name: self._place.seat(name) for name in commands}
        placed = {name: self._put(name, command, seats[name]) for name, command in commands.items()}
        for name, (host, start) in placed.items():
            started, seat = _started(name, seats[name], start), seats[name]
            path = self._log_path(name)
            self.members[name] = Member(name, host, started, path, commands[name], seat)
        return list(placed)

    def _put(self, name: str, command: list[str], seat: Seat) -> tuple[Any, Any]:
        """The host of a process, the last one if that lives, and what its start will return."""
        before, words = self.members.get(name), [*command, *seat.words]
        if before is not None and before.seat is seat and before.host_lives():
            return before.host, before.host.start.remote(words)
        ready = str(seat.directory / f"{name}.ready")
        # Two calls at once: one waits for the worker's end, beside all others.
        options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 2}
        options |= UNTOLD | seat.options()
        environment = {**self._environment, **seat.environment}
        log_path = str(self._log_path(name))
        host = ray.remote(**options)(Host).remote(words, environment, log_path, ready)
        return host, host.start.remote()

    def room(self, name: str) -> str:
        """Why no seat can be had for this process; ''."""
        return self._place.room(name)

    def leave(self, name: str) -> None:
        """Have others take the seat of a process that has left for good."""
        self._place.leave(name)

    def outdated(self) -> list[str]:
        """Actors that look for the learner where it is no longer."""
        alive = [m for m in self.members.values() if is_actor(m.name) and m.poll() is None]
        return [m.name for m in alive if self._place.outdated(m.words)]

    def evicted(self, waiting: Sequence[str]) -> dict[str, str]:
        """Actors that run where they cannot stay and are to leave now, each with the reason; room
        is first that of those `waiting` to start.
        """
        actors = [m for m in self.members.values() if is_actor(m.name) and m.seat.leaving]
        alive = {m.name: m.seat for m in actors if m.poll() is None}
        ends = {name: seat.leaves_at for name, seat in alive.items()}
        leave = self._place.evicted(ends, waiting)
        return {name: alive[name].leaving for name in leave}

    def displaced(self) -> str:
        """Why the learner is to save and move now, while it can; ''."""
        return self._place.displaced()

    def news(self) -> list[str]:
        """Lines on nodes that went or came since the last call."""
        return self._place.news()

    def _log_path(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def dead(self) -> dict[str, int]:
        """Exit codes of the processes that have ended."""
        codes = {name: member.poll() for name, member in self.members.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def wait(self, names: list[str], deadline_s: float) -> list[str]:
        """Wait until these have ended; return those that have not by the deadline."""
        end = time.monotonic() + deadline_s
        left = [name for name in names if name in self.members]
        while left := [name for name in left if self.members[name].poll() is None]:
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        return left

    def end(self, names: list[str], deadline_s: float) -> list[str]:
        """SIGTERM these; SIGKILL and return the names of what is left at the deadline."""
        alive = [name for name in names if self.members[name].poll() is None]
        for name in alive:
            self.members[name].signal(signal.SIGTERM)
        left = self.wait(alive, deadline_s)
        for name in left:
            self.members[name].signal(signal.SIGKILL)
        self.wait(left, 5.0)
        return left
