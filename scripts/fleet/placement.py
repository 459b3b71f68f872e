"""The placement of a run's processes on the nodes of a cluster. Pure.

    learner     its ranks on as few nodes as hold them; alone where there is a choice
    actors      evenly over the nodes that may have some, those without a rank first
    retrieval   `cluster.retrieval_replicas` servers on each node that has actors
    replay      beside the launcher

On GPUs each rank, and each worker of an engine, has one of its own.
"""

import contextlib
import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from configs.load import ConfigError
from configs.schema import Config
from scripts.fleet.kinds import ACTOR, LEARNER, REPLAY, RETRIEVAL, kind_of
from scripts.fleet.nodes import Node

GIB = 1 << 30


@dataclass(frozen=True)
class Need:
    """What one process needs of the node that it lies on."""

    gpus: int
    memory_bytes: int


@dataclass(frozen=True)
class Room:
    """What a node has for processes of the run."""

    node: Node
    gpus: int
    memory_bytes: int

    def holds(self, need: Need) -> bool:
        """True where a process that needs this fits."""
        return need.gpus <= self.gpus and need.memory_bytes <= self.memory_bytes

    def without(self, need: Need) -> "Room":
        """What is left beside such a process."""
        return Room(self.node, self.gpus - need.gpus, self.memory_bytes - need.memory_bytes)


class NoRoom(ConfigError):
    """A process that no node can hold; the message names field, needs, nodes and remedy."""


def placed(
    config: Config, rooms: Sequence[Room], needs: Mapping[str, Need], here: str
) -> dict[str, str]:
    """The address of each process's node, by the process's name; `here` is the launcher's. Raises
    NoRoom.
    """
    seats = Seats(config, rooms, needs, here)
    seats.take(REPLAY, here)
    for name in ranks_of(config):
        seats.seat(name)
    for index in range(config.actors.count):
        seats.seat(f"actor-{index}")
    if config.starts_retrieval_server:
        for name, address in servers(config, seats.by_name, here).items():
            seats.take(name, address)
    return seats.by_name


def ranks_of(config: Config) -> list[str]:
    """The names of the learner's processes, rank by rank."""
    return [LEARNER, *(f"learner-{rank}" for rank in range(1, config.learner.ranks))]


def servers(config: Config, seats: Mapping[str, str], here: str) -> dict[str, str]:
    """The retrieval servers that the actors' nodes ask for, each with its node's address."""
    if not config.cluster.retrieval_replicas:
        return {RETRIEVAL: here}
    nodes = dict.fromkeys(at for name, at in seats.items() if kind_of(name) == ACTOR)
    many = config.cluster.retrieval_replicas > 1
    return {
        f"{RETRIEVAL}-{address}" + f"-{replica}" * many: address
        for address in nodes
        for replica in range(config.cluster.retrieval_replicas)
    }


class Seats:
    """Who lies where, and what that leaves of each node. `by_name`: addresses of nodes."""

    def __init__(
        self, config: Config, rooms: Iterable[Room], needs: Mapping[str, Need], here: str
    ) -> None:
        self.by_name: dict[str, str] = {}
        self._config, self._needs, self._here = config, needs, here
        self._rooms = {room.node.address: room for room in rooms}

    def seat(self, name: str) -> str:
        """Find a process a node; return its address. Raises NoRoom."""
        kind = kind_of(name)
        find = self._for_rank if kind == LEARNER else self._for_actor
        fitting = [room for room in self._allowed(kind) if room.holds(self._needs[kind])]
        if not fitting:
            raise NoRoom(self._refusal(kind))
        return self.take(name, find(fitting).node.address)

    def with_room(self, names: Sequence[str]) -> list[str]:
        """Those of these processes that would find nodes, each in its turn; nothing changes."""
        trial, found = copy.copy(self), []
        trial.by_name, trial._rooms = dict(self.by_name), dict(self._rooms)
        for name in names:
            with contextlib.suppress(NoRoom):
                trial.leave(name)
                trial.seat(name)
                found.append(name)
        return found

    def take(self, name: str, address: str) -> str:
        """Have a process lie on a node, whether or not it fits there; return the node's address."""
        self.leave(name)
        self._rooms[address] = self._rooms[address].without(self._needs[kind_of(name)])
        self.by_name[name] = address
        return address

    def leave(self, name: str) -> None:
        """Have a process lie nowhere."""
        need, address = self._needs[kind_of(name)], self.by_name.pop(name, "")
        if room := self._rooms.get(address):
            self._rooms[address] = Room(
                room.node, room.gpus + need.gpus, room.memory_bytes + need.memory_bytes
            )

    def add(self, room: Room) -> None:
        """Have a node, new or back, with nothing on it."""
        self._rooms[room.node.address] = room

    def recount(self, node: Node) -> None:
        """Have a node of whose GPUs others have taken another number than before."""
        if room := self._rooms.get(node.address):
            gpus = room.gpus + room.node.taken - node.taken
            self._rooms[node.address] = Room(node, gpus, room.memory_bytes)

    def overfull(self) -> list[Room]:
        """The nodes that lack memory for who lies there."""
        return [room for room in self._rooms.values() if room.memory_bytes < 0]

    def close(self, address: str) -> None:
        """Give no more seats on a node."""
        self._rooms.pop(address, None)

    def remove(self, address: str) -> None:
        """Have a node no longer, nor anybody on it."""
        self.close(address)
        self.by_name = {name: at for name, at in self.by_name.items() if at != address}

    def _allowed(self, kind: str) -> list[Room]:
        cluster, rooms = self._config.cluster, self._rooms.values()
        names = cluster.learner if kind == LEARNER else cluster.actors
        if kind == LEARNER and not (names or cluster.shared):  # where its checkpoints are found
            return [room for room in rooms if room.node.address == self._here]
        if not names:
            return list(rooms)
        named = (room for name in names for room in rooms if room.node.is_one_of((name,)))
        return list({room.node.address: room for room in named}.values())

    def _count(self, kind: str, address: str) -> int:
        return sum(at == address and kind_of(n) == kind for n, at in self.by_name.items())

    def _for_rank(self, fitting: Sequence[Room]) -> Room:
        """Where ranks lie already; else the node that holds the most of those to come, and of
        several that hold all the one with the least to spare.
        """
        seated = sum(kind_of(name) == LEARNER for name in self.by_name)
        missing, need = self._config.learner.ranks - seated, self._needs[LEARNER]

        def order(room: Room) -> tuple[int, int, int]:
            most = room.memory_bytes // max(need.memory_bytes, 1)
            held = min(missing, most, room.gpus // need.gpus if need.gpus else most)
            return -self._count(LEARNER, room.node.address), -held, room.gpus

        return min(fitting, key=order)

    def _for_actor(self, fitting: Sequence[Room]) -> Room:
        def order(room: Room) -> tuple[int, int, int]:
            address = room.node.address
            ranks = self._count(LEARNER, address)
            return self._count(ACTOR, address), min(ranks, 1), -room.gpus

        return min(fitting, key=order)

    def _refusal(self, kind: str) -> str:
        """Say what is needed and what each node has, of what is too little."""
        learner, need, cluster = kind == LEARNER, self._needs[kind], self._config.cluster
        field, names = _FIELDS[kind]
        count = self._config.learner.ranks if learner else self._config.actors.count
        chosen = cluster.learner if learner else cluster.actors
        allowed, seated = self._allowed(kind), sum(kind_of(n) == kind for n in self.by_name)
        lower = f"lower {field} to {seated}" if seated else "add a node that holds one"
        remedy = f"{lower}, or let other nodes have some ({names})"
        if learner and not (chosen or cluster.shared):
            remedy = "set cluster.shared, so that it may run on other nodes than the launcher's"
        if not allowed:
            there = ", ".join(room.node.shown for room in self._rooms.values())
            return f"{names} = {list(chosen)!r}: no such node is there: name some of {there}"
        if all(room.gpus < need.gpus for room in allowed):
            has = ", ".join(f"{room.node.shown} {_gpus_of(room)}" for room in allowed)
            each = f"each needs {need.gpus} GPU{'s' * (need.gpus > 1)} of its own"
            if any(room.node.taken for room in allowed):
                remedy = f"end the other jobs that hold some (`ray status`), or {remedy}"
            return f"{field} = {count!r}: {each}; {seated} find room, and left are {has}: {remedy}"
        has = ", ".join(f"{r.node.shown} {r.memory_bytes / GIB:.2f}" for r in allowed)
        return (
            f"{field} = {count!r}: each needs {need.memory_bytes / GIB:.2f} GiB of memory; "
            f"{seated} find room, and left are {has}: {remedy}, or name a smaller model.path"
        )


def _gpus_of(room: Room) -> str:
    """How many a node has left, and where they are."""
    node, left = room.node, str(max(0, room.gpus))
    return left if not node.taken else f"{left} (other jobs hold {node.taken} of {node.gpus})"


_FIELDS = {LEARNER: ("learner.ranks", "cluster.learner"), ACTOR: ("actors.count", "cluster.actors")}
