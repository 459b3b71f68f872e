"""The arrangement of a run over nodes: who lies where, at which addresses, and the words that tell
each process so. It decides from facts alone, and asks nobody.

    replay.endpoint, weight_sync.endpoint    tcp, on the launcher's node and on rank 0's
    learner.rendezvous                       tcp on rank 0's node, where ranks lie on several
    retrieval.url                            of an actor: its own node's servers, then the others'
    keys                                     of a node: what its processes need, in its directory
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from configs.devices import on_cpu
from configs.keys import CLIENTS, keys_of
from configs.runtime.files import weights_bytes
from configs.runtime.process import socket_dir
from configs.schema import Config
from scripts.fleet.kinds import ACTOR, LEARNER, REPLAY, RETRIEVAL, is_rank, kind_of
from scripts.fleet.node_checks import gpu_lines, problems, retrieval_share, threads_of
from scripts.fleet.nodes import Surveyed
from scripts.fleet.placement import GIB, Need, NoRoom, Room, Seats, placed, servers
from scripts.setup.fit import fitted
from scripts.setup.machine import LESS, memory_by_process
from scripts.setup.model_size import Model, known_model
from scripts.setup.overrides import with_field

TOKEN_FILE = "retrieval_token"  # in the folder of keys
LEAVE_S = 30.0  # of an actor that leaves its node, beside draining; the launcher may be busy
_REPLAY_PORT, _SYNC_PORT, _RENDEZVOUS_PORT, _RETRIEVAL_PORT = range(4)  # of a node's free ones


def ports_needed(config: Config) -> int:
    """How many free ports of a node may be used."""
    return _RETRIEVAL_PORT + max(1, config.cluster.retrieval_replicas)


class Arrangement:
    """Of one run. `config` has the sizes that its nodes leave; `seats`, by process, the addresses
    of nodes. Raises NoRoom.
    """

    def __init__(self, config: Config, found: Mapping[str, Surveyed], here: str) -> None:
        self.here, self.found = here, dict(found)
        self._closed: set[str] = set()  # addresses of nodes that are to go
        self._model = known_model(Path(config.model.path))
        self.config = _fitted(config, list(found.values()), self._model)
        self._needs = _needs(self.config, self._model)
        rooms = [_room(each) for each in found.values()]
        first = placed(self.config, rooms, self._needs, here)
        self._seats = Seats(self.config, rooms, self._needs, here)
        for name, address in first.items():
            self._seats.take(name, address)

    @property
    def seats(self) -> Mapping[str, str]:
        """The address of each process's node."""
        return self._seats.by_name

    def problems(self, came: Sequence[str]) -> Iterator[str]:
        """Yield what is wrong with the nodes in use (scripts/fleet/node_checks.py)."""
        used = {at: self.found[at] for at in (self.here, *self.seats.values())}
        yield from self._checked(used, self.seats, came)
        for room in self._seats.overfull():
            has = self.found[room.node.address].facts.memory_bytes
            yield (
                f"node {room.node.shown}: {(has - room.memory_bytes) / GIB:.2f} GiB of memory are "
                f"needed there, and {has / GIB:.2f} are free: {LESS}"
            )

    def problems_of(self, comer: Surveyed, came: Sequence[str]) -> Iterator[str]:
        """Yield what is wrong with a node that is to have what its lists let it have."""
        at, cluster = comer.node.address, self.config.cluster
        seats, found = {}, self.found | {at: comer}
        if comer.node.is_one_of(cluster.actors):
            seats["actor-0"] = at
            if self.config.starts_retrieval_server and cluster.retrieval_replicas:
                seats[f"{RETRIEVAL}-{at}"] = at
        if cluster.shared and comer.node.is_one_of(cluster.learner):
            seats[LEARNER] = at
        yield from self._checked(found, seats, came)

    def _checked(
        self, found: Mapping[str, Surveyed], seats: Mapping[str, str], came: Sequence[str]
    ) -> Iterator[str]:
        yield from problems(self.config, found, seats, self.here, came)
        for line, fits in gpu_lines(self.config, found, seats, self._model):
            if not fits:
                yield f"too little memory on a GPU: {line}; {LESS}"

    def always_open(self) -> dict[str, list[int]]:
        """The port that is listened at as long as the run lives, by its node's address."""
        parts = urlsplit(self._replay)
        return {str(parts.hostname): [int(parts.port or 0)]}

    def places(self) -> dict[str, list[int]]:
        """The ports that processes listen at, by their nodes' addresses."""
        found: dict[str, list[int]] = {}
        urls = [self._replay, self._weight_sync, *self._rendezvous, *self._servers().values()]
        for url in urls:
            parts = urlsplit(url)
            found.setdefault(str(parts.hostname), []).append(int(parts.port or 0))
        return found

    def table(self) -> Iterator[str]:
        """Yield a line a node: who lies there, with what they need; and one where cores are few."""
        for address, there in self.found.items():
            names = [name for name, at in self.seats.items() if at == address]
            needs = [self._needs[kind_of(name)] for name in names]
            memory, gpus = sum(n.memory_bytes for n in needs), sum(n.gpus for n in needs)
            has = f"{memory / GIB:.1f} of {there.facts.memory_bytes / GIB:.1f} GiB"
            if there.node.gpus:
                has += f", {gpus} of {there.node.gpus} GPUs"
                has += f" (other jobs hold {there.node.taken})" * bool(there.node.taken)
            yield f"node {there.node.shown}: {', '.join(names) or 'nobody'}; {has}"
            threads = sum(threads_of(self.config)[kind_of(name)] for name in names)
            if threads > there.facts.cores:
                yield (
                    f"node {there.node.shown}: the processes there have {threads} threads, and "
                    f"{there.facts.cores} cores are there: they work, and slow each other down"
                )

    def gpus(self, name: str) -> int:
        """How many GPUs a process has for itself."""
        return self._needs[kind_of(name)].gpus

    # ---- seats that change

    def seat(self, name: str) -> str:
        """The address of a process's node, found anew where it has none. Raises NoRoom."""
        before = self.seats.get(name, "")
        if before and before not in self._closed:
            return before
        if kind_of(name) in (RETRIEVAL, REPLAY):
            address = self.here if name in (RETRIEVAL, REPLAY) else _node_of(name)
            if address not in self.found or address in self._closed:
                raise NoRoom(f"node {address} is {'to go' if address in self.found else 'gone'}")
            return self._seats.take(name, address)
        self._seats.leave(name)
        return self._seats.seat(name)

    def leave(self, name: str) -> None:
        """Have others take the seat of a process that has left for good."""
        self._seats.leave(name)

    def beside(self, names: Sequence[str]) -> list[str]:
        """The retrieval servers that nodes of these actors are to have and lack."""
        if not (self.config.starts_retrieval_server and any(kind_of(n) == ACTOR for n in names)):
            return []
        return [
            name for name in servers(self.config, self.seats, self.here) if name not in self.seats
        ]

    def close(self, address: str) -> str:
        """Give no more seats on a node that is to go; what becomes of those who cannot leave it."""
        self._closed.add(address)
        self._seats.close(address)
        there = {kind_of(name) for name, at in self.seats.items() if at == address}
        if REPLAY in there:
            return (
                ": the run ends with it: end it (Ctrl-C); elsewhere forage resume --trust goes on"
            )
        if LEARNER not in there:
            return ""
        if not self.config.cluster.shared:
            return ": the run ends with it, for its learner is there: set cluster.shared"
        return ": its learner saves, and goes on elsewhere"

    def learner_moves(self, left_s: float | None) -> bool:
        """True where a learner is to leave a node now that is to go in so long (None: not known):
        others have room, or saving may take what is left.
        """
        ranks = self._ranks_to_move()
        if not ranks or not self.config.cluster.shared or self.here in self._closed:
            return False
        saving_s = self.config.learner.saving_s(weights_bytes(self.config.model.path))
        fit = self._seats.with_room(ranks) == ranks
        return fit or (left_s is not None and left_s <= saving_s)

    def actors_that_move(
        self, left_s: Mapping[str, float | None], waiting: Sequence[str]
    ) -> list[str]:
        """Those of these actors that are to leave nodes now which are to go in so long (None: not
        known): others have room for them beside the learner and those `waiting` to start, or
        draining may take what is left.
        """
        seatless = [name for name in waiting if self.seats.get(name) in {None, *self._closed}]
        fit = self._seats.with_room([*dict.fromkeys([*self._ranks_to_move(), *seatless, *left_s])])
        needed_s = self.config.actors.drain_deadline_s + LEAVE_S
        late = [name for name, s in left_s.items() if s is None or s <= needed_s]
        return [name for name in left_s if name in fit or name in late]

    def _ranks_to_move(self) -> list[str]:
        return [n for n, at in self.seats.items() if is_rank(n) and at in self._closed]

    def remove(self, address: str) -> None:
        """Have a node no longer."""
        self._closed.discard(address)
        self._seats.remove(address)
        self.found.pop(address, None)

    def recount(self, taken: Mapping[str, int]) -> None:
        """Note how many GPUs others have now, by the addresses of nodes."""
        for address in self.found.keys() & taken.keys():
            there = self.found[address]
            node = msgspec.structs.replace(there.node, taken=taken[address])
            self.found[address] = msgspec.structs.replace(there, node=node)
            self._seats.recount(node)

    def add(self, node: Surveyed) -> None:
        """Have a node, new or back."""
        self.found[node.node.address] = node
        self._closed.discard(node.node.address)
        self._seats.add(_room(node))

    # ---- what each process is told

    def wired(self) -> Config:
        """The configuration with the run's endpoints."""
        config: Config = with_field(self.config, "replay.endpoint", self._replay)
        return msgspec.structs.replace(
            config,
            weight_sync=msgspec.structs.replace(config.weight_sync, endpoint=self._weight_sync),
        )

    def words(self, name: str) -> list[str]:
        """The fields that a process is told beside its configuration, as overrides."""
        kind, own = kind_of(name), self._servers()
        at = self.seats[name]
        words = [f"replay.endpoint={self._replay}"]
        words += [self.learner_word] if LEARNER in self.seats else []  # else it waits for room
        words += [f"keys={self.keys(at)}"] if at != self.here else []
        words += [f"learner.rendezvous={each}" for each in self._rendezvous]
        if own:
            words.append(f"retrieval.token_file={self.token_file(at)}")
        if own and kind in (RETRIEVAL, REPLAY):  # replay tells it to who joins
            parts = urlsplit(own[name] if kind == RETRIEVAL else next(iter(own.values())))
            words += [f"retrieval.host={parts.hostname}", f"retrieval.port={parts.port}"]
        if own and kind == ACTOR:
            urls = sorted(own.values(), key=lambda url: urlsplit(url).hostname != at)
            words.append(f"retrieval.url=[{','.join(urls)}]")
        return words

    @property
    def learner_word(self) -> str:
        """The one that says where weights come from."""
        return f"weight_sync.endpoint={self._weight_sync}"

    def token_file(self, address: str) -> str:
        """What searches from a node show, where the user names none: it goes with the keys."""
        return self.config.retrieval.token_file or str(self.keys(address) / TOKEN_FILE)

    def keys(self, address: str) -> Path:
        """The folder of secrets on a node: the run's own here, elsewhere one that goes with it."""
        here = address == self.here
        return keys_of(self.config).folder if here else self.directory(address) / "keys"

    def secrets(self, address: str) -> dict[str, Path]:
        """The files, by name, to be laid on a node: those that processes there need."""
        if address == self.here:
            return {}
        keys, found = keys_of(self.config), set[Path]()
        draws_token = bool(self._servers()) and not self.config.retrieval.token_file
        for name in (name for name, at in self.seats.items() if at == address):
            kind = kind_of(name)
            found.update(keys.to_ask(kind) if kind in CLIENTS else ())
            found.update(keys.to_serve if name == LEARNER else ())  # rank 0 publishes
            if kind in (ACTOR, RETRIEVAL) and draws_token:
                found.add(Path(self.token_file(self.here)))
        return {path.name: path for path in sorted(found)}

    def directory(self, address: str) -> Path:
        """The folder of a node for sockets: no two nodes' are one, though they may see one /tmp."""
        own = socket_dir(self.config.run_dir)
        return own if address == self.here else own.with_name(f"{own.name}-{address}")

    @property
    def _replay(self) -> str:
        return self.config.replay.endpoint or self._endpoint(self.here, _REPLAY_PORT)

    @property
    def _weight_sync(self) -> str:
        return self._endpoint(self.seats[LEARNER], _SYNC_PORT)

    @property
    def _rendezvous(self) -> list[str]:
        nodes = {at for name, at in self.seats.items() if kind_of(name) == LEARNER}
        rank_0 = self.seats.get(LEARNER)
        return [self._endpoint(rank_0, _RENDEZVOUS_PORT)] if rank_0 and len(nodes) > 1 else []

    def _servers(self) -> dict[str, str]:
        """The addresses of the run's own retrieval servers, by name."""
        names = [name for name in self.seats if kind_of(name) == RETRIEVAL]
        own, found = self.config.retrieval.port, {}
        for name in names:
            address = self.seats[name]
            number = sum(self.seats[each] == address for each in names[: names.index(name)])
            ports = self.found[address].facts.ports
            port = own + number if own else ports[_RETRIEVAL_PORT + number]
            found[name] = f"http://{_host(address)}:{port}"
        return found

    def _endpoint(self, address: str, port: int) -> str:
        return f"tcp://{_host(address)}:{self.found[address].facts.ports[port]}"


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _node_of(server: str) -> str:
    """The address in the name of a retrieval server."""
    return server.removeprefix(f"{RETRIEVAL}-").split("-")[0]


def _room(found: Surveyed) -> Room:
    return Room(found.node, found.node.gpus - found.node.taken, found.facts.memory_bytes)


def _needs(config: Config, model: Model) -> dict[str, Need]:
    """What each kind of process needs of its node."""
    gpus = 0 if on_cpu() else 1
    memory = memory_by_process(config, bool(gpus), model)
    return {
        LEARNER: Need(gpus, memory["rank"]),
        ACTOR: Need(gpus * config.actors.tensor_parallel, memory["actor"]),
        REPLAY: Need(0, memory["replay"]),
        RETRIEVAL: Need(0, memory["retrieval_server"]),
    }


def _fitted(config: Config, found: Sequence[Surveyed], model: Model) -> Config:
    """With the sizes that the smallest GPU among the nodes leaves, one for each rank and worker."""
    sizes = [size for each in found for size in each.facts.gpu_bytes]
    count = config.learner.ranks + config.actors.count * config.actors.tensor_parallel
    gpus = [] if on_cpu() or not sizes else [min(sizes) - retrieval_share(config, found)] * count
    # A retrieval server's share is taken off each GPU of its node: here it has none.
    retrieval = msgspec.structs.replace(config.retrieval, device="cpu", index_device="cpu")
    made = fitted(msgspec.structs.replace(config, retrieval=retrieval), gpus, model)
    return msgspec.structs.replace(made, retrieval=config.retrieval)
