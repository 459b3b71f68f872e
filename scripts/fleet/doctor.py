"""The command `forage doctor`: a check of this machine, or of every node of a Ray cluster.

Of a cluster each node looks at itself as this machine would, and all are compared: their versions,
clocks and connections, and the bandwidth of each to the next.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from configs.load import ConfigError
from configs.runtime.files import write_json
from configs.runtime.process import Exit
from scripts.fleet.node_checks import CLOCK_S
from scripts.fleet.nodes import OURS, Surveyed
from scripts.options import Options, argument, option, overrides
from scripts.setup import doctor as machine
from scripts.setup.doctor import Finding
from scripts.setup.gpu_memory import GIB
from scripts.terminal import status

LEAST_GBIT_S = 1.0  # between nodes; below, new weights of a small model take seconds
Pair = tuple[str, str]  # of addresses: from, to


@dataclass(frozen=True)
class DoctorOptions(Options):
    config: str | None = argument("check for this configuration too", default=None)
    overrides: tuple[str, ...] = overrides()
    cluster: str | None = option(
        "check every node of a Ray cluster: auto, or its head's HOST:PORT", metavar="ADDRESS"
    )
    nodes: int | None = option("wait until the cluster has so many", metavar="N", least=1)
    json: Path | None = option("write the findings there", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes is not None and self.cluster is None:
            raise ConfigError(f"--nodes {self.nodes}: of a cluster: say --cluster auto too")
        if self.config and self.cluster is not None:
            raise ConfigError(
                f"CONFIG = {self.config!r}: a cluster's nodes are checked for every run alike; "
                "`forage train` checks them for this one before it starts: leave it out"
            )


def doctor(options: DoctorOptions) -> int:
    """Check, show, and fail where something needed is missing. Raises ConfigError."""
    console = Console()
    if options.cluster is None:
        found = machine.of_this_machine(options.config, options.overrides)
    else:
        found = of_cluster(options.cluster, options.nodes or 1)
    machine.show(found, console)
    if options.json:
        write_json(options.json, [asdict(each) for each in found])
    return Exit.FAILED if any(each.problems for each in found) else Exit.DONE


def of_cluster(address: str, count: int) -> list[Finding]:
    """What was found on a cluster of at least so many nodes. Raises ConfigError."""
    from scripts.fleet.examination import examined  # ray, which takes a second

    with status("looking at every node, loading its libraries"):
        found = examined(address, count)
    each = [row for there in found.surveyed for row in of_node(there, found.own)]
    together = (
        *versions(found.surveyed),
        *clocks(found.surveyed),
        *reach(found.unreachable, found.surveyed),
        *bandwidths(found.rates, found.surveyed),
    )
    return [*each, *together]


def of_node(there: Surveyed, found: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    """Yield a row on what a node has, and one for each of its shortcomings."""
    name, facts, own = there.node.shown, there.facts, found[there.node.address]
    gpus = f"{len(facts.gpu_bytes)} GPUs, " if facts.gpu_bytes else ""
    yield Finding(
        what=name,
        has=f"{gpus}{there.node.cpus:g} cores, {facts.memory_bytes / GIB:.0f} GiB free",
        needs="as of one machine",
        ok=all(each.ok for each in own),
        required=False,
    )
    yield from (replace(each, what=f"{name}: {each.what}") for each in own if not each.ok)


def versions(surveyed: Sequence[Surveyed]) -> Iterator[Finding]:
    """Yield whether all nodes have what the first has, package by package where not."""
    first, *others = surveyed
    different = [
        (package, wanted, there)
        for there in others
        for package, wanted in first.facts.versions.items()
        if there.facts.versions.get(package, "") != wanted
    ]
    if not different:
        yield Finding("versions", "alike", "alike", True)
    for package, wanted, there in different:
        has = there.facts.versions.get(package) or "missing"
        same = "the same source" if package == OURS else f"{package} {wanted}"
        yield Finding(
            what=f"{there.node.shown}: {package}",
            has=has,
            needs=f"{wanted or 'none'}, as {first.node.shown}",
            ok=False,
            remedy=f"install {same} there: the same `git` revision and `make .venv`",
        )


def clocks(surveyed: Sequence[Surveyed]) -> Iterator[Finding]:
    """Yield how far each node's clock is from the one of this machine."""
    for there in surveyed:
        off, needs = f"{there.ahead_s:+.2f} s", f"within {CLOCK_S:g} s"
        ok = abs(there.ahead_s) - there.doubt_s <= CLOCK_S
        remedy = "set the clocks of both by NTP (timedatectl set-ntp true)"
        yield Finding(f"{there.node.shown}: clock", off, needs, ok, remedy)


def reach(unreachable: dict[Pair, str], surveyed: Sequence[Surveyed]) -> Iterator[Finding]:
    """Yield whether all nodes can connect to each other, pair by pair where not."""
    names = _names(surveyed)
    if not unreachable:
        yield Finding("TCP between nodes", "connects", "to connect", True)
    for (one, other), why in unreachable.items():
        yield Finding(
            what=f"{names[one]} to {names[other]}: TCP",
            has=why,
            needs="to connect",
            ok=False,
            remedy=f"let {one} connect to ports 20000 to 31999 of {other}: see its firewall",
        )


def bandwidths(rates: dict[Pair, float], surveyed: Sequence[Surveyed]) -> Iterator[Finding]:
    """Yield the bits a second from each node to the next."""
    names = _names(surveyed)
    for (one, other), rate in rates.items():
        gbit_s = 8 * rate / 1e9
        yield Finding(
            what=f"{names[one]} to {names[other]}",
            has=f"{gbit_s:.1f} Gbit/s",
            needs=f">= {LEAST_GBIT_S:g}",
            ok=gbit_s >= LEAST_GBIT_S,
            remedy="have Ray use a faster network (FORAGE_INTERFACE of deploy/ray.sh)",
            required=False,
        )


def _names(surveyed: Sequence[Surveyed]) -> dict[str, str]:
    return {each.node.address: each.node.shown for each in surveyed}
