"""Serper, SerpAPI and Google's Custom Search as one: the request of a query, the passages of its
answer, and what an answer that holds none means.

A passage is a title, a line break and the provider's snippet; its id is the page's address. Where a
provider shows an answer of its own before the pages, that is the first passage.
"""

import email.utils
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import httpx
import msgspec
from blake3 import blake3

from configs.retrieval import LIVE_PASSAGES, LiveConfig
from retrieval_server.protocol import BadReply, Document

MOST_ID_CHARS = 1000
MOST_CHARS = 8000  # of a title or snippet
LONGEST_RETRY_AFTER_S = 600.0
_SHOWN_BYTES = 200
_OF_THE_QUERY = (400, 413, 414, 422)
_OF_THE_ACCOUNT = re.compile(rb"credit|api.?key|quota|billing|account", re.I)
_RATE = re.compile(rb"rateLimitExceeded", re.I)
# Some answer with the status of haste where waiting a while would not help.
_SPENT = re.compile(
    rb"(run )?out of (searches|credits)|(not enough|insufficient) (searches|credits|quota)"
    rb"|dailyLimitExceeded|per (day|month)\b"
    rb"|\b(daily|monthly)( [a-z]+)? (limit|quota|searches|queries|requests|credits)",
    re.I,
)
# What passes within the hour is haste, whatever limits are told beside it.
_SOON = re.compile(rb"per (second|minute|hour)\b|hourly", re.I)


class _Hit(msgspec.Struct, frozen=True):
    """A page; or an answer of the provider's own, whose fields may be of any type."""

    title: Any = None
    link: Any = None
    snippet: Any = None
    answer: Any = None


class _Serper(msgspec.Struct, frozen=True):
    organic: list[_Hit] = []
    answerBox: _Hit | None = None


class _Metadata(msgspec.Struct, frozen=True):
    status: str = ""


class _SerpApi(msgspec.Struct, frozen=True):
    search_metadata: _Metadata = _Metadata()
    organic_results: list[_Hit] = []
    answer_box: _Hit | None = None
    error: str = ""


class _GoogleCse(msgspec.Struct, frozen=True):
    kind: str = ""
    items: list[_Hit] = []


_SERPER = msgspec.json.Decoder(_Serper)
_SERPAPI = msgspec.json.Decoder(_SerpApi)
_GOOGLE_CSE = msgspec.json.Decoder(_GoogleCse)


@dataclass(frozen=True)
class Provider(ABC):
    """One provider, with the key that it is shown. The key is in nothing that is said of it."""

    asked: LiveConfig
    key: str = field(repr=False)
    kind = ""
    own_url = ""

    @property
    def url(self) -> str:
        """Where it is asked."""
        return self.asked.url or self.own_url

    @abstractmethod
    def request(self, client: httpx.AsyncClient, query: str) -> httpx.Request:
        """Make the request of a query, as that client sends it."""

    @abstractmethod
    def documents(self, content: bytes) -> list[Document]:
        """Read the passages of a 200's content. Raises BadReply."""

    def hidden(self, content: bytes) -> bytes:
        """Return what came from there without the key, which some say again."""
        return _spellings(self.key).sub(b"...", content)

    def _places(self) -> dict[str, str]:
        places = {"gl": self.asked.country, "hl": self.asked.language}
        return {name: value for name, value in places.items() if value}


class Serper(Provider):
    """google.serper.dev: a POST, the key in a header."""

    kind = "serper"
    own_url = "https://google.serper.dev/search"

    def request(self, client: httpx.AsyncClient, query: str) -> httpx.Request:
        """Make the request of a query, as that client sends it."""
        body = {"q": query, "num": LIVE_PASSAGES, **self._places()}
        return client.build_request("POST", self.url, json=body, headers={"x-api-key": self.key})

    def documents(self, content: bytes) -> list[Document]:
        """Read the passages of a 200's content. Raises BadReply."""
        reply = _decoded(_SERPER, content)
        return _documents(reply.answerBox, reply.organic)


class SerpApi(Provider):
    """serpapi.com: a GET, the key in its query. A search without results is a success there, too,
    beside an `error` that says so.
    """

    kind = "serpapi"
    own_url = "https://serpapi.com/search.json"

    def request(self, client: httpx.AsyncClient, query: str) -> httpx.Request:
        """Make the request of a query, as that client sends it."""
        said = {"engine": "google", "q": query, "num": f"{LIVE_PASSAGES}", "output": "json"}
        return client.build_request(
            "GET", self.url, params=said | self._places() | {"api_key": self.key}
        )

    def documents(self, content: bytes) -> list[Document]:
        """Read the passages of a 200's content. Raises BadReply."""
        reply = _decoded(_SERPAPI, content)
        if (status := reply.search_metadata.status) != "Success":
            raise BadReply(f"status {status!r}, error {reply.error[:_SHOWN_BYTES]!r}")
        return _documents(reply.answer_box, reply.organic_results)


class GoogleCse(Provider):
    """Google's Custom Search JSON API: a GET, the key in a header."""

    kind = "google_cse"
    own_url = "https://www.googleapis.com/customsearch/v1"

    def request(self, client: httpx.AsyncClient, query: str) -> httpx.Request:
        """Make the request of a query, as that client sends it."""
        said = {"cx": self.asked.engine_id, "q": query, "num": f"{LIVE_PASSAGES}"}
        headers = {"x-goog-api-key": self.key}
        return client.build_request("GET", self.url, params=said | self._places(), headers=headers)

    def documents(self, content: bytes) -> list[Document]:
        """Read the passages of a 200's content. Raises BadReply."""
        reply = _decoded(_GOOGLE_CSE, content)
        if reply.kind != "customsearch#search":
            raise BadReply(f"kind {reply.kind!r}, no search: {_shown(content)}")
        return _documents(None, reply.items)


PROVIDERS: Mapping[str, type[Provider]] = {each.kind: each for each in (Serper, SerpApi, GoogleCse)}


@dataclass(frozen=True)
class Fault:
    """What another status than 200 means. `billed`: that cannot be ruled out."""

    said: str
    after_s: float | None = None  # it is to be asked again then; None: that would not help
    of_the_query: bool = False
    unsent: bool = False  # by nobody else's word
    billed: bool = False


def fault(status: int, retry_after_s: float | None, content: bytes, pause_s: float) -> Fault:
    """Tell what an answer that is no 200 means; `pause_s` until the next try, where it says
    none, and at least where that may be billed again.

    Some answer 400 where money or key are at fault, or 429 where all searches of the account, or
    of its day, are made; and Google may answer 403 to haste.
    """
    said = f"answered {status}: {_shown(content)}"
    wait_s = retry_after_s if retry_after_s is not None else pause_s
    is_haste = status == 429 or (status == 403 and _RATE.search(content))
    if is_haste and (_SOON.search(content) or not _SPENT.search(content)):
        return Fault(said, wait_s)
    if status >= 500:
        return Fault(said, max(wait_s, pause_s), billed=True)
    if status in _OF_THE_QUERY and not _OF_THE_ACCOUNT.search(content):
        return Fault(said, of_the_query=True)
    return Fault(f"see its account, retrieval.live.url and the key: it {said}")


def retry_after_s(told: str) -> float | None:
    """The seconds of a Retry-After, which may be a date, `LONGEST_RETRY_AFTER_S` at most; None
    where there is none.
    """
    if told.strip().isdecimal() and len(told) <= 9:
        return min(float(told), LONGEST_RETRY_AFTER_S)
    try:
        left_s = email.utils.parsedate_to_datetime(told).timestamp() - time.time()
        return min(max(0.0, left_s), LONGEST_RETRY_AFTER_S)
    except (TypeError, ValueError, OverflowError):
        return None


@lru_cache(maxsize=8)
def _spellings(key: str) -> re.Pattern[bytes]:
    """What finds a key as it is, as an address has it, and as JSON escapes it."""
    return re.compile("".join(_spelt(char) for char in key).encode())


def _spelt(char: str) -> str:
    units = char.encode("utf-16-be").hex()
    numbers = "".join(rf"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
    quoted = "".join(f"%{byte:02x}" for byte in char.encode())
    escaped = re.escape(f"\\{char}") if char in '"\\/' else None
    forms = (escaped, re.escape(char), f"(?i:{numbers})", f"(?i:{quoted})")
    return f"(?:{'|'.join(filter(None, forms))})"


def _decoded(decoder: "msgspec.json.Decoder[Any]", content: bytes) -> Any:
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadReply(f"{error}; body {_shown(content)}") from error


def _documents(own: _Hit | None, pages: Iterable[_Hit]) -> list[Document]:
    found = [_document(hit) for hit in ((own,) if own else ())]
    found += [_document(hit) for hit in pages]
    return [each for each in found if each is not None][:LIVE_PASSAGES]


def _document(hit: _Hit) -> Document | None:
    title, link = _text(hit.title), _text(hit.link)
    said = " ".join(filter(None, (_text(hit.answer), _text(hit.snippet))))
    if not (title or said):
        return None
    contents = f"{title or link}\n{said}"
    name = link if 0 < len(link) <= MOST_ID_CHARS else ""
    return Document(name or f"blake3-{blake3(contents.encode()).hexdigest(length=8)}", contents)


def _text(value: Any) -> str:
    """A text on one line; '' for whatever is none."""
    if not isinstance(value, str | int | float):
        return ""
    return " ".join(str(value)[:MOST_CHARS].encode(errors="replace").decode().split())


def _shown(content: bytes) -> str:
    return repr(content[:_SHOWN_BYTES].decode(errors="replace"))
