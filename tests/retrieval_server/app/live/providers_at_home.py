"""Local servers that answer as Serper, SerpAPI and Google's Custom Search do, and bill for it."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY = "k3y-0f-the-provider-0123456789"
Scripted = tuple[int, dict[str, str], Any]  # status, headers, body


@dataclass
class Home:
    """A provider: `billed` requests, all `requests` made, and what it answers first."""

    kind: str
    url: str = ""
    billed: int = 0
    requests: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    script: list[Scripted] = field(default_factory=list)
    delay_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, query: str, key: str) -> Scripted:
        """Answer one request; a 200 is billed."""
        with self.lock:
            self.requests.append(query)
            self.times.append(time.monotonic())
            scripted = self.script.pop(0) if self.script else None
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        time.sleep(self.delay_s)
        with self.lock:
            self.under_way -= 1
            if scripted is not None:
                return scripted
            if key != KEY:
                return refusal(self.kind, key)
            self.billed += 1
            return 200, {}, body(self.kind, query)


def body(kind: str, query: str) -> dict[str, Any]:
    """An answer of two pages; of none for a query that begins with "nothing"."""
    pages = [
        {
            "position": number,
            "title": f"{query} {number}",
            "link": f"https://example.org/{number}",
            "snippet": f"snippet {number}\n of  {query}",
        }
        for number in (1, 2)
    ]
    empty = query.startswith("nothing")
    if kind == "serper":
        return {
            "searchParameters": {"q": query, "type": "search", "num": 10, "engine": "google"},
            "answerBox": {"title": "Own", "answer": 42, "link": "https://example.org/own"},
            "organic": [] if empty else [{**page, "sitelinks": []} for page in pages],
            "credits": 1,
        } | ({"answerBox": None} if empty else {})
    if kind == "serpapi":
        told: dict[str, Any] = {
            "search_metadata": {"id": "64c3", "status": "Success", "json_endpoint": "https://x"},
            "search_parameters": {"engine": "google", "q": query},
            "search_information": {"organic_results_state": "Results for exact spelling"},
        }
        if empty:
            return told | {"error": "Google hasn't returned any results for this query."}
        return told | {
            "answer_box": {"type": "organic_result", "title": "Own", "answer": "42", "list": []},
            "organic_results": [{**page, "displayed_link": "example.org"} for page in pages],
        }
    found = {
        "kind": "customsearch#search",
        "url": {"type": "application/json"},
        "searchInformation": {"searchTime": 0.1, "totalResults": "2"},
    }
    items = [{"kind": "customsearch#result", **page, "htmlSnippet": "<b>x</b>"} for page in pages]
    return found if empty else found | {"items": items}


def refusal(kind: str, key: str) -> Scripted:
    """The answer to another key; it says again what it was shown."""
    if kind == "serper":
        return 403, {}, {"message": f"Unauthorized. {key}", "statusCode": 403}
    if kind == "serpapi":
        return 401, {}, {"error": f"Invalid API key {key}."}
    said = "API key not valid. Please pass a valid API key."
    error = {"code": 400, "message": f"{said} {key}", "status": "INVALID_ARGUMENT"}
    return 400, {}, {"error": error}


def throttled(kind: str, after: str = "") -> Scripted:
    """The provider's 429."""
    said: Any = {"message": "Too many requests", "statusCode": 429}
    if kind == "serpapi":
        said = {"error": "Your searches exceed the hourly throughput limit of this API key."}
    if kind == "google_cse":
        said = exhausted("minute")
    return 429, {"retry-after": after} if after else {}, said


def spent(kind: str) -> Scripted:
    """The provider's refusal where all searches that were paid for, or the day's, are made."""
    if kind == "serper":
        return 400, {}, {"message": "Not enough credits", "statusCode": 400}
    if kind == "serpapi":
        return 429, {}, {"error": "Your account has run out of searches."}
    return 429, {}, exhausted("day")


def exhausted(unit: str) -> dict[str, Any]:
    """Google's words for too many queries a minute, or a day."""
    said = (
        f"Quota exceeded for quota metric 'Queries' and limit 'Queries per {unit}' of service "
        "'customsearch.googleapis.com' for consumer 'project_number:1'."
    )
    errors = [{"message": said, "domain": "global", "reason": "rateLimitExceeded"}]
    status = "RESOURCE_EXHAUSTED"
    return {"error": {"code": 429, "message": said, "errors": errors, "status": status}}


@contextmanager
def at_home(kind: str) -> Iterator[Home]:
    """The provider, serving on a loopback port."""
    home = Home(kind)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            told = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._say(home.answer(told["q"], self.headers.get("x-api-key", "")))

        def do_GET(self) -> None:
            told = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
            key = told.get("api_key") or self.headers.get("x-goog-api-key", "")
            self._say(home.answer(told["q"], key))

        def _say(self, said: Scripted) -> None:
            status, headers, content = said
            sent = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    home.url = f"http://127.0.0.1:{server.server_address[1]}/search"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield home
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5.0)
