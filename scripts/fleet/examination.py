"""The examination of every node of a Ray cluster, for `forage doctor --cluster`.

Every wait has a deadline; what is wrong with the cluster itself raises ConfigError.
"""

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ray

from configs.load import ConfigError
from scripts.fleet.cluster import alive, connect
from scripts.fleet.examiner import Examiner
from scripts.fleet.host import FleetError
from scripts.fleet.nodes import CONNECT_S, Asked, Node, Surveyed
from scripts.fleet.post import START_S, Post, all_of
from scripts.setup.doctor import LOAD_S, Finding

JOIN_S = 300.0  # for the nodes that are waited for
RATE_S = 1.0  # of one measurement
RUN_DIR = "runs"
Pair = tuple[str, str]  # of addresses: from, to


@dataclass(frozen=True)
class Examined:
    """What was found: on each node, by address what `forage doctor` says there, and of pairs of
    nodes why they do not connect, and the bytes a second from one to the next.
    """

    surveyed: list[Surveyed]
    own: dict[str, list[Finding]]
    unreachable: dict[Pair, str]
    rates: dict[Pair, float]


def examined(address: str, count: int) -> Examined:
    """What is found on the cluster's nodes, once there are so many. Raises ConfigError."""
    _require_head(address)
    connect(address)
    try:
        with _posts(_awaited(count, JOIN_S)) as posts:
            surveyed = all_of(posts, _look)
            return Examined(
                surveyed=list(surveyed.values()),
                own=all_of(posts, lambda post: post.ask("findings", deadline_s=LOAD_S + START_S)),
                unreachable=_unreachable(posts, surveyed),
                rates=_rates(posts),
            )
    except FleetError as error:
        raise ConfigError(
            f"{error}: install Forage there, in the same folder as here, and start its Ray anew"
        ) from error
    finally:
        ray.shutdown()


def _require_head(address: str) -> None:
    """Raise ConfigError where nothing answers at the head's HOST:PORT: Ray would wait for it."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--cluster {address}: no head of Ray answers there ({error}): name it as HOST:PORT, "
            "or say auto on a node of the cluster"
        ) from error


def _awaited(count: int, deadline_s: float) -> list[tuple[Node, str]]:
    """The nodes and Ray's ids of them, once there are so many. Raises ConfigError."""
    end = time.monotonic() + deadline_s
    while len(there := alive()) < count:
        if time.monotonic() > end:
            names = ", ".join(node.shown for node, _ in there)
            raise ConfigError(
                f"--nodes {count}: {len(there)} in the cluster after {deadline_s:g} s: {names}: "
                "start the others (deploy/ray.sh worker HEAD), and see what they say"
            )
        time.sleep(0.5)
    return sorted(there, key=lambda each: each[0].address)


@contextlib.contextmanager
def _posts(there: Sequence[tuple[Node, str]]) -> Iterator[list[Post]]:
    posts = [Post(node, node_id, Examiner) for node, node_id in there]
    try:
        all_of(posts, lambda post: post.ask("clock", deadline_s=START_S))  # it starts a process
        yield posts
    finally:
        for post in posts:
            post.close()


def _look(post: Post) -> Surveyed:
    return Surveyed(post.node, post.ask("look", Asked(RUN_DIR, (), "", ports=1)), *post.clock())


def _unreachable(posts: Sequence[Post], surveyed: dict[str, Surveyed]) -> dict[Pair, str]:
    """Why a connection failed, from one node to another."""
    ports = {address: each.facts.ports[:1] for address, each in surveyed.items()}
    all_of(posts, lambda post: post.ask("listen", ports[post.node.address]))

    def tried(post: Post) -> dict[tuple[str, int], str]:
        others = [(at, port) for at in ports for port in ports[at] if at != post.node.address]
        found: dict[tuple[str, int], str] = post.ask(
            "unreachable", others, deadline_s=START_S + CONNECT_S * len(others)
        )
        return found

    failed = all_of(posts, tried)
    return {(one, at): why for one, whys in failed.items() for (at, _), why in whys.items()}


def _rates(posts: Sequence[Post]) -> dict[Pair, float]:
    """The bytes a second from each node to the next, one after the other."""
    found = {}
    for one, other in zip(posts, [*posts[1:], *posts[:1]], strict=True):
        if one is not other:
            place = other.node.address, other.ask("receive")
            rate = one.ask("rate", place, RATE_S)
            found[one.node.address, other.node.address] = float(rate)
    return found
