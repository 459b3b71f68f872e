"""From placed processes to a named ending: shows the run, and ends it with the first cause.

Consumes replay's `Status` and the fleet's exit codes; produces the cause of the end and the actors'
last gauges; waits for the learner to end well, unblocked by its exit, by any other process's death
or by Ctrl-C.
"""

import signal
import time
from pathlib import Path

from configs.schema import Config
from replay.client import Observer
from replay.protocol import ReplayError, Status
from scripts.console import Console
from scripts.fleet import Fleet

POLL_S = 0.2
DRAIN_MARGIN_S = 15.0


class RunFailed(RuntimeError):
    """A process of the run died or did not answer; the message is the first cause."""


class Interrupt:
    """Remembers Ctrl-C or SIGTERM; only the launcher gets them, workers have own sessions."""

    def __init__(self) -> None:
        self.cause = ""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._set)

    def _set(self, number: int, _frame: object) -> None:
        if self.cause:
            raise KeyboardInterrupt  # the second time: leave at once, ending the fleet on the way
        self.cause = f"interrupted by {signal.Signals(number).name}"


class Supervisor:
    """Watches one run. `gauges` holds each actor's last numbers, also of actors that have left."""

    def __init__(self, config: Config, fleet: Fleet, console: Console, stop: Interrupt) -> None:
        self.gauges: dict[str, dict[str, float]] = {}
        self._config, self._fleet, self._console, self._stop = config, fleet, console, stop
        self._status = Status((), (), {}, {}, "starting", "")
        self._steps = self._evaluations = 0
        self._asked = False

    def watch(self, observer: Observer) -> str:
        """Show the run until the learner has ended well; return why it ended. Raises RunFailed."""
        while not self._over():
            if self._stop.cause and not self._asked:
                self._console.phase("stopping")
                observer.shutdown(self._stop.cause)
                self._asked = True
            try:
                status = observer.status(self._steps, self._evaluations)
            except ReplayError as error:
                if not self._fleet.dead():
                    raise RunFailed(f"replay does not answer: {error}") from error
                continue
            self._show(status)
            time.sleep(POLL_S)
        return self._status.stop_cause or self._stop.cause

    def drain(self) -> None:
        """After the learner: actors within their deadline, then replay, then retrieval. Raises
        RunFailed.
        """
        fleet = self._fleet
        actors = [name for name in fleet.members if name.startswith("actor-")]
        left = fleet.wait(actors, self._config.actors.drain_deadline_s + DRAIN_MARGIN_S)
        fleet.end(left, deadline_s=5.0)
        for service in ("replay", "retrieval_server"):
            if service in fleet.members:
                fleet.end([service], deadline_s=10.0)
        if left:
            raise RunFailed(f"{', '.join(left)} did not drain within actors.drain_deadline_s")

    def _over(self) -> bool:
        dead = self._fleet.dead()
        ending = self._asked or bool(self._status.stop_cause)
        broken = {name: code for name, code in dead.items() if code or not ending}
        if broken:
            raise RunFailed(first_cause(self._fleet, broken))
        return "learner" in dead

    def _show(self, status: Status) -> None:
        self._status = status
        self.gauges.update(status.fleet)
        config = self._config
        for result in status.evaluations:
            self._console.evaluation(result, Path(config.run_dir), config.model.path)
            if result.step == 0 and config.learner.total_steps and not self._asked:
                self._console.phase("training")
        for report in status.steps:
            self._console.step(report, config.learner.total_steps)
        self._steps += len(status.steps)
        self._evaluations += len(status.evaluations)
        self._console.remind(status.phase)


def first_cause(fleet: Fleet, broken: dict[str, int]) -> str:
    """A killed process is a cause, one that fails beside it usually a consequence."""
    name = min(broken, key=lambda name: (broken[name] >= 0, broken[name] == 0, name))
    code = broken[name]
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    member = fleet.members[name]
    return f"{name} {how} (log: {member.log_path})\n{member.last_words()}".rstrip()
