"""The head of a cluster, asked before Ray joins it: small servers stand in for it."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from scripts.fleet import head
from scripts.fleet.head import NoHead


@contextmanager
def serving(answer: Callable[[bytes, Any], bytes] | None) -> Iterator[str]:
    """The address of a gRPC server that answers as a head does; None: that knows no such call."""
    server = grpc.server(ThreadPoolExecutor(1))
    if answer:
        service, _, call = head._ALIVE.strip("/").partition("/")
        handler = grpc.unary_unary_rpc_method_handler(answer)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {call: handler}),)
        )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def asks_for_token(request: bytes, context: Any) -> bytes:
    if ("authorization", "Bearer ours") not in context.invocation_metadata():
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "token")
    return b""


def test_a_head_answers_whoever_has_its_token() -> None:
    with serving(asks_for_token) as address:
        head.require(address, "ours")
        with pytest.raises(NoHead, match=f"{address} refuses our token"):
            head.require(address, "theirs")


def test_another_server_is_no_head() -> None:
    with serving(None) as address, pytest.raises(NoHead, match="no head of Ray"):
        head.require(address, "")


def test_what_speaks_otherwise_is_no_head() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def say() -> None:
            for _ in range(2):  # it is tried, then asked
                with server.accept()[0] as peer:
                    peer.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=say)
        thread.start()
        with pytest.raises(NoHead, match="no head of Ray"):
            head.require(f"127.0.0.1:{server.getsockname()[1]}", "")
        thread.join()


def test_nobody_there_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(NoHead, match=r"cannot be reached \(Connection refused\)"):
        head.require(f"127.0.0.1:{port}", "")


def test_a_head_that_starts_meanwhile_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr(head, "LOOK_S", 0.01)
    tried: list[str] = []

    def require(at: str, token: str) -> None:
        tried.append(at)
        if len(tried) < 3:
            raise head.NoHeadYet("not yet")

    with monkeypatch.context() as patched:
        patched.setattr(head, "require", require)
        assert head.awaited(address, "", 60.0) == address and len(tried) == 3
    with pytest.raises(NoHead, match="cannot be reached"):
        head.awaited(address, "", 0.0)


def test_a_token_that_is_refused_is_not_tried_again() -> None:
    with serving(asks_for_token) as address, pytest.raises(NoHead, match="copy its"):
        head.awaited(address, "theirs", 60.0)


def test_a_name_that_nobody_knows_is_said() -> None:
    with pytest.raises(NoHead, match="is not known here"):
        head.require("no-such-host.invalid:6379", "")


def test_a_token_is_where_ray_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    assert head.token() == ""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("home\n")
    assert head.token() == "home"
    (tmp_path / "file").write_text("file")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "file"))
    assert head.token() == "file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "said")
    assert head.token() == "said"
