"""The sessions of a gateway: each is a lease as a program sees it, behind a key of its own.

A session keeps every call that was completed, in the order of their ends, and the result that was
posted. Once it is closed its calls in flight end, and its key is refused: as that of an ended
session while it is among the last 65,536 of these, later as one of no session.
"""

import asyncio
import hashlib
import math
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from actors.errors import ActorError, TooManyCalls
from actors.gateway.calls import Call
from actors.gateway.history import History
from actors.gateway.merging import Merging
from actors.gateway.protocol import Refused
from actors.gateway.searches import SessionSearches
from actors.prompt import Tokens
from configs.environment import GatewayConfig
from replay.protocol import Lease

_ENDED_KEPT = 1 << 16  # keys of ended sessions that are known as such


@dataclass(frozen=True)
class Result:
    """What a program says that it has come to."""

    answer: str | None
    reward: float | None


class Work:
    """A request in flight, and the task that serves it just now."""

    def __init__(self, siblings: "set[Work]") -> None:
        self._siblings = siblings
        siblings.add(self)
        self.attach()

    def attach(self) -> None:
        """Have the current task be the one that is cancelled when the session ends."""
        task = asyncio.current_task()
        assert task is not None  # requests are served by tasks
        self.task = task

    def release(self) -> None:
        """Be in flight no more. Twice is harmless."""
        self._siblings.discard(self)


class Session:
    """One lease as a program sees it. `key`: the secret that its calls show; `searches`: what
    answers its searches, where there is something to search; `free`: it is used by hand: a call's
    own temperature and seed hold, where it gives them, not the lease's, and only the latest calls
    are kept, of which there may be any number.
    """

    def __init__(self, lease: Lease, limits: GatewayConfig, deadline_s: float, free: bool) -> None:
        self.key = f"forage-{secrets.token_urlsafe(32)}"
        self.lease, self.free, self.history = lease, free, History(limits.calls)
        self.result: Result | None = None
        self.searches: SessionSearches | None = None
        self.begun = 0  # calls
        self.given_up = False  # a request, unanswered, and none was answered since
        self.full = False  # a call's prompt has left no room for a completion
        self._limits, self._ends = limits, time.monotonic() + deadline_s
        self._calls: list[Call] = []
        self._merging = Merging()
        self._record_full = False  # a record could not hold another call
        self._fault: ActorError | None = None
        self._fault_at = 0.0
        self._at_work: set[Work] = set()
        self.closed = False

    @property
    def calls(self) -> tuple[Call, ...]:
        """The completed calls, in the order of their ends."""
        return tuple(self._calls)

    @property
    def fault(self) -> ActorError | None:
        """The error of policy or weights that its calls met, which is none of the program's; None
        again once a call that was begun later is completed.
        """
        return self._fault

    @fault.setter
    def fault(self, error: ActorError | None) -> None:
        self._fault, self._fault_at = error, time.time()

    @property
    def spent(self) -> bool:
        """True once it may make no more calls, or no record could hold them."""
        return self.begun >= self._limits.calls or self._record_full

    @property
    def left_s(self) -> float:
        """The seconds until its deadline."""
        return self._ends - time.monotonic()

    @property
    def at_work(self) -> int:
        """Its calls in flight."""
        return len(self._at_work)

    @property
    def unanswered(self) -> bool:
        """True where a request waits for its answer, or was given up before that."""
        return self.given_up or bool(self._at_work)

    def close(self) -> None:
        """End the session, and its calls in flight; every later one is refused. Twice is
        harmless.
        """
        self.closed = True
        for work in self._at_work:
            work.task.cancel()

    def require_open(self) -> None:
        """Raise Refused where it has ended."""
        if self.closed or self.left_s <= 0.0:
            raise ended()

    def work(self) -> "Work":
        """Begin a request in flight. Raises Refused where there are too many."""
        self.require_open()
        limit = self._limits.calls_at_once
        if len(self._at_work) >= limit:
            raise Refused(
                f"{limit} calls of this session are in flight already "
                "(environment.gateway.calls_at_once): wait for one",
                status=429,
                code="calls_at_once",
                retry_after_s=1,
            )
        return Work(self._at_work)

    def begin(self, prompt: Tokens) -> int:
        """Number a call of the policy. Raises Refused beyond `environment.gateway.calls`, and where
        the record of the session could not hold it.
        """
        limit = self._limits.calls
        if self.begun >= limit and not self.free:
            raise Refused(
                f"this session has made {limit} calls, the most that one may "
                "(environment.gateway.calls)",
                status=429,
                code="calls",
            )
        if not self.free:
            with self._recordable():
                self._merging.require_room(prompt)
        self.begun += 1
        return self.begun - 1

    def record(self, call: Call) -> None:
        """Keep a completed call. Raises Refused where the session has ended meanwhile, and where
        calls that ended meanwhile have left its record no room.
        """
        self.require_open()
        if not self.free:
            with self._recordable():
                self._merging.take(call)
        if call.started_at >= self._fault_at:
            self._fault = None
        self._calls.append(call)
        self.given_up = False
        del self._calls[: -self._limits.calls]

    def post(self, result: Result) -> None:
        """Take the program's result. Raises Refused where the session has ended, the result says
        nothing, or another was posted before.
        """
        self.require_open()
        if result == Result(None, None):
            raise Refused("answer, reward: neither is given: give one, or both", param="answer")
        if self.result not in (None, result):
            raise Refused(
                "another result of this session was posted before: post one",
                status=409,
                code="result_posted",
            )
        self.result = result

    @contextmanager
    def _recordable(self) -> Iterator[None]:
        try:
            yield
        except TooManyCalls as error:
            self._record_full = True
            raise Refused(str(error), status=413, code="record_bytes") from error


class Sessions:
    """The sessions of one gateway, by their keys."""

    def __init__(self, limits: GatewayConfig) -> None:
        self._limits = limits
        self._open: dict[bytes, Session] = {}
        self._ended: dict[bytes, None] = {}
        self.opened = 0

    def __len__(self) -> int:
        return len(self.all)

    @property
    def all(self) -> tuple[Session, ...]:
        """The open ones."""
        self._forget()
        return tuple(self._open.values())

    def open(self, lease: Lease, *, deadline_s: float = math.inf, free: bool = False) -> Session:
        """Begin a session, which ends by itself after `deadline_s`."""
        session = Session(lease, self._limits, deadline_s, free)
        self._forget()
        self._open[_digest(session.key)] = session
        self.opened += 1
        return session

    def find(self, authorization: str) -> Session:
        """Return the session whose key an Authorization header shows. Raises Refused: 401 for a key
        that is none, 410 for one whose session has ended.
        """
        scheme, _, shown = authorization.strip().partition(" ")
        digest = _digest(shown.strip())  # compared as a digest: its time tells nothing of the key
        if digest in self._ended:
            raise ended()
        if scheme.lower() != "bearer" or digest not in self._open:
            raise Refused(
                "this key is of no session: give the one that the session was opened with",
                status=401,
                code="invalid_api_key",
            )
        session = self._open[digest]
        session.require_open()
        return session

    def close(self) -> None:
        """End all."""
        for session in self.all:
            session.close()

    def _forget(self) -> None:
        for digest in [digest for digest, each in self._open.items() if each.closed]:
            del self._open[digest]
            self._ended[digest] = None
        while len(self._ended) > _ENDED_KEPT:
            del self._ended[next(iter(self._ended))]


def ended() -> Refused:
    """Return the refusal of a call whose session is over."""
    said = (
        "this session has ended: no call with its key is served any more: end the program's work "
        "before it returns or prints its result"
    )
    return Refused(said, status=410, code="session_ended")


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="replace"), digest_size=16).digest()
