"""The supervisor of a run: shows it, has what ends unasked started again, names why it ended.

Consumes replay's `Status` and the fleet's exit codes; produces the cause of the end and the actors'
last gauges; waits for the learner to end well, unblocked by its exit, by a death that no restart
makes good, or by Ctrl-C.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from configs.runtime.process import Exit
from configs.runtime.signals import Interrupt
from configs.schema import Config
from replay.clients.launcher import Observer
from replay.log.event_log import FILE_NAME
from replay.protocol import ReplayError, Status
from replay.restoring import stop_cause
from scripts.fleet.causes import first_cause
from scripts.fleet.console import Console
from scripts.fleet.disk_forecast import DiskWatch
from scripts.fleet.fleet import Fleet
from scripts.fleet.kinds import REPLAY, RETRIEVAL, is_actor, is_rank, kind_of
from scripts.fleet.money import MoneyWatch
from scripts.fleet.restarts import BudgetSpent, Restarts
from scripts.fleet.resume import Progress
from scripts.fleet.scale import Wanted
from scripts.fleet.view import TRAINING
from scripts.fleet.wait_graph import wait_graph
from scripts.runs.waits_file import WaitsFile
from scripts.runs.waits_log import WaitsLog
from scripts.setup.preflight import lacks_descriptors

POLL_S = 0.2
SETTLE_S = 5.0  # for the first cause to end as well, once its consequences have
DRAIN_MARGIN_S = 15.0
SERVICES = (REPLAY, RETRIEVAL)


class RunFailed(RuntimeError):
    """A process of the run died or did not answer; the message is the first cause."""


class Supervisor:
    """Watches one run. `gauges` holds each actor's last numbers, also of actors that have left."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        console: Console,
        stop: Interrupt,
        shown: Progress,
        actor_command: Callable[[str], list[str]],
    ) -> None:
        """`shown`: by an earlier launch, and not again; `actor_command(name)` starts one."""
        self.gauges: dict[str, dict[str, float]] = {}
        self._config, self._fleet, self._console, self._stop = config, fleet, console, stop
        self._stop_cause = ""
        self._steps, self._evaluations = shown.reports, shown.evaluations
        self._asked = self._told = self._training = False  # processes, replay
        self._settled_at = 0.0
        self._status: Status | None = None
        self._restoring = ""  # how far replay is, by its last word; '' once it has been restored
        self._explained: set[str] = set()
        self._left: set[str] = set()  # actors that have left in order
        self._deserted_s = math.inf  # since when no actor is left
        self._heard_s = time.monotonic() + config.actors.starting_deadline_s
        self.restarts = Restarts(config.fleet, fleet, Path(config.run_dir), console.say)
        self.restarts.reach(shown.step)
        self._disk, self._money = DiskWatch(config, console.say), MoneyWatch(config, console.say)
        self._waits, self._waited = WaitsFile(Path(config.run_dir)), WaitsLog(Path(config.run_dir))
        self._wanted, self._actor_command = Wanted(Path(config.run_dir)), actor_command

    def watch(self, observer: Observer) -> str:
        """Show the run until the learner has ended well; return why. Raises RunFailed."""
        try:
            return self._watch(observer)
        except RunFailed:
            self._explain()
            raise
        finally:
            self._waits.remove()
            self._waited.end()

    def _watch(self, observer: Observer) -> str:
        while True:
            # Exit codes first: who ended well has told replay why, so the status explains them.
            dead = self._fleet.dead()
            for line in self._fleet.news():
                self._console.say(line, "bold yellow")
            self._disk.tend(time.monotonic())
            self._money.tend(time.monotonic())
            with _within_budget():
                self.restarts.look()
            if (wanted := self._wanted.change()) and not self._asked:
                self._scale(wanted)
            members = self._fleet.members  # some have been started again since
            dead = {n: code for n, code in dead.items() if members[n].exit_code is not None}
            try:
                if self._stop.cause and not self._told:
                    self._end_early(observer)
                if "replay" not in dead or "learner" in dead:
                    self._show(observer.status(self._steps, self._evaluations))
                    self._heard_s = time.monotonic()
            except ReplayError as error:
                self._judge_silence(dead, error)
            if self._judge(dead):
                continue
            if "learner" in dead:
                return self._stop_cause or self._interrupted or self._logged_cause()
            time.sleep(POLL_S)

    @property
    def _interrupted(self) -> str:
        return f"interrupted by {self._stop.cause}" if self._stop.cause else ""

    def drain(self) -> None:
        """Await the ranks and the actors; end replay, then retrieval. Raises RunFailed."""
        fleet = self._fleet
        services = {name for name in fleet.members if kind_of(name) in SERVICES}
        fleet.end([name for name in self.restarts.waiting if name not in services], deadline_s=5.0)
        others = [name for name in fleet.members if name not in services | {"learner"}]
        left = fleet.wait(others, self._config.actors.drain_deadline_s + DRAIN_MARGIN_S)
        fleet.end(left, deadline_s=5.0)
        for service in SERVICES:
            fleet.end([name for name in fleet.members if kind_of(name) == service], 10.0)
        if left:
            raise RunFailed(f"{', '.join(left)} did not drain within actors.drain_deadline_s")

    def _end_early(self, observer: Observer) -> None:
        """Tell all that the run ends; a replay that is restored, and would only then answer, once
        it has been.
        """
        first, self._asked = not self._asked, True
        try:
            if first:
                self._call_off()
            if not self._restoring:
                self._told = True
                observer.shutdown(self._interrupted)
        finally:
            # The learner may wait for actors that have left. Its other ranks leave with it: it may
            # still need them to save.
            if first:
                self._fleet.members["learner"].signal(signal.SIGTERM)

    def _call_off(self) -> None:
        """Have nobody come any more, and those leave whom replay does not tell."""
        self._console.phase("stopping")
        self.restarts.call_off()
        for name, member in self._fleet.members.items():
            # An engine that still starts is far from asking replay anything.
            hears = self._training and name in self.gauges and not self._restoring
            if is_actor(name) and not hears:
                member.signal(signal.SIGTERM)

    def _judge(self, dead: dict[str, int]) -> bool:
        """Return True where a process has died unasked and the run goes on. Raises RunFailed."""
        trained = dead.get("learner") == Exit.DONE
        ending = bool(self._stop_cause or self._stop.cause)
        ending = ending or (trained and dead.get("replay") == Exit.DONE)  # before it could be asked
        broken = {name: code for name, code in dead.items() if code or not (ending or trained)}
        if ending or trained:  # who dies now, or rests, has nothing left to do
            broken = {n: code for n, code in broken.items() if n == "replay" or is_rank(n)}
        if ending:
            broken = {n: code for n, code in broken.items() if code != Exit.MADE_WAY}
        elif not trained:
            broken = self._without_leavers(broken)
        if self._stop.cause and "replay" in broken and "learner" not in dead:
            self._tend({"replay": broken["replay"]}, at_once=True)  # the others' end waits for it
        if not broken or self._stop.cause:
            return False
        if ending or not self._config.fleet.restarts:
            return self._settle(broken, dead)
        waiters = {name for name, code in broken.items() if code == Exit.CONSEQUENCE}
        if waiters - self._explained:  # a deadline has passed
            self._explain()
        self._explained = waiters
        self._tend(broken)
        time.sleep(max(0.02, min(POLL_S, self.restarts.due_in_s())))
        return True

    def _tend(self, broken: dict[str, int], at_once: bool = False) -> None:
        with _within_budget():
            self.restarts.tend(broken, at_once)

    def _explain(self) -> None:
        age_s = max(0.0, time.monotonic() - self._heard_s)
        states = self.restarts.states()
        names = dict.fromkeys([*self._fleet.members, *states])
        lines = wait_graph(self._status, age_s, names, states)
        self._console.say("who waits for whom:", "bold yellow")
        for line in lines:
            self._console.say(f"  {line}")

    def _without_leavers(self, broken: dict[str, int]) -> dict[str, int]:
        """Without the actors that were asked to leave and have; the last one may not."""
        actors = {name for name in self._fleet.members if is_actor(name)}
        broken = {n: code for n, code in broken.items() if n not in self.restarts.returning}
        leavers = {n for n in actors & broken.keys() if not broken[n] or self.restarts.unwanted(n)}
        for name in sorted(leavers - self._left):
            self._console.say(f"{name} has left", "bold yellow")
            self._fleet.leave(name)
        self._left = leavers  # one that has come back may leave again
        deserted = leavers and actors <= leavers
        self._deserted_s = min(self._deserted_s, time.monotonic()) if deserted else math.inf
        if self._heard_s > self._deserted_s:  # and replay does not say that the run is over
            raise RunFailed(f"every actor has left: {', '.join(sorted(actors))}")
        return {name: code for name, code in broken.items() if name not in leavers}

    def _settle(self, broken: dict[str, int], dead: dict[str, int]) -> bool:
        """Raise RunFailed once the first cause is known, or SETTLE_S after the first death."""
        now = time.monotonic()
        self._settled_at = self._settled_at or now + SETTLE_S
        alive = self._fleet.members.keys() - dead.keys()
        if set(broken.values()) != {Exit.CONSEQUENCE} or now > self._settled_at or not alive:
            raise RunFailed(first_cause(self._fleet, broken))
        time.sleep(POLL_S)
        return True

    def _judge_silence(self, dead: dict[str, int], error: ReplayError) -> None:
        """Replace replay unless it starts, is stopped for a while, or left after the others, or one
        is gone that is about to be back.
        """
        limit_s = self._config.fleet.silence_deadline_s
        returning = "replay" in self.restarts.waiting or self.restarts.stopped("replay")
        gone = (dead.keys() | self._fleet.dead().keys()) - self._left - self.restarts.absent
        if returning or gone or self._stop.cause:
            return
        if time.monotonic() - self._heard_s < limit_s:
            return
        if not self._config.fleet.restarts:
            raise RunFailed(f"replay does not answer: {error}") from error
        self.restarts.end("replay", f"gave no answer for {limit_s:g} s")
        self._heard_s = time.monotonic()

    def _logged_cause(self) -> str:
        """The cause of the stop on record, for when replay has left before it could be asked."""
        path = Path(self._config.run_dir) / FILE_NAME
        return stop_cause(path) or "the learner ended without a word"

    def _scale(self, wanted: int) -> None:
        if why := lacks_descriptors(wanted):
            self._console.say(f"{wanted} actors wanted: refused: {why}", "bold red")
            return
        with _within_budget():
            self.restarts.scale(wanted, self._actor_command)

    def _show(self, status: Status) -> None:
        if status.restoring:
            if status.phase != self._restoring:  # a long log is no start that hangs
                self._restoring = status.phase
                self.restarts.got_on["replay"] = time.monotonic()
            self._console.remind(status.phase)
            return
        self._restoring = ""
        self._status, self._stop_cause = status, status.stop_cause
        self.gauges.update(status.fleet)
        config = self._config
        for result in status.evaluations:
            self._console.evaluation(result, status.shown, config.model.path)
            if result.step == 0 and config.learner.total_steps:
                self._begin_training()
        for report in status.steps:
            self._begin_training()
            self._console.step(report, config.learner.total_steps)
        reached = [result.step for result in status.evaluations]
        reached += [report.step for report in status.steps]
        self.restarts.reach(max(reached, default=-1))
        self._steps, self._evaluations = status.reported, status.evaluated
        self._console.status(status, self._actor_states())
        self._waits.tell(status, self.restarts.states())
        self._waited.tell(status, self.restarts.states())

    def _actor_states(self) -> dict[str, str]:
        states = self.restarts.states()
        actors = {*filter(is_actor, self._fleet.members), *filter(is_actor, states)} - self._left
        return {name: states.get(name, "") for name in sorted(actors, key=_in_order)}

    def _begin_training(self) -> None:
        if not (self._training or self._asked):
            self._training = True
            self._console.phase(TRAINING)


def _in_order(name: str) -> tuple[int, str]:
    return len(name), name


@contextlib.contextmanager
def _within_budget() -> Iterator[None]:
    try:
        yield
    except BudgetSpent as spent:
        raise RunFailed(str(spent)) from spent
