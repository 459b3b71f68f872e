"""Routes of a version: who gets it with the others, who by a download of its own; who receives it
from the learner, and who from its node's relay. Pure.

The learner sends each version once to every other node. There the first of the actors that lack it
is the *relay*: its first worker receives, and hands the version on to all other workers of the node
by a file. On the learner's own node every worker receives for itself.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lacking:
    """Who lacks a version: a group is formed of those `together`, the `late` download."""

    together: tuple[str, ...]
    late: tuple[str, ...]


def lacking(
    has: Mapping[str, int], version: int, far: Container[str], settled: Collection[str]
) -> Lacking:
    """Who lacks this version (name → the version that serves there, -1: none).

    Of the actors that can download, `far` ones, who has none comes late where others serve. Who
    holds weights but was in no group yet, the `settled`, waits for the next version while others
    serve this one: it is not sent this one for its sake alone.
    """
    newest = max(has.values(), default=-1)
    behind = [name for name, held in has.items() if held < version]
    late = {name for name in behind if name in far and has[name] < 0 <= newest}
    waits = {name for name in behind if name in settled and newest >= version}
    together = (name for name in behind if name not in late and name not in waits)
    return Lacking(tuple(together), tuple(name for name in behind if name in late))


@dataclass(frozen=True)
class Routes:
    """`members` are in the group with the learner, each with the devices of its workers that are;
    `relays` are those of them that hand on, each with the actors that read from it; `remote` counts
    the workers that the learner reaches over the network.
    """

    members: dict[str, tuple[str, ...]]
    relays: dict[str, tuple[str, ...]]
    remote: int

    @property
    def hops(self) -> int:
        """How often the bytes travel until all have them."""
        return 2 if self.relays else 1

    def said(self) -> str:
        """The relays' part, in words."""
        readers = {relay: ", ".join(names) or "its workers" for relay, names in self.relays.items()}
        return "".join(f"; {relay} hands on to {names}" for relay, names in readers.items())


def routes(
    devices: Mapping[str, Sequence[str]], nodes: Mapping[str, str], own: str, apart: Container[str]
) -> Routes:
    """The routes to these actors (name → its workers' devices), on these nodes (by name).

    `own` is the learner's node; on nodes that are `apart` nobody hands on.
    """
    together: dict[str, list[str]] = {}
    for name in devices:
        together.setdefault(nodes[name], []).append(name)
    relays: dict[str, tuple[str, ...]] = {}
    readers: set[str] = set()
    for node, names in together.items():
        if node != own and node not in apart and sum(len(devices[each]) for each in names) > 1:
            relay, *others = names
            relays[relay] = tuple(others)
            readers.update(others)
    members = {
        name: tuple(workers[:1] if name in relays else workers)
        for name, workers in devices.items()
        if name not in readers
    }
    remote = sum(len(workers) for name, workers in members.items() if nodes[name] != own)
    return Routes(members, relays, remote)
