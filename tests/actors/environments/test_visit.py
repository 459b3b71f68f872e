"""The tool `visit` against a local server: text, bounds, redirects, and what it refuses."""

import gzip
import socket
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from actors.environments import visit as visiting
from actors.environments.toolbox import Toolbox
from actors.environments.tools import load_tools
from actors.environments.visit import NotShown, is_public, visitor
from configs.environment import EnvironmentConfig, VisitConfig
from tests.actors.conftest import make_lease

PAGE = """<!doctype html><html><head><title>The
 mayor</title><script>var x = "<p>no</p>";</script><style>p {}</style></head>
<body><nav><a href=/>Home</a></nav><h1>Bore</h1><p>Its <b>may</b>or is&nbsp;Kelu &amp; sons.</p>
<ul><li>one<li>two</ul><footer>(c)</footer></body></html>"""


def reply_of(request: web.Request) -> web.StreamResponse:
    match request.match_info["what"]:
        case "page":
            return web.Response(text=PAGE, content_type="text/html")
        case "gzip":
            body, headers = gzip.compress(b"x" * 50_000_000), {"Content-Encoding": "gzip"}
            return web.Response(body=body, headers=headers, content_type="text/plain")
        case "broken":
            headers = {"Content-Encoding": "gzip"}
            return web.Response(body=b"kelu", headers=headers, content_type="text/plain")
        case "brotli":
            headers = {"Content-Encoding": "br"}
            return web.Response(body=b"kelu", headers=headers, content_type="text/plain")
        case "long":
            return web.Response(text="kelu" * 500_000)
        case "latin":
            body = '<meta charset="latin-1"><p>caf\xe9'.encode("latin-1")
            return web.Response(body=body, content_type="text/html")
        case "odd":
            return web.Response(body=b"kelu", headers={"Content-Type": "text/plain; charset=x"})
        case "image":
            return web.Response(body=b"x", content_type="image/png")
        case "round":
            return web.Response(status=302, headers={"Location": "/round"})
        case "there":
            return web.Response(status=301, headers={"Location": "page"})
        case "away":
            return web.Response(status=302, headers={"Location": "http://127.0.0.2/page"})
        case "odd_away":
            url = "http://①②⑦.⓪.⓪.②/page"
            return web.Response(status=302, headers={"Location": url})
        case "file":
            return web.Response(status=302, headers={"Location": "file:///etc/passwd"})
    raise web.HTTPNotFound


@pytest.fixture
async def server() -> AsyncIterator[Callable[[str], str]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        return reply_of(request)

    app = web.Application()
    app.router.add_get("/{what}", handle)
    async with TestServer(app) as running:
        yield lambda path: str(running.make_url(f"/{path}"))


async def visit(url: str, start: int = 0, **settings: Any) -> str:
    return await visitor(VisitConfig(private=True, **settings))(url, start)


async def test_a_page_is_its_title_and_text_without_menus_and_scripts(server: Any) -> None:
    said = await visit(server("page"))
    text = "Home\nBore\nIts mayor is Kelu & sons.\none\ntwo\n(c)"
    assert said == f"The mayor\n({len(text)} characters, from 0)\n{text}"
    assert (await visit(server("there"), 5)).endswith("characters, from 5)\n" + text[5:])


async def test_no_more_is_read_than_the_bound(server: Any) -> None:
    assert (await visit(server("long"), max_bytes=100)).startswith("(100 characters, from 0)\nkelu")
    assert (await visit(server("gzip"), max_bytes=100)).startswith("(100 characters, from 0)\nxxxx")


async def test_text_is_read_by_its_charset(server: Any) -> None:
    assert (await visit(server("latin"))).endswith("café")
    assert (await visit(server("odd"))).endswith("kelu")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("missing", "the server answers 404"),
        ("image", "it is image/png, which is no text"),
        ("round", "it leads on more than 2 times"),
        ("broken", "its compression is broken"),
        ("brotli", "it is compressed by br"),
        ("file", "it is no http or https address"),
    ],
)
async def test_what_cannot_be_shown_is_told(server: Any, path: str, why: str) -> None:
    said = await visit(server(path), redirects=2)
    assert said.startswith(f"{server(path)} cannot be shown: {why}")


@pytest.mark.parametrize("url", ["kelu", "ftp://kelu/", "http://", "http://[::1"])
async def test_what_is_no_address_is_told(url: str) -> None:
    assert "cannot be shown: it is no " in await visit(url)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254"),
        *("①②⑦.⓪.⓪.①", "127。0。0。1", "１２７.0.0.1"),
    ],
)
async def test_private_addresses_are_refused(host: str) -> None:
    said = await visitor(VisitConfig())(f"http://{host}:9/", 0)
    assert said.endswith("cannot be shown: it leads into a private network.")


async def test_an_address_spelt_as_a_number_is_no_way_around() -> None:
    for host in ("2130706433", "0x7f.1", "127.1"):
        assert "cannot be shown: it " in await visitor(VisitConfig())(f"http://{host}:9/", 0)


async def test_a_name_that_is_none_is_told() -> None:
    said = await visit("http://kelu.invalid/")
    assert said == "http://kelu.invalid/ cannot be shown: the name of its server is not known."


async def test_a_redirect_into_a_private_network_is_refused(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visiting, "is_public", lambda address: address == "127.0.0.1")
    assert (await visitor(VisitConfig())(server("page"), 0)).startswith("The mayor")
    assert "private network" in await visitor(VisitConfig())(server("away"), 0)
    assert "private network" in await visitor(VisitConfig())(server("odd_away"), 0)


async def test_no_connection_is_opened_to_what_only_the_check_of_names_let_pass(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visiting, "_checked", lambda url, private: url)
    said = await visitor(VisitConfig())(server("page"), 0)
    assert said.endswith("cannot be shown: it leads into a private network.")
    with pytest.raises(NotShown):
        visiting._public_socket((socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::1", 9, 0, 0)))


def test_this_machines_own_addresses_are_not_public(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_public("8.8.8.8")
    own = SimpleNamespace(address="8.8.8.8"), SimpleNamespace(address="2606:4700::1111%eth0")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": own})
    assert not is_public("8.8.8.8") and not is_public("2606:4700::1111")
    assert not is_public("::ffff:8.8.8.8") and is_public("8.8.4.4")


@pytest.mark.parametrize("charset", ["punycode", "idna", "undefined", "unicode_escape", "zip", "x"])
def test_a_charset_that_no_page_has_is_read_as_utf8(charset: str) -> None:
    assert visiting._decoded("caf\u00e9-".encode() * 3, charset) == "café-café-café-"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("10.0.0.1", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:8.8.8.8", True),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("2002:a00:1::", False),
        ("64:ff9b:1::a00:1", False),
        ("fec0::1", False),
        ("::a00:1", False),
        ("::ffff:0:a00:1", False),
        ("168.63.129.16", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) == public


async def test_a_fault_of_the_network_is_the_tools_and_told(unused_tcp_port: int) -> None:
    settings = EnvironmentConfig(tools=("visit",), visit=VisitConfig(private=True))
    (tool,) = load_tools(settings)
    box = Toolbox(make_lease(), [tool], settings)
    said = await box.use(tool, {"url": f"http://127.0.0.1:{unused_tcp_port}/"})
    assert (
        said.startswith("visit failed: ClientConnectorError") and box.noted()["tools"][0]["error"]
    )
    assert tool.arguments.one_text == "url"
