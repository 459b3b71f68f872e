"""The watch over nodes, on threads of its own: it feels their pulses, and sees who comes.

What it finds are events, which the launcher takes when it gets to them: nothing else changes.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from configs.load import ConfigError
from scripts.fleet.host import FleetError
from scripts.fleet.nodes import Node, Surveyed
from scripts.fleet.post import LOOK_S, START_S, Post

NEWS_S, AGAIN_S = 5.0, 60.0  # how often nodes that come are looked for; one that was refused
Event = tuple[str, Post | None, Surveyed | None]  # what to say; of which node; facts: it came


class NodeWatch:
    """Watches the nodes of `posts`, by address, which others change.

    `newcomers()` lists nodes, with Ray's ids, that nobody has; `inspect(node, id)` makes a post
    there and returns it with the node's facts, or raises FleetError.
    """

    def __init__(
        self,
        posts: Mapping[str, Post],
        newcomers: Callable[[], list[tuple[Node, str]]],
        inspect: Callable[[Node, str], tuple[Post, Surveyed]],
    ) -> None:
        self._posts, self._newcomers, self._inspect = posts, newcomers, inspect
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="nodes")
        self._looker = threading.Thread(target=self._look, daemon=True, name="new nodes")
        self._told: set[Post] = set()
        self._known: set[str] = set()  # ids that came, and are not taken note of yet

    def start(self) -> None:
        """Begin both threads: one that waits for a new node would miss the others' pulses."""
        self._thread.start()
        self._looker.start()

    def close(self) -> None:
        """End them; twice is harmless."""
        self._over.set()
        for thread in (self._thread, self._looker):
            if thread.is_alive():
                thread.join(START_S)

    def events(self) -> Iterator[Event]:
        """Yield what has happened since the last call."""
        while not self._events.empty():
            yield self._events.get()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            for post in list(self._posts.values()):
                if not post.gone:
                    post.feel()
                if post.gone and post not in self._told:
                    self._told.add(post)
                    self._known.discard(post.node_id)
                    self._events.put((post.gone, post, None))

    def _look(self) -> None:
        refused: dict[str, float] = {}  # until when, by id
        while not self._over.wait(NEWS_S):
            for node, node_id in self._newcomers():
                if node_id in self._known or refused.get(node_id, 0.0) > time.monotonic():
                    continue
                try:
                    post, surveyed = self._inspect(node, node_id)
                except (FleetError, ConfigError) as error:
                    if not self._over.is_set():
                        refused[node_id] = time.monotonic() + AGAIN_S
                        said = f"node {node.shown} has come and cannot be used: {error}"
                        self._events.put((said, None, None))
                    continue
                self._known.add(node_id)
                self._events.put((f"node {node.shown} has come", post, surveyed))
