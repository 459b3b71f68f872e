"""Searches of the live web: answered from the record, else by one request to the provider.

- The same query is asked once, however many want it, and what has been sent is waited for even
  where they have gone: it is paid for, and goes on record. What nobody waits for is not sent.
- Requests begin no faster than `requests_per_s`. After a failure none begins until its Retry-After
  is over, or pauses that double; a search whose deadline is before that is refused at once. After
  `SICK_AFTER` in a row that may have been billed, one begins each `LONGEST_PAUSE_S`, until one
  succeeds.
- Each request is paid for before it is made (`budget`). A search that the rest of the money does
  not do for, and a query that the provider refuses, are told so in place of passages, by name: the
  policy reads it. All else that fails is an error of retrieval; so is a refusal while nothing has
  been answered yet, or after `REFUSED_IN_A_ROW` others, which the configuration may have met.
- While an answer that is paid for cannot be put on record, nothing is asked.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

import httpx

from configs.retrieval import LiveConfig, is_near
from retrieval_server.app.live.budget import Budget
from retrieval_server.app.live.providers import Fault, Provider, fault, retry_after_s
from retrieval_server.app.live.record import BUDGET_SPENT, QUERY_REFUSED, Answer, Answers
from retrieval_server.protocol import (
    PROBE,
    TELLS_ERROR,
    BadReply,
    Document,
    NotRecorded,
    RetrievalOverloaded,
    RetrievalUnavailable,
    ScoredDocument,
)

MOST_BYTES = 8 << 20  # of an answer
PAID_TRIES = 2  # of a query, in which the provider failed and may have billed it
SICK_AFTER = 5  # failures in a row that may have been billed
REFUSED_IN_A_ROW = 5  # queries; then it is no query's fault
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
_LEAVE_S = 2.0  # for requests under way, at the end
_SHOWN = 200
TOLD = {
    BUDGET_SPENT: "nothing was searched for, as all money for searches is spent.",
    QUERY_REFUSED: "the search engine refused this query.",
}
_COUNTED = ("asked", "remembered", "failed_requests")
Rows = list[list[ScoredDocument]]
T = TypeVar("T")
logger = logging.getLogger("retrieval_server")


@dataclass(eq=False)
class _Flight:
    """A query that is being answered, for those who wait for it, the last until `deadline`."""

    deadline: float  # of the monotonic clock
    waiters: int = 0
    sent: bool = False
    task: "asyncio.Task[Answer] | None" = None


class _Failed(Exception):
    """A request that brought no passages; the key is not in its text."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.said)
        self.fault = fault


class LiveSearch:
    """The searches of one server; use as `async with`, from one event loop.

    Without a provider and a budget the record alone answers. `counts`: queries by what came of
    them, and failed requests.
    """

    def __init__(
        self,
        answers: Answers,
        provider: Provider | None,
        budget: Budget | None,
        asked: LiveConfig,
    ) -> None:
        self._answers, self._provider, self.budget, self._asked = answers, provider, budget, asked
        self._flights: dict[str, _Flight] = {}
        self._turns = asyncio.Semaphore(asked.concurrency)
        self._next = self._held_until = 0.0  # of the monotonic clock
        # Failures in a row, of what was under way together one, and what was met
        self._failed, self._failed_at, self._why = 0, 0.0, ""
        self._billed = self._refused = 0  # failures that may be billed, and refusals, in a row
        self._has_answered = self._said_spent = False
        self.counts: Counter[str] = Counter()
        self._files = ThreadPoolExecutor(max_workers=1, thread_name_prefix="live")
        self._client: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        if self._provider is not None:
            # A proxy of the environment leads to the web, and must not come before the loopback.
            limits = httpx.Limits(max_connections=self._asked.concurrency)
            near = is_near(self._provider.url)
            self._client = httpx.AsyncClient(limits=limits, trust_env=not near)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait for what is paid for, a little; abandon the rest."""
        tasks = {each.task for each in self._flights.values() if each.task is not None}
        paid = {each.task for each in self._flights.values() if each.task and each.sent}
        for task in tasks - paid:
            task.cancel()
        if paid:
            _done, late = await asyncio.wait(paid, timeout=_LEAVE_S)
            for task in late:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()
        self._files.shutdown()
        self._answers.close()

    @property
    def name(self) -> str:
        """What is asked, and for how much: a search that was told that the money is spent is not to
        be remembered where there is more.
        """
        scope, budget = self._answers.scope, self.budget
        asked = [scope.kind, scope.engine_id, scope.country, scope.language]
        means = f"{budget.budget_usd!r} USD" if budget else f"on record in {self._answers.path}"
        return f"live {' '.join(filter(None, asked))}, {means}"

    def figures(self) -> dict[str, float]:
        """Return queries by what came of them, and the money."""
        found = {key: float(self.counts[key]) for key in (*_COUNTED, *TOLD)}
        if self.budget is not None:
            found |= {"spent_usd": self.budget.spent_usd, "budget_usd": self.budget.budget_usd}
        return found

    @property
    def waiting(self) -> int:
        """Queries that are not answered yet."""
        return len(self._flights)

    @property
    def offered(self) -> int:
        """How many queries a request had best hold: where one fails, its request does."""
        return 1

    @property
    def backlog_s(self) -> float:
        """Seconds until another request may begin."""
        return max(0.0, self._next - time.monotonic(), self._held_until - time.monotonic())

    def search(self, queries: Sequence[str], top_k: int, deadline: float) -> "asyncio.Future[Rows]":
        """Per query at most `top_k` passages, best first, by then (of the monotonic clock).

        Cancel it when nobody waits any more. It raises RetrievalOverloaded where the provider may
        be asked only after that; RetrievalUnavailable, NotRecorded or BadRecord.
        """
        return asyncio.ensure_future(self._rows(queries, top_k, deadline))

    async def _rows(self, queries: Sequence[str], top_k: int, deadline: float) -> Rows:
        wanted = [each for each in dict.fromkeys(queries) if each != PROBE]
        joined = {query: self._join(query, deadline) for query in wanted}
        try:
            tasks = [asyncio.shield(each.task) for each in joined.values() if each.task]
            answers = await asyncio.gather(*tasks)
        finally:
            for each in joined.values():
                each.waiters -= 1
                if not each.waiters and not each.sent and each.task is not None:
                    each.task.cancel()
        found = {query: _scored(each) for query, each in zip(joined, answers, strict=True)}
        return [found.get(query, [])[:top_k] for query in queries]

    def _join(self, query: str, deadline: float) -> _Flight:
        flight = self._flights.get(query)
        if flight is None or (flight.task is not None and flight.task.cancelling()):
            flight = self._flights[query] = _Flight(deadline)
            flight.task = asyncio.create_task(self._answer(query, flight))
            flight.task.add_done_callback(partial(self._landed, query, flight))
        flight.waiters += 1
        flight.deadline = max(flight.deadline, deadline)
        return flight

    def _landed(self, query: str, flight: _Flight, task: "asyncio.Task[Answer]") -> None:
        if self._flights.get(query) is flight:
            del self._flights[query]
        if not task.cancelled() and (error := task.exception()) is not None:
            self.counts[type(error).__name__] += 1

    async def _answer(self, query: str, flight: _Flight) -> Answer:
        known = await self._in_thread(partial(self._answers.find, query))
        if known is not None:
            self.counts["remembered"] += 1
            return known
        if self._provider is None:
            raise NotRecorded(
                f"query {_quoted(query)} is not in {self._answers.path}, which holds "
                f"{len(self._answers)} of this provider: repeat the rollouts of the run that made "
                "it, or leave retrieval.live.replay empty to ask the provider"
            )
        if self.budget is not None and self.budget.is_spent:  # without waiting for a turn
            answer = await self._told_spent(query, self.budget)
        else:
            async with self._turns:
                answer = await self._bought(query, flight, self._provider)
        self.counts[answer.error or "asked"] += 1
        return answer

    async def _bought(self, query: str, flight: _Flight, provider: Provider) -> Answer:
        """Ask until there is an answer; nothing is asked again, perhaps for more money, once nobody
        waits any more.
        """
        tries = 0
        while True:
            await self._turn(flight)
            if self._answers.is_behind:
                await self._in_thread(self._answers.settle)
            flight.sent = True
            if self.budget is not None and not await self._in_thread(self.budget.take):
                return await self._told_spent(query, self.budget)
            try:
                documents = await self._exchange(query, provider)
            except _Failed as error:
                flight.sent = False
                tries += error.fault.billed
                if error.fault.of_the_query and self._is_believed(error.fault):
                    logger.info("%s refused a query: %s", provider.kind, error)
                    return await self._in_thread(
                        partial(self._answers.add, query, [], error=QUERY_REFUSED)
                    )
                if error.fault.after_s is None or tries >= PAID_TRIES or not flight.waiters:
                    raise RetrievalUnavailable(f"{provider.kind}: {error}") from error
            else:
                return await self._in_thread(partial(self._answers.add, query, documents))

    def _is_believed(self, refusal: Fault) -> bool:
        """True where the query is at fault; else the configuration may be."""
        if refusal.unsent:
            return True
        self._refused += 1
        if self._has_answered and self._refused <= REFUSED_IN_A_ROW:
            return True
        if self._refused in (1, REFUSED_IN_A_ROW + 1):
            logger.warning(
                "the provider refuses what it is asked, whatever the query: see "
                "retrieval.live.engine_id, country, language and url: %s",
                refusal.said,
            )
        return False

    async def _turn(self, flight: _Flight) -> None:
        """Wait until a request may begin. Raises RetrievalOverloaded where that is too late."""
        while True:
            now = time.monotonic()
            at, is_sick = max(now, self._next, self._held_until), self._billed >= SICK_AFTER
            if at > flight.deadline:
                held = at == self._held_until or is_sick
                why = self._why if held else "see retrieval.live.requests_per_s"
                raise RetrievalOverloaded(
                    f"the provider may be asked in {at - now:.3g} s, and "
                    f"{max(0.0, flight.deadline - now):.3g} s are left: {why}",
                    at - now,
                )
            self._next = at + (LONGEST_PAUSE_S if is_sick else 1.0 / self._asked.requests_per_s)
            await asyncio.sleep(at - now)
            if self._held_until <= time.monotonic():
                return

    async def _told_spent(self, query: str, budget: Budget) -> Answer:
        """Say once in the log, and on record of this query, that the money is spent."""
        if not self._said_spent:
            self._said_spent = True
            logger.warning(
                "retrieval.live.budget_usd = %r is spent (%.6g, see %s): nothing more is asked, "
                "and searches are told %s: raise it, and start again or resume the run",
                budget.budget_usd,
                budget.spent_usd,
                budget.path,
                BUDGET_SPENT,
            )
        return await self._in_thread(partial(self._answers.add, query, [], error=BUDGET_SPENT))

    async def _exchange(self, query: str, provider: Provider) -> list[Document]:
        """Make one request; what was not billed is given back. Raises _Failed, BadRecord."""
        begun = time.monotonic()
        try:
            documents = await self._documents(query, provider)
        except _Failed as error:
            self._hold(error.fault, begun)
            if not error.fault.billed and self.budget is not None:
                await self._in_thread(self.budget.give_back)
            raise
        if self._billed >= SICK_AFTER:
            self._next = time.monotonic()
        self._failed = self._billed = self._refused = 0
        self._has_answered = True
        return documents

    async def _documents(self, query: str, provider: Provider) -> list[Document]:
        """Send a query, and read what came. Raises _Failed."""
        begun = time.monotonic()
        try:
            response, content = await self._replied(query, provider)
            if response.status_code == 200:
                return provider.documents(content)
        except BadReply as error:
            raise _Failed(Fault(f"{error}", self._pause_s(begun), billed=True)) from None
        except TimeoutError:
            said = f"no answer within {self._asked.timeout_s:g} s"
            raise _Failed(Fault(said, self._pause_s(begun), billed=True)) from None
        except httpx.HTTPError as error:
            said = f"the answer broke off ({type(error).__name__})"
            raise _Failed(Fault(said, self._pause_s(begun), billed=True)) from None
        after_s = retry_after_s(response.headers.get("retry-after", ""))
        raise _Failed(fault(response.status_code, after_s, content, self._pause_s(begun)))

    def _pause_s(self, begun: float) -> float:
        """What is waited after a failure of a request that began then: more after each before it,
        of which those under way together are one.
        """
        before = self._failed - (begun < self._failed_at)
        return min(FIRST_PAUSE_S * 2.0 ** min(max(0, before), 16), LONGEST_PAUSE_S)

    async def _replied(self, query: str, provider: Provider) -> tuple[httpx.Response, bytes]:
        """Send a query; the answer and its content, without the key. Raises _Failed, BadReply,
        TimeoutError or HTTPError.
        """
        client = self._client
        if client is None:
            raise RuntimeError("use LiveSearch as `async with`")
        try:
            async with asyncio.timeout(self._asked.timeout_s):
                request = provider.request(client, query)
                request.extensions["timeout"] = {"connect": self._asked.timeout_s / 2}
                response = await client.send(request, stream=True)
                try:
                    content = await _content(response)
                finally:
                    await response.aclose()
        except (httpx.InvalidURL, UnicodeEncodeError):
            raise _Failed(
                Fault("no request holds this query", of_the_query=True, unsent=True)
            ) from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            said = f"no connection ({type(error).__name__})"
            raise _Failed(Fault(said, after_s=FIRST_PAUSE_S)) from None
        return response, provider.hidden(content)

    def _hold(self, met: Fault, begun: float) -> None:
        """Begin no request before the provider wants one."""
        if met.of_the_query:
            return
        self._billed += met.billed
        after_s = LONGEST_PAUSE_S if met.after_s is None else met.after_s
        if self._billed >= SICK_AFTER:
            after_s = max(after_s, LONGEST_PAUSE_S)
        self.counts["failed_requests"] += 1
        if begun >= self._failed_at:
            self._failed, self._failed_at = self._failed + 1, time.monotonic()
            logger.warning("the provider is asked again in %.3g s: %s", after_s, met.said)
        self._why = met.said
        self._held_until = max(self._held_until, time.monotonic() + after_s)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Do what reads or writes files, one thing at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._files, work)


async def _content(response: httpx.Response) -> bytes:
    """An answer's content. Raises BadReply where it is too long."""
    chunks, size = [], 0
    async for chunk in response.aiter_bytes():
        chunks.append(chunk)
        size += len(chunk)
        if size > MOST_BYTES:
            raise BadReply(f"an answer of more than {MOST_BYTES} bytes")
    return b"".join(chunks)


def _scored(answer: Answer) -> list[ScoredDocument]:
    """An answer's passages by rank, or the one that tells why there are none."""
    if answer.error:
        said = f"Search error\n{answer.error}: {TOLD.get(answer.error, 'nothing was found.')}"
        return [ScoredDocument(Document(f"{TELLS_ERROR}{answer.error}", said), 0.0)]
    return [
        ScoredDocument(document, 1.0 / rank)
        for rank, document in enumerate(answer.passages, start=1)
    ]


def _quoted(query: str) -> str:
    return repr(query if len(query) <= _SHOWN else query[: _SHOWN - 1] + "…")
