"""The head of a Ray cluster: found, and asked whether it answers, before Ray joins it.

Ray itself tries for minutes, whatever answers there, and says nothing that helps.
"""

import os
import socket
import time
from pathlib import Path

import grpc
from ray._private import services

ANSWER_S = 5.0  # for a connection, and for an answer
LOOK_S = 0.5  # how often a head is looked for that is awaited
_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class NoHead(Exception):
    """No cluster can be joined there; the message says why, and the remedy."""


class NoHeadYet(NoHead):
    """Nobody is there, who may still start."""


def awaited(address: str, token: str, wait_s: float) -> str:
    """HOST:PORT of the head, once it answers. Raises NoHead."""
    end = time.monotonic() + wait_s
    while True:
        try:
            require(at := found(address), token)
            return at
        except NoHeadYet:
            if time.monotonic() >= end:
                raise
        time.sleep(LOOK_S)


def found(address: str) -> str:
    """HOST:PORT of the head; `auto` is the cluster that Ray finds here. Raises NoHead."""
    if address != "auto":
        return address
    try:
        at = services.canonicalize_bootstrap_address(address)
    except (OSError, ValueError) as error:  # several run here
        raise NoHead(f"{str(error).partition('. ')[0]}: name one by HOST:PORT") from error
    if not at:
        raise NoHeadYet("Ray does not run here: deploy/ray.sh head, or deploy/ray.sh worker HEAD")
    return str(at)


def require(address: str, token: str) -> None:
    """Have the head at HOST:PORT answer. Raises NoHead."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except socket.gaierror as error:
        raise NoHead(
            f"the host name {host} is not known here: check it, or write it into /etc/hosts"
        ) from error
    except OSError as error:
        raise NoHeadYet(
            f"{address} cannot be reached ({error.strerror or error}): see that deploy/ray.sh head "
            "runs there, and on which port (6379)"
        ) from error
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return  # Ray alone knows its certificates
    shown = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_ALIVE)(b"", timeout=ANSWER_S, metadata=shown)
        except grpc.RpcError as error:
            if error.code() in _REFUSED:
                raise NoHead(
                    f"the head at {address} refuses our token: copy its ~/.ray/auth_token to here, "
                    "or name a copy in RAY_AUTH_TOKEN_PATH"
                ) from error
            raise NoHead(
                f"what answers at {address} is no head of Ray: name the port of "
                "deploy/ray.sh head (6379)"
            ) from error


def token() -> str:
    """The token that this machine shows, as Ray finds it; ''."""
    if told := os.environ.get("RAY_AUTH_TOKEN", ""):
        return told
    named = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    return path.read_text().strip() if path.is_file() else ""
