"""A server that is both a package index for pip and npm's registry, of files held in memory."""

import base64
import gzip
import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from scripts.wiki.packages import Package


class Registries(ThreadingHTTPServer):
    """`files`: their content by name; `requests`: the paths that were asked for; `cut`: the files
    of which half is sent.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.cut: set[str] = set()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def wheel(self, name: str, files: dict[str, bytes]) -> Package:
        """Offer a wheel of these files."""
        about = {
            f"{name}-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: %b\nVersion: 1.0\n",
            f"{name}-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\n",
        }
        about = {file: text.replace(b"%b", name.encode()) for file, text in about.items()}
        return self._offer("pip", name, f"{name}-1.0-py3-none-any.whl", zipped(files | about))

    def npm(self, name: str, files: dict[str, bytes]) -> Package:
        """Offer an npm package of these files."""
        return self._offer("npm", name, f"{name}-1.0.tgz", tarred(files))

    def _offer(self, registry: str, name: str, file: str, content: bytes) -> Package:
        self.files[file] = content
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        return Package(registry, name, "1.0", file, digest, len(content))


class _Handler(BaseHTTPRequestHandler):
    server: Registries

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        *_, name = self.path.strip("/").split("/")
        if self.path.startswith("/simple/"):
            links = [f'<a href="/{f}">{f}</a>' for f in self.server.files if f.startswith(name)]
            return self._send("".join(links).encode(), "text/html")
        if name == "1.0":
            tarball = f"{self.server.url}/{self.path.split('/')[-2]}-1.0.tgz"
            return self._send(json.dumps({"dist": {"tarball": tarball}}).encode())
        if name in self.server.files:
            return self._send(self.server.files[name])
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, content: bytes, kind: str = "application/octet-stream") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        cut = self.path.split("/")[-1] in self.server.cut
        self.wfile.write(content[: len(content) // 2] if cut else content)


@contextmanager
def serving() -> Iterator[Registries]:
    """The server, for a block."""
    server = Registries()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def zipped(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return packed.getvalue()


def tarred(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as squeezed,  # the same bytes each time
        tarfile.open(fileobj=squeezed, mode="w") as archive,
    ):
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def integrity(content: bytes) -> str:
    """As npm writes it."""
    return f"sha512-{base64.b64encode(hashlib.sha512(content).digest()).decode()}"
