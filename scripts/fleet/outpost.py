"""The launcher's outpost on a node: it tells the node's facts, lays what processes there read
first, shows the ends of their logs, and its answers are the node's pulse. It lives in a Ray actor.

A guardian of its own ends every process of the run on the node when the outpost ends, however, and
removes the node's directory for sockets and secrets.
"""

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from configs.runtime.files import replacing
from configs.runtime.process import make_private
from scripts.fleet import guardian
from scripts.fleet.host import tail
from scripts.fleet.nodes import Asked, Facts, Listeners, look, unreachable

CLOSE_S, LOOK_S = 5.0, 0.05  # of the guardian: how long it is waited for


class Laid(msgspec.Struct, frozen=True):
    """A file that processes on a node read."""

    path: str
    content: bytes


class Outpost:
    """One node's. Ray calls its methods from several threads."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listeners = Listeners()
        self._guardian: subprocess.Popen[bytes] | None = None

    def clock(self) -> float:
        """The node's time, in seconds since the epoch."""
        return time.time()

    def look(self, asked: Asked) -> Facts:
        """Find the node's facts."""
        return look(asked, self._address)

    def listen(self, ports: Sequence[int]) -> list[int]:
        """Listen on these until `deafen`, for other nodes to try; the ports. Raises OSError."""
        return self._listeners.open(self._address, ports)

    def deafen(self) -> None:
        """Close what `listen` opened."""
        self._listeners.close()

    def unreachable(self, places: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """Why connections from here failed, by place."""
        return unreachable(places)

    def lay(
        self, token: str, directory: str, folders: Sequence[str], files: Sequence[Laid]
    ) -> None:
        """End what an earlier outpost of the run left; make its directory for sockets and secrets,
        which goes with us, and write the files. Raises OSError.
        """
        guardian.sweep(token)
        make_private(Path(directory))
        self._directory = Path(directory)
        self._guardian = guardian.start(token, self._directory, detached=True)
        for folder in folders:
            Path(folder).mkdir(parents=True, exist_ok=True)
        for file in files:
            path = Path(file.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, file.content, 0o666)

    def entrust(self, folder: str, secrets: Mapping[str, bytes]) -> None:
        """Have a folder in our directory hold these, by name, and nothing else. Raises OSError."""
        place = Path(folder)
        make_private(place)
        for path in place.iterdir():
            if path.name not in secrets:
                path.unlink()
        for name, content in secrets.items():
            _write(place / name, content, 0o600)

    def tail(self, path: str, offset: int) -> str:
        """What a log has from there on."""
        return tail(path, offset)

    def close(self) -> None:
        """End whatever of the run is left on the node; the guardian removes its directory last."""
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()
            self._guardian.wait()
            end = time.monotonic() + CLOSE_S
            while self._directory.exists() and time.monotonic() < end:
                time.sleep(LOOK_S)


def _write(path: Path, content: bytes, mode: int) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    with replacing(path, durable=False, contended=True) as draft:
        draft.touch(mode=mode)
        draft.write_bytes(content)
