"""The place of a run's hosts: this machine (`Here`), or the nodes of a cluster
(scripts/fleet/cluster.py). Each host has a seat there.
"""

import contextlib
import faulthandler
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import ray

from configs.runtime.process import Exit
from configs.runtime.watchdog import phase
from scripts.fleet.host import CALL_DEADLINE_S, FleetError, tail
from scripts.fleet.local_ray import MONITOR, start_ray

# Of an actor of Ray: else its head keeps 4 KB of each call, and hosts are called each second.
UNTOLD = {"enable_task_events": False}
RAY_STARTS = 3  # on a machine that is busy
RAY_DEADLINE_S = 180.0  # of all of them: to connect to what it has started Ray waits without end
LOCKED_S = 10.0  # after that: the process ends, and says where it stood


class NodeGone(FleetError):
    """The machine of a host answers no more."""


class Seat:
    """The place of one host. `words` end the command of its process, which finds the sockets and
    files of the run in `directory`; `gone` says why nothing is there any more, `leaving` that it
    will not be for long, `leaves_at` until when (since the epoch; 0: not known); `node_id` is
    Ray's, of one of several nodes.
    """

    gone = leaving = node_id = ""
    leaves_at = 0.0
    look_s = CALL_DEADLINE_S  # how often, while a host is awaited, `gone` is looked at

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        words: Sequence[str] = (),
    ) -> None:
        self.directory, self.words = directory, list(words)
        self.environment = dict(environment or {})

    def options(self) -> dict[str, Any]:
        """The options of the host's Ray actor."""
        return {}

    def tail(self, log: Path, offset: int) -> str:
        """What a log has from there on; raises nothing."""
        return tail(str(log), offset)

    def why_not(self) -> str:
        """Why Ray may not have placed the host, where that is known."""
        return ""


class Place(Protocol):
    """Where the hosts of a run may lie."""

    def open(self, token: str, directory: Path) -> None:
        """Have Ray run, and all that hosts need be there. Raises FleetError."""

    def close(self) -> None:
        """Leave Ray; end what `open` has started."""

    def seat(self, name: str) -> Seat:
        """The seat of a process that is about to start. Raises NoRoom."""

    def room(self, name: str) -> str:
        """Why no seat can be had for this process; ''."""

    def leave(self, name: str) -> None:
        """Have others take the seat of a process that has left for good."""

    def beside(self, names: Sequence[str]) -> dict[str, list[str]]:
        """The commands of further processes that these need where they now lie."""

    def outdated(self, words: Sequence[str]) -> bool:
        """True where a process with these words looks for the learner where it is no longer."""

    def evicted(self, ends: Mapping[str, float], waiting: Sequence[str]) -> list[str]:
        """Those of these actors, whose seats end at these times (0: not known), that are to leave
        now; room is first that of those `waiting` to start.
        """

    def displaced(self) -> str:
        """Why the learner is to save and move now, while it can; ''."""

    def news(self) -> list[str]:
        """Lines on nodes that went or came since the last call."""


class Here:
    """This machine alone, with a Ray of the run's own."""

    def open(self, token: str, directory: Path) -> None:
        """Start Ray."""
        self._seat = Seat(directory)
        os.environ.update({"SPT_NOENV": "1", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
        # Ray's monitor would end the hosts, which are small, for what their processes hold; the
        # kernel ends the process that holds most, and that one is started again.
        os.environ.setdefault(MONITOR, "0")
        with watched("starting Ray"):
            self._start_ray(directory / "ray")

    def _start_ray(self, folder: Path) -> None:
        for left in reversed(range(RAY_STARTS)):
            try:
                start_ray(os.cpu_count(), folder)
                return
            except Exception as error:  # Ray raises it bare
                ray.shutdown()
                if not left or "timed out during startup" not in str(error):  # it waits for 30 s
                    raise

    def close(self) -> None:
        """End Ray."""
        ray.shutdown()

    def seat(self, name: str) -> Seat:
        """The same for all."""
        return self._seat

    def room(self, name: str) -> str:
        """There always is."""
        return ""

    def leave(self, name: str) -> None:
        """It was nobody's."""

    def beside(self, names: Sequence[str]) -> dict[str, list[str]]:
        """None."""
        return {}

    def outdated(self, words: Sequence[str]) -> bool:
        """Never."""
        return False

    def evicted(self, ends: Mapping[str, float], waiting: Sequence[str]) -> list[str]:
        """None."""
        return []

    def displaced(self) -> str:
        """Never."""
        return ""

    def news(self) -> list[str]:
        """None."""
        return []


@contextlib.contextmanager
def watched(name: str) -> Iterator[None]:
    """Have this process end where Ray does not come back from what is done inside."""
    # Where Ray holds the interpreter's lock while it waits, no thread of Python's can watch.
    faulthandler.dump_traceback_later(RAY_DEADLINE_S + LOCKED_S, exit=True)
    try:
        with phase(name, RAY_DEADLINE_S, _leave, who="the launcher"):
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _leave(message: str) -> None:
    """End this process, which cannot leave Ray's native code; the guardian ends Ray's."""
    print(f"forage: {message}: run the same command again", file=sys.stderr, flush=True)
    os._exit(Exit.FAILED)
