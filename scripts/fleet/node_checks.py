"""Checks of the nodes that a run is to lie on, from the facts that were found there. Pure.

Each problem is one line that names the node, what is there, what is needed and the remedy.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median

from configs.schema import Config
from scripts.fleet.kinds import ACTOR, LEARNER, REPLAY, RETRIEVAL, kind_of
from scripts.fleet.nodes import OURS, Surveyed
from scripts.fleet.placement import GIB
from scripts.setup import gpu_memory
from scripts.setup.model_size import Model

CLOCK_S = 1.0  # between two nodes' clocks: records and deadlines of a run carry times
NTP = "set both by NTP (timedatectl set-ntp true)"
LEAST_BYTES = 256 << 20  # free in /tmp, and in /dev/shm where an engine has several workers


def problems(
    config: Config,
    found: Mapping[str, Surveyed],
    seats: Mapping[str, str],
    here: str,
    came: Collection[str] = (),
) -> Iterator[str]:
    """Yield what is wrong with the nodes that have a seat, by address, and with the clocks of all
    that are `found`. `came`: those of which the launcher sees what they wrote into
    `cluster.shared`.
    """
    yield from _storage(config, seats, here)
    for one, other, apart_s in clocks_apart(list(found.values())):
        yield (
            f"the clocks of node {one.node.shown} ({one.ahead_s:+.2f} s from the launcher's) and "
            f"node {other.node.shown} ({other.ahead_s:+.2f} s) are {apart_s:.2f} s apart, and "
            f"{CLOCK_S:g} s are allowed: {NTP}"
        )
    for address in dict.fromkeys(seats.values()):
        there = found[address]
        kinds = {kind_of(name) for name, at in seats.items() if at == address}
        for problem in (
            *_versions(there, found[here]),
            *_paths(config, there, found[here], kinds),
            *_folders(config, there, kinds, address in came),
            *_cores(config, there, kinds),
            *_gpus(there),
        ):
            yield f"node {there.node.shown}: {problem}"


def clocks_apart(found: Sequence[Surveyed]) -> Iterator[tuple[Surveyed, Surveyed, float]]:
    """Yield the two nodes whose clocks are furthest apart, and the seconds, where that is too much
    whatever is in doubt; then the same without the one of both that is further from the middle.
    """
    left, middle_s = list(found), median(each.ahead_s for each in found) if found else 0.0
    while pair := max(combinations(left, 2), key=_certainly_apart_s, default=None):
        if _certainly_apart_s(pair) <= CLOCK_S:
            return
        one, other = pair
        yield one, other, abs(one.ahead_s - other.ahead_s)
        left.remove(max(pair, key=lambda each: abs(each.ahead_s - middle_s)))


def _certainly_apart_s(pair: tuple[Surveyed, Surveyed]) -> float:
    one, other = pair
    return abs(one.ahead_s - other.ahead_s) - one.doubt_s - other.doubt_s


def paths_of(config: Config, kinds: Collection[str]) -> dict[str, str]:
    """The files and folders, by field, that processes of these kinds read."""
    retrieval, rewards = config.retrieval, config.rewards
    read: dict[str, tuple[str, ...]] = {
        LEARNER: ("model.path",),
        ACTOR: ("model.path", "retrieval.recorded", "retrieval.token_file"),
        RETRIEVAL: (
            "retrieval.corpus",
            "retrieval.index",
            "retrieval.word_index",
            "retrieval.encoder",
            "retrieval.reranker",
            "retrieval.token_file",
            "retrieval.live.key_file",
            "retrieval.live.replay",
        ),
    }
    every = {
        "model.path": config.model.path,
        "retrieval.recorded": retrieval.recorded,
        "retrieval.token_file": retrieval.token_file,
        "retrieval.corpus": retrieval.corpus,
        "retrieval.index": retrieval.index,
        "retrieval.word_index": retrieval.word_index,
        "retrieval.encoder": retrieval.encoder,
        "retrieval.reranker": retrieval.reranker,
        "retrieval.live.key_file": retrieval.live.key_file,
        "retrieval.live.replay": retrieval.live.replay,
    }
    found = {field: every[field] for kind in kinds for field in read.get(kind, ())}
    if ACTOR in kinds:
        found["rewards.judge.key_file"] = rewards.judge.key_file
        found["rewards.similarity.model"] = rewards.similarity.model
        for number, key in enumerate(config.environment.mcp_keys):
            found[f"environment.mcp_keys[{number}].file"] = key.file
    return {field: path for field, path in found.items() if path}


def threads_of(config: Config) -> dict[str, int]:
    """How many threads compute in a process of each kind."""
    return {
        REPLAY: 1,
        LEARNER: config.learner.threads,
        ACTOR: config.actors.threads,
        RETRIEVAL: config.retrieval.threads,
    }


def gpu_lines(
    config: Config, found: Mapping[str, Surveyed], seats: Mapping[str, str], model: Model
) -> Iterator[tuple[str, bool]]:
    """Yield, for each node with GPUs, a line on what its fullest must hold, and True where that
    fits.
    """
    for address in dict.fromkeys(seats.values()):
        sizes = found[address].facts.gpu_bytes
        kinds = {kind_of(name) for name, at in seats.items() if at == address}
        beside = gpu_memory.retrieval_needs(config, 0, len(sizes)) if RETRIEVAL in kinds else {}
        needs = {"retrieval server": beside} if beside else {}
        reckoned = {
            "learner rank": (LEARNER, gpu_memory.learner_needs),
            "engine": (ACTOR, gpu_memory.engine_needs),
        }
        for who, (kind, reckon) in reckoned.items():
            if sizes and kind in kinds:
                each = {who: reckon(config, model), **needs}
                line, fits = gpu_memory.line_of(0, min(sizes), each)
                yield f"{found[address].node.shown}: {line.replace('GPU 0', 'a GPU', 1)}", fits


def retrieval_share(config: Config, found: Sequence[Surveyed]) -> int:
    """Bytes that a retrieval server of the run's own takes of a GPU, at most."""
    sizes = [len(each.facts.gpu_bytes) for each in found if each.facts.gpu_bytes]
    return max(
        (sum(gpu_memory.retrieval_needs(config, 0, count).values()) for count in sizes), default=0
    )


def _storage(config: Config, seats: Mapping[str, str], here: str) -> Iterator[str]:
    shared, ranks = config.cluster.shared, [n for n in seats if kind_of(n) == LEARNER]
    away = dict.fromkeys(seats[name] for name in ranks if seats[name] != here)
    if away and not shared:
        yield (
            f"cluster.shared = '': the learner runs on {', '.join(away)}, and its checkpoints "
            f"would, away from the launcher on {here}: name a folder that all nodes see, with "
            "run_dir in it, or start the run where the learner has room"
        )
    elif shared and not Path(config.run_dir).is_relative_to(shared):
        yield (
            f"run_dir = {config.run_dir!r} is outside cluster.shared = {shared!r}: name a "
            "directory inside it"
        )


def _versions(there: Surveyed, here: Surveyed) -> Iterator[str]:
    for package, wanted in here.facts.versions.items():
        has = there.facts.versions.get(package, "")
        if has != wanted:
            remedy = "put the same there" if package == OURS else "install the same there"
            yield f"{package} is {has or 'missing'} there and {wanted or 'missing'} here: {remedy}"


def _paths(
    config: Config, there: Surveyed, here: Surveyed, kinds: Collection[str]
) -> Iterator[str]:
    for field, path in paths_of(config, kinds).items():
        size, wanted = there.facts.sizes.get(path), here.facts.sizes.get(path)
        if size is None:
            yield f"{field} = {path!r}: nothing is there: copy it there, to the same path"
        elif wanted is not None and size != wanted and not field.endswith("_file"):
            yield (
                f"{field} = {path!r}: {size} bytes there and {wanted} here: copy it there again, "
                "to the same path"
            )


def _folders(config: Config, there: Surveyed, kinds: Collection[str], came: bool) -> Iterator[str]:
    facts = there.facts
    if facts.run_dir:
        yield f"run_dir = {config.run_dir!r}: {facts.run_dir}: name one that all nodes can make"
    if config.cluster.shared and (wrong := facts.shared or ("" if came else _UNSEEN)):
        yield (
            f"cluster.shared = {config.cluster.shared!r}: {wrong}: mount the same storage there, "
            "or name a folder that all nodes see"
        )
    rooms = {"/tmp": facts.tmp_bytes}
    if ACTOR in kinds and config.actors.tensor_parallel > 1:
        rooms["/dev/shm"] = facts.shm_bytes
    for place, free in rooms.items():
        if free < LEAST_BYTES:
            yield (
                f"{free / GIB:.2f} GiB are free in {place}, and {LEAST_BYTES / GIB:.2f} are "
                "needed: make room there"
            )


_UNSEEN = "what it wrote there does not come to the launcher"


def _cores(config: Config, there: Surveyed, kinds: Collection[str]) -> Iterator[str]:
    fields = {LEARNER: "learner", ACTOR: "actors", RETRIEVAL: "retrieval"}
    threads = threads_of(config)
    for kind, section in fields.items():
        if kind in kinds and (count := threads[kind]) > there.facts.cores:
            yield (
                f"{section}.threads = {count!r}: {there.facts.cores} cores are there: lower it, or "
                "let other nodes have it (cluster.learner, cluster.actors)"
            )


def _gpus(there: Surveyed) -> Iterator[str]:
    told, found = there.node.gpus, len(there.facts.gpu_bytes)
    if told > found:
        yield (
            f"Ray was told of {told} GPUs, and the driver shows {found}: start Ray there with "
            f"--num-gpus={found}, or see `forage doctor` there"
        )
