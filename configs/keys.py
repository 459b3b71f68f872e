"""Addresses of a run's processes, and the keys that TCP connections to them need.

One CurveZMQ key pair serves, the other asks; a peer with neither is refused before its bytes are
read. The learner's ranks, which do not speak ZeroMQ to each other, prove that they hold the latter.
`ipc://` endpoints lie in a 0700 directory and need no keys. The launcher makes the folder of keys,
or the first process that serves; a machine that joins gets a copy of it, and a node of a cluster
what its processes need.
"""

import hashlib
import hmac
import logging
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from configs.load import ConfigError
from configs.runtime.process import socket_dir
from configs.schema import Config

SERVER, CLIENT = "server", "client"
_POLL_MS = 200
_REFUSED = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it broke off the handshake",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak CurveZMQ with our key",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key is not this run's",
}
logger = logging.getLogger(__name__)


class Keys:
    """The folder of a run's key pairs, `NAME.key` and `NAME.key_secret`, 0600 in a 0700 folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> "Keys":
        """Make the keys where there are none; several processes may do so at once."""
        if not self.folder.is_dir():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=".keys-", dir=self.folder.parent))  # 0700
            for name in (SERVER, CLIENT):
                for path in zmq.auth.create_certificates(draft, name):
                    Path(path).chmod(0o600)
            try:
                draft.rename(self.folder)
            except OSError:  # somebody else's are there now
                shutil.rmtree(draft)
        return self

    @property
    def to_ask(self) -> tuple[Path, ...]:
        """What a process needs that connects to others."""
        return self.folder / f"{SERVER}.key", self.folder / f"{CLIENT}.key_secret"

    @property
    def to_serve(self) -> tuple[Path, ...]:
        """What a process needs that others connect to."""
        return self.folder / f"{CLIENT}.key", self.folder / f"{SERVER}.key_secret"

    def check(self) -> None:
        """Raise ConfigError unless a client's keys are here."""
        self._load(SERVER, secret=False)
        self._load(CLIENT, secret=True)

    def present(self, socket: Any) -> None:
        """Have a socket that will connect show this run's key. Raises ConfigError."""
        socket.curve_serverkey = self._load(SERVER, secret=False)[0]
        socket.curve_publickey, socket.curve_secretkey = self._load(CLIENT, secret=True)

    def guard(self, context: "zmq.Context[Any]", socket: "zmq.Socket[bytes]") -> "Guard":
        """Have a socket that will bind take this run's key alone. Raises ConfigError."""
        allowed = self._load(CLIENT, secret=False)[0]
        socket.curve_publickey, socket.curve_secretkey = self._load(SERVER, secret=True)
        socket.curve_server = True
        return Guard(context, socket, allowed)

    def proof(self, *said: bytes) -> bytes:
        """32 bytes that only who holds this run's client key can make of `said`, whose parts have
        lengths that are known. Raises ConfigError.
        """
        secret = self._load(CLIENT, secret=True)[1]
        return hmac.new(secret, b"".join(said), hashlib.sha256).digest()

    def _load(self, name: str, secret: bool) -> tuple[bytes, bytes]:
        path = self.folder / f"{name}.key{'_secret' if secret else ''}"
        try:
            mode = path.stat().st_mode & 0o777
            public, private = zmq.auth.load_certificate(path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"keys = {str(self.folder)!r}: {path.name} cannot be read ({error}): start replay "
                "first, or copy the keys folder of the run here"
            ) from error
        if secret and mode & 0o077:
            raise ConfigError(
                f"keys = {str(self.folder)!r}: {path.name} has mode {mode:04o}, which lets others "
                f"read it: chmod 600 {path}"
            )
        return public, private or b""


def keys_of(config: Config) -> Keys:
    """The keys of a run, made or not."""
    return Keys(Path(config.keys) if config.keys else Path(config.run_dir) / "keys")


class Guard:
    """Admits one key and logs who is refused; close it before the context."""

    def __init__(
        self, context: "zmq.Context[Any]", socket: "zmq.Socket[bytes]", allowed: bytes
    ) -> None:
        self._allowed = allowed
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        self._socket, self._over = socket, threading.Event()
        self._monitor = socket.get_monitor_socket(sum(_REFUSED))
        self._thread = threading.Thread(target=self._watch, daemon=True, name="refusals")
        self._thread.start()

    def callback(self, _domain: str, key: bytes) -> bool:
        """True where a client's key is this run's."""
        return key == self._allowed

    def close(self) -> None:
        """End both threads."""
        self._over.set()
        self._thread.join()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._authenticator.stop()

    def _watch(self) -> None:
        while not self._over.is_set():
            if self._monitor.poll(_POLL_MS):
                event = recv_monitor_message(self._monitor)
                if cause := _REFUSED.get(zmq.Event(event["event"])):
                    place = event["endpoint"].decode(errors="replace")
                    logger.warning("refused a connection to %s: %s", place, cause)


@dataclass(frozen=True)
class Address:
    """The endpoint of a process; `keys` over TCP alone, and not necessarily made yet."""

    endpoint: str
    keys: Keys | None


@dataclass(frozen=True)
class Addresses:
    """The addresses of replay, of the learner's weight publisher, and where its ranks meet.

    Each process resolves them once, from its configuration, and passes them on.
    """

    replay: Address
    weight_sync: Address
    rendezvous: Address

    @classmethod
    def of(cls, config: Config) -> "Addresses":
        """The configured endpoints; where there is none, a socket in the run's own directory."""

        def resolved(configured: str, name: str) -> Address:
            endpoint = configured or f"ipc://{socket_dir(config.run_dir)}/{name}"
            return Address(endpoint, keys_of(config) if endpoint.startswith("tcp://") else None)

        return cls(
            replay=resolved(config.replay.endpoint, "replay"),
            weight_sync=resolved(config.weight_sync.endpoint, "weight_sync"),
            rendezvous=resolved(config.learner.rendezvous, "learner.sock"),
        )

    @property
    def keys(self) -> Keys | None:
        """The run's keys where any process of it is reached over TCP."""
        return self.replay.keys or self.weight_sync.keys or self.rendezvous.keys
