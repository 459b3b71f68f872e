"""A retrieval server of one's own, for as long as questions are asked.

Consumes a configuration; produces it with the port that is served, and the server as a child that
is ended on leaving, and by the kernel if this process is killed. Waits for the child to serve;
unblocked by that, by its end or by `actors.starting_deadline_s`.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from configs import load
from configs.load import retrieval_url
from configs.schema import Config
from retrieval_server.bearer import read_token
from retrieval_server.client import RetrievalClient
from retrieval_server.protocol import RetrievalError, RetrievalRefused
from scripts.resolve import with_port

LEAVE_S = 2.0  # then it is killed
PROBE_S = 5.0
_LOOK_EVERY_S = 0.02
_TOLD = 3  # last lines of its log, where it failed


class ServerFailed(Exception):
    """The retrieval server cannot be searched; the message names the remedy."""


class Server:
    """The child; `wait` for it before it is asked."""

    def __init__(self, process: "subprocess.Popen[bytes]", ready: Path, log: Path) -> None:
        self._process, self._ready, self._log = process, ready, log

    def wait(self, deadline_s: float) -> None:
        """Return when it serves. Raises ServerFailed."""
        end = time.monotonic() + deadline_s
        while not self._ready.exists():
            if self._process.poll() is not None:
                said = self._log.read_text(errors="replace").strip().splitlines()[-_TOLD:]
                raise ServerFailed("the retrieval server did not start: " + " / ".join(said))
            if time.monotonic() > end:
                raise ServerFailed(
                    f"the retrieval server does not serve after {deadline_s:g} s: build its index "
                    "first (scripts/build_index.py), or raise actors.starting_deadline_s"
                )
            time.sleep(_LOOK_EVERY_S)


def own_address(config: Config) -> Config:
    """The configuration with a free port for a server of one's own, whatever port the run had; its
    end is not announced, for nobody else asks it."""
    own = msgspec.structs.replace(config.retrieval, port=0, drain_notice_s=0.0)
    return msgspec.structs.replace(config, retrieval=with_port(own))


@contextmanager
def serving(config: Config) -> Iterator[Server]:
    """The server of `config.retrieval`, starting; ended on leaving."""
    with tempfile.TemporaryDirectory(prefix="forage-ask-") as name:
        path, ready, log = (Path(name) / each for each in ("config.yaml", "ready", "log"))
        load.save(config, path)
        environment = {"FORAGE_PARENT": str(os.getpid()), "FORAGE_READY": str(ready)}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "retrieval_server.worker", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | environment,
                start_new_session=True,  # Ctrl-C is ours alone
            )
        try:
            yield Server(process, ready, log)
        finally:
            process.terminate()
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def probe(config: Config, deadline_s: float = PROBE_S, retries: int = 0) -> None:
    """Search once as rollouts will, so that a wrong address or token is told before there are any.
    Raises ServerFailed."""
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
