"""The gateway: an OpenAI-compatible endpoint in front of an actor's engine, on the loopback alone.

Consumes the calls of programs, each behind a session's key; produces completions, and keeps them
(`Session.calls`). Shares the actor's event loop. A request waits for its completion, bounded by
`actors.rollout_deadline_s` and its session's own deadline, and for verified weights, bounded by who
gives `verified`; a client that leaves gives its call up, and one that is slow to ask is closed.
"""

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator
from typing import Self

import uvicorn

from actors.errors import ActorError
from actors.gateway.app import create_app
from actors.gateway.completing import Verified
from actors.gateway.endpoints import Endpoints
from actors.gateway.sessions import Session, Sessions
from actors.policies.base import Policy
from actors.prompt import Prompter
from configs.load import ConfigError
from configs.schema import Config
from replay.protocol import Lease
from retrieval_server.app.connections import Connections, guarded, most_connections

HOST = "127.0.0.1"
_BACKLOG, _KEEP_ALIVE_S = 1024, 75
_START_S, _LEAVE_S, _LOOK_S = 10.0, 2.0, 0.01
_BODY_S = 30.0  # for a request to come in


class _Server(uvicorn.Server):
    """A server within a process that has its own handlers of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


class Gateway:
    """One gateway; made by `await Gateway.start(…)`, ended by `close`. `url`: of its `/v1`."""

    def __init__(self, endpoints: Endpoints, sessions: Sessions, listener: socket.socket) -> None:
        self._endpoints, self._sessions, self._listener = endpoints, sessions, listener
        self.url = f"http://{HOST}:{listener.getsockname()[1]}/v1"
        self._server = _Server(
            uvicorn.Config(
                create_app(endpoints),
                http=guarded(Connections(most_connections(), body_s=_BODY_S)),
                access_log=False,
                log_config=None,
                log_level="warning",
                ws="none",
                lifespan="off",
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(_LEAVE_S),
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    @classmethod
    async def start(
        cls,
        policy: Policy,
        prompter: Prompter,
        config: Config,
        verified: Verified,
        port: int = 0,
    ) -> Self:
        """Serve on `port`, 0: any free one. `verified(versions)` waits until all of them have
        passed their probe here, or raises UnverifiedWeights. Raises ConfigError for a port that is
        taken, and ActorError where it does not serve.
        """
        listener = _listen(port)
        sessions = Sessions(config.environment.gateway)
        gateway = cls(Endpoints(policy, prompter, config, verified, sessions), sessions, listener)
        try:
            async with asyncio.timeout(_START_S):
                while not gateway._server.started and not gateway._serving.done():
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            await gateway.close()
            raise ActorError(f"the gateway did not serve within {_START_S:g} s") from error
        if gateway._serving.done():
            await gateway.close()
            cause = gateway._serving.exception()
            raise ActorError(f"the gateway ended as it began: {cause}") from cause
        return gateway

    def open(self, lease: Lease, *, deadline_s: float = math.inf, free: bool = False) -> Session:
        """Begin a lease's session, which ends by `close`, or after `deadline_s`. `free`: by hand: a
        call's own temperature and seed hold, and the number of calls has no limit.
        """
        return self._sessions.open(lease, deadline_s=deadline_s, free=free)

    def gauges(self) -> dict[str, float]:
        """Return the gateway's numbers."""
        at_work = sum(session.at_work for session in self._sessions.all)
        return self._endpoints.gauges() | {
            "actor/gateway_sessions": float(len(self._sessions)),
            "actor/gateway_calls_in_flight": float(at_work),
        }

    async def close(self) -> None:
        """Begin no more calls, end all sessions, and the server."""
        self._endpoints.close()
        self._sessions.close()
        self._server.should_exit = True
        done, _ = await asyncio.wait([self._serving], timeout=2 * _LEAVE_S)
        if not done:
            self._server.force_exit = True
            self._serving.cancel()
            await asyncio.wait([self._serving], timeout=_LEAVE_S)
        self._listener.close()


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port {port}: {error.strerror}: end the process that holds it, or give another (0: "
            "any free port)"
        ) from error
    return listener
