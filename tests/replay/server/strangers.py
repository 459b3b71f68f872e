"""A replay server whose process may open few files, and connections of nobody to it."""

import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.children import ends_with_us

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47)
UNFINISHED = GREETING + b"\x06" + (16 << 20).to_bytes(8, "big")  # a long command begins

LIMITED = """
import resource, sys
most = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
from configs.runtime import guard
guard.HANDSHAKE_S = 600.0  # what frees descriptors here is that they are needed
from configs.runtime.process import begin
from replay.worker import main
begin("replay")
sys.exit(main(sys.argv[1:]))
"""


@contextmanager
def limited(config: Path, most: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Replay's process, which may have so many descriptors."""
    command = [sys.executable, "-c", LIMITED, str(most), str(config)]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stderr=errors, env=ends_with_us())
    yield process
    process.kill()
    process.wait()


@contextmanager
def crowd(endpoint: str, count: int, said: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections to an endpoint that say this, as far as they may, and stay."""
    parts = urlsplit(endpoint)
    with ExitStack() as stack:
        connections = []
        for _ in range(count):
            one = socket.create_connection((parts.hostname, parts.port))
            connections.append(stack.enter_context(one))
            with contextlib.suppress(ConnectionError):  # it was closed meanwhile
                one.sendall(said)
        yield connections


def resident(pid: int) -> int:
    """Bytes that a process holds in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
