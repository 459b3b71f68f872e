"""The rendezvous of one learner's ranks: where they meet, and how each hears of another's end.

They meet on a socket in the run's own directory, or at `learner.rendezvous`, where each proves that
it holds the run's keys (what they say to each other then, and the collectives, travel in clear).
Each says which node it is on, rank 0 tells all of them, and all have to see the run's directory. A
lost rank is named: by RankLost where the main thread fails because of it, otherwise by the message
with which the process ends.
"""

import contextlib
import logging
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from torch import distributed

from configs.keys import Address, Addresses
from configs.load import ConfigError
from configs.runtime.node import interface, own_address, own_node
from configs.runtime.process import make_socket_dir
from configs.schema import Config
from learner.errors import BadModel, RankLost
from learner.model.placement import Placement
from learner.ranks.connection import connect, host_and_port, listen, refusal, serve
from learner.ranks.link import Link
from learner.ranks.shared_folder import SEEN_S, Mark, marked

log = logging.getLogger(__name__)
GRACE_S = 5.0  # for the main thread to end by itself once a rank is lost
RETRY_S = 0.1
HELLO_S = 5.0  # for the first message of who has connected


class Rendezvous:
    """Links to the other ranks. `on_stall(message)` ends the process when one is lost and the main
    thread does not notice within GRACE_S.
    """

    def __init__(self, on_stall: Callable[[str], None]) -> None:
        self.links: dict[int, Link] = {}
        self.nodes: dict[int, str] = {}  # of the ranks that have joined rank 0
        self.refused: set[str] = set()  # who has connected and was no rank, and why
        self.resources = contextlib.ExitStack()
        self._on_stall = on_stall
        self._lost, self._dismissed = threading.Event(), False
        self._loss, self._timer = "", threading.Timer(0.0, on_stall)

    def add(self, rank: int, link: Link, where: str = "") -> None:
        """Watch a rank that has joined; `where` it is goes into its name."""
        self.links[rank] = link
        link.watch(f"rank {rank} of the learner{where}", self._lose)

    def send_all(self, name: str, value: Any = None) -> None:
        """Send every rank the same message."""
        for link in self.links.values():
            link.send(name, value)

    @contextlib.contextmanager
    def naming_lost_rank(self) -> Iterator[None]:
        """Turn the collectives' errors into the name of the rank whose end caused them."""
        try:
            yield
        except (RuntimeError, RankLost) as error:
            # A RankLost has its name already; the rank's own last words would be better.
            if not self._lost.wait(RETRY_S if isinstance(error, RankLost) else 2 * GRACE_S):
                raise
            self._timer.cancel()
            raise RankLost(self._loss) from error

    def dismiss(self) -> None:
        """Expect the ranks to leave: from now on their ends are not reported."""
        self._dismissed = True

    def close(self) -> None:
        """Close all links and release what the rendezvous holds."""
        self.dismiss()
        self._timer.cancel()
        for link in self.links.values():
            link.close()
        self.resources.close()

    def _lose(self, loss: str) -> None:
        if self._dismissed or self._lost.is_set():
            return
        self._loss = loss
        self._timer = threading.Timer(GRACE_S, self._on_stall, (loss,))
        self._timer.daemon = True
        self._timer.start()
        self._lost.set()
        log.error(loss)
        for link in self.links.values():
            with contextlib.suppress(RankLost):  # one of them is the one that is gone
                link.send("failed", loss)


class Hello(msgspec.Struct, frozen=True):
    """The first message of a rank that joins."""

    rank: int
    settings: dict[str, Any]  # in which it must agree with rank 0
    node: str
    host: str  # the name of its machine, for people


class Meeting(msgspec.Struct, frozen=True):
    """Rank 0's answer once all have joined: the store of the process group, a file's path or
    HOST:PORT, the nodes of all ranks, and a mark in the run's directory to look for.
    """

    store: str
    nodes: tuple[str, ...]
    mark: Mark


def admit_ranks(config: Config, rendezvous: Rendezvous) -> tuple[distributed.Store, Placement]:
    """Wait, on rank 0, until all ranks have joined and see the run's directory; return the store of
    their process group and their places, which they are told too.

    Raises RankLost naming who is missing, BadModel and ConfigError.
    """
    learner, address = config.learner, Addresses.of(config).rendezvous
    deadline = time.monotonic() + learner.step_deadline_s
    with listen(config, address) as listener:
        while missing := sorted(set(range(1, learner.ranks)) - rendezvous.links.keys()):
            left_s = deadline - time.monotonic()
            listener.settimeout(max(left_s, 0.001))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                left_s = 0.0
            if left_s <= 0.0:
                raise RankLost(_missing(missing, config, rendezvous.refused))
            if why := refusal(connection, address.keys):
                rendezvous.refused.add(why)
            else:
                _admit(connection, config, rendezvous)
    nodes = (own_node(), *(rendezvous.nodes[rank] for rank in range(1, learner.ranks)))
    store, place = _make_store(config, address, rendezvous)
    with marked(Path(config.run_dir)) as mark:
        rendezvous.send_all("meeting", msgspec.to_builtins(Meeting(place, nodes, mark)))
        _await_sight(config, rendezvous)
    return store, Placement(0, nodes, _interface(address))


def join_leader(
    config: Config, rank: int, rendezvous: Rendezvous
) -> tuple[Link, distributed.Store, Placement]:
    """Join rank 0; return its link, the store, and the places of all ranks.

    Raises RankLost, BadModel and ConfigError.
    """
    learner, address = config.learner, Addresses.of(config).rendezvous
    deadline = time.monotonic() + learner.step_deadline_s
    while True:
        try:
            connection = connect(config, address)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankLost(_absent(config, error)) from error
        time.sleep(RETRY_S)
    link = Link(connection, "rank 0 of the learner")
    rendezvous.add(0, link, f" at {learner.rendezvous}" if address.keys else "")
    hello = Hello(rank, settings_of(config), own_node(), socket.gethostname())
    link.send("join", msgspec.to_builtins(hello))
    _, told = link.receive(learner.step_deadline_s)
    meeting = msgspec.convert(told, Meeting)
    link.send("sees", meeting.mark.seen())
    store = _reach_store(meeting.store, config, bool(address.keys))
    return link, store, Placement(rank, meeting.nodes, _interface(address))


def _admit(connection: socket.socket, config: Config, rendezvous: Rendezvous) -> None:
    link = Link(connection, "a rank that joins")
    try:
        what, value = link.receive(HELLO_S)
        hello = msgspec.convert(value if what == "join" else None, Hello)
    except (RankLost, msgspec.ValidationError) as error:
        log.warning("refused a connection: %s", error)
        link.close()
        return
    rank = hello.rank
    if rank not in range(1, config.learner.ranks) or rank in rendezvous.links:
        link.send("failed", f"rank {rank!r} is taken or not one of {config.learner.ranks}")
        link.close()
    elif unequal := _unequal(hello.settings, settings_of(config)):
        why = (
            f"rank {rank} of the learner on {hello.host} has another configuration: {unequal}; "
            "start every rank with the same CONFIG and overrides"
        )
        link.send("failed", why)
        link.close()
        raise BadModel(why)
    else:
        tcp = connection.family != socket.AF_UNIX
        where = f" on {hello.host} ({connection.getpeername()[0]})" if tcp else ""
        rendezvous.nodes[rank] = hello.node
        rendezvous.add(rank, link, where)


def _await_sight(config: Config, rendezvous: Rendezvous) -> None:
    """Raise ConfigError naming the first rank that does not see the run's directory."""
    for link in rendezvous.links.values():
        _, sees = link.receive(SEEN_S + config.learner.step_deadline_s)
        if sees is not True:
            why = (
                f"run_dir = {config.run_dir!r} is not seen by {link.peer}, which could not save "
                "its part of a checkpoint: name a folder that all nodes share"
            )
            rendezvous.send_all("failed", why)
            raise ConfigError(why)


def _missing(ranks: list[int], config: Config, refused: set[str]) -> str:
    learner = config.learner
    text = (
        f"ranks {ranks!r} of the learner have not joined within {learner.step_deadline_s:g} s "
        f"(learner.ranks = {learner.ranks!r}): start them with `python -m learner.worker CONFIG "
        "--rank R`"
    )
    if refused:
        text += f"; refused {' and '.join(sorted(refused)[:3])}"
    if learner.rendezvous and not _interface(Addresses.of(config).rendezvous):
        text += (
            f"; learner.rendezvous = {learner.rendezvous!r} is the loopback here, where ranks on "
            "other machines cannot reach it"
        )
    return text


def _absent(config: Config, error: OSError) -> str:
    learner = config.learner
    text = f"rank 0 of the learner has not been there for {learner.step_deadline_s:g} s"
    if not learner.rendezvous:
        return text
    return (
        f"{text}: learner.rendezvous = {learner.rendezvous!r} ({error.strerror or error}): start "
        "it on that machine, and let other machines reach it there"
    )


def _make_store(
    config: Config, address: Address, rendezvous: Rendezvous
) -> tuple[distributed.Store, str]:
    learner = config.learner
    if not address.keys:
        # A new file each time: keys left by ranks that were killed would be taken for live ones.
        folder = tempfile.TemporaryDirectory(prefix="ranks-", dir=make_socket_dir(config.run_dir))
        path = f"{rendezvous.resources.enter_context(folder)}/store"
        return distributed.FileStore(path, learner.ranks), path
    # The store is handed a bound socket: left to itself it listens on every interface.
    host = host_and_port(address)[0]
    listener = serve(host)
    port = listener.getsockname()[1]
    store = distributed.TCPStore(
        host,
        port,
        learner.ranks,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=learner.step_deadline_s),
        master_listen_fd=listener.detach(),
    )
    return store, f"{host}:{port}"


def _reach_store(place: str, config: Config, tcp: bool) -> distributed.Store:
    learner = config.learner
    if not tcp:
        return distributed.FileStore(place, learner.ranks)
    host, _, port = place.rpartition(":")
    limit = timedelta(seconds=learner.step_deadline_s)
    try:
        return distributed.TCPStore(host, int(port), learner.ranks, timeout=limit)
    except RuntimeError as error:
        raise RankLost(f"the store of rank 0 of the learner at {place}: {error}") from error


def _interface(address: Address) -> str:
    """The interface of this machine that has its address towards rank 0; '' for the loopback."""
    return interface(own_address(*host_and_port(address))) if address.keys else ""


def settings_of(config: Config) -> dict[str, Any]:
    """The fields that all ranks must agree in, and their values as they travel."""
    sections = {"model": config.model, "learner": config.learner}
    fields = {
        f"{name}.{field}": value
        for name, section in sections.items()
        for field, value in msgspec.json.decode(msgspec.json.encode(section)).items()
    }
    return {"seed": config.seed, **fields}


def _unequal(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    return ", ".join(
        f"{field} = {theirs.get(field)!r} there, {ours.get(field)!r} here"
        for field in sorted(theirs.keys() | ours.keys())
        if theirs.get(field) != ours.get(field)
    )
