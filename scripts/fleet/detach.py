"""A launcher that outlives its terminal, for `forage train --detach` and `forage resume --detach`.

    detached    the command: starts the launcher in a session of its own, and stays until that has
                placed its processes, or has ended
    loose       the launcher's part, once the run's directory is there

Until then it says all where the command does, and ends with it. From then on it writes to the log
in that directory, of which the command shows what comes.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING

from configs.runtime.process import Exit, outlive_parent, start_child
from configs.runtime.signals import Interrupt
from scripts.command.terminal import clean, complain, redirect

if TYPE_CHECKING:
    from scripts.fleet.console import Console

LOG = "launcher.log"
WIRE = "FORAGE_DETACHED"  # the descriptor by which the launcher tells the command how far it is
STARTED = b"started\n"
LOOK_S = 0.2  # how often the log is looked at


def is_detached() -> bool:
    """True in a launcher that `detached` has started, until it is loose."""
    return WIRE in os.environ


@contextlib.contextmanager
def loose(console: "Console", log: Path) -> Iterator[Callable[[], None]]:
    """Have a detached launcher write to the log, and live on whatever becomes of the command and of
    the terminal; yield what tells the command that all is placed. Nothing in the foreground.
    """
    descriptor = os.environ.pop(WIRE, "")
    if not descriptor:
        yield lambda: None
        return
    outlive_parent()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # there is no terminal: somebody's `kill`
    os.set_inheritable(int(descriptor), False)
    with log.open("ab") as file:
        redirect(file.fileno(), file.fileno())
    print(console.moved(), end="", flush=True)
    shown_from = log.stat().st_size
    with os.fdopen(int(descriptor), "wb", buffering=0) as wire:
        _tell(wire, f"{shown_from} {log}\n".encode())
        yield partial(_tell, wire, STARTED)


def _tell(wire: RawIOBase, words: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # the command is gone
        wire.write(words)


def detached(words: Sequence[str]) -> int:
    """Start the launcher, python by these words; the exit code: 0 once all is placed, its own where
    it has ended before.
    """
    reading, writing = os.pipe()
    with Interrupt(polled=True) as stop, os.fdopen(reading, "rb", buffering=0):
        launcher = start_child(
            words,
            environment={WIRE: str(writing)},
            own_session=True,
            passed_files=[writing],
        )
        os.close(writing)
        try:
            log, started = _followed(launcher, reading, stop)
        except KeyboardInterrupt:  # the second one
            launcher.send_signal(signal.SIGINT)
            raise
    if started:
        print(_how_to_go_on(launcher.pid, log))
        return Exit.DONE
    code = launcher.wait()
    if code < 0:
        complain(f"the launcher was ended by {signal.Signals(-code).name}")
    if log:
        print(f"see {log}")
    return code if code >= 0 else Exit.INTERRUPTED if stop.cause else Exit.FAILED


def _followed(launcher: "subprocess.Popen[bytes]", wire: int, stop: Interrupt) -> tuple[str, bool]:
    """The path of its log ('': it never got so far), and True once all is placed, False where it
    ends. Shows the log meanwhile; hands an interrupt on.
    """
    told, path, asked = b"", "", False
    with contextlib.ExitStack() as stack:
        while not told.endswith(STARTED) or stop.cause:
            if stop.cause and not asked:
                asked = True
                launcher.send_signal(signal.SIGINT)
            ended = False
            if select.select([wire], [], [], LOOK_S)[0]:
                piece = os.read(wire, 4096)
                told, ended = told + piece, not piece
            if not path and b"\n" in told:
                shown_from, _, path = told.partition(b"\n")[0].decode().partition(" ")
                said = stack.enter_context(Path(path).open(errors="replace"))
                said.seek(int(shown_from))
            if ended:
                launcher.wait()
            if path:
                print(clean(said.read()), end="", flush=True)
            if ended:
                return path, False
    return path, True


def _how_to_go_on(pid: int, log: str) -> str:
    return "\n".join(
        [
            f"launcher {pid} goes on by itself on {socket.gethostname()}, whoever logs out",
            f"  to watch it: tail -f {log}",
            f"  to end it: kill -INT {pid} (it drains; again: at once)",
        ]
    )
