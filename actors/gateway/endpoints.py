"""The endpoints of a gateway: a request is checked, made by the policy, and answered or refused."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from actors.errors import ActorError, UnverifiedWeights
from actors.gateway.completing import Asked, Completer, Verified
from actors.gateway.protocol import Refused, ResultRequest, TooLong, decoded
from actors.gateway.reading import Read, Reading
from actors.gateway.replies import Replies
from actors.gateway.sessions import Result, Session, Sessions, Work, ended
from actors.gateway.streaming import Events, events
from actors.policies.base import Policy
from actors.prompt import Prompter
from configs.load import ConfigError
from configs.schema import Config

MODEL = "policy"
_AGAIN_S = 1  # after which a client is to ask again where weights were late
_GONE = 499  # nobody reads it
_encode = msgspec.json.Encoder().encode
logger = logging.getLogger(__name__)
T = TypeVar("T")


class Endpoints:
    """The answers of a gateway. `draining`: no more calls are begun."""

    def __init__(
        self,
        policy: Policy,
        prompter: Prompter,
        config: Config,
        verified: Verified,
        sessions: Sessions,
    ) -> None:
        self._prompter, self._sessions = prompter, sessions
        self._body_bytes = config.environment.gateway.body_bytes
        self._deadline_s = config.actors.rollout_deadline_s
        self._reading = Reading(prompter, config)
        self._completer = Completer(policy, prompter, config, verified)
        self.draining = False
        self._refused = self._unverified = self._given_up = 0

    def gauges(self) -> dict[str, float]:
        """Return the counts of calls and of what became of them."""
        return {
            "actor/gateway_calls_total": float(self._completer.calls),
            "actor/gateway_refused_total": float(self._refused),
            "actor/gateway_unverified_total": float(self._unverified),
            "actor/gateway_given_up_total": float(self._given_up),
            "actor/gateway_overridden_total": float(self._completer.overridden),
        }

    async def chat(self, request: Request) -> Response:
        """Answer `POST /v1/chat/completions`."""
        return await self._answered(request, partial(self._call, request, self._reading.chat))

    async def completion(self, request: Request) -> Response:
        """Answer `POST /v1/completions`."""
        return await self._answered(request, partial(self._call, request, self._reading.text))

    async def models(self, request: Request) -> Response:
        """Answer `GET /v1/models`."""
        return await self._answered(request, self._listed)

    async def model(self, request: Request) -> Response:
        """Answer `GET /v1/models/{model}`, whatever it is called."""
        name = request.path_params["model"]
        return await self._answered(request, partial(self._told, name))

    async def result(self, request: Request) -> Response:
        """Answer `POST /v1/result`."""
        return await self._answered(request, partial(self._posted, request))

    async def retrieve(self, request: Request) -> Response:
        """Answer `POST /v1/retrieve`."""
        return await self._answered(request, partial(self._searched, request))

    def refuse(self, refused: Refused) -> Response:
        """Answer a request that is not served."""
        self._refused += 1
        return _reply(refused.body, refused.status, refused.headers)

    async def _answered(
        self, request: Request, serve: Callable[[Session], Awaitable[Response]]
    ) -> Response:
        session = None
        try:
            session = self._sessions.find(request.headers.get("authorization", ""))
            return await serve(session)
        except ClientDisconnect:
            self._given_up += 1
            if session is not None:
                session.given_up = True
            return Response(status_code=_GONE)
        except (Exception, asyncio.CancelledError) as error:
            if (refused := self._refusal(session, error)) is None:
                raise
            return self.refuse(refused)

    def close(self) -> None:
        """Begin no more calls."""
        self.draining = True
        self._reading.close()

    async def _listed(self, session: Session) -> Response:
        return _reply({"object": "list", "data": [_model(MODEL)]})

    async def _told(self, name: str, session: Session) -> Response:
        return _reply(_model(name))

    async def _posted(self, request: Request, session: Session) -> Response:
        said = decoded(await self._body(request), ResultRequest)
        session.post(Result(said.answer, said.reward))
        return _reply({"object": "result", "answer": said.answer, "reward": said.reward})

    async def _searched(self, request: Request, session: Session) -> Response:
        if session.searches is None:
            raise Refused("this session has nothing to search", status=404, code="no_retrieval")
        work = session.work()
        try:
            body = await self._body(request)
            ends = asyncio.get_running_loop().time() + min(session.left_s, self._deadline_s)
            answered = await _in_time(request, ends, session.searches.answer(body))
            session.given_up = False
            return _reply(answered)
        finally:
            work.release()

    async def _call(self, request: Request, read: Read, session: Session) -> Response:
        if self.draining:
            raise Refused("this gateway is closing", status=503, code="draining")
        work, handed_on = session.work(), False
        try:
            body = await self._body(request)
            left_s = min(session.left_s, self._deadline_s)
            ends = asyncio.get_running_loop().time() + left_s
            asked = await _in_time(request, ends, self._reading.read(session, body, read))
            replies = Replies(asked, self._prompter.decode)
            if not asked.wanted.stream:
                making = self._completer.complete(session, asked, replies.whole)
                return _response(await _in_time(request, ends, making))
            response = await self._stream(request, session, asked, replies, ends, work)
            handed_on = True
            return response
        finally:
            if not handed_on:
                work.release()

    async def _stream(
        self,
        request: Request,
        session: Session,
        asked: Asked,
        replies: Replies,
        ends: float,
        work: Work,
    ) -> Response:
        """Begin a stream once its first piece is there: before, an error has a status."""
        pieces = self._completer.stream(session, asked, replies.events)
        try:
            first = await _in_time(request, ends, anext(pieces))
        except BaseException:
            await pieces.aclose()
            raise

        async def over(sent: bool) -> None:
            self._given_up += not sent
            work.release()
            session.given_up |= all(each.prompt is not asked.prompt for each in session.calls)
            await pieces.aclose()

        refusal = partial(self._refusal, session)
        told = events(first, pieces, ends, refusal, work.attach)
        return Events(told, over)

    async def _body(self, request: Request) -> bytes:
        chunks: list[bytes] = []
        declared = request.headers.get("content-length", "0")
        size = int(declared) if declared.isdecimal() else 0
        if size <= self._body_bytes:
            size = 0
            async for chunk in request.stream():
                chunks.append(chunk)
                if (size := size + len(chunk)) > self._body_bytes:
                    break
        if size > self._body_bytes:
            raise Refused(
                f"the body is over {self._body_bytes} bytes (environment.gateway.body_bytes)",
                status=413,
                code="body_bytes",
            )
        return b"".join(chunks)

    def _refusal(self, session: Session | None, error: BaseException) -> Refused | None:
        """Return what a client is told of an error; None where it is no matter of a client's."""
        if isinstance(error, Refused):
            if session is not None and isinstance(error, TooLong):
                session.full = True
            return error
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if session is None or not session.closed or task is None:
                return None
            task.uncancel()  # it was for this call alone
            return ended()
        if session is not None and isinstance(error, TimeoutError):
            if session.left_s <= 0.0:
                return ended()
            said = f"this call took over {self._deadline_s:g} s (actors.rollout_deadline_s)"
            return Refused(said, status=503, code="deadline")
        if isinstance(error, Exception):
            return self._fault(session, error)
        return None

    def _fault(self, session: Session | None, error: Exception) -> Refused:
        said = f"{type(error).__name__}: {error}"
        foreseen = isinstance(error, ActorError | ConfigError)
        if session is not None:
            fault = error if isinstance(error, ActorError) else ActorError(f"the gateway: {said}")
            session.fault = session.fault or fault
        if not isinstance(error, ConfigError):  # else the command that plays the policy tells it
            logger.warning("a call was not served: %s", said, exc_info=None if foreseen else error)
        if not foreseen:
            return Refused(said, status=500, code="gateway_failed")
        if isinstance(error, UnverifiedWeights):
            self._unverified += 1
            return Refused(said, status=503, code="unverified_weights", retry_after_s=_AGAIN_S)
        return Refused(said, status=503, code="policy_failed")


async def _in_time(request: Request, ends: float, work: Awaitable[T]) -> T:
    """Await a call's work while its client waits. Raises TimeoutError, and ClientDisconnect where
    the client has left: either way the work is given up.
    """
    task = asyncio.current_task()
    leaving = asyncio.ensure_future(request.receive())  # all else of it has been read

    def leave(_: object) -> None:
        if task is not None and not leaving.cancelled():
            task.cancel()

    leaving.add_done_callback(leave)
    try:
        async with asyncio.timeout_at(ends):
            return await work
    except asyncio.CancelledError:
        if leaving.done() and not leaving.cancelled() and task is not None:
            task.uncancel()
            raise ClientDisconnect from None
        raise
    finally:
        leaving.remove_done_callback(leave)
        leaving.cancel()


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "forage"}


def _reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return _response(_encode(body), status, headers)


def _response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")
