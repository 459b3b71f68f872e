"""The rendezvous of one learner's ranks: where they meet, and how each hears of another's end.

They meet on a socket in the run's own directory, or at `learner.rendezvous` (on a trusted network:
neither it nor the collectives are authenticated). A lost rank is named: by RankLost where the main
thread fails because of it, otherwise by the message with which the process ends.
"""

import contextlib
import hashlib
import logging
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from torch import distributed

from configs.runtime.process import make_socket_dir
from configs.schema import Config
from learner.errors import BadModel, RankLost
from learner.ranks.link import Link

log = logging.getLogger(__name__)
GRACE_S = 5.0  # for the main thread to end by itself once a rank is lost
RETRY_S, CONNECT_S = 0.1, 5.0


class Rendezvous:
    """Links to the other ranks. `on_stall(message)` ends the process when one is lost and the main
    thread does not notice within GRACE_S.
    """

    def __init__(self, on_stall: Callable[[str], None]) -> None:
        self.links: dict[int, Link] = {}
        self.resources = contextlib.ExitStack()
        self._on_stall = on_stall
        self._lost, self._dismissed = threading.Event(), False
        self._loss, self._timer = "", threading.Timer(0.0, on_stall)

    def add(self, rank: int, link: Link) -> None:
        """Watch a rank that has joined."""
        self.links[rank] = link
        link.watch(f"rank {rank} of the learner", self._lose)

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


def admit_ranks(config: Config, rendezvous: Rendezvous) -> distributed.Store:
    """Wait, on rank 0, until all ranks have joined; return the store of their process group, which
    they are told too. Raises RankLost naming who is missing, and BadModel.
    """
    learner = config.learner
    with _listen(config) as listener:
        listener.settimeout(learner.step_deadline_s)
        deadline = time.monotonic() + learner.step_deadline_s
        while missing := sorted(set(range(1, learner.ranks)) - rendezvous.links.keys()):
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise RankLost(
                    f"ranks {missing!r} of the learner have not joined within "
                    f"{learner.step_deadline_s:g} s (learner.ranks = {learner.ranks!r}): "
                    "start them with `python -m learner.worker CONFIG --rank R`"
                ) from None
            _admit(Link(connection, "a rank that joins"), config, rendezvous)
    if learner.rendezvous:
        host = _address(config)[0]
        store = _host_store(host, learner.ranks)
        rendezvous.send_all("place", {"host": host, "port": store.port})
        return store
    # A new file each time: keys left by ranks that were killed would be taken for live ones.
    folder = tempfile.TemporaryDirectory(prefix="ranks-", dir=make_socket_dir(config.run_dir))
    path = f"{rendezvous.resources.enter_context(folder)}/store"
    rendezvous.send_all("place", {"path": path})
    return distributed.FileStore(path, learner.ranks)


def _host_store(host: str, ranks: int) -> distributed.TCPStore:
    """Open a store at `host`, on a free port."""
    # The store is handed a bound socket: left to itself it listens on every interface.
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return distributed.TCPStore(
        host,
        port,
        ranks,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_leader(
    config: Config, rank: int, rendezvous: Rendezvous
) -> tuple[Link, distributed.Store]:
    """Join rank 0; return its link, and the store. Raises RankLost and BadModel."""
    learner = config.learner
    deadline = time.monotonic() + learner.step_deadline_s
    while (connection := _connect(config)) is None:
        if time.monotonic() > deadline:
            raise RankLost(
                f"rank 0 of the learner has not been there for {learner.step_deadline_s:g} s"
            )
        time.sleep(RETRY_S)
    link = Link(connection, "rank 0 of the learner")
    rendezvous.add(0, link)
    link.send("join", {"rank": rank, "made_of": _digest(config)})
    _, place = link.receive(learner.step_deadline_s)
    if "path" in place:
        return link, distributed.FileStore(place["path"], learner.ranks)
    return link, distributed.TCPStore(place["host"], place["port"], learner.ranks)


def _admit(link: Link, config: Config, rendezvous: Rendezvous) -> None:
    try:
        what, hello = link.receive(RETRY_S * 50)
    except RankLost as error:
        log.warning("refused a connection: %s", error)
        link.close()
        return
    known = what == "join" and isinstance(hello, dict)
    rank = int(hello.get("rank", 0)) if known else 0
    if rank not in range(1, config.learner.ranks) or rank in rendezvous.links:
        link.send("failed", f"rank {rank!r} is taken or not one of {config.learner.ranks}")
        link.close()
    elif hello.get("made_of") != _digest(config):
        why = (
            f"rank {rank} of the learner has another configuration: start every rank with the same "
            "CONFIG and overrides"
        )
        link.send("failed", why)
        link.close()
        raise BadModel(why)
    else:
        rendezvous.add(rank, link)


def _digest(config: Config) -> str:
    encoded = msgspec.json.encode((config.seed, config.model, config.learner))
    return hashlib.blake2b(encoded, digest_size=8).hexdigest()


def _address(config: Config) -> tuple[str, int]:
    given = urlsplit(config.learner.rendezvous)
    if given.scheme != "tcp" or not given.hostname or not given.port:
        raise BadModel(
            f"learner.rendezvous = {config.learner.rendezvous!r}: give tcp://HOST:PORT of rank 0's "
            "machine, or leave it empty when all ranks are on one"
        )
    return given.hostname, given.port


def _socket_path(config: Config) -> Path:
    if not config.run_dir:
        raise BadModel("run_dir = '': the learner's ranks meet there; name the run's directory")
    return make_socket_dir(config.run_dir) / "learner.sock"


def _listen(config: Config) -> socket.socket:
    if config.learner.rendezvous:
        return socket.create_server(_address(config))
    path = _socket_path(config)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    return listener


def _connect(config: Config) -> socket.socket | None:
    if config.learner.rendezvous:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(_address(config), timeout=CONNECT_S)
            connection.settimeout(None)
            return connection
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(_socket_path(config)))
    except OSError:
        connection.close()
        return None
    return connection
