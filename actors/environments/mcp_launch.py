"""The process of an MCP server that an actor starts, and its end by force."""

import os
import shlex
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

# A server ends with this process, however that ends. Nothing of ours may run between the fork and
# the exec of a process of threads, so a program between them asks for it. It also says which
# process it is, by a file of that name: once their folder is gone, it starts nothing any more.
_LAUNCH = """
import ctypes, os, signal, sys
parent, folder, program, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
if os.getppid() != int(parent):
    sys.exit(1)
try:
    os.close(os.open(os.path.join(folder, str(os.getpid())), os.O_CREAT | os.O_EXCL))
except FileNotFoundError:
    sys.exit(1)
for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(ignored_by_python, signal.SIG_DFL)
os.execv(program, command)
"""


class Launch:
    """The start of one server by its command line, and its end. Use once, and `close` it."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._folder: Path | None = None
        self._pid: int | None = None

    def command(self) -> list[str]:
        """Return the command that starts the server in a process group of its own. Raises
        FileNotFoundError.
        """
        command = shlex.split(self._spec)
        if (program := shutil.which(command[0])) is None:
            raise FileNotFoundError(f"there is no program {command[0]!r} that may be run")
        self._folder = Path(tempfile.mkdtemp(prefix="forage-mcp-"))
        ours = [str(os.getpid()), str(self._folder)]
        return [sys.executable, "-I", "-S", "-c", _LAUNCH, *ours, program, *command]

    def settle(self) -> None:
        """Learn which process the server is; one that has not begun by now never does."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        try:
            folder.rmdir()
        except OSError:  # it is not empty
            self._pid = int(next(folder.iterdir()).name)
            shutil.rmtree(folder)

    def kill(self) -> None:
        """Kill the server's process group, unless the server has ended by itself."""
        self.settle()
        if self._pid is None:
            return
        with suppress(ChildProcessError, ProcessLookupError):
            os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # still our child
            os.killpg(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of a server that has ended."""
        self.settle()
        self._pid = None
