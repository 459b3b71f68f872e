"""The retrieval server of a command that needs one for itself, and one search to try it.

The server is a child process, started and ended with the command, out of Ctrl-C's reach, and ended
by the kernel if the command is killed.
"""

import asyncio
import socket
import subprocess
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import msgspec

from actors.environments.registry import searches
from configs.load import ConfigError, retrieval_urls, save
from configs.retrieval import shown_urls
from configs.runtime.process import end_child, start_child
from configs.schema import Config
from retrieval_server.auth import read_token
from retrieval_server.client import RetrievalClient
from retrieval_server.protocol import PROBE, RetrievalError, RetrievalRefused
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


async def probe(config: Config, deadline_s: float = PROBE_S, retries: int = 0) -> str:
    """Search once as rollouts will: a wrong address or token is told first. Returns the version of
    the index that was searched. Raises ServerFailed.
    """
    return await _search(config, retrieval_urls(config), deadline_s, retries)


async def _search(config: Config, urls: Sequence[str], deadline_s: float, retries: int) -> str:
    asked, where = config.retrieval, f"a search at retrieval.url = {shown_urls(urls)}"
    deadline_s, token = min(deadline_s, asked.timeout_s), read_token(asked.token_file)
    try:
        async with RetrievalClient(urls, deadline_s, retries, token=token) as client:
            await client.retrieve([PROBE], asked.top_k)
            return client.index_version
    except RetrievalRefused as error:
        raise ServerFailed(f"{where} was refused: {error}") from error
    except RetrievalError as error:
        raise ServerFailed(
            f"{where} failed: {error}: say where the retrieval server is, retrieval.url=URL"
        ) from error


def try_search(config: Config) -> None:
    """`probe` of each server before a run, with a rollout's patience for one that does listen;
    where none does, that is told at once. Raises ServerFailed, which lists those that failed, and
    where they serve different indexes.
    """
    urls = config.retrieval.url
    tried = asyncio.run(_try_each(config, urls))
    if failed := [str(each) for each in tried if isinstance(each, ServerFailed)]:
        raise ServerFailed("\n".join(failed))
    if len(set(tried)) > 1:
        served = ", ".join(f"{url} {version!r}" for url, version in zip(urls, tried, strict=True))
        raise ServerFailed(
            f"retrieval.url = {shown_urls(urls)}: they serve different indexes ({served}), and a "
            "run searches one: serve the same corpus and index everywhere, or leave servers out"
        )


def with_index_version(config: Config) -> Config:
    """The configuration with the version of the index that its several servers serve: an actor
    that is started later must find the same. Raises ConfigError.
    """
    asked, version = config.retrieval, ""
    if len(asked.url) > 1 and searches(config):
        try:
            version = asyncio.run(probe(config, asked.timeout_s, max(asked.retries, RETRIES)))
        except ServerFailed as error:
            raise ConfigError(str(error)) from error
    return msgspec.structs.replace(
        config, retrieval=msgspec.structs.replace(asked, index_version=version)
    )


async def _try_each(config: Config, urls: Sequence[str]) -> "list[str | ServerFailed]":
    async def version(url: str) -> str | ServerFailed:
        try:
            await asyncio.to_thread(_reach, url, len(urls))
            return await _search(config, [url], asked.timeout_s, max(asked.retries, RETRIES))
        except ServerFailed as error:
            return error

    asked = config.retrieval
    return await asyncio.gather(*map(version, urls))


def _reach(url: str, servers: int) -> None:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((str(parts.hostname), port), PROBE_S).close()
    except OSError as error:
        other = "leave retrieval.url empty for one of the run's own"
        raise ServerFailed(
            f"retrieval.url = {url!r}: no retrieval server can be reached there ({error}): "
            f"start it first, or {'leave it out' if servers > 1 else other}"
        ) from error
