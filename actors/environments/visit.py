"""The built-in tool `visit`: a page of the web as text, bounded in bytes, redirects and time.

What leads to this machine or a private network is refused after its name is looked up and before a
connection is opened, at every redirect. Pages that cannot be shown are told as text; faults of the
network are raised.
"""

import asyncio
import codecs
import ipaddress
import re
import socket
import zlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Any
from urllib.parse import urljoin

import psutil

from actors.environments.html_text import html_text
from configs.environment import VisitConfig

_HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; Forage)", "Accept-Encoding": "gzip, deflate"}
_MOVED = (301, 302, 303, 307, 308)
_TEXTS = ("text/", "application/json", "application/xml", "application/xhtml")
_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset=["']?([\w-]{1,40})""", re.IGNORECASE)
_GLOBAL = ipaddress.ip_network("2000::/3")  # all of IPv6 that leads to other networks
_AZURE = "168.63.129.16"  # the cloud's own, to each of its machines
_NO_CHARSETS = ("idna", "punycode", "undefined", "unicode-escape", "raw-unicode-escape")


class NotShown(Exception):
    """A page that cannot be shown, and why."""


def visitor(settings: VisitConfig) -> Callable[..., Awaitable[str]]:
    """Make the tool."""

    async def visit(
        url: Annotated[str, "http or https"],
        start: Annotated[int, "the first character to show"] = 0,
    ) -> str:
        """It shows the text of a web page."""
        try:
            page = await _fetched(url.strip(), settings)
            return await asyncio.to_thread(_shown, *page, max(0, start))
        except NotShown as error:
            return f"{url} cannot be shown: {error}."

    return visit


def is_public(address: str) -> bool:
    """True for an IP address that leads to the public internet, by itself and by what it wraps."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
        if found.sixtofour or found.teredo or found not in _GLOBAL:
            return False
    if str(found) == _AZURE or str(found) in _own_addresses():
        return False
    return found.is_global and not found.is_multicast


def _own_addresses() -> set[str]:
    """Return the addresses of this machine's own interfaces."""
    interfaces = psutil.net_if_addrs().values()
    return {each.address.partition("%")[0] for addresses in interfaces for each in addresses}


async def _fetched(url: str, settings: VisitConfig) -> tuple[bytes, str, str]:
    """Return a page's body, its type and its charset. Raises NotShown, ClientError, OSError."""
    import aiohttp

    connector = aiohttp.TCPConnector(
        resolver=_resolver(settings.private),
        use_dns_cache=False,
        socket_factory=None if settings.private else _public_socket,
    )
    async with aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=_HEADERS,
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None),  # the tool has a deadline
    ) as session:
        for _ in range(settings.redirects + 1):
            address = _checked(url, settings.private)
            try:
                async with session.get(address, allow_redirects=False) as reply:
                    if reply.status not in _MOVED or "Location" not in reply.headers:
                        body = await _body(reply, settings.max_bytes)
                        return body, reply.content_type, reply.charset or ""
                    url = urljoin(str(address), reply.headers["Location"])
            except aiohttp.ClientConnectorDNSError as error:
                raise NotShown("the name of its server is not known") from error
            except (aiohttp.InvalidURL, ValueError) as error:
                raise NotShown(f"it is no address ({error})") from error
    raise NotShown(f"it leads on more than {settings.redirects} times")


def _checked(url: str, private: bool) -> Any:
    """Return the address as it will be connected to. Raises NotShown for one that is none, or an IP
    address that is not public.
    """
    import yarl

    try:
        address = yarl.URL(url)
        host = address.host or ""  # normalised: digits of any alphabet are digits
        if address.scheme not in ("http", "https") or not host:
            raise NotShown("it is no http or https address")
    except ValueError as error:
        raise NotShown(f"it is no address ({error})") from error
    try:
        allowed = private or is_public(host)
    except ValueError:  # a name, which the resolver looks up
        return address
    if not allowed:
        raise NotShown("it leads into a private network")
    return address


def _public_socket(found: tuple[Any, ...]) -> socket.socket:
    """Make the socket of a connection to what getaddrinfo `found`. Raises NotShown."""
    family, kind, protocol, _, (host, *_) = found
    if not is_public(host):
        raise NotShown("it leads into a private network")
    return socket.socket(family, kind, protocol)


def _resolver(private: bool) -> Any:
    """Make a resolver of names, whose addresses are the ones that are then connected to."""
    import aiohttp

    class Public(aiohttp.ThreadedResolver):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> Any:
            found = await super().resolve(host, port, family)
            public = [each for each in found if is_public(each["host"])]
            if not public:
                raise NotShown("it leads into a private network")
            return public

    return aiohttp.ThreadedResolver() if private else Public()


async def _body(reply: Any, most: int) -> bytes:
    """Read at most `most` bytes of a reply, decompressed. Raises NotShown."""
    if reply.status >= 400:
        raise NotShown(f"the server answers {reply.status}")
    if not reply.content_type.startswith(_TEXTS):
        raise NotShown(f"it is {reply.content_type}, which is no text")
    coding = reply.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("identity", "gzip", "x-gzip", "deflate"):
        raise NotShown(f"it is compressed by {coding}")
    inflate = None if coding == "identity" else zlib.decompressobj(zlib.MAX_WBITS | 32)
    body = bytearray()
    try:
        async for chunk in reply.content.iter_any():
            left = most - len(body)
            body += chunk[:left] if inflate is None else inflate.decompress(chunk, left)
            if len(body) >= most:
                break
    except zlib.error as error:
        raise NotShown(f"its compression is broken ({error})") from error
    return bytes(body)


def _shown(body: bytes, kind: str, charset: str, start: int) -> str:
    if found := _CHARSET.search(body, 0, 2048):
        charset = charset or found[1].decode()
    text, title = _decoded(body, charset or "utf-8"), ""
    if "html" in kind:
        title, text = html_text(text)
    head = f"{title}\n" if title else ""
    return f"{head}({len(text)} characters, from {start})\n{text[start:]}"


def _decoded(body: bytes, charset: str) -> str:
    """Decode by UTF-8 where the charset is none of pages."""
    try:
        known = codecs.lookup(charset).name.replace("_", "-")
        return body.decode("utf-8" if known in _NO_CHARSETS else known, errors="replace")
    except (LookupError, ValueError):
        return body.decode(errors="replace")
