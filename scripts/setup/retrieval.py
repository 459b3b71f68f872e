"""The retrieval server of a command that needs one for itself, and one search to try it.

The server is a child process, started and ended with the command, out of Ctrl-C's reach, and ended
by the kernel if the command is killed.
"""

import asyncio
import socket
import subprocess
import tempfile
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import msgspec

from configs.load import retrieval_url, save
from configs.runtime.process import end_child, start_child
from configs.schema import Config
from retrieval_server.auth import read_token
from retrieval_server.client import RetrievalClient
from retrieval_server.protocol import RetrievalError, RetrievalRefused
from scripts.setup.resolve import with_port

LEAVE_S = 10.0  # for requests in flight; then it is killed
PROBE_S = 5.0
RETRIES = 3  # at least: one lost reply must keep no run from starting
LOG = "retrieval_server.log"
_READY = "retrieval_server.ready"
_READY_EVERY_S, _ALIVE_EVERY_S = 0.02, 0.1
_T = TypeVar("_T")
_TOLD = 3  # last lines of its log, where it ended


class ServerFailed(Exception):
    """The retrieval server cannot be searched; the message names the remedy."""


@dataclass(frozen=True)
class OwnServer:
    """The child; `ready` before it is asked, `watch` while it is. Its log may be older starts' too,
    up to `log_begins` (bytes), and is there to be read afterwards where it `stays`.
    """

    process: "subprocess.Popen[bytes]"
    said: Path
    log: Path
    log_begins: int
    stays: bool
    starting_deadline_s: float

    async def ready(self) -> None:
        """Return once it serves. Raises ServerFailed when it ends, or at the deadline."""
        end = time.monotonic() + self.starting_deadline_s
        while not self.said.exists():
            self._check()
            if time.monotonic() >= end:
                raise ServerFailed(
                    f"the retrieval server does not serve after {self.starting_deadline_s:g} s: "
                    "build its index first (forage index), or raise "
                    f"actors.starting_deadline_s{self._where()}"
                )
            await asyncio.sleep(_READY_EVERY_S)

    async def watch(self) -> NoReturn:
        """Return never; raise ServerFailed when it has ended."""
        while True:
            self._check()
            await asyncio.sleep(_ALIVE_EVERY_S)

    async def beside(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the work's result; cancel it once the server ends. Raises ServerFailed."""
        working, watching = asyncio.create_task(work), asyncio.create_task(self.watch())
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            return await (working if working.done() else watching)
        except Exception:
            self._check()
            raise
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    def _check(self) -> None:
        if (code := self.process.poll()) is not None:
            with self.log.open("rb") as log:
                log.seek(self.log_begins)
                lines = log.read().decode(errors="replace").strip().splitlines()[-_TOLD:]
            last = f": {' / '.join(lines)}" if lines else ""
            raise ServerFailed(
                f"the retrieval server ended with exit code {code}{last}{self._where()}"
            )

    def _where(self) -> str:
        return f"; see {self.log}" if self.stays else ""


def own_address(config: Config) -> Config:
    """The configuration with a free port for a server of one's own; its end is not announced."""
    own = msgspec.structs.replace(config.retrieval, port=0, drain_notice_s=0.0)
    return msgspec.structs.replace(config, retrieval=with_port(own))


@contextmanager
def serving(
    config: Config, folder: Path | None = None, leave_s: float = LEAVE_S
) -> Iterator[OwnServer]:
    """The server, starting, and ended on leaving; configuration and log stay in a `folder`."""
    with ExitStack() as stack:
        place = folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="forage-server-"))
        )
        path, said, log = (place / name for name in ("config.yaml", _READY, LOG))
        save(config, path)
        said.unlink(missing_ok=True)
        begun = log.stat().st_size if log.exists() else 0
        # In a session of its own: Ctrl-C is ours alone.
        command = ["-m", "retrieval_server.worker", str(path)]
        process = start_child(command, log=log, ready=said, own_session=True)
        try:
            yield OwnServer(
                process=process,
                said=said,
                log=log,
                log_begins=begun,
                stays=folder is not None,
                starting_deadline_s=config.actors.starting_deadline_s,
            )
        finally:
            process.terminate()
            end_child(process, leave_s)
            said.unlink(missing_ok=True)


async def probe(config: Config, deadline_s: float = PROBE_S, retries: int = 0) -> None:
    """Search once as rollouts will: a wrong address or token is told first. Raises ServerFailed."""
    asked, url = config.retrieval, retrieval_url(config)
    deadline_s, token = min(deadline_s, asked.timeout_s), read_token(asked.token_file)
    try:
        async with RetrievalClient(url, deadline_s, retries, token=token) as client:
            await client.retrieve(["forage"], asked.top_k)
    except RetrievalRefused as error:
        raise ServerFailed(f"a search at retrieval.url = {url!r} was refused: {error}") from error
    except RetrievalError as error:
        raise ServerFailed(
            f"a search at retrieval.url = {url!r} failed: {error}: say where the retrieval server "
            "is, retrieval.url=URL"
        ) from error


def try_search(config: Config) -> None:
    """`probe` before a run, with a rollout's patience for a server that does listen; where none
    does, that is told at once. Raises ServerFailed.
    """
    asked = config.retrieval
    parts = urlsplit(asked.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((str(parts.hostname), port), PROBE_S).close()
    except OSError as error:
        raise ServerFailed(
            f"retrieval.url = {asked.url!r}: no retrieval server can be reached there ({error}): "
            "start it first, or leave retrieval.url empty for one of the run's own"
        ) from error
    asyncio.run(probe(config, asked.timeout_s, max(asked.retries, RETRIES)))
