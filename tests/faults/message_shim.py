"""A shim that drops, doubles and reorders whole ZeroMQ messages on their way to replay and back.

Clients talk to a ROUTER at LISTEN; each has a DEALER at TARGET, so that replay sees one connection
per client. `python -m tests.faults.message_shim LISTEN TARGET --fault drop=0.1 --fault reorder=0.1`
does so both ways. In tests `to_replay` and `to_client` are set from any thread. No keys: for ipc://
only. It works on a thread of its own, and ends on SIGINT, SIGTERM or `close`.
"""

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import zmq

from tests.faults.tcp_proxy import between

HOLD_S = 0.05  # a message that waits for a later one to overtake it goes then at the latest
LOOK_S = 0.01
Send = Callable[[bytes], None]


def everything(_message: bytes) -> bool:
    """Each message may be touched."""
    return True


@dataclass(frozen=True)
class Faults:
    """Probabilities, one way; of the messages that `picks` returns True for."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    picks: Callable[[bytes], bool] = everything


class Way:
    """One way of one client's connection; a held message lets a later one overtake it."""

    def __init__(self, send: Send, chance: random.Random, counts: Counter[str]) -> None:
        self._send, self._random, self._counts = send, chance, counts
        self._held: list[bytes] = []
        self._since_s = 0.0

    def take(self, message: bytes, faults: Faults) -> None:
        """Send it on, or let its fault happen."""
        lot = self._lot(faults) if faults.picks(message) else "passed"
        self._counts[lot] += 1
        if lot == "reorder" and not self._held:
            self._held, self._since_s = [message], time.monotonic()
            return
        for _ in range({"drop": 0, "duplicate": 2}.get(lot, 1)):
            self._send(message)
        self.release()

    def _lot(self, faults: Faults) -> str:
        point = self._random.random()
        for name in ("drop", "duplicate", "reorder"):
            if point < getattr(faults, name):
                return name
            point -= getattr(faults, name)
        return "passed"

    def release(self, held_s: float = 0.0) -> None:
        """Send what has been held for so long."""
        if self._held and time.monotonic() - self._since_s >= held_s:
            self._send(self._held.pop())


class ChaosShim:
    """A context manager; `counts` of messages by their fault, both ways together."""

    def __init__(self, listen: str, target: str, seed: int = 0) -> None:
        """Binds `listen` at once. Raises zmq.ZMQError."""
        self.to_replay = self.to_client = Faults()
        self.counts: Counter[str] = Counter()
        self._target, self._random = target, random.Random(seed)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        self._router.bind(listen)
        self._dealers: dict[bytes, zmq.Socket[bytes]] = {}
        self._ways: dict[tuple[bytes, bool], Way] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and close every connection; what is held is lost."""
        self._over.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._over.is_set():
            poller = zmq.Poller()
            for socket in (self._router, *self._dealers.values()):
                poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(int(LOOK_S * 1000)))
            if self._router in ready:
                name, message = self._router.recv_multipart()
                self._connected(name)
                self._ways[name, True].take(message, self.to_replay)
            for name, dealer in list(self._dealers.items()):
                if dealer in ready:
                    self._ways[name, False].take(dealer.recv(), self.to_client)
            for key in list(self._ways):
                if way := self._ways.get(key):
                    way.release(HOLD_S)

    def _connected(self, name: bytes) -> None:
        if name in self._dealers:
            return
        dealer = self._dealers[name] = self._context.socket(zmq.DEALER)
        dealer.set(zmq.SNDHWM, 0)
        dealer.connect(self._target)
        self._ways[name, True] = Way(dealer.send, self._random, self.counts)
        self._ways[name, False] = Way(
            lambda message: self._answer(name, message), self._random, self.counts
        )

    def _answer(self, name: bytes, message: bytes) -> None:
        try:
            self._router.send_multipart((name, message), zmq.NOBLOCK)
        except zmq.ZMQError:  # the client has gone: so has its connection to replay
            for inwards in (True, False):
                self._ways.pop((name, inwards), None)
            if dealer := self._dealers.pop(name, None):
                dealer.close(linger=0)


def main() -> None:
    """Serve until a signal."""
    arguments = between(__doc__)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    with ChaosShim(arguments.listen, arguments.target, arguments.seed) as shim:
        shim.to_replay = shim.to_client = Faults(**dict(arguments.fault))
        over.wait()


if __name__ == "__main__":
    main()
