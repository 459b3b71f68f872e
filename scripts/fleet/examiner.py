"""An outpost that examines its node for `forage doctor --cluster`, and the connections by which
bandwidth is measured. Every socket has a deadline.
"""

import socket
import struct
import threading
import time

from scripts.fleet.nodes import CONNECT_S
from scripts.fleet.outpost import Outpost
from scripts.setup import doctor
from scripts.setup.doctor import Finding

PIECE = bytes(1 << 20)
SILENCE_S = 10.0
_COUNT = struct.Struct("!Q")


class Examiner(Outpost):
    """One node's. Lives in a Ray actor."""

    def findings(self, runs: str) -> list[Finding]:
        """What `forage doctor` finds here; `runs`: where runs lie."""
        return list(doctor.findings(runs=runs))

    def receive(self) -> int:
        """Take in what one peer sends to the port that this returns."""
        server = socket.create_server((self._address, 0))
        server.settimeout(SILENCE_S)
        threading.Thread(target=_receive, args=(server,), daemon=True).start()
        return int(server.getsockname()[1])

    def rate(self, place: tuple[str, int], seconds: float) -> float:
        """The bytes a second that arrive there, over so many seconds; 0 where none do."""
        return rate(place, seconds)


def rate(place: tuple[str, int], seconds: float) -> float:
    """The bytes a second that arrive at a place; 0 where none do."""
    try:
        with socket.create_connection(place, CONNECT_S) as peer:
            peer.settimeout(SILENCE_S)
            begun = time.monotonic()
            while time.monotonic() < begun + seconds:
                peer.sendall(PIECE)
            peer.shutdown(socket.SHUT_WR)
            (arrived,) = _COUNT.unpack(peer.recv(_COUNT.size, socket.MSG_WAITALL))
            return float(arrived / (time.monotonic() - begun))
    except (OSError, struct.error):
        return 0.0


def _receive(server: socket.socket) -> None:
    count, into = 0, bytearray(len(PIECE))
    with server:
        try:
            peer, _ = server.accept()
        except OSError:
            return
        with peer:
            peer.settimeout(SILENCE_S)
            while size := peer.recv_into(into):
                count += size
            peer.sendall(_COUNT.pack(count))
