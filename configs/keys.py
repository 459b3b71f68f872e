"""Addresses of a run's processes, and the keys that TCP connections to them need.

One CurveZMQ key pair serves, the others ask: the actors', and that of learner and launcher, which
may say more. A peer without one is refused before its bytes are read. The learner's ranks, which do
not speak ZeroMQ to each other, prove that they hold the learner's.
`ipc://` endpoints lie in a 0700 directory and need no keys. The launcher makes the folder of keys,
or the first process that serves; a machine that joins gets a copy of it, and a node of a cluster
what its processes need.
"""

import hashlib
import hmac
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.auth

from configs.load import ConfigError
from configs.runtime.guard import Guard
from configs.runtime.process import socket_dir
from configs.schema import Config

SERVER, ACTOR, LEARNER = "server", "actor", "learner"  # a key pair each
CLIENTS = (ACTOR, LEARNER)


class Keys:
    """The folder of a run's key pairs, `NAME.key` and `NAME.key_secret`, 0600 in a 0700 folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> "Keys":
        """Make the keys where there are none; several processes may do so at once."""
        if not self.folder.is_dir():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=".keys-", dir=self.folder.parent))  # 0700
            for name in (SERVER, *CLIENTS):
                for path in zmq.auth.create_certificates(draft, name):
                    Path(path).chmod(0o600)
            try:
                draft.rename(self.folder)
            except OSError:  # somebody else's are there now
                shutil.rmtree(draft)
        return self

    def discard(self) -> bool:
        """Remove what lies in their place, so that `make` draws new ones; False where nothing does.
        Where it is a link, what that leads to stays.
        """
        if not os.path.lexists(self.folder):
            return False
        aside = Path(tempfile.mkdtemp(prefix=".keys-", dir=self.folder.parent))
        self.folder.rename(aside / self.folder.name)
        shutil.rmtree(aside)
        return True

    def to_ask(self, role: str) -> tuple[Path, ...]:
        """What a process in this role needs that connects to others."""
        return self.folder / f"{SERVER}.key", self.folder / f"{role}.key_secret"

    @property
    def to_serve(self) -> tuple[Path, ...]:
        """What a process needs that others connect to."""
        clients = (self.folder / f"{role}.key" for role in CLIENTS)
        return *clients, self.folder / f"{SERVER}.key_secret"

    def check(self, role: str) -> None:
        """Raise ConfigError unless the keys of a client in this role are here."""
        self._load(SERVER, secret=False)
        self._load(role, secret=True)

    def present(self, socket: Any, role: str) -> None:
        """Have a socket that will connect show this role's key. Raises ConfigError."""
        socket.curve_serverkey = self._load(SERVER, secret=False)[0]
        socket.curve_publickey, socket.curve_secretkey = self._load(role, secret=True)

    def guard(self, context: "zmq.Context[Any]", socket: "zmq.Socket[bytes]") -> Guard:
        """Have a socket that will bind take this run's keys alone. Raises ConfigError."""
        roles = {self._load(role, secret=False)[0]: role for role in CLIENTS}
        socket.curve_publickey, socket.curve_secretkey = self._load(SERVER, secret=True)
        socket.curve_server = True
        return Guard(context, socket, roles)

    def proof(self, *said: bytes) -> bytes:
        """32 bytes that only who holds the learner's key can make of `said`, whose parts have
        lengths that are known. Raises ConfigError.
        """
        secret = self._load(LEARNER, secret=True)[1]
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
