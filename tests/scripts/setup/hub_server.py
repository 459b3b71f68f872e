"""A server that answers as the Hugging Face Hub does, of repositories held in memory."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

SHA = "a" * 40
Files = dict[str, bytes]


class FakeHub(ThreadingHTTPServer):
    """`repositories`: files by `models/NAME` or `datasets/NAME`; `gated`: those whose files are not
    given; `store`: the server, if any, that large files are to be fetched from; `page`: what is
    answered instead of all, if anything; `requests`: the paths that were asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Files] = {}
        self.gated: set[str] = set()
        self.store, self.page = "", b""
        self.requests: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.requests.append(path)
        if self.server.page:
            return self._send(200, self.server.page)
        if path == "token":
            of = {"Cas-Url": self.server.store, "Access-Token": "t", "Token-Expiration": "9" * 10}
            return self._send(200, b"", **{f"X-Xet-{name}": value for name, value in of.items()})
        if path.startswith("api/"):
            name, rest = "/".join(path.split("/")[1:4]), path.split("/")[4:]
            files = self.server.repositories.get(name)
            if files is None:
                return self._send(401, b"{}", **{"X-Error-Code": "RepoNotFound"})
            listed = self._tree(files) if rest[:1] == ["tree"] else self._info(name, files)
            return self._send(200, json.dumps(listed).encode())
        name, _, file = path.partition(f"/resolve/{SHA}/")
        name = name if name.startswith("datasets/") else f"models/{name}"
        if name in self.server.gated:
            return self._send(403, b"", **{"X-Error-Code": "GatedRepo"})
        content = self.server.repositories[name][file]
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        headers = {"ETag": etag, "X-Repo-Commit": SHA}
        if self.server.store and file.endswith(".safetensors"):
            headers |= {"X-Xet-Hash": "b" * 64, "X-Xet-Refresh-Route": f"{self.server.url}/token"}
        return self._send(200, content, **headers)

    def _info(self, name: str, files: Files) -> dict[str, object]:
        siblings = [{"rfilename": file, "size": len(each)} for file, each in files.items()]
        return {"id": name.partition("/")[2], "sha": SHA, "siblings": siblings}

    def _tree(self, files: Files) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": file, "size": len(each), "oid": hashlib.sha1(each).hexdigest()}
            for file, each in files.items()
        ]

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextmanager
def serving_hub() -> Iterator[FakeHub]:
    """A server on a free port."""
    with FakeHub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
