"""The built-in tool `visit`: a page of the web as text, bounded in bytes, redirects and time.

What leads to this machine or a private network is refused after its name is looked up and before a
connection is opened, at every redirect. Pages that cannot be shown are told as text; faults of the
network are raised.
"""

import asyncio
import ipaddress
import re
import socket
import zlib
from collections.abc import Awaitable, Callable
from html.parser import HTMLParser
from typing import Annotated, Any
from urllib.parse import urljoin, urlsplit

from configs.environment import VisitConfig

_HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; Forage)", "Accept-Encoding": "gzip, deflate"}
_MOVED = (301, 302, 303, 307, 308)
_TEXTS = ("text/", "application/json", "application/xml", "application/xhtml")
_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset=["']?([\w-]{1,40})""", re.IGNORECASE)
_HIDDEN = ("script", "style", "noscript", "template", "svg", "title")
_MAIN, _BESIDE = ("main", "article"), ("nav", "header", "footer", "aside", "form")
_INLINE = (
    *("a", "abbr", "b", "bdi", "cite", "code", "em", "font", "i", "mark", "q", "s", "small"),
    *("span", "strong", "sub", "sup", "u"),
)
_ENOUGH = 200  # characters of a page's main part, for the rest to be left out


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
        if found.sixtofour or found.teredo or found in ipaddress.ip_network("64:ff9b::/96"):
            return False
    return found.is_global and not found.is_multicast


async def _fetched(url: str, settings: VisitConfig) -> tuple[bytes, str, str]:
    """Return a page's body, its type and its charset. Raises NotShown, ClientError, OSError."""
    import aiohttp

    connector = aiohttp.TCPConnector(resolver=_resolver(settings.private), use_dns_cache=False)
    async with aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=_HEADERS,
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None),  # the tool has a deadline
    ) as session:
        for _ in range(settings.redirects + 1):
            _check(url, settings.private)
            try:
                async with session.get(url, allow_redirects=False) as reply:
                    if reply.status not in _MOVED or "Location" not in reply.headers:
                        body = await _body(reply, settings.max_bytes)
                        return body, reply.content_type, reply.charset or ""
                    url = urljoin(url, reply.headers["Location"])
            except aiohttp.ClientConnectorDNSError as error:
                raise NotShown("the name of its server is not known") from error
            except (aiohttp.InvalidURL, ValueError) as error:
                raise NotShown(f"it is no address ({error})") from error
    raise NotShown(f"it leads on more than {settings.redirects} times")


def _check(url: str, private: bool) -> None:
    """Raise NotShown for an address that is none, or an IP address that is not public."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme not in ("http", "https") or not host:
            raise NotShown("it is no http or https address")
    except ValueError as error:
        raise NotShown(f"it is no address ({error})") from error
    try:
        allowed = private or is_public(host)
    except ValueError:  # a name, which the resolver looks up
        return
    if not allowed:
        raise NotShown("it leads into a private network")


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
    try:
        text = body.decode(charset or "utf-8", errors="replace")
    except LookupError:
        text = body.decode(errors="replace")
    title = ""
    if "html" in kind:
        title, text = page_text(text)
    head = f"{title}\n" if title else ""
    return f"{head}({len(text)} characters, from {start})\n{text[start:]}"


def page_text(page: str) -> tuple[str, str]:
    """Return the title and the text of an HTML page: of its main part where it names one, else
    without menus, else all.
    """
    reader = _Reader()
    reader.feed(page)
    reader.close()
    for wanted in ((True, False), (None, False)):
        text = reader.text(*wanted)
        if len(text) >= _ENOUGH:
            return reader.title, text
    return reader.title, reader.text(None, None)


class _Reader(HTMLParser):
    """Collects the pieces of text, each with whether it stands in the main part, and beside it."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._depth = dict.fromkeys((*_HIDDEN, *_MAIN, *_BESIDE), 0)
        self._pieces: list[tuple[bool, bool, str]] = []
        self._title: list[str] = []

    @property
    def title(self) -> str:
        """The page's title, on one line."""
        return " ".join("".join(self._title).split())

    def text(self, main: bool | None, beside: bool | None) -> str:
        """The pieces that stand so; None: in either. Lines are stripped, empty ones left out."""
        kept = [
            text
            for in_main, is_beside, text in self._pieces
            if main in (None, in_main) and beside in (None, is_beside)
        ]
        lines = (" ".join(line.split()) for line in "".join(kept).split("\0"))
        return "\n".join(line for line in lines if line)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        """Enter an element."""
        if tag in self._depth:
            self._depth[tag] += 1
        self._break(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        """Pass an element without content."""
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        """Leave an element."""
        if self._depth.get(tag):
            self._depth[tag] -= 1
        self._break(tag)

    def handle_data(self, data: str) -> None:
        """Keep a piece of text that is shown."""
        if self._depth["title"] and not self._depth["svg"]:
            self._title.append(data)
        elif not self._inside(_HIDDEN):
            self._keep(data.replace("\0", " "))

    def _break(self, tag: str) -> None:
        if tag not in _INLINE:
            self._keep("\0")

    def _keep(self, text: str) -> None:
        self._pieces.append((self._inside(_MAIN), self._inside(_BESIDE), text))

    def _inside(self, tags: tuple[str, ...]) -> bool:
        return any(self._depth[tag] for tag in tags)
