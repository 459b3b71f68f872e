"""The retrieval server's process: `python -m retrieval_server.worker CONFIG [a.b=c …]`.

Consumes the configuration and its corpus; serves HTTP on `retrieval.host:port`; waits for requests;
ends on SIGTERM after answering those in flight, with exit code 0. What makes serving impossible is
said before serving, with exit code 2.
"""

import argparse
import logging
import math
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from configs import load
from configs.retrieval import RetrievalConfig, shown_urls
from configs.runtime import process
from configs.runtime.signals import on_stop
from configs.schema import Config
from retrieval_server.auth import is_loopback, read_token
from retrieval_server.protocol import DEFAULT_TOP_K, MAX_TOP_K, BadIndex, CorpusError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    import uvicorn
    from fastapi import FastAPI

    from retrieval_server.index.base import Index

logger = logging.getLogger("retrieval_server")

_KEEP_ALIVE_S = 75  # longer than the client's, so that an idle connection is closed by the client
_BACKLOG = 2048
_ANSWER_S = 1.0  # for a 503 to a request that has not come in by its deadline


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m retrieval_server.worker", description=__doc__)
    parser.add_argument("config", help="YAML file of differences from the defaults")
    parser.add_argument("overrides", nargs="*", help="a.b=c")
    parsed = parser.parse_args(arguments)
    process.begin("retrieval_server")
    try:
        config = load.load(parsed.config, parsed.overrides)
        check(config)
        token = read_token(config.retrieval.token_file)
        listener = bind(config.retrieval.host, config.retrieval.port)
    except load.ConfigError as error:
        print(f"retrieval_server: {error}", file=sys.stderr)
        return process.Exit.BAD_INPUT
    with listener:
        return serve(config, listener, token)


def check(config: Config) -> None:
    """Raise ConfigError for settings that no server can be started from."""
    retrieval = config.retrieval
    if retrieval.url:
        raise load.ConfigError(
            f"retrieval.url = {shown_urls(retrieval.url)}: names an external server, so none is "
            "started; leave it empty to start one"
        )
    if retrieval.recorded:
        raise load.ConfigError(
            f"retrieval.recorded = {retrieval.recorded!r}: that run's log answers searches, so no "
            "server is started; leave it empty to start one"
        )
    if retrieval.is_live:
        from retrieval_server.app.live import opening

        opening.require_folder(config)
        opening.check(config)
        return
    if not (retrieval.corpus or retrieval.index):
        raise load.ConfigError("retrieval.corpus = '': name a JSONL file of passages")
    if retrieval.encoder and not retrieval.index:
        raise load.ConfigError(
            f"retrieval.encoder = {retrieval.encoder!r}: without retrieval.index, BM25 is served, "
            "which needs none: name an index, or leave it empty"
        )
    if retrieval.top_k > MAX_TOP_K:
        raise load.ConfigError(f"retrieval.top_k = {retrieval.top_k!r}: at most {MAX_TOP_K}")


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket: whoever connects early waits until the index is built.

    Raises ConfigError when host or port cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise load.ConfigError(
            f"retrieval.host = {host!r}: {error.strerror}; give an address of this machine"
        ) from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)  # now: a port that is only bound can be bound by others too
    except OSError as error:
        listener.close()
        raise load.ConfigError(
            f"retrieval.port = {port!r} on retrieval.host = {host!r}: {error.strerror}; "
            "end the process that holds it, or give another (0: any free port)"
        ) from error
    return listener


def serve(
    config: Config,
    listener: socket.socket,
    token: str,
    wrap: "Callable[[Index], Index]" = lambda index: index,
) -> int:
    """Index the corpus and serve until SIGTERM or SIGINT; returns the exit code.

    `wrap` may put something before the index, such as a delay.
    """
    process.limit_threads(config.retrieval.threads)
    on_stop(_leave)
    try:
        app, serves, by = _application(config, token, wrap)
    except (load.ConfigError, CorpusError, BadIndex) as error:
        field = "retrieval.corpus: " if isinstance(error, CorpusError) else "retrieval.index: "
        field = "" if isinstance(error, load.ConfigError) else field
        print(f"retrieval_server: {field}{error}", file=sys.stderr)
        return process.Exit.BAD_INPUT
    host, port = listener.getsockname()[:2]
    if not token:
        _warn_of_strangers(config, host)
    server = _server(app, config.retrieval)
    # While it serves, uvicorn handles the signals: it drains, restores ours and raises them again.
    on_stop(partial(_drain, app, server))
    logger.info("serving %s on http://%s:%d by %s", serves, host, port, by)
    process.announce_ready()
    server.run(sockets=[listener])
    return process.Exit.DONE


def _application(
    config: Config, token: str, wrap: "Callable[[Index], Index]"
) -> "tuple[FastAPI, str, str]":
    """The application, what it serves and by what. Raises ConfigError, CorpusError, BadIndex."""
    # Imported late: numpy and torch read the thread count when they are first imported.
    from retrieval_server.app.app import Limits, create_app, create_live_app

    asked = config.retrieval
    top_k = asked.top_k or DEFAULT_TOP_K
    limits = Limits(asked.max_waiting_queries, asked.request_deadline_s)
    if asked.is_live:
        from retrieval_server.app.live.opening import open_live

        live = open_live(config)
        return create_live_app(live, top_k, token, limits), "the live web", live.name
    from retrieval_server.index.open_index import open_index

    documents, index = open_index(asked)
    app = create_app(documents, wrap(index), top_k, token, limits)
    return app, f"{len(documents)} passages", index.name


def _server(app: "FastAPI", asked: RetrievalConfig) -> "uvicorn.Server":
    import uvicorn

    from retrieval_server.app.connections import Connections, guarded, most_connections

    connections = Connections(most_connections(), body_s=asked.request_deadline_s + _ANSWER_S)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=guarded(connections),
            access_log=False,
            log_config=None,
            log_level="warning",
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(asked.request_deadline_s) + 1,
        )
    )
    _tell_when_leaving(app, server, asked.drain_notice_s)
    return server


def _warn_of_strangers(config: Config, address: str) -> None:
    if not is_loopback(address):
        logger.warning(
            "retrieval.host = %r: everybody who can reach %s may search here, for "
            "retrieval.token_file is empty: name a file with a token, or listen on 127.0.0.1",
            config.retrieval.host,
            address,
        )


def _tell_when_leaving(app: "FastAPI", server: "uvicorn.Server", notice_s: float) -> None:
    """From the first signal on, fail `/ready`; close after `notice_s`, or at the next signal."""
    leave = server.handle_exit

    def handle(sig: int, frame: "FrameType | None") -> None:
        again, app.state.draining = app.state.draining, True
        if again or not notice_s:
            leave(sig, frame)
        else:
            later = threading.Timer(notice_s, leave, (sig, frame))
            later.daemon = True
            later.start()

    server.handle_exit = handle  # type: ignore[method-assign]


def _leave(cause: str) -> None:
    """Stop while still starting: nothing has been promised to anybody yet."""
    logger.info("%s before serving, leaving", cause)
    raise SystemExit(process.Exit.DONE)


def _drain(app: "FastAPI", server: "uvicorn.Server", cause: str) -> None:
    app.state.draining = True
    server.should_exit = True
    logger.info("%s: leaving", cause)


if __name__ == "__main__":
    sys.exit(main())
