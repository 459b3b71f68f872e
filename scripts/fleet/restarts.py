"""Restarts of a run's processes: what ends unasked or stands still starts again, at a bounded rate.

A restart waits `fleet.first_pause_s`, twice as long each time that the same process ends soon after
the last; the ranks of a learner start together. An actor whose restarts are spent rests while
others serve. Nothing here waits. Every event is a line in `fleet.jsonl`.
"""

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from configs.fleet import FleetConfig
from configs.runtime.process import Exit
from configs.runtime.signals import MAKE_WAY
from scripts.fleet.allowance import Allowance
from scripts.fleet.causes import blame, cause_of
from scripts.fleet.fleet import Fleet, Member
from scripts.fleet.kinds import is_actor, is_rank
from scripts.fleet.place import NodeGone
from scripts.fleet.stopped import Stopped
from scripts.runs.fleet_log import FleetLog

SOON_S = 60.0  # a process that ends later than this after its start starts afresh
HOMELESS_S = 600.0  # how long a run waits for a node with room for its learner, or any actor
_WHOSE_ROOM = ("an actor", "the learner")
_REMEDY = "mend what ends it, or raise fleet.restarts, before you go on with the run"
LOOK_S = 3.0  # how often stopped processes are looked for, and room for those that wait for it


class BudgetSpent(RuntimeError):
    """No restart is left of what the run needs, or none would help; the message is the cause."""


class Restarts:
    """Starts processes again; `made`: which and why; `got_on`: when one that starts last did so."""

    def __init__(
        self, config: FleetConfig, fleet: Fleet, run_dir: Path, say: Callable[[str, str], None]
    ) -> None:
        """`say(text, style)` tells the person at the terminal."""
        self.made: list[dict[str, str]] = []
        self._config, self._fleet, self._say = config, fleet, say
        self._log = FleetLog(run_dir)
        self._allowed = Allowance(config.restarts, config.restarts_window_s)
        self._due: dict[str, float] = {}  # when to start it again
        self._resting: set[str] = set()  # of those, actors that ended more often than they may
        self._unproved: set[str] = set()  # actors that have rested, and not been ready since
        self._step = -1  # the last that was reported or evaluated
        self._ended_for: dict[str, str] = {}  # by the launcher, and why
        self._since: dict[str, float] = {}
        self._tries: dict[str, int] = {}
        self._stopped = Stopped(config.stopped_deadline_s, self._log, say)
        self._unready: set[str] = set()
        self._worked: set[str] = set()  # those that were ready once: their input is good
        self._wanted: int | None = None  # actors, once somebody has asked for a number
        self.got_on: dict[str, float] = {}
        self._looked_s, self._ending = 0.0, False
        self._leaving: set[str] = set()  # told to
        self._evicted: dict[str, Member] = {}  # told that their nodes are to go
        self._moving = False  # the learner, told the same
        self._returning: dict[str, list[str]] = {}  # actors that are to start, and how
        self._roomless: dict[str, str] = {}  # no node has room for them: why
        self._unsaid: set[str] = set()  # those of whom that has not been said
        self._homeless_s: dict[str, float] = {}  # since when that is so of all actors, of a rank
        self._counted: set[str] = set()  # nodes whose end has cost its restart
        self._note_started(list(fleet.members))

    @property
    def returning(self) -> set[str]:
        """Actors that are to start: once they have left, or once a node has room for them."""
        return set(self._returning)

    @property
    def absent(self) -> set[str]:
        """Who rests, waits for room or is to start, but no rank: that may last for weeks."""
        found = self._resting | self._roomless.keys() | self._returning.keys()
        return {name for name in found if not is_rank(name)}

    @property
    def waiting(self) -> set[str]:
        """Processes that are about to be started again, or have not said that they are ready."""
        return self._due.keys() | self._unready

    def due_in_s(self) -> float:
        """Seconds until the next one is started again; infinite when nobody waits for that."""
        return max(0.0, min(self._due.values(), default=math.inf) - time.monotonic())

    def states(self) -> dict[str, str]:
        """The reason why a process does not work, by name; without those that do."""
        now = time.monotonic()
        found = {name: f"starts since {now - self._since[name]:.0f} s" for name in self._unready}
        for name, since in self._stopped.since.items():
            found[name] = f"is stopped (SIGSTOP) since {now - since:.0f} s"
        for name, member in self._fleet.members.items():
            if member.exit_code is not None:
                found[name] = f"has ended with {member.exit_code}"
        for name, why in self._roomless.items():
            found[name] = f"waits for room: {why}"
        for name in self._due.keys() - self._roomless.keys():
            what = "rests" if name in self._resting else "has ended"
            found[name] = f"{what}, and starts again in {max(0.0, self._due[name] - now):.1f} s"
        return found

    def tend(self, broken: Mapping[str, int], at_once: bool = False) -> None:
        """Start again, in time or at once, those that ended unasked. Raises BudgetSpent."""
        now = time.monotonic()
        known = self._due.keys() | self._returning.keys()
        fresh = {name: code for name, code in broken.items() if name not in known}
        for name, code in sorted(fresh.items(), key=blame):
            if name not in self._due:  # another rank's end may have brought it here
                self._schedule(name, code, now)
        due = [n for n, at in self._due.items() if at <= now or (at_once and n in broken)]
        # The ranks of a learner find each other only if all start anew.
        due = [name for name in due if self._fleet.members[name].poll() is not None]
        due = self._with_room(sorted(due, key=lambda name: not is_rank(name)), now)
        if any(map(is_rank, self._roomless)):
            due = [name for name in due if not is_rank(name)]
        if due:
            if self._start({name: self._command(name) for name in due}):
                self._follow_the_learner(due)
            else:
                self._due |= dict.fromkeys(due, now + LOOK_S)

    def _start(self, commands: dict[str, list[str]]) -> bool:
        """Start these; False where the node of one has gone meanwhile."""
        try:
            self._note_started(self._fleet.start(commands))
        except NodeGone as error:
            self._say(f"{', '.join(commands)} cannot start: {error}", "bold yellow")
            return False
        return True

    def _with_room(self, names: Sequence[str], now: float) -> list[str]:
        """Those that find a node, and say what is new of that. Raises BudgetSpent."""
        waited = set(self._roomless)
        found = [name for name in names if self._has_room(name, now)]
        if came := [name for name in found if name in waited]:
            self._say(f"there is room now for {', '.join(came)}", "bold yellow")
        for why in dict.fromkeys(self._roomless[name] for name in names if name in self._unsaid):
            alike = [n for n in names if n in self._unsaid and self._roomless[n] == why]
            verb = "waits" if len(alike) == 1 else "wait"
            self._say(f"{', '.join(alike)} {verb} for room: {why}", "bold yellow")
        self._unsaid.clear()
        return found

    def _has_room(self, name: str, now: float) -> bool:
        """True where a process finds a node; one that does not is looked at again. Raises
        BudgetSpent where the run cannot do without it.
        """
        if self._learner_first(name):
            if name in self._due:
                self._due[name] = now + LOOK_S
            return False
        if not (why := self._fleet.room(name)):
            self._roomless.pop(name, None)
            return True
        if name == "replay":
            raise BudgetSpent(f"{name} cannot be started again: {why}")
        if self._roomless.get(name) != why:
            self._unsaid.add(name)
        self._roomless[name] = why
        if name in self._due:
            self._due[name] = now + LOOK_S
        actors = [each for each in self._fleet.members if is_actor(each)]
        homeless = all(each in self._roomless for each in actors if not self.unwanted(each))
        if homeless or is_rank(name):
            who = _WHOSE_ROOM[is_rank(name)]
            if now - self._homeless_s.setdefault(who, now) > HOMELESS_S:
                raise BudgetSpent(f"for {HOMELESS_S:g} s no node had room for {who}: {why}")
        return False

    def _learner_first(self, name: str) -> bool:
        """True for an actor while a rank of the learner has no node: it would take its room."""
        ranks = [each for each in self._due if is_rank(each)]
        homeless = any(self._fleet.members[each].seat.gone for each in ranks)
        return is_actor(name) and homeless

    def _follow_the_learner(self, started: list[str]) -> None:
        """Have actors that look for a learner where it is no longer leave, and come back."""
        if "learner" in started and (actors := self._fleet.outdated()):
            self._call_back(actors)
            self._say(f"the learner has moved: {', '.join(actors)} start again", "bold yellow")

    def _evict(self) -> None:
        """Have actors drain whose node is to go, and come back on another."""
        waiting = [*self._returning, *sorted(filter(is_actor, self._due.keys() - self._resting))]
        for name, why in self._fleet.evicted(waiting).items():
            member = self._fleet.members[name]
            if self._evicted.get(name) is member:
                continue
            self._evicted[name] = member
            member.drain()  # also one that drains already: it may have less time now
            if name not in self._returning and not self.unwanted(name):
                self._returning[name] = member.command
                self._say(f"{name} drains: {why}", "bold yellow")

    def _move_the_learner(self) -> None:
        """Have the learner save and leave, where it can, a node that is to go."""
        if self._moving or not self._config.restarts or not (why := self._fleet.displaced()):
            return
        if self._fleet.members["learner"].poll() is None:
            self._moving = True
            self._fleet.members["learner"].signal(MAKE_WAY)
            self._say(f"the learner saves and moves: {why}", "bold yellow")

    def _call_back(self, actors: Sequence[str]) -> None:
        for name in actors:
            self._fleet.members[name].signal(signal.SIGTERM)
            if not self.unwanted(name):
                self._returning.setdefault(name, self._fleet.members[name].command)

    def _bring_back(self) -> None:
        """Start the actors that are to, have ended and find room. Raises BudgetSpent."""
        if self._moving:
            return  # room is the learner's first, and actors are told where it is
        members, now = self._fleet.members, time.monotonic()
        looks = now - self._looked_s >= LOOK_S
        ready = [n for n in self._returning if n not in members or members[n].poll() is not None]
        found = self._with_room([n for n in ready if looks or n not in self._roomless], now)
        if found and self._start({name: self._returning[name] for name in found}):
            for name in found:
                del self._returning[name]
                self._allowed.renew(name)

    def call_off(self) -> None:
        """Have no actor come, or come back, any more: the run is to end."""
        self._ending = True
        self._returning.clear()

    def scale(self, count: int, actor_command: Callable[[str], list[str]]) -> None:
        """Have `actor-0` to `actor-(count - 1)` run, those that find no node as soon as one has
        room, and the other actors drain and leave. Raises BudgetSpent.
        """
        members, names = self._fleet.members, [f"actor-{index}" for index in range(count)]
        self._wanted = count
        new = [n for n in names if n not in members or members[n].poll() == 0]
        leaving = [n for n in members if self.unwanted(n) and members[n].poll() is None]
        for name in leaving:
            members[name].signal(signal.SIGTERM)
        back = [n for n in names if n in self._leaving.union(self._returning) and n not in new]
        self._leaving = {*leaving, *back}
        for noted in (self._due, self._roomless):
            for name in [name for name in noted if self.unwanted(name)]:
                del noted[name]
        self._resting &= self._due.keys()
        for name in [n for n in self._returning if n not in members and self.unwanted(n)]:
            self._fleet.leave(name)  # a seat that was found and not taken
        self._returning = {name: members[name].command for name in back}
        self._returning |= {name: actor_command(name) for name in new}
        self._looked_s = 0.0  # whoever waits may find room
        self._bring_back()
        changes = [f"{n} {'waits' if n in self._returning else 'starts'}" for n in new]
        changes += [f"{name} is to leave" for name in leaving]
        self._say(f"{count} actors wanted: {', '.join(changes) or 'as it is'}", "bold yellow")

    def unwanted(self, name: str) -> bool:
        """True for an actor beyond the number that is wanted."""
        number = name[6:] if is_actor(name) else ""
        return self._wanted is not None and number.isdigit() and int(number) >= self._wanted

    def look(self) -> None:
        """Note who is ready; name who is stopped, and end it once its time is over."""
        for name in sorted(self._unready):
            if (at_s := self._fleet.members[name].ready_at()) is not None:
                self._unready.discard(name)
                self._worked.add(name)
                self._unproved.discard(name)
                self._allowed.renew(name)
                self._log.write("ready", name, at_s)
        if not self._ending:
            self._move_the_learner()
            self._evict()
            self._bring_back()
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        for name, why in self._stopped.look(self._fleet.members, now):
            self.end(name, why)
        self._end_hung_starts(now)

    def reach(self, step: int) -> None:
        """Note a step that was reported or evaluated: no restart before a new one was in vain."""
        if step > self._step:
            self._step = step
            self._allowed.progress()

    def stopped(self, name: str) -> bool:
        """True where this process was stopped when last looked at."""
        return name in self._stopped.since

    def end(self, name: str, why: str) -> None:
        """End a process that does no work; `tend` starts it again."""
        self._say(f"{name} {why}: it is ended", "bold yellow")
        self._ended_for[name] = why
        self._fleet.members[name].signal(signal.SIGKILL)

    def _end_hung_starts(self, now: float) -> None:
        """End those that live and do not get on by their deadline, unless they wait for others."""
        limit_s, since = self._config.start_deadline_s, self._since
        late = [n for n in self._unready if now - max(since[n], self.got_on.get(n, 0.0)) >= limit_s]
        for name in sorted(set(late) - self._stopped.since.keys() - self._ended_for.keys()):
            member = self._fleet.members[name]
            if member.poll() is None and not member.awaits_others():
                self._allowed.hang(name)
                self.end(name, f"was not ready within {limit_s:g} s (fleet.start_deadline_s)")

    def _schedule(self, name: str, code: int, now: float) -> None:
        cause = cause_of(self._fleet.members[name], code, self._ended_for.pop(name, ""))
        first_line = cause.splitlines()[0]
        self._log.write("ended", name, code=code, cause=first_line)
        if code == Exit.FINAL or (code == Exit.BAD_INPUT and name not in self._worked):
            raise BudgetSpent(cause)
        free = self._is_free(name, code)
        if not free and (why := self._allowed.spent(name, now)):
            self._rest(name, cause, why, now)
            return
        soon = now - self._since[name] < SOON_S
        self._tries[name] = self._tries.get(name, 0) + 1 if soon else 1
        pause_s = self._config.first_pause_s * 2 ** min(self._tries[name] - 1, 30)
        pause_s = min(pause_s, self._config.longest_pause_s)
        if not free:
            self.made.append({"name": name, "cause": cause})
            self._allowed.spend(name, now)
        ranks = [each for each in self._fleet.members if is_rank(each)]
        for other in ranks if is_rank(name) else [name]:
            self._due[other] = now + pause_s
            if other != name:
                self._fleet.members[other].signal(signal.SIGKILL)
        number, most = self._allowed.count(name, now), self._allowed.most
        self._say(f"{first_line}; restart {number} of {most} in {pause_s:g} s", "bold yellow")
        self._log.write("restarting", name, cause=first_line, pause_s=pause_s)

    def _is_free(self, name: str, code: int) -> bool:
        """True for an end that costs no restart: because another stands still, or is about to be
        back; of a node that is to go, or whose end has cost one.
        """
        seat = self._fleet.members[name].seat
        counted = bool(seat.gone) and seat.node_id in self._counted
        self._counted |= {seat.node_id} if seat.gone else set()
        others = bool(self._stopped.since or self._due.keys() - self.absent)
        free = code == Exit.CONSEQUENCE and others
        return free or bool(seat.leaving) or counted or (is_rank(name) and self._moving)

    def _rest(self, name: str, cause: str, why: str, now: float) -> None:
        """Leave an actor alone for a while whose restarts are spent, if others serve. Raises
        BudgetSpent.
        """
        if not is_actor(name) or not (serving := [n for n in self._actors() if n != name]):
            raise BudgetSpent(f"{self._spent(name, cause, why)}\n{_REMEDY}")
        rest_s = self._allowed.rest_s(name, now)
        self._due[name] = now + rest_s
        self._resting.add(name)
        first_line = cause.splitlines()[0]
        self._say(
            f"{first_line}; {why}: it rests for {rest_s:.0f} s, and the run goes on with "
            f"{len(serving)} actors",
            "bold yellow",
        )
        self._log.write("resting", name, cause=first_line, pause_s=rest_s)

    def _spent(self, name: str, cause: str, why: str) -> str:
        made = [each["cause"] for each in self.made if each["name"] == name]
        made = made[-max(1, self._allowed.most) :]
        return f"{made[0]}\n{why}; then {cause}" if made else cause

    def _command(self, name: str) -> list[str]:
        command = self._fleet.members[name].command
        flag = {"replay": "--restart", "learner": "--resume"}.get(name)
        rest = [word for word in command if word not in ("--restart", "--resume")]
        if name == "learner":  # it waits for so many actors
            rest = [word for word in rest if not word.startswith("actors.count=")]
            rest.append(f"actors.count={max(1, len(self._actors()))}")
        return [*rest, flag] if flag else command

    def _actors(self) -> list[str]:
        members = self._fleet.members
        there = [n for n in members if is_actor(n) and members[n].exit_code != Exit.DONE]
        absent = self.absent | self._unproved
        return [n for n in there if not self.unwanted(n) and n not in absent]

    def _note_started(self, names: list[str]) -> None:
        for name in names:
            self._since[name] = now = time.monotonic()
            for noted in (self._stopped.since, self._due, self._roomless, self._ended_for):
                noted.pop(name, None)
            if name in self._resting:
                self._resting.discard(name)
                self._unproved.add(name)
                self._allowed.rested(name)
                self._allowed.spend(name, now)
            if is_actor(name) or is_rank(name):
                self._homeless_s.pop(_WHOSE_ROOM[is_rank(name)], None)
            self._leaving.discard(name)
            self._unready.add(name)
            member = self._fleet.members[name]
            self._log.write("started", name, member.started_at, pid=member.pid)
        self._moving = self._moving and "learner" not in names
