"""The proof that all ranks see one run directory: a checkpoint is written by all of them into it.

Rank 0 leaves a mark there, a file with a token, and every other rank reads it.
"""

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

SEEN_S, RETRY_S = 10.0, 0.2  # a file system in the network may show a new file late


class Mark(msgspec.Struct, frozen=True):
    """A file and what is in it."""

    path: str
    token: str

    def seen(self, patience_s: float = SEEN_S) -> bool:
        """True where this process reads it."""
        deadline = time.monotonic() + patience_s
        while not self._read():
            if time.monotonic() > deadline:
                return False
            time.sleep(RETRY_S)
        return True

    def _read(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(self.path).read_text() == self.token
        return False


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[Mark]:
    """Leave a mark in a folder during the block."""
    token = secrets.token_hex(16)
    path = folder / f".ranks-{token[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(token)
    try:
        yield Mark(str(path), token)
    finally:
        path.unlink(missing_ok=True)
