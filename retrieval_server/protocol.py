"""Wire types of the retrieval server, its limits, and this package's errors. A leaf module.

The wire format is Search-R1's: `POST /retrieve {"queries", "topk", "return_scores"}` is answered by
`{"result": …}` with one list per query, so its clients and servers work with ours unchanged. One
thing differs on purpose: a `topk` of 0 is refused instead of silently meaning the server's default,
as null does. SkyRL's clients send one `query` instead of `queries`.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_QUERIES = 4096  # Search-R1 sends a whole training batch in one POST
MAX_QUERY_CHARS = 65_536  # 512 tokens of the longest kind that vocabularies hold
MAX_TOP_K = 100
MAX_BODY_BYTES = 32 << 20
DEFAULT_TOP_K = 3
INDEX_VERSION = "x-index-version"  # of a reply with results: `Info.index_version`
DEADLINE = "x-deadline-s"  # of a search: the seconds that its client waits at most
RETRY_AFTER = "x-retry-after-s"  # beside Retry-After, which tells whole seconds alone
BATCH_QUERIES = "x-batch-queries"  # of a reply: how many queries a request had best hold
# What a command asks to see that it is answered: one word that no corpus holds, so soon looked up.
# Where searches cost money, nobody is paid for it.
PROBE = "forageprobeqxz"
TELLS_ERROR = "error:"  # how the id of a document begins that tells why nothing was found


class RetrievalError(Exception):
    """Root of this package's errors.

    RetrievalError
    ├── CorpusError           a corpus that cannot be served; names file, line, field and remedy
    ├── BadIndex              an index or encoder that cannot be served; names file and remedy
    ├── RetrievalTimeout      no answer within the call's deadline           (retried)
    ├── RetrievalUnavailable  a broken connection, 429 or 5xx                (retried)
    │   ├── RetrievalUnreachable  no connection                              (until the deadline)
    │   ├── RetrievalOverloaded   503 with Retry-After             (until the deadline)
    │   └── OtherIndex        a server of a list serves another index        (at another server)
    ├── BadReply              a reply that is not what was asked for         (retried)
    ├── NotRecorded           a search that is not on record                 (never retried)
    ├── BadRecord             what live searches brought or cost cannot be read or written
    └── RetrievalRefused      any other 4xx: the request itself is at fault  (never retried)
        ├── RetrievalDenied   a 4xx whatever is asked: token, address or path is wrong
        └── BadQuery          refused by the client, nobody was asked: too long, or no text
    """


class CorpusError(RetrievalError):
    """A corpus that cannot be served; the message names file, line, field, value and remedy."""


class BadIndex(RetrievalError):
    """An index or encoder that cannot be built or served; the message names file and remedy."""


class RetrievalTimeout(RetrievalError):
    """The server did not answer within the call's deadline."""


class RetrievalUnavailable(RetrievalError):
    """No connection, a broken one, or a server that says it cannot answer (429, 5xx)."""


class RetrievalUnreachable(RetrievalUnavailable):
    """Nobody listens there: the server is being started again, or the address is wrong."""


class RetrievalOverloaded(RetrievalUnavailable):
    """More waits to be searched than the server takes in; `retry_after_s` is when to ask again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OtherIndex(RetrievalUnavailable):
    """A server of a list serves another index than the run's: its passages are not taken."""


class BadReply(RetrievalError):
    """A 200 whose body is not one list of scored documents per query."""


class RetrievalRefused(RetrievalError):
    """The server refused the request itself (4xx): asking again would not help."""


class RetrievalDenied(RetrievalRefused):
    """The server refused whoever asks, whatever is asked (401, 403, 404 …): no query's fault."""


class BadQuery(RetrievalRefused):
    """A query that no server is asked: too long, or no text."""


class NotRecorded(RetrievalError):
    """A record answers, of a run or of the live web, and this search is not in it."""


class BadRecord(RetrievalError):
    """The record of live answers, or of their cost, cannot be read or written; names the file."""


RETRIED = (RetrievalTimeout, RetrievalUnavailable, BadReply)


class Passage(msgspec.Struct, frozen=True):
    """One retrieved passage; `contents` holds the title on its first line."""

    id: str
    contents: str
    score: float

    @property
    def title(self) -> str:
        """The first line without surrounding quotes; empty when there is only one line."""
        first, newline, _ = self.contents.partition("\n")
        return first.strip().strip('"') if newline else ""

    @property
    def text(self) -> str:
        """Everything after the title's line; the whole contents when there is only one line."""
        first, newline, rest = self.contents.partition("\n")
        return rest if newline else first


class Document(msgspec.Struct, frozen=True, gc=False):
    """A passage on the wire and in the corpus; other servers may send numbers as ids."""

    id: str | int
    contents: str


class ScoredDocument(msgspec.Struct, frozen=True):
    """A document and its score, higher is better."""

    document: Document
    score: float


_Query = Annotated[str, Meta(max_length=MAX_QUERY_CHARS)]


class RetrieveRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of `POST /retrieve`; unknown fields are ignored. `topk` null: the server's default.

    Either `queries` or one `query`. Raises ValueError for both or none.
    """

    queries: Annotated[list[_Query], Meta(max_length=MAX_QUERIES)] | None = None
    topk: Annotated[int, Meta(ge=1, le=MAX_TOP_K)] | None = None
    return_scores: bool = False
    query: _Query | None = None

    def __post_init__(self) -> None:
        if (self.queries is None) == (self.query is None):
            raise ValueError("name either `queries` or one `query`")

    @property
    def wanted(self) -> list[str]:
        """The queries to search for."""
        return [self.query] if self.query is not None else self.queries or []


class ScoredReply(msgspec.Struct, frozen=True):
    """Reply when `return_scores` is true: per query, best first, fewer than `topk` if few match."""

    result: list[list[ScoredDocument]]


class PlainReply(msgspec.Struct, frozen=True):
    """Reply when `return_scores` is false."""

    result: list[list[Document]]


class Health(msgspec.Struct, frozen=True):
    """Reply to `GET /health`."""

    status: str
    passages: int


class Readiness(msgspec.Struct, frozen=True):
    """Reply to `GET /ready`: `ready`, or, with a 503, `draining`."""

    status: str


class Info(msgspec.Struct, frozen=True):
    """Reply to `GET /info`: what is served, and what may be asked.

    `index_version` changes with any passage, their order or the kind of index: results of the same
    version are the same.
    """

    index: str
    index_version: str
    passages: int
    default_top_k: int
    max_top_k: int = MAX_TOP_K
    max_queries: int = MAX_QUERIES
    max_query_chars: int = MAX_QUERY_CHARS
    max_body_bytes: int = MAX_BODY_BYTES


class Refusal(msgspec.Struct, frozen=True):
    """Body of every 4xx and 503: what was wrong, and what is allowed or to be done."""

    detail: str


ALLOWED = (
    f"allowed: `queries`, a list of at most {MAX_QUERIES} strings of at most {MAX_QUERY_CHARS} "
    f"characters each, or `query`, one such string; `topk`, null or 1 to {MAX_TOP_K}; "
    f"`return_scores`, true or false; a body of at most {MAX_BODY_BYTES} bytes"
)
UNAUTHORIZED = (
    "the header `Authorization: Bearer TOKEN` is missing or shows another token than the server's: "
    "give the client the server's own retrieval.token_file"
)
