"""The command `forage doctor`: a check of this machine, or of every node of a Ray cluster.

Of a cluster each node looks at itself as this machine would, and all are compared: their versions,
clocks and connections, what they see of shared storage, and the bandwidth of each to the next.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console

from configs.fleet import ClusterConfig
from configs.load import ConfigError, load
from configs.runtime.files import write_json
from configs.runtime.process import Exit
from configs.schema import Config
from scripts.command.options import Options, argument, option, overrides, refusing
from scripts.command.terminal import status
from scripts.fleet.node_checks import CLOCK_S, NTP, clocks_apart
from scripts.fleet.nodes import OURS, Node, Surveyed
from scripts.setup import doctor as machine
from scripts.setup import preflight
from scripts.setup.doctor import RUNS, Finding
from scripts.setup.gpu_memory import GIB
from scripts.setup.resolve import PORTS

LEAST_GBIT_S = 1.0  # between nodes; below, new weights of a small model take seconds
UNSEEN = "what it wrote there does not come here"
AGAIN = "see that it is up, with Forage in the same folder as here, and start its Ray anew"
LATE = "see that it is up, start its Ray anew where it is not, and look again"
FIXED, CHOSEN = "20000 to 31999", "above 32767 (weights, collectives)"
Pair = tuple[str, str]  # of addresses: from, to


@dataclass(frozen=True)
class DoctorOptions(Options):
    config: str | None = argument("check for this configuration too", default=None)
    overrides: tuple[str, ...] = overrides()
    cluster: str | None = option(
        "check every node of a Ray cluster (cluster.address): auto, or its head's HOST:PORT",
        metavar="ADDRESS",
    )
    shared: str | None = option(
        "a folder that all its nodes are to see (cluster.shared)", metavar="FOLDER"
    )
    nodes: int | None = option("wait until the cluster has so many", metavar="N", least=1)
    json: Path | None = option("write the findings there", metavar="FILE")

    @property
    def words(self) -> tuple[str, ...]:
        """The overrides, with those that options stand for."""
        named = {"cluster.address": self.cluster, "cluster.shared": self.shared}
        return (*self.overrides, *(f"{field}={value}" for field, value in named.items() if value))

    def over_nodes(self) -> Config:
        """What of a configuration says where nodes are. Raises ConfigError."""
        if self.config:
            config = load(self.config, self.words)
        else:
            with refusing(ValueError):
                cluster = ClusterConfig(address=self.cluster or "", shared=self.shared or "")
            config = Config(cluster=cluster)
        return msgspec.structs.replace(config, run_dir=str(Path(config.run_dir or RUNS).resolve()))


def doctor(options: DoctorOptions) -> int:
    """Check, show, and fail where something needed is missing. Raises ConfigError."""
    console, config = Console(), options.over_nodes()
    if config.cluster.address:
        found = of_cluster(config, options.nodes)
        if options.config:
            found.append(configuration(options.config, options.words))
    elif options.nodes:
        raise ConfigError(f"--nodes {options.nodes} needs --cluster: say --cluster auto too")
    else:
        found = machine.of_this_machine(options.config, options.overrides)
    machine.show(found, console)
    if options.json:
        write_json(options.json, [asdict(each) for each in found])
    return Exit.FAILED if any(each.problems for each in found) else Exit.DONE


def of_cluster(config: Config, count: int | None) -> list[Finding]:
    """What was found on the nodes of `cluster.address`, once there are so many; None: on those that
    are there. Raises ConfigError.
    """
    from scripts.fleet.examination import examined  # ray, which takes a second

    with status("looking at every node, loading its libraries"):
        found = examined(config, count)
    surveyed = [each.surveyed for each in found.seen.values()]
    came = {address: each.came for address, each in found.seen.items()}
    alone = [row for each in found.seen.values() for row in of_node(each.surveyed, each.own)]
    alone += lost(found.lost, found.seen)
    if not surveyed:
        return alone
    return [
        *alone,
        *versions(surveyed),
        *clocks(surveyed),
        *storage(config.cluster.shared, surveyed, came),
        *reach(found.unreachable),
        *bandwidths(found.rates),
    ]


def configuration(path: str, words: Sequence[str]) -> Finding:
    """The checks of a run over nodes, made without starting it."""
    from scripts.fleet.cluster import joined

    def check() -> None:
        with joined(preflight.checked(path, words, nodes=True)):
            pass

    return machine.configuration(check)


def of_node(there: Surveyed, own: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a row on what a node has, and one for each of its shortcomings."""
    name, facts, told = there.node.address, there.facts, there.node.gpus
    gpus = f"{len(facts.gpu_bytes)} GPUs, " if facts.gpu_bytes else ""
    good = f"{sum(each.ok for each in own)} of {len(own)} checks"  # those of one machine
    yield Finding(
        what=there.node.shown,
        has=f"{gpus}{facts.cores} cores, {facts.memory_bytes / GIB:.0f} GiB free, {good}",
        needs="all checks",
        ok=all(each.ok for each in own),
        required=False,
    )
    yield from (replace(each, what=f"{name}: {each.what}") for each in own if not each.ok)
    if told != len(facts.gpu_bytes):
        yield Finding(
            what=f"{name}: GPUs of Ray",
            has=str(told),
            needs=f"{len(facts.gpu_bytes)}, as the driver shows",
            ok=False,
            remedy=f"start Ray there with --num-gpus={len(facts.gpu_bytes)}",
        )


def lost(nodes: Mapping[Node, str], seen: Collection[str]) -> Iterator[Finding]:
    """Yield the nodes that could not be looked at, with the reason; those that were `seen`, by
    address, not to the end.
    """
    for node, why in nodes.items():
        said = why.removeprefix(f"node {node.shown}").lstrip(": ")
        late = node.address in seen
        has, remedy = ("stopped answering", LATE) if late else ("cannot be looked at", AGAIN)
        yield Finding(node.shown, has, "to answer", False, f"{said}: {remedy}")


def versions(surveyed: Sequence[Surveyed]) -> Iterator[Finding]:
    """Yield whether all nodes have what the first has, package by package where not."""
    different = [
        (package, wanted, there, surveyed[0])
        for there in surveyed[1:]
        for package, wanted in surveyed[0].facts.versions.items()
        if there.facts.versions.get(package, "") != wanted
    ]
    if not different:
        yield Finding("versions", "alike", "alike", True)
    for package, wanted, there, first in different:
        has = there.facts.versions.get(package) or "missing"
        same = "the same source" if package == OURS else f"{package} {wanted}"
        yield Finding(
            what=f"{there.node.address}: {package}",
            has=has,
            needs=f"{wanted or 'none'}, as {first.node.address}",
            ok=False,
            remedy=f"install {same} there: the same `git` revision and `make .venv`",
        )


def clocks(surveyed: Sequence[Surveyed]) -> Iterator[Finding]:
    """Yield how far all clocks are apart at most; where that is too much, pair by pair."""
    limit, far = f"within {CLOCK_S:g} s", list(clocks_apart(surveyed))
    if not far:
        ahead = [there.ahead_s for there in surveyed]
        yield Finding("clocks", f"{max(ahead) - min(ahead):.2f} s apart", limit, True)
    for one, other, apart_s in far:
        yield Finding(
            what=f"{one.node.address} and {other.node.address}: clocks",
            has=f"{one.ahead_s:+.2f} s and {other.ahead_s:+.2f} s",
            needs=limit,
            ok=False,
            remedy=f"they are {apart_s:.2f} s apart (here is 0): {NTP}",
        )


def storage(
    shared: str, surveyed: Sequence[Surveyed], came: Mapping[str, bool]
) -> Iterator[Finding]:
    """Yield whether all nodes see the same folder, node by node where not. `came`: whether what one
    wrote there is seen here, by its address.
    """
    wrong = {
        there.node.address: there.facts.shared or UNSEEN
        for there in surveyed
        if shared and (there.facts.shared or not came[there.node.address])
    }
    if shared and not wrong:
        yield Finding("shared storage", "seen by all, with locks", shared, True)
    for name, why in wrong.items():
        yield Finding(
            what=f"{name}: shared storage",
            has="no",
            needs=shared,
            ok=False,
            remedy=f"{why}: mount the same storage there, or name a folder that all nodes see",
        )


def reach(unreachable: Mapping[Pair, Mapping[int, str]]) -> Iterator[Finding]:
    """Yield whether all nodes can connect to each other, pair by pair where not."""
    if not unreachable:
        yield Finding("TCP between nodes", "connects", "to connect", True)
    for (one, other), whys in unreachable.items():
        kinds = dict.fromkeys(FIXED if port in PORTS else CHOSEN for port in whys)
        yield Finding(
            what=f"{one} to {other}: TCP",
            has=", ".join(f"{port}: {why}" for port, why in whys.items()),
            needs="to connect",
            ok=False,
            remedy=f"let {one} connect to ports {' and '.join(kinds)} of {other}: see its firewall",
        )


def bandwidths(rates: Mapping[Pair, float]) -> Iterator[Finding]:
    """Yield the bits a second from each node to the next."""
    for (one, other), rate in rates.items():
        gbit_s = 8 * rate / 1e9
        yield Finding(
            what=f"{one} to {other}",
            has=f"{gbit_s:.1f} Gbit/s",
            needs=f">= {LEAST_GBIT_S:g}",
            ok=gbit_s >= LEAST_GBIT_S,
            remedy="have Ray use a faster network (FORAGE_INTERFACE of deploy/ray.sh)",
            required=False,
        )
