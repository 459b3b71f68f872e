"""The section `retrieval`: the servers that answer searches, and what their clients ask."""

import ipaddress
import math
import re
from collections.abc import Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from configs.section import (
    CHANGEABLE,
    NAMES_SECRET,
    OF_THE_MACHINE,
    ONE_OR_MORE,
    REACHES_OUT,
    SPENDS,
    WRITES_THERE,
    InputPath,
    ModelPath,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Seconds,
    Section,
)

LIVE = ("serper", "serpapi", "google_cse")  # kinds that a provider on the web answers
LIVE_PASSAGES = 10  # of a search there, at most: what each gives for the price of one request
LEAST_USD = 1e-9  # that is counted
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class LiveConfig(Section, frozen=True):
    """The provider that answers searches of the live web, what that may cost, and its record."""

    # Of the provider's search; empty: its own, on the web
    url: Annotated[str, OF_THE_MACHINE, REACHES_OUT] = ""
    # 0600; holds the key that is shown to the provider
    key_file: Annotated[InputPath, OF_THE_MACHINE, NAMES_SECRET] = ""
    # The environment variable that holds it instead
    key_variable: Annotated[str, OF_THE_MACHINE, NAMES_SECRET] = ""
    engine_id: str = ""  # google_cse's cx
    country: str = ""  # gl, such as us; empty: not sent
    language: str = ""  # hl, such as en; empty: not sent
    price_usd: Annotated[NonNegativeFloat, CHANGEABLE, SPENDS] = 0.0  # of a request
    # Of the run; then nothing is asked
    budget_usd: Annotated[NonNegativeFloat, CHANGEABLE, SPENDS] = 0.0
    requests_per_s: Annotated[PositiveFloat, CHANGEABLE] = 5.0  # begun, at most
    concurrency: Annotated[Positive, CHANGEABLE] = 16  # requests under way at once
    timeout_s: Annotated[Seconds, CHANGEABLE] = 10.0  # of a request
    # The file of all answers, asked first; empty: live/answers.jsonl in the run's folder
    record: Annotated[InputPath, OF_THE_MACHINE, WRITES_THERE] = ""
    replay: InputPath = ""  # such a file, which alone answers: no request is made

    def __post_init__(self) -> None:
        if self.url:
            _require_safe(self.url)
        if self.key_file and self.key_variable:
            raise ValueError(
                f"retrieval.live.key_file = {self.key_file!r} and retrieval.live.key_variable: the "
                "key is in a file or in the environment: leave one of them out"
            )
        if self.key_variable and not _VARIABLE.fullmatch(self.key_variable):
            raise ValueError(
                "retrieval.live.key_variable is no name of an environment variable: give the "
                "variable's name, never the key itself"
            )
        if self.record and self.replay:
            raise ValueError(
                f"retrieval.live.record = {self.record!r} and retrieval.live.replay = "
                f"{self.replay!r}: a replay asks nobody, so it has nothing to record: leave one out"
            )

    @property
    def needs_key(self) -> bool:
        """True where the provider is asked."""
        return not self.replay


class RetrievalConfig(Section, frozen=True):
    """The retrieval server and its client, or the recorded run that answers in its place."""

    corpus: InputPath = ""  # JSONL, plain or .gz, or parquet
    index: InputPath = ""  # of `forage index`, or a FAISS file; empty: BM25, made at the start
    # What is searched; empty: what the index is, or bm25. tantivy, which ranks otherwise, is never
    # searched unless it is named; the last three are the live web's
    kind: Literal[
        "", "bm25", "tantivy", "dense", "bm25+dense", "tantivy+dense", "serper", "serpapi",
        "google_cse",
    ] = ""  # fmt: skip
    live: LiveConfig = LiveConfig()
    word_index: InputPath = ""  # of bm25 or tantivy, its ranks fused with those of a dense `index`
    reranker: ModelPath = ""  # a cross-encoder that puts the best candidates in order; empty: none
    rerank_candidates: Annotated[int, Meta(ge=1, le=100)] = 50  # how many it reads for each query
    encoder: ModelPath = ""  # of a dense index; empty: where it was when the index was built
    encoder_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # and of the reranker
    device: Literal["cpu", "cuda"] = "cpu"  # of encoder and reranker
    index_device: Literal["cpu", "cuda"] = "cpu"  # of the vectors; cuda: over all GPUs, in halves
    map_index: bool = False  # vectors stay on the disk, read when needed (Flat and HNSW on a CPU)
    ef_search: Annotated[int, Meta(ge=100)] = 256  # HNSW: how many neighbours are looked at
    nprobe: NonNegative = 0  # IVF: lists looked into; 0: five times the root of their number
    threads: Positive = 1  # of the encoder and of FAISS
    # External servers, all of one index; where any is named, none is started
    url: Annotated[tuple[str, ...], ONE_OR_MORE, OF_THE_MACHINE, REACHES_OUT] = ()
    # Of several servers; empty: found when a run is prepared
    index_version: Annotated[str, OF_THE_MACHINE] = ""
    recorded: InputPath = ""  # non-empty: a run's directory, whose log answers; none is started
    # Where the run's own server listens
    host: Annotated[str, OF_THE_MACHINE, REACHES_OUT] = "127.0.0.1"
    # 0 = a free one, chosen by the launcher
    port: Annotated[int, Meta(ge=0, le=65535), OF_THE_MACHINE] = 0
    # 0600; holds what clients must show; empty: everybody is let in
    token_file: Annotated[InputPath, OF_THE_MACHINE, NAMES_SECRET] = ""
    top_k: Annotated[int, Meta(ge=0, le=100)] = 3  # 0: nothing is asked, every observation is empty
    timeout_s: Seconds = 30.0  # of a search, retries included
    retries: NonNegative = 3  # of what a server met; until timeout_s while none listens
    max_connections: Positive = 64  # of a client to all servers, at once
    cache_queries: NonNegative = 8192  # whose results each actor remembers
    max_waiting_queries: Positive = 8192  # at the server; beyond it answers 503 and Retry-After
    request_deadline_s: Seconds = 12.0  # of a search there; then 503 too; under half of timeout_s
    drain_notice_s: Annotated[float, Meta(ge=0.0)] = 0.0  # /ready says so, then the port closes

    def __post_init__(self) -> None:
        for url in self.url:
            _require_url(url)
        if len({url.rstrip("/").removesuffix("/retrieve") for url in self.url}) < len(self.url):
            raise ValueError(
                f"retrieval.url = {shown_urls(self.url)}: a server is named twice: keep one"
            )
        if ("+" in self.kind) != bool(self.word_index) or (self.word_index and not self.index):
            raise ValueError(
                f"retrieval.kind = {self.kind!r}, retrieval.index = {self.index!r} and "
                f"retrieval.word_index = {self.word_index!r}: two indexes are searched as one "
                "where retrieval.kind=bm25+dense or tantivy+dense, and both are named, a dense "
                "index and a word_index of bm25 or tantivy: say all three, or leave word_index "
                "empty and + out of the kind"
            )
        if self.reranker and self.top_k > self.rerank_candidates:
            raise ValueError(
                f"retrieval.top_k = {self.top_k!r}: more than the passages that are reranked: "
                f"raise retrieval.rerank_candidates ({self.rerank_candidates})"
            )
        if self.url and self.recorded:
            raise ValueError(
                f"retrieval.recorded = {self.recorded!r} and retrieval.url = "
                f"{shown_urls(self.url)}: a recorded run answers searches, or a server does: leave "
                "one of them empty"
            )
        if self.is_live:
            self._require_live()

    def _require_live(self) -> None:
        """Raise ValueError for what a search of the live web lacks, or cannot use."""
        kind, live = f"retrieval.kind = {self.kind!r}", self.live
        for field in ("index", "word_index", "reranker"):
            if value := getattr(self, field):
                raise ValueError(
                    f"retrieval.{field} = {value!r} acts on nothing with {kind}: leave it out"
                )
        if self.top_k > LIVE_PASSAGES:
            raise ValueError(
                f"retrieval.top_k = {self.top_k!r}: a search of {kind} brings at most "
                f"{LIVE_PASSAGES} passages: give no more"
            )
        if self.kind == "google_cse" and not live.engine_id:
            raise ValueError(
                f"retrieval.live.engine_id = {live.engine_id!r}: {kind} needs the id (cx) of your "
                "search engine: see programmablesearchengine.google.com"
            )
        if not live.needs_key:
            return
        for field, what in (("price_usd", "a request costs"), ("budget_usd", "the run may spend")):
            if not LEAST_USD <= (value := getattr(live, field)) < math.inf:
                raise ValueError(
                    f"retrieval.live.{field} = {value!r}: {kind} asks a provider that is paid: say "
                    f"what {what}, in US dollars, or answer from a record: "
                    "retrieval.live.replay=FILE"
                )
        if live.budget_usd < live.price_usd:
            raise ValueError(
                f"retrieval.live.budget_usd = {live.budget_usd!r}: less than one request costs, "
                f"retrieval.live.price_usd = {live.price_usd!r}: raise it"
            )

    @property
    def is_live(self) -> bool:
        """True where a provider on the web is asked, or the record of one that was."""
        return self.kind in LIVE

    @property
    def has_own_server(self) -> bool:
        """True where the run starts a retrieval server of its own."""
        return not self.url and not self.recorded


def shown_urls(urls: Sequence[str]) -> str:
    """Servers' addresses for a message: one as a text, several as a list."""
    return repr(urls[0] if len(urls) == 1 else list(urls))


def is_near(url: str) -> bool:
    """True for an address on this machine's loopback."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _require_safe(url: str) -> None:
    """Raise ValueError for a provider's address at which others could read the key, or that may
    hold it: such a one is not shown.
    """
    try:
        parts = urlsplit(url)
        found = bool(parts.hostname) and parts.port != 0  # a port that is none raises
    except ValueError:
        raise ValueError(
            "retrieval.live.url is no address: give one such as https://gateway/search"
        ) from None
    if parts.query or parts.fragment or "@" in url:
        raise ValueError(
            "retrieval.live.url holds a query or a user's name, which would be recorded: give the "
            "address alone, and the key by retrieval.live.key_file"
        )
    if not found or not (parts.scheme == "https" or (parts.scheme == "http" and is_near(url))):
        raise ValueError(
            f"retrieval.live.url = {url!r}: the key is shown there: give an https:// address, or "
            "an http:// one on this machine's loopback"
        )


def _require_url(url: str) -> None:
    whole = url.startswith(("http://", "https://"))
    meant = url if whole else f"http://{url.rpartition('://')[2]}"
    try:
        parts = urlsplit(meant)
        found = bool(parts.hostname) and parts.port != 0  # a port that is none raises
    except ValueError:
        found = False
    if not (whole and found) or "," in url:
        remedy = f"did you mean {meant}?" if found else "give one such as http://127.0.0.1:8000"
        if "," in url:
            remedy = f"write a list, retrieval.url=[{url}]"
        raise ValueError(f"retrieval.url = {url!r} is no http:// or https:// address: {remedy}")
