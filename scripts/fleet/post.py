"""The launcher's line to the outpost of one node: questions with deadlines, and its pulse."""

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from scripts.fleet.host import FleetError
from scripts.fleet.nodes import Node
from scripts.fleet.outpost import Outpost
from scripts.fleet.place import UNTOLD, NodeGone

START_S = 90.0  # of an outpost, whose process Ray starts
ANSWER_S = 60.0  # of a node that looks around, on a slow disk
PULSE_S, SILENT_S = 1.0, 8.0  # how often a node is asked for a beat, and how long it may owe one
LOOK_S = 0.2
CLOCKS = 5  # how often a clock is read: the quickest answer tells most


class Post:
    """One node's. `gone` says why it is given up: nothing is asked of it any more; `leaving`, that
    it is to go, `leaves_at` when (since the epoch; 0: not known); `laid`: what processes read is
    there; `entrusted`: the names of secrets there.
    """

    def __init__(self, node: Node, node_id: str, kind: type[Outpost] = Outpost) -> None:
        """Have Ray start its outpost; `node_id` is Ray's."""
        self.node, self.node_id, self.gone, self.laid = node, node_id, "", False
        self.leaving, self.leaves_at, self.entrusted = "", 0.0, frozenset[str]()
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        remote = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4, **UNTOLD)(kind)
        self._outpost = remote.options(scheduling_strategy=there).remote(node.address)
        self._beat: Any = None
        self._asked_s = self._heard_s = time.monotonic()

    def ask(self, method: str, *arguments: object, deadline_s: float = ANSWER_S) -> Any:
        """Ask the outpost. Raises NodeGone, and FleetError naming the node."""
        reference = getattr(self._outpost, method).remote(*arguments)
        end = time.monotonic() + deadline_s
        while not self.gone:
            try:
                return ray.get(reference, timeout=LOOK_S)
            except ray.exceptions.GetTimeoutError:
                if time.monotonic() >= end:
                    raise FleetError(
                        f"node {self.node.shown} did not answer in {deadline_s:g} s ({method})"
                    ) from None
            except ray.exceptions.RayTaskError as error:
                cause = error.cause if isinstance(error.cause, Exception) else error
                raise FleetError(f"node {self.node.shown}: {_gist(cause)}") from error
            except (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnavailableError) as error:
                raise NodeGone(f"node {self.node.shown}: {_gist(error)}") from error
            except ray.exceptions.RayError as error:
                raise FleetError(f"node {self.node.shown}: {_gist(error)}") from error
        raise NodeGone(self.gone)

    def clock(self) -> tuple[float, float]:
        """Seconds by which its clock is ahead of ours, and within which that is known."""
        found = []
        for _ in range(CLOCKS):
            before = time.time()
            there, after = self.ask("clock"), time.time()
            found.append(((after - before) / 2, there - (before + after) / 2))
        doubt_s, ahead_s = min(found)
        return ahead_s, doubt_s

    def feel(self) -> None:
        """Ask for the next beat when it is due; give the node up when it owes one for too long."""
        now = time.monotonic()
        if self._beat is None:
            if now - self._asked_s >= PULSE_S:
                self._beat, self._asked_s = self._outpost.clock.remote(), now
            return
        if not ray.wait([self._beat], timeout=0)[0]:
            if now - self._asked_s > SILENT_S:
                self.give_up(f"no answer for {SILENT_S:g} s")
            return
        try:
            ray.get(self._beat)
        except ray.exceptions.ActorUnavailableError:  # the connection broke: it may come back
            if now - self._heard_s > SILENT_S:
                self.give_up(f"no answer for {SILENT_S:g} s")
        except ray.exceptions.RayError as error:
            self.give_up(_gist(error))
        else:
            self._heard_s = now
        self._beat = None

    def give_up(self, why: str) -> None:
        """Count the node as gone."""
        self.gone = f"node {self.node.shown} is gone ({why})"
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._outpost)

    def close(self) -> None:
        """Have what is left there ended; a node that does not answer is left to its guardian."""
        if not self.gone:
            with contextlib.suppress(FleetError):
                self.ask("close", deadline_s=SILENT_S)
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self._outpost)


def how_soon(leaves_at: float) -> str:
    """In how many seconds a node goes, in words, of a time since the epoch; '' of 0."""
    return f" in {max(0.0, leaves_at - time.time()):.0f} s" if leaves_at else ""


def _gist(error: Exception) -> str:
    """Of a message, what it says first; of a traceback, last: what was raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any("Traceback (most recent call last)" in line for line in lines):
        lines.reverse()
    return lines[0].rstrip(".:") if lines else type(error).__name__


def each_of(
    posts: Sequence[Post], ask: Callable[[Post], Any], lost: dict[Node, str]
) -> dict[str, Any]:
    """The answers, by address, of nodes that are not lost; those that give none then are."""

    def tried(post: Post) -> Any:
        try:
            return ask(post)
        except FleetError as error:
            return error

    answers = all_of([post for post in posts if post.node not in lost], tried)
    for post in posts:
        if isinstance(error := answers.get(post.node.address), FleetError):
            lost[post.node] = str(error)
            del answers[post.node.address]
    return answers


def all_of(posts: Sequence[Post], ask: Callable[[Post], Any]) -> dict[str, Any]:
    """The answers of nodes, by address, asked beside each other. Raises FleetError listing all that
    went wrong.
    """
    answers, wrong = {}, []
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(posts)))) as pool:
        asked = [(post, pool.submit(ask, post)) for post in posts]
        for post, future in asked:
            try:
                answers[post.node.address] = future.result()
            except FleetError as error:
                wrong.append(str(error))
    if wrong:
        raise FleetError("\n".join(wrong))
    return answers
