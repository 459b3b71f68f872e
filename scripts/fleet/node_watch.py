"""The watch over nodes, on threads of its own: it feels their pulses, hears who is to go, and sees
who comes.

What it finds are events, which the launcher takes when it gets to them: nothing else changes.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from configs.load import ConfigError
from scripts.fleet.host import FleetError
from scripts.fleet.nodes import Node, Surveyed
from scripts.fleet.post import LOOK_S, PULSE_S, Post, how_soon

log = logging.getLogger(__name__)
END_S = 5.0  # of a thread
NEWS_S, AGAIN_S = 5.0, 60.0  # how often nodes that come are looked for; one that was refused
# Examinations of a node that comes before it is refused: what Ray starts on a node that has just
# started may die, and so may another node that takes part.
TRIES = 3


@dataclass(frozen=True)
class NodeEvent:
    """What has happened, in words, and to which node; `surveyed`, of one that has come, are its
    facts. One that `is_to_go` is there for a while.
    """

    said: str
    post: Post | None = None
    surveyed: Surveyed | None = None
    is_to_go: bool = False


class NodeWatch:
    """Watches the nodes of `posts`, by address, which others change.

    `newcomers()` lists nodes, with Ray's ids, that nobody has; `inspect(node, id)` makes a post
    there and returns it with the node's facts, or raises FleetError; `leavers()` lists the ids of
    nodes that are to go, each with the time, in seconds since the epoch, or 0. The first and the
    last may raise FleetError, and are asked again.
    """

    def __init__(
        self,
        posts: Mapping[str, Post],
        newcomers: Callable[[], list[tuple[Node, str]]],
        inspect: Callable[[Node, str], tuple[Post, Surveyed]],
        leavers: Callable[[], Mapping[str, float]],
    ) -> None:
        self._posts, self._newcomers, self._inspect = posts, newcomers, inspect
        self._leavers = leavers
        self._events: queue.SimpleQueue[NodeEvent] = queue.SimpleQueue()
        self._over = threading.Event()
        self._told: set[Post] = set()  # whose end is
        self._known: set[str] = set()  # ids that came, and are not taken note of yet
        self._refused: dict[str, float] = {}  # until when, by id
        self._failed: dict[str, int] = {}  # examinations in a row, by id
        # One that waits for a new node would miss the others' pulses.
        self._threads = [
            threading.Thread(target=self._every, args=each, daemon=True, name=each[1].__name__)
            for each in ((LOOK_S, self._feel), (PULSE_S, self._hear), (NEWS_S, self._look))
        ]

    def start(self) -> None:
        """Begin to watch."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads; twice is harmless."""
        self._over.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(END_S)  # one that looks at a node ends with the process

    def events(self) -> Iterator[NodeEvent]:
        """Yield what has happened since the last call."""
        while not self._events.empty():
            yield self._events.get()

    def _every(self, seconds: float, do: Callable[[], None]) -> None:
        while not self._over.wait(seconds):
            try:
                do()
            except FleetError:  # Ray's head is away for a while
                continue
            except Exception:
                log.exception("the watch over nodes goes on")

    def _feel(self) -> None:
        for post in list(self._posts.values()):
            if not post.gone:
                post.feel()
            if post.gone and post not in self._told:
                self._told.add(post)
                self._known.discard(post.node_id)
                self._events.put(NodeEvent(post.gone, post))

    def _hear(self) -> None:
        """Have the posts of nodes that are to go say so."""
        at_s = self._leavers()
        for post in list(self._posts.values()):
            if post.node_id not in at_s:
                continue
            if post.leaving:
                if 0.0 < at_s[post.node_id] < post.leaves_at:  # it is to go sooner
                    post.leaves_at = at_s[post.node_id]
            else:
                post.leaves_at = at_s[post.node_id]
                post.leaving = f"node {post.node.shown} is to go"
                said = f"{post.leaving}{how_soon(post.leaves_at)}"
                self._events.put(NodeEvent(said, post, is_to_go=True))

    def _look(self) -> None:
        for node, node_id in self._newcomers():
            waits = self._refused.get(node_id, 0.0) > time.monotonic()
            if waits or node_id in self._known or self._over.is_set():
                continue
            try:
                post, surveyed = self._inspect(node, node_id)
            except (FleetError, ConfigError) as error:
                self._fail(node, node_id, error)
                continue
            self._known.add(node_id)
            self._failed.pop(node_id, None)
            self._events.put(NodeEvent(f"node {node.shown} has come", post, surveyed))

    def _fail(self, node: Node, node_id: str, error: Exception) -> None:
        self._failed[node_id] = self._failed.get(node_id, 0) + 1
        if self._over.is_set() or self._failed[node_id] < TRIES:
            return
        del self._failed[node_id]
        self._refused[node_id] = time.monotonic() + AGAIN_S
        self._events.put(NodeEvent(f"node {node.shown} has come and cannot be used: {error}"))
