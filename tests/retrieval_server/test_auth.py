"""The token: whose file is taken, who is let in, over real HTTP."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from configs.load import ConfigError
from retrieval_server.auth import authorized, is_loopback, read_token
from retrieval_server.client import RetrievalClient
from retrieval_server.protocol import RetrievalRefused


def test_a_file_of_its_owner_s_holds_the_token(write_token: Callable[..., Path]) -> None:
    assert read_token(str(write_token("sesame-12"))) == "sesame-12"
    assert read_token(str(write_token("c2VzYW1l=="))) == "c2VzYW1l=="
    assert read_token("") == ""


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("sesame", 0o644, "mode 0644 lets others read it: chmod 600"),
        ("sesame", 0o610, "mode 0610 lets others read it: chmod 600"),
        ("", 0o600, "must hold one token .* openssl rand -hex 32"),
        ("open sesame", 0o600, "must hold one token"),
        ("one\ntwo", 0o600, "must hold one token"),
        ("sésame", 0o600, "must hold one token"),
        ("x" * 5000, 0o600, "must hold one token of at most 4096"),
    ],
)
def test_a_file_that_is_not_fit_is_named(
    write_token: Callable[..., Path], text: str, mode: int, said: str
) -> None:
    path = write_token(text, mode)
    with pytest.raises(ConfigError, match=said) as raised:
        read_token(str(path))
    assert f"retrieval.token_file = {str(path)!r}" in str(raised.value)
    assert not text or text not in str(raised.value), "a message must not tell the token"


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none': No such file .* openssl rand -hex 32 > "):
        read_token(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("header", "let_in"),
    [
        ("Bearer sesame", True),
        ("bearer  sesame ", True),
        ("", False),
        ("sesame", False),
        ("Basic sesame", False),
        ("Bearer sesam", False),
        ("Bearer sesame2", False),
        ("Bearer sésame", False),
    ],
)
def test_only_the_token_is_let_in(header: str, let_in: bool) -> None:
    assert authorized("sesame", header) is let_in
    assert authorized("", header)


@pytest.mark.parametrize("header", [None, "Bearer other", "Basic sesame-12"])
def test_a_stranger_gets_401_and_is_told_why(guarded_url: str, header: str | None) -> None:
    headers = {"authorization": header} if header else {}
    body = {"queries": ["kelu"], "topk": 1}
    reply = httpx.post(f"{guarded_url}/retrieve", json=body, headers=headers, trust_env=False)
    assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
    assert "Authorization: Bearer TOKEN" in reply.json()["detail"]
    assert "sesame" not in reply.text
    assert httpx.get(f"{guarded_url}/health", trust_env=False).json()["status"] == "ok"


async def test_the_client_shows_its_token(guarded_url: str) -> None:
    async with RetrievalClient(guarded_url, token="sesame-12") as client:
        assert (await client.retrieve(["kelu"], 1))[0][0].id == "p0"


@pytest.mark.parametrize("token", ["", "other"])
async def test_a_client_without_it_is_refused_at_once(guarded_url: str, token: str) -> None:
    async with RetrievalClient(guarded_url, token=token) as client:
        with pytest.raises(RetrievalRefused, match=r"401: retrieval\.token_file does not hold"):
            await client.retrieve(["kelu"], 1)
    assert client.gauges()["retrieval/retried"] == 0


async def test_a_server_that_asks_for_none_takes_a_token_too(server_url: str) -> None:
    async with RetrievalClient(server_url, token="any") as client:
        assert (await client.retrieve(["kelu"], 1))[0][0].id == "p0"


@pytest.mark.parametrize(
    ("address", "own"),
    [("127.0.0.1", True), ("127.9.0.1", True), ("::1", True), ("0.0.0.0", False), ("::", False)],
)
def test_what_only_this_machine_reaches(address: str, own: bool) -> None:
    assert is_loopback(address) is own
