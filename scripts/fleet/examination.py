"""The examination of every node of a Ray cluster, for `forage doctor --cluster`.

Every wait has a deadline. What is wrong with the cluster itself raises ConfigError; a node that
cannot be looked at, or stops answering, is named among those that are.
"""

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import ray

from configs.load import ConfigError
from configs.schema import Config
from scripts.fleet.examiner import Examiner
from scripts.fleet.host import FleetError
from scripts.fleet.nodes import ANY, CONNECT_S, Node, Surveyed
from scripts.fleet.post import START_S, Post, all_of, each_of
from scripts.fleet.ray_cluster import alive, connect
from scripts.fleet.survey import survey
from scripts.setup.doctor import LOAD_S, Finding

JOIN_S = 300.0  # for the nodes that are waited for
RATE_S = 1.0  # of one measurement
Pair = tuple[str, str]  # of addresses: from, to


@dataclass(frozen=True)
class Seen:
    """One node: its facts, what `forage doctor` says there, and whether the launcher sees what it
    wrote into `cluster.shared`.
    """

    surveyed: Surveyed
    own: list[Finding]
    came: bool


@dataclass(frozen=True)
class Examined:
    """What was found: on each node by address; why some could not be looked at, or not to the end;
    of pairs of nodes, why they do not connect to which ports, and the bytes a second from one to
    the next.
    """

    seen: dict[str, Seen]
    lost: dict[Node, str]
    unreachable: dict[Pair, dict[int, str]]
    rates: dict[Pair, float]


def examined(config: Config, count: int | None) -> Examined:
    """What is found on the nodes of `cluster.address`, once there are so many; None: without
    waiting for any. Raises ConfigError.
    """
    connect(config.cluster.address, JOIN_S if count else 0.0)
    try:
        with _posts(_awaited(count or 1, JOIN_S)) as posts:
            return examined_by(posts, config)
    except FleetError as error:
        raise ConfigError(f"cluster.address = {config.cluster.address!r}: {error}") from error
    finally:
        ray.shutdown()


def examined_by(posts: Sequence[Post], config: Config) -> Examined:
    """What is found by these; a node that stops answering loses nothing that was found before."""
    lost: dict[Node, str] = {}
    seen = each_of(posts, lambda post: _look(config, post), lost)
    unreachable = _unreachable(posts, seen, lost)
    rates = _rates(posts, lost, unreachable)
    gone = {node.address for node in lost}
    return Examined(
        seen,
        lost,
        {pair: whys for pair, whys in unreachable.items() if gone.isdisjoint(pair)},
        {pair: rate for pair, rate in rates.items() if gone.isdisjoint(pair)},
    )


def _awaited(count: int, deadline_s: float) -> list[tuple[Node, str]]:
    """The nodes and Ray's ids of them, once there are so many. Raises ConfigError, FleetError."""
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
        yield posts
    finally:
        all_of(posts, Post.close)


def _look(config: Config, post: Post) -> Seen:
    surveyed, came = survey(config, [post])
    own = post.ask("findings", config.run_dir, deadline_s=LOAD_S + START_S)
    return Seen(surveyed[post.node.address], own, bool(came))


def _unreachable(
    posts: Sequence[Post], seen: dict[str, Seen], lost: dict[Node, str]
) -> dict[Pair, dict[int, str]]:
    """Why connections failed, from one node to another, by port: a fixed one, and any."""
    fixed = {address: each.surveyed.facts.ports[:1] for address, each in seen.items()}
    ports = each_of(posts, lambda post: post.ask("listen", [*fixed[post.node.address], ANY]), lost)

    def tried(post: Post) -> dict[tuple[str, int], str]:
        others = [(at, port) for at in ports for port in ports[at] if at != post.node.address]
        found: dict[tuple[str, int], str] = post.ask(
            "unreachable", others, deadline_s=START_S + CONNECT_S * len(others)
        )
        return found

    found: dict[Pair, dict[int, str]] = {}
    for one, whys in each_of(posts, tried, lost).items():
        for (other, port), why in whys.items():
            found.setdefault((one, other), {})[port] = why
    return found


def _rates(
    posts: Sequence[Post], lost: dict[Node, str], unreachable: Collection[Pair]
) -> dict[Pair, float]:
    """The bytes a second from each node to the next that it reaches, one after the other."""
    left, found = [post for post in posts if post.node not in lost], {}
    for one, other in zip(left, [*left[1:], *left[:1]], strict=True):
        pair = one.node.address, other.node.address
        if one is other or pair in unreachable:
            continue
        if (rate := _rate(one, other, lost)) is not None:
            found[pair] = rate
    return found


def _rate(one: Post, other: Post, lost: dict[Node, str]) -> float | None:
    """The bytes a second; None where one of both does not answer."""
    if not (place := each_of([other], lambda post: post.ask("receive"), lost)):
        return None
    ((at, port),) = place.items()
    asked = each_of([one], lambda post: post.ask("rate", (at, port), RATE_S), lost)
    return next(map(float, asked.values()), None)
