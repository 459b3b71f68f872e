"""The nodes of a Ray cluster as the place of a run's hosts.

    joined     connects to the cluster that the user started, looks at its nodes, arranges the run
               on them, and refuses it before anything of it starts
    Cluster    a seat for each host: a placement group of its own, pinned to the node; a thread
               feels each node's pulse, and takes in nodes that come

Every wait has a deadline, and names the node that it waits for.
"""

import contextlib
import ipaddress
import os
import secrets
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from configs.keys import Addresses
from configs.load import ConfigError
from configs.schema import Config
from scripts.fleet import guardian, head
from scripts.fleet.arrangement import Arrangement
from scripts.fleet.fleet import Seat, watched
from scripts.fleet.host import FleetError
from scripts.fleet.node_watch import NodeEvent, NodeWatch
from scripts.fleet.nodes import Node, Surveyed
from scripts.fleet.outpost import Laid
from scripts.fleet.placement import ACTOR, LEARNER, RETRIEVAL, NoRoom, kind_of
from scripts.fleet.post import LOOK_S, Post, all_of
from scripts.fleet.survey import refused, survey, unmet, unreachable

SAID = 300  # characters of what Ray says, which may be a page
_SLIVER = 0.001  # of a node's own resource: it pins, and takes nothing


@contextlib.contextmanager
def joined(config: Config) -> Iterator["Cluster"]:
    """The run arranged on the nodes of `cluster.address`, until the block ends. Raises ConfigError
    listing every problem.
    """
    connect(config.cluster.address)
    cluster = Cluster(config)
    try:
        cluster.arrange()
        yield cluster
    except FleetError as error:
        if cluster.opened:
            raise
        raise ConfigError(str(error)) from error
    finally:
        cluster.close()


def connect(address: str, wait_s: float = 0.0) -> None:
    """Be a driver of the cluster there, for whose head so long is waited. Raises ConfigError."""
    if not (token := head.token()):
        os.environ["RAY_AUTH_MODE"] = "disabled"
    try:
        at = head.awaited(address, token, wait_s)
        with watched(f"joining the Ray cluster at {at}"):
            ray.init(address=at, log_to_driver=False, configure_logging=False)
    except head.NoHead as error:
        raise ConfigError(f"cluster.address = {address!r}: {error}") from error
    except Exception as error:  # Ray raises many kinds
        said = textwrap.shorten(str(error) or type(error).__name__, SAID).rstrip(".")
        raise ConfigError(
            f"cluster.address = {address!r}: {said}: start Ray on this machine too (deploy/ray.sh "
            "worker HEAD), with the token of here"
        ) from error


class NodeSeat(Seat):
    """A host's place on a node, for as long as the node is there without a break."""

    look_s = LOOK_S

    def __init__(self, post: Post, directory: Path, environment: dict[str, str], gpus: int) -> None:
        super().__init__(directory, environment)
        self.post, self._gpus = post, gpus
        self._group: PlacementGroup | None = None

    @property
    def gone(self) -> str:  # type: ignore[override]
        """Why its node is given up; ''."""
        return self.post.gone

    @property
    def node_id(self) -> str:  # type: ignore[override]
        """Ray's, drawn anew each time that the node comes."""
        return self.post.node_id

    @property
    def leaving(self) -> str:  # type: ignore[override]
        """What was said of its node that is to go; ''."""
        return self.post.leaving

    @property
    def leaves_at(self) -> float:  # type: ignore[override]
        """When that is, where it is known; 0."""
        return self.post.leaves_at

    def options(self) -> dict[str, Any]:
        """In a placement group of its own, which keeps its GPUs while it is started again."""
        if self._group is None:
            bundle = {f"node:{self.post.node.address}": _SLIVER}
            bundle |= {"GPU": self._gpus} if self._gpus else {}
            self._group = placement_group([bundle])
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        return {"scheduling_strategy": strategy, "num_gpus": self._gpus}

    def tail(self, log: Path, offset: int) -> str:
        """What a log on the node has from there on."""
        with contextlib.suppress(FleetError):
            return str(self.post.ask("tail", str(log), offset))
        return ""

    def why_not(self) -> str:
        """Whether others hold what it needs."""
        if self._group is None or self._group.wait(0):
            return ""
        what = f"{self._gpus} GPUs" if self._gpus else "room"
        return f"Ray has no {what} for it on node {self.post.node.shown}: see `ray status`"

    def leave(self) -> None:
        """Give up what it holds, and end what still runs in it."""
        if self._group is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                remove_placement_group(self._group)
            self._group = None


class Cluster:
    """A `Place` of hosts (scripts/fleet/fleet.py). `arrangement` says who lies where."""

    def __init__(self, config: Config) -> None:
        self.opened = False
        self._given, self._here = config, ray.util.get_node_ip_address()
        self._posts: dict[str, Post] = {}
        self._seats: dict[str, NodeSeat] = {}
        self._watch = NodeWatch(self._posts, self._newcomers, self._inspect, _to_go)
        self._token = ""

    # ---- before anything starts

    def arrange(self) -> None:
        """Look at the nodes and find all processes a seat. Raises ConfigError, FleetError."""
        found = alive()
        if self._here not in {node.address for node, _ in found}:
            raise ConfigError(
                f"cluster.address = {self._given.cluster.address!r}: {self._here}, this machine, "
                "is no node of it: deploy/ray.sh worker HEAD here"
            )
        wanted = [(node, id) for node, id in found if self._may_be_used(node)]
        wanted.sort(key=lambda each: (each[0].address != self._here, _number(each[0].address)))
        self._posts.update({node.address: Post(node, id) for node, id in wanted})
        surveyed, came = survey(self._given, list(self._posts.values()))
        self.arrangement = Arrangement(self._given, surveyed, self._here)
        used = [self._posts[at] for at in dict.fromkeys(self.arrangement.seats.values())]
        reached = unreachable(used, self.arrangement.places())
        if wrong := [*self.arrangement.problems(came), *reached, *unmet(self._grouped())]:
            raise ConfigError("\n".join(wrong))
        for post in [each for each in self._posts.values() if each not in used]:
            if post.node.address != self._here:  # the watch looks at it, as at one that comes
                self._posts.pop(post.node.address).close()
                self.arrangement.remove(post.node.address)

    def _grouped(self) -> list[Post]:
        """The posts of nodes whose processes form groups: ranks, and who takes in weights."""
        seats = dict(self.arrangement.seats)
        at = dict.fromkeys(seats[name] for name in seats if kind_of(name) in (LEARNER, ACTOR))
        return [post for post in map(self._posts.get, at) if post is not None and not post.gone]

    def _may_be_used(self, node: Node) -> bool:
        cluster = self._given.cluster
        usable = node.is_one_of(cluster.learner) or node.is_one_of(cluster.actors)
        return node.address == self._here or usable

    # ---- a Place

    def open(self, token: str, directory: Path) -> None:
        """Lay on every node what processes read first, and begin to feel the nodes' pulses."""
        self.opened, self._token = True, token
        token_file = Path(self.arrangement.token_file)
        if not self._given.retrieval.token_file and not token_file.exists():
            token_file.touch(mode=0o600)
            token_file.write_text(secrets.token_hex(32))
        all_of([self._posts[at] for at in {*self.arrangement.seats.values()}], self._lay)
        self._watch.start()

    def _lay(self, post: Post) -> None:
        run_dir, at = Path(self._given.run_dir), post.node.address
        keys = Addresses.of(self.arrangement.wired()).keys
        assert keys is not None  # endpoints are tcp
        secret = [path for path in sorted(keys.folder.iterdir()) if path.is_file()]
        files = [Laid(str(run_dir / "config.yaml"), (run_dir / "config.yaml").read_bytes())]
        files += [Laid(str(path), path.read_bytes(), private=True) for path in secret]
        directory = self.arrangement.directory(at)
        own = directory / "outpost" if at == self.arrangement.here else directory
        post.ask("lay", f"{self._token}@{at}", str(own), [str(run_dir / "logs")], files)
        post.laid = True

    @property
    def servers(self) -> list[str]:
        """The names of the run's own retrieval servers."""
        return [name for name in self.arrangement.seats if kind_of(name) == RETRIEVAL]

    def close(self) -> None:
        """Leave the cluster as it was; twice is harmless."""
        self._watch.close()
        with contextlib.suppress(FleetError):
            all_of(list(self._posts.values()), Post.close)
        for seat in self._seats.values():
            seat.leave()
        self._posts.clear()
        self._seats.clear()
        ray.shutdown()

    def seat(self, name: str) -> NodeSeat:
        """The seat of a process that is about to start, on another node where its own is gone.
        Raises NoRoom.
        """
        before, address = self._seats.get(name), self.arrangement.seat(name)
        post = self._posts[address]
        if before is None or before.post is not post:
            if before is not None:
                before.leave()
            if not post.laid:
                self._lay(post)
            self._seats[name] = self._new_seat(name, post)
        seat = self._seats[name]
        seat.words = self.arrangement.words(name)
        return seat

    def _new_seat(self, name: str, post: Post) -> NodeSeat:
        address, facts = post.node.address, self.arrangement.found[post.node.address].facts
        directory = self.arrangement.directory(address)
        environment = {
            "FORAGE_NODE": address,
            "PYTHONPATH": facts.python_path,
            guardian.TOKEN: f"{self._token}@{address}",
        }
        if address != self.arrangement.here:
            environment["FORAGE_SOCKETS"] = str(directory)
        if kind_of(name) == RETRIEVAL and facts.gpu_bytes:  # Ray hides those it has not given
            every = ",".join(map(str, range(len(facts.gpu_bytes))))
            environment["CUDA_VISIBLE_DEVICES"] = every
        return NodeSeat(post, directory, environment, self.arrangement.gpus(name))

    def room(self, name: str) -> str:
        """Why no seat can be had for this process; ''."""
        try:
            self.arrangement.seat(name)
            if LEARNER not in self.arrangement.seats:  # all are told where it will be
                self.arrangement.seat(LEARNER)
        except NoRoom as error:
            return str(error)
        return ""

    def beside(self, names: Sequence[str]) -> dict[str, list[str]]:
        """The retrieval servers that nodes of these actors lack."""
        path = str(Path(self._given.run_dir) / "config.yaml")
        missing = self.arrangement.beside(names)
        return {name: ["-m", "retrieval_server.worker", path] for name in missing}

    def outdated(self, words: Sequence[str]) -> bool:
        """True where a process with these words looks for the learner where it is no longer."""
        return self.arrangement.learner_word not in words

    def displaced(self) -> str:
        """Why the learner is to save and move now, while it can; ''."""
        ranks = [seat for name, seat in self._seats.items() if kind_of(name) == LEARNER]
        posts = [seat.post for seat in ranks if seat.leaving and not seat.gone]
        ends = [post.leaves_at - time.time() for post in posts if post.leaves_at]
        moves = self.arrangement.learner_moves(min(ends, default=None))
        return posts[0].leaving if posts and moves else ""

    def news(self) -> list[str]:
        """Take note of nodes that went, came or are to go; a line on each. Raises FleetError once
        the launcher's own is gone.
        """
        return [self._note(event) for event in self._watch.events()]

    def _note(self, event: NodeEvent) -> str:
        post = event.post
        if post is not None and event.surveyed is not None:
            self._posts[post.node.address] = post
            self.arrangement.add(event.surveyed)
        elif post is not None and self._posts.get(post.node.address) is post:
            if post.node.address == self.arrangement.here and not event.is_to_go:
                raise FleetError(f"{event.said}: it is the launcher's own: start Ray here again")
            if event.is_to_go:
                return f"{event.said}{self.arrangement.close(post.node.address)}"
            del self._posts[post.node.address]
            self.arrangement.remove(post.node.address)
            for name in [n for n, seat in self._seats.items() if seat.post is post]:
                self._seats.pop(name).leave()
        return event.said

    # ---- nodes that come, on the watch's thread

    def _newcomers(self) -> list[tuple[Node, str]]:
        known = {post.node_id for post in [*self._posts.values()] if not post.gone}
        return [(node, id) for node, id in alive() if id not in known and self._may_be_used(node)]

    def _inspect(self, node: Node, node_id: str) -> tuple[Post, Surveyed]:
        """Its post and facts. Raises FleetError with all that is wrong with it."""
        post = Post(node, node_id)
        try:
            surveyed, came = survey(self._given, [post])
            comer, plan = surveyed[node.address], self.arrangement
            others = [each for each in self._grouped() if each.node.address != node.address]
            wrong = [*plan.problems_of(comer, came), *refused(post, plan.always_open())]
            wrong += unmet(others, post)
            if wrong:
                raise FleetError("\n".join(wrong))
        except BaseException:
            post.close()
            raise
        return post, comer


def alive() -> list[tuple[Node, str]]:
    """The nodes that Ray counts as alive and that are not to go, with its ids."""
    found, leave = [], _to_go()
    with _head_answers():
        told = ray.nodes()
    for each in told:
        if each["Alive"] and each["NodeID"] not in leave:
            has = each["Resources"]
            address, name = each["NodeManagerAddress"], each["NodeManagerHostname"]
            node = Node(address, name, int(has.get("GPU", 0)), has.get("CPU", 0.0))
            found.append((node, each["NodeID"]))
    return found


def _to_go() -> dict[str, float]:
    """Ray's ids of the nodes that are drained, each with the time in seconds since the epoch when
    it ends; 0: it is not known.
    """
    # What `ray drain-node`, autoscalers and pre-emption hooks say; no public function tells it.
    with _head_answers():
        at_ms = ray._private.state.state.get_draining_nodes()
    return {node_id: ms / 1e3 for node_id, ms in at_ms.items()}


@contextlib.contextmanager
def _head_answers() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Ray raises many kinds
        raise FleetError(f"Ray's head does not answer: {error}") from error


def _number(address: str) -> tuple[int, str]:
    """An address's place in an order."""
    with contextlib.suppress(ValueError):
        return int(ipaddress.ip_address(address)), ""
    return 0, address
