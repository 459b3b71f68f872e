"""Processes of a run that are stopped (SIGSTOP), engines too: each is named, and goes on or is to
be replaced.
"""

from collections.abc import Callable, Iterator, Mapping

from scripts.fleet.fleet import Member
from scripts.runs.fleet_log import FleetLog


class Stopped:
    """Who is, by name, and since when."""

    def __init__(self, limit_s: float, log: FleetLog, say: Callable[[str, str], None]) -> None:
        """`limit_s`: `fleet.stopped_deadline_s`."""
        self.since: dict[str, float] = {}
        self._limit_s, self._log, self._say = limit_s, log, say

    def look(self, members: Mapping[str, Member], now: float) -> Iterator[tuple[str, str]]:
        """Note who is and who goes on; yield those whose time is over, each with the reason."""
        for name, member in list(members.items()):
            pids = member.stopped() if member.exit_code is None else []
            if not pids:
                if self.since.pop(name, None) is not None:
                    self._log.write("continued", name)
            elif name not in self.since:
                self.since[name] = now
                self._log.write("stopped", name)
                self._name(name, pids)
            elif now - self.since[name] >= self._limit_s:
                del self.since[name]
                yield name, f"was stopped for {self._limit_s:g} s"

    def _name(self, name: str, pids: list[int]) -> None:
        self._say(
            f"{name} is stopped (SIGSTOP): `kill -CONT {' '.join(map(str, pids))}` lets it go "
            f"on; in {self._limit_s:g} s (fleet.stopped_deadline_s) it is replaced",
            "bold yellow",
        )
