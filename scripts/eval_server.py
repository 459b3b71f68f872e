"""The retrieval server of a command that needs one for itself: started with it, ended with it.

Consumes a configuration on the disk; produces a server that answers, and its log. Waits, with a
deadline, until it has its index; unblocked by the server's word (`FORAGE_READY`) or by its end.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from scripts.ask_retrieval import ServerFailed

_LOOK_EVERY_S = 0.1
_LEAVE_S = 10.0  # for requests in flight; then it is killed


class OwnServer:
    """One server process, out of the reach of Ctrl-C; use as a context manager."""

    def __init__(self, config: Path, log: Path, starting_deadline_s: float) -> None:
        self._config, self._log, self._deadline_s = config, log, starting_deadline_s
        self._said = log.with_suffix(".ready")

    def __enter__(self) -> Self:
        self._said.unlink(missing_ok=True)
        environment = {"FORAGE_PARENT": str(os.getpid()), "FORAGE_READY": str(self._said)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "retrieval_server.worker", str(self._config)],
                stdout=log,
                stderr=log,
                env=os.environ | environment,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.unlink(missing_ok=True)

    async def ready(self) -> None:
        """Return once it serves. Raises ServerFailed when it ends, or at the deadline."""
        waited_s = 0.0
        while not self._said.exists():
            self._check()
            if waited_s >= self._deadline_s:
                raise ServerFailed(
                    f"the retrieval server was not ready within {self._deadline_s:g} s "
                    f"(actors.starting_deadline_s): see {self._log}"
                )
            await asyncio.sleep(_LOOK_EVERY_S)
            waited_s += _LOOK_EVERY_S

    async def watch(self) -> NoReturn:
        """Return never; raise ServerFailed when it has ended."""
        while True:
            self._check()
            await asyncio.sleep(_LOOK_EVERY_S)

    def _check(self) -> None:
        if (code := self._process.poll()) is not None:
            lines = self._log.read_text(errors="replace").splitlines()
            last = f": {lines[-1]}" if lines else ""
            raise ServerFailed(
                f"the retrieval server ended with exit code {code}{last}; see {self._log}"
            )
