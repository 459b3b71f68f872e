"""Connections between the ranks of a learner: where rank 0 listens, and who is let in.

On one host they meet on a socket in the run's 0700 directory. Over TCP each side proves, on a
challenge that the other has just drawn, that it holds the run's keys. Until then a stranger has
brought 64 bytes at most, within a deadline, and none of them was decoded.
"""

import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Iterator
from hmac import compare_digest
from pathlib import Path
from urllib.parse import urlsplit

from configs.keys import Address, Keys
from configs.load import ConfigError
from configs.runtime.process import make_socket_dir
from configs.schema import Config

log = logging.getLogger(__name__)
CONNECT_S = HANDSHAKE_S = 5.0
_BYTES = 32  # of a challenge, and of a proof
_REFUSED = bytes(_BYTES)
_JOINS, _LEADS = b"joins", b"leads"


def host_and_port(address: Address) -> tuple[str, int]:
    """Those of a tcp:// address."""
    parts = urlsplit(address.endpoint)
    return str(parts.hostname), int(parts.port or 0)


def serve(host: str, port: int = 0) -> socket.socket:
    """Listen at this address alone, by default at a port that is free."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family)


def listen(config: Config, address: Address) -> socket.socket:
    """Listen as rank 0, with the run's keys made. Raises ConfigError."""
    if address.keys:
        address.keys.make()
        try:
            return serve(*host_and_port(address))
        except OSError as error:
            raise ConfigError(
                f"learner.rendezvous = {address.endpoint!r}: rank 0 cannot listen there "
                f"({error.strerror or error}): name an address of its machine, and a free port"
            ) from error
    path = _socket_path(config, address)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    return listener


def refusal(connection: socket.socket, keys: Keys | None) -> str:
    """Have who has connected to rank 0 prove itself. Where it does not, close the connection and
    return who it was, and why it is refused; else nothing.
    """
    if keys is None:
        return ""
    ours, peer = secrets.token_bytes(_BYTES), "somebody"
    try:
        peer = connection.getpeername()[0]
        connection.settimeout(HANDSHAKE_S)
        connection.sendall(ours)
        answer = _read(connection, 2 * _BYTES)
        theirs, proof = answer[:_BYTES], answer[_BYTES:]
        known = compare_digest(proof, keys.proof(_JOINS, ours, theirs))
        connection.sendall(keys.proof(_LEADS, theirs, ours) if known else _REFUSED)
        connection.settimeout(None)
        why = "" if known else "its key is not this run's"
    except OSError as error:
        why = f"it broke off the handshake ({error})"
    if not why:
        return ""
    log.warning("refused a rank's connection from %s: %s", peer, why)
    connection.close()
    return f"{peer}: {why}"


def connect(config: Config, address: Address) -> socket.socket:
    """A connection to rank 0, which has proved itself.

    Raises OSError while it is not there, and ConfigError where one of the two has other keys.
    """
    if address.keys is None:
        return _connected(config, address)
    connection = socket.create_connection(host_and_port(address), timeout=CONNECT_S)
    with _closed_on_error(connection):
        _introduce(connection, address.keys, address.endpoint)
        connection.settimeout(None)
        return connection


def _connected(config: Config, address: Address) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _closed_on_error(connection):
        connection.connect(str(_socket_path(config, address)))
        return connection


@contextlib.contextmanager
def _closed_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _introduce(connection: socket.socket, keys: Keys, endpoint: str) -> None:
    connection.settimeout(HANDSHAKE_S)
    theirs, ours = _read(connection, _BYTES), secrets.token_bytes(_BYTES)
    connection.sendall(ours + keys.proof(_JOINS, theirs, ours))
    answer = _read(connection, _BYTES)
    if not compare_digest(answer, keys.proof(_LEADS, ours, theirs)):
        who = "refused" if answer == _REFUSED else "who answers there did not know"
        raise ConfigError(
            f"keys = {str(keys.folder)!r}: rank 0 of the learner at {endpoint} {who} this key: "
            "copy the keys folder of its run here"
        )


def _read(connection: socket.socket, count: int) -> bytes:
    """So many bytes, within the deadline of a handshake. Raises OSError."""
    found, deadline = b"", time.monotonic() + HANDSHAKE_S
    while len(found) < count:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        if not (more := connection.recv(count - len(found))):
            raise ConnectionError("it has hung up")
        found += more
    return found


def _socket_path(config: Config, address: Address) -> Path:
    if not config.run_dir:
        raise ConfigError("run_dir = '': the learner's ranks meet there; name the run's directory")
    make_socket_dir(config.run_dir)
    return Path(address.endpoint.removeprefix("ipc://"))
