"""The socket of a replay that is still restored from its log: bound at once, so that whoever lives
on hears that it is there, and how far it is.

Only what promises nothing is answered: actors hear that replay lives, the console and the learner
how far it is. What needs the ledger is held, in order and within bounds, until there is one.
"""

import itertools
import time

import replay.protocol as wire
from configs.keys import LEARNER
from configs.load import dump
from configs.schema import Config
from replay.codec import decode_request, encode
from replay.server.connections import Router
from replay.server.held import Bounds

TELL_EVERY_S = 0.5
LOOK_EVERY_S = 0.05
MOST_READ = 2_000  # messages at one look: the log is to be read


def request_of(frames: list[bytes], role: str) -> wire.Request:
    """Return the request of a message, from a peer whose key has this role. Raises CodecError."""
    if len(frames) != 1:
        raise wire.Garbled(f"a message of {len(frames)} frames: send one")
    request = decode_request(frames[0])
    if role != LEARNER and not isinstance(request, wire.WithActorKey):
        kind, whose = type(request).__name__, role or "nobody"
        raise wire.CodecError(f"{kind} with the key of {whose}: show the learner's")
    return request


class Reception:
    """The socket, bound by `open`; `held`: who asks the ledger, what, in so many bytes."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._router: Router | None = None
        self._told_s = self._looked_s = float("-inf")
        self.held: list[tuple[bytes, wire.Request, int]] = []
        self._askers: set[bytes] = set()  # of what is held, those that are no actors
        self._of_actors, self._of_others = Bounds("actors"), Bounds("others")

    def open(self) -> Router:
        """Bind the socket, once. Raises ReplayError."""
        if self._router is None:
            self._router = Router(self._config)
        return self._router

    def close(self) -> None:
        """Close it, where it is bound."""
        if self._router is not None:
            self._router.close()

    def look(self, done: int, total: int) -> None:
        """Answer what has come; `done` of `total` bytes of the log are read."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        router = self.open()
        far = f"restoring: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB of the event log are read"
        for peer, frames, role in itertools.islice(router.messages(), MOST_READ):
            if reply := self._answer(peer, frames, role, far, done):
                router.send(peer, encode(reply))
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            wait = encode(_wait(far, done))
            for peer in self._askers:
                router.send(peer, wait)

    def _answer(
        self, peer: bytes, frames: list[bytes], role: str, far: str, done: int
    ) -> wire.Reply | None:
        try:
            request = request_of(frames, role)
        except wire.CodecError as error:
            lost = isinstance(error, wire.Garbled)
            return wire.Unknown() if lost else wire.Refused(str(error))
        match request:
            case wire.Heartbeat():
                return wire.Alive()
            case wire.Describe():
                return wire.Described(dump(self._config))
            case wire.Observe():
                return wire.Status((), (), {}, {}, far, "", restoring=True)
            case _:
                self._hold(peer, request, len(frames[0]))
        if isinstance(request, wire.FromActor):
            return None
        self._askers.add(peer)
        return _wait(far, done)

    def _hold(self, peer: bytes, request: wire.Request, size: int) -> None:
        of_actor = isinstance(request, wire.FromActor)
        bounds = self._of_actors if of_actor else self._of_others
        if bounds.admits(peer, request, size):
            bounds.add(peer, request, size)
            self.held.append((peer, request, size))


def _wait(far: str, done: int) -> wire.Wait:
    return wire.Wait(far, oldest=False, restored=done)
