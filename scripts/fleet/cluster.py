"""The nodes of a Ray cluster as the place of a run's hosts.

    joined     connects to the cluster that the user started, looks at its nodes, arranges the run
               on them, and refuses it before anything of it starts
    Cluster    a seat for each host, which Ray reserves before any is taken; a thread feels each
               node's pulse, and takes in nodes that come

Every wait has a deadline, and names the node that it waits for.
"""

import contextlib
import ipaddress
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import ray

from configs.load import ConfigError
from configs.schema import Config
from scripts.fleet import guardian
from scripts.fleet.arrangement import Arrangement
from scripts.fleet.host import FleetError
from scripts.fleet.kinds import ACTOR, LEARNER, RETRIEVAL, kind_of
from scripts.fleet.node_seat import NodeSeat, refusals
from scripts.fleet.node_watch import NodeEvent, NodeWatch
from scripts.fleet.nodes import Node, Surveyed
from scripts.fleet.outpost import Laid
from scripts.fleet.placement import NoRoom
from scripts.fleet.post import Post, all_of
from scripts.fleet.ray_cluster import alive, connect, head_answers, to_go
from scripts.fleet.survey import (
    refused,
    survey,
    survey_of_those_that_answer,
    unmet,
    unreachable,
)

RESERVE_S = 20.0  # for Ray to reserve all seats; it takes milliseconds where they are free
AGAIN_S = 2.0  # the same of one, while the run goes on
BACK_S, BACK_LOOK_S = 10.0, 0.5  # for Ray to take back the GPUs of a run that has just ended


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


class Cluster:
    """A `Place` of hosts (scripts/fleet/place.py). `arrangement` says who lies where."""

    def __init__(self, config: Config) -> None:
        self.opened = False
        self._given, self._here = config, ray.util.get_node_ip_address()
        self._posts: dict[str, Post] = {}
        self._seats: dict[str, NodeSeat] = {}
        self._watch = NodeWatch(self._posts, self._newcomers, self._inspect, to_go)
        self._token = ""
        self._stay: set[str] = set()  # actors on nodes that are to go
        self._said: list[str] = []  # what is news

    # ---- before anything starts

    def arrange(self) -> None:
        """Look at the nodes and find all processes a seat. Raises ConfigError, FleetError."""
        found = alive()
        if self._here not in {node.address for node, _ in found}:
            raise ConfigError(
                f"cluster.address = {self._given.cluster.address!r}: {self._here}, this machine, "
                "is no node of it, or one that is to go: `ray stop`, then deploy/ray.sh worker HEAD"
            )
        wanted = [(node, id) for node, id in found if self._may_be_used(node)]
        wanted.sort(key=lambda each: (each[0].address != self._here, _number(each[0].address)))
        self._posts.update({node.address: Post(node, id) for node, id in wanted})
        surveyed, came, lost = self._surveyed()
        try:
            self.arrangement = self._arranged(surveyed)
        except NoRoom as error:
            lacking = [f"{why}: see that it answers (`ray status`)" for why in lost]
            raise ConfigError("\n".join([str(error), *lacking])) from error
        used = [self._posts[at] for at in dict.fromkeys(self.arrangement.seats.values())]
        reached = unreachable(used, self.arrangement.places())
        if wrong := [*self.arrangement.problems(came), *reached, *unmet(self._grouped())]:
            raise ConfigError("\n".join(wrong))
        for post in [each for each in self._posts.values() if each not in used]:
            if post.node.address != self._here:  # the watch looks at it, as at one that comes
                self._posts.pop(post.node.address).close()
                self.arrangement.remove(post.node.address)
        self._reserve()

    def _surveyed(self) -> tuple[dict[str, Surveyed], list[str], list[str]]:
        """The facts of nodes; those seen in `cluster.shared`; why others, which do not answer, are
        passed over: the watch looks at them again. Raises ConfigError, FleetError.
        """
        lost: dict[Node, str] = {}
        surveyed, came = survey_of_those_that_answer(self._given, [*self._posts.values()], lost)
        if self._here not in surveyed:
            raise FleetError("\n".join(lost.values()))
        all_of([self._posts.pop(node.address) for node in lost], lambda post: post.close())
        self._said += [f"{why}: it is passed over, until it answers" for why in lost.values()]
        return surveyed, came, list(lost.values())

    def _arranged(self, found: Mapping[str, Surveyed]) -> Arrangement:
        """The run on these nodes. Raises NoRoom, FleetError."""
        end = time.monotonic() + BACK_S
        while True:
            try:
                return Arrangement(self._given, found, self._here)
            except NoRoom:
                if time.monotonic() > end or not any(each.node.taken for each in found.values()):
                    raise
            time.sleep(BACK_LOOK_S)
            now = {node.address: node for node, _ in alive()}
            found = {
                at: msgspec.structs.replace(each, node=now.get(at, each.node))
                for at, each in found.items()
            }

    def _reserve(self) -> None:
        """Have Ray hold all seats. Raises ConfigError, FleetError."""
        for name, address in self.arrangement.seats.items():
            self._seats[name] = self._seat_on(name, self._posts[address])
        with head_answers():
            wrong = [*refusals(self._seats, RESERVE_S)]
        if wrong:
            raise ConfigError("\n".join(wrong))

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
        token_file = Path(self.arrangement.token_file(self._here))
        if not self._given.retrieval.token_file and not token_file.exists():
            token_file.touch(mode=0o600)
            token_file.write_text(secrets.token_hex(32))
        all_of([self._posts[at] for at in {*self.arrangement.seats.values()}], self._lay)
        self._watch.start()

    def _lay(self, post: Post) -> None:
        run_dir, at = Path(self._given.run_dir), post.node.address
        files = [Laid(str(run_dir / "config.yaml"), (run_dir / "config.yaml").read_bytes())]
        directory = self.arrangement.directory(at)
        own = directory / "outpost" if at == self.arrangement.here else directory
        post.ask("lay", f"{self._token}@{at}", str(own), [str(run_dir / "logs")], files)
        post.laid = True
        self._entrust(post)

    def _entrust(self, post: Post) -> None:
        """Have a node hold the secrets that processes there need, and no others."""
        at = post.node.address
        needed = self.arrangement.secrets(at)
        if post.laid and post.entrusted != needed.keys():
            files = {name: path.read_bytes() for name, path in needed.items()}
            post.ask("entrust", str(self.arrangement.keys(at)), files)
            post.entrusted = frozenset(needed)

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
        post = self._posts[self.arrangement.seat(name)]
        if not post.laid:
            self._lay(post)
        self._entrust(post)
        seat = self._seats[name] = self._seat_on(name, post)
        seat.environment, seat.words = self._environment(name, post), self.arrangement.words(name)
        return seat

    def _seat_on(self, name: str, post: Post) -> NodeSeat:
        """The seat of a process on this node: its own where it has one there."""
        before = self._seats.get(name)
        if before is not None and before.post is post:
            return before
        if before is not None:
            self._vacate(before)
        directory = self.arrangement.directory(post.node.address)
        return NodeSeat(post, directory, self.arrangement.gpus(name))

    def _environment(self, name: str, post: Post) -> dict[str, str]:
        address, facts = post.node.address, self.arrangement.found[post.node.address].facts
        environment = {
            "FORAGE_NODE": address,
            "PYTHONPATH": facts.python_path,
            guardian.TOKEN: f"{self._token}@{address}",
        }
        if address != self.arrangement.here:
            environment["FORAGE_SOCKETS"] = str(self.arrangement.directory(address))
        if kind_of(name) == RETRIEVAL and facts.gpu_bytes:  # Ray hides those it has not given
            every = ",".join(map(str, range(len(facts.gpu_bytes))))
            environment["CUDA_VISIBLE_DEVICES"] = every
        return environment

    def leave(self, name: str) -> None:
        """Free the seat of a process that has left for good, in our books and in Ray's."""
        self.arrangement.leave(name)
        if seat := self._seats.pop(name, None):
            self._vacate(seat)

    def _vacate(self, seat: NodeSeat) -> None:
        """Give up a seat that our books have no more, and the secrets that were for it alone."""
        seat.leave()
        with contextlib.suppress(FleetError):  # the watch tells of a node that does not answer
            self._entrust(seat.post)

    def room(self, name: str) -> str:
        """Why no seat can be had for this process; ''."""
        gpus = self.arrangement.gpus(name)
        try:
            if gpus:
                self._recount()
            if kind_of(name) == ACTOR and LEARNER not in self.arrangement.seats:
                self.arrangement.seat(LEARNER)  # it comes first, and actors are told where it is
            address = self.arrangement.seat(name)
            return self._refused(name, self._posts[address]) if gpus else ""
        except (NoRoom, FleetError) as error:
            return str(error)

    def _recount(self) -> None:
        """Note how many GPUs others hold now: what Ray has given away, but to us."""
        ours: Counter[str] = Counter()
        for seat in self._seats.values():
            ours[seat.post.node.address] += seat.held
        taken = {node.address: max(0, node.taken - ours[node.address]) for node, _ in alive()}
        self.arrangement.recount(taken)

    def _refused(self, name: str, post: Post) -> str:
        """Have Ray reserve a seat; why it does not."""
        seat = self._seats[name] = self._seat_on(name, post)
        with head_answers():
            if seat.granted(AGAIN_S):
                return ""
        self.leave(name)
        return seat.lacking

    def beside(self, names: Sequence[str]) -> dict[str, list[str]]:
        """The retrieval servers that nodes of these actors lack."""
        path = str(Path(self._given.run_dir) / "config.yaml")
        missing = self.arrangement.beside(names)
        return {name: ["-m", "retrieval_server.worker", path] for name in missing}

    def outdated(self, words: Sequence[str]) -> bool:
        """True where a process with these words looks for the learner where it is no longer."""
        return self.arrangement.learner_word not in words

    def evicted(self, ends: Mapping[str, float], waiting: Sequence[str]) -> list[str]:
        """Those of these actors, whose nodes go at these times (0: not known), that are to leave
        now: the others work on, as no other node has room for them beside those `waiting` to start.
        """
        now = time.time()
        leave = self.arrangement.actors_that_move(
            {name: at - now if at else None for name, at in ends.items()}, waiting
        )
        stay = ends.keys() - set(leave)
        for name in sorted(stay - self._stay):
            self._said.append(f"{name} works on there for now: no other node has room for it")
        self._stay = stay
        return leave

    def displaced(self) -> str:
        """Why the learner is to save and move now, while it can; ''."""
        ranks = [seat for name, seat in self._seats.items() if kind_of(name) == LEARNER]
        ranks = [seat for seat in ranks if seat.leaving and not seat.gone]
        ends = [seat.leaves_at - time.time() for seat in ranks if seat.leaves_at]
        moves = self.arrangement.learner_moves(min(ends, default=None))
        return ranks[0].leaving if ranks and moves else ""

    def news(self) -> list[str]:
        """Take note of nodes that went, came or are to go; lines on these, and on who works on
        there. Raises FleetError once the launcher's own is gone.
        """
        said, self._said = self._said, []
        return [*said, *(self._note(event) for event in self._watch.events())]

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


def _number(address: str) -> tuple[int, str]:
    """An address's place in an order."""
    with contextlib.suppress(ValueError):
        return int(ipaddress.ip_address(address)), ""
    return 0, address
