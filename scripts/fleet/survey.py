"""The survey of nodes before a run lies on them: their facts, what they share, whom they reach."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from configs.load import ConfigError
from configs.schema import Config
from scripts.fleet import nodes
from scripts.fleet.arrangement import ports_needed
from scripts.fleet.host import FleetError
from scripts.fleet.kinds import ACTOR, LEARNER, REPLAY, RETRIEVAL
from scripts.fleet.node_checks import paths_of
from scripts.fleet.nodes import ANY, Asked, Node, Surveyed
from scripts.fleet.post import START_S, Post, all_of, each_of


def survey(config: Config, posts: Sequence[Post]) -> tuple[dict[str, Surveyed], list[str]]:
    """The facts of nodes, by address, and those of which the launcher sees what they wrote into
    `cluster.shared`. Raises ConfigError, FleetError.
    """
    lost: dict[Node, str] = {}
    surveyed = survey_of_those_that_answer(config, posts, lost)
    if lost:
        raise FleetError("\n".join(lost.values()))
    return surveyed


def survey_of_those_that_answer(
    config: Config, posts: Sequence[Post], lost: dict[Node, str]
) -> tuple[dict[str, Surveyed], list[str]]:
    """The same of the nodes that answer; `lost`: why the others do not. Raises ConfigError."""
    kinds = {LEARNER, ACTOR, REPLAY} | ({RETRIEVAL} if config.starts_retrieval_server else set())
    paths = tuple(paths_of(config, kinds).values())
    # Ray starts a process each.
    each_of(posts, lambda post: post.ask("clock", deadline_s=START_S), lost)
    with _meeting(config.cluster.shared) as meeting:
        asked = Asked(config.run_dir, paths, meeting, ports_needed(config))

        def look(post: Post) -> Surveyed:
            facts = post.ask("look", asked)
            return Surveyed(post.node, facts, *post.clock())

        found = each_of(posts, look, lost)
        return found, [at for at in found if meeting and nodes.came(Path(meeting), at)]


@contextlib.contextmanager
def _meeting(shared: str) -> Iterator[str]:
    if not shared:
        yield ""
        return
    try:
        with nodes.meeting_in(Path(shared)) as meeting:
            yield str(meeting)
    except OSError as error:
        raise ConfigError(
            f"cluster.shared = {shared!r}: cannot be used here ({error.strerror}): name a folder "
            "that all nodes see, and may write"
        ) from error


def unreachable(
    posts: Sequence[Post],
    places: Mapping[str, Sequence[int]],
    trying: Sequence[Post] | None = None,
) -> Iterator[str]:
    """Yield which of those `trying`, else of these nodes, do not reach which ports, by address of
    their nodes, at which nobody listens yet. Raises FleetError.
    """
    listening = [post for post in posts if post.node.address in places]
    try:
        opened = all_of(listening, lambda post: post.ask("listen", places[post.node.address]))
        tried = {**places, **opened}
        for found in all_of(trying or posts, lambda post: [*refused(post, tried)]).values():
            yield from found
    finally:
        all_of(listening, lambda post: post.ask("deafen"))


def unmet(posts: Sequence[Post], comer: Post | None = None) -> Iterator[str]:
    """Yield which nodes whose processes are to form groups do not reach each other at ports of the
    system's choice, where groups meet; of a comer, it and the others. Raises FleetError.
    """
    places = {post.node.address: [ANY] for post in posts}
    if comer is None:
        yield from unreachable(posts, places)
    elif posts:
        yield from unreachable(posts, places, trying=[comer])
        yield from unreachable([comer], {comer.node.address: [ANY]}, trying=posts)


def refused(post: Post, places: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Yield the ports of other nodes that this one does not reach. Raises FleetError."""
    wanted = [(at, port) for at, ports in places.items() for port in ports]
    wanted = [place for place in wanted if place[0] != post.node.address]
    limit_s = START_S + nodes.CONNECT_S * len(wanted)
    for (at, port), why in post.ask("unreachable", wanted, deadline_s=limit_s).items():
        yield (
            f"node {post.node.shown}: cannot connect to {at}:{port} ({why}): let nodes reach each "
            "other over TCP, on all ports above 1023: weights and collectives take any of them"
        )
