"""The rollouts of an evaluation: every one is made, tried again, or given up by a named cause.

Consumes what is to be asked; produces a row for each, as it ends. Waits for rollouts, each bounded
by `actors.rollout_deadline_s`. What no question is to blame for (the engine is gone, nobody answers
searches, or nobody is let in) ends it all, with the rows that are there: a question is never failed
for that. So do searches that fail rollout after rollout, whatever by.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from actors.errors import ActorError, EngineDead
from replay.protocol import Lease
from replay.trajectory import Question, Sampling, Trajectory
from retrieval_server.protocol import (
    BadQuery,
    RetrievalDenied,
    RetrievalError,
    RetrievalUnreachable,
)
from scripts.eval_rows import FINAL, Asked, Row, Rows, failed_row, row_of

ATTEMPTS = 3
IN_A_ROW = 10
RollOut = Callable[[Lease], Awaitable[Trajectory]]


class SearchesFail(Exception):
    """One rollout after the other fails by its searches: who answers them is at fault."""


NOBODYS_FAULT = (EngineDead, RetrievalUnreachable, RetrievalDenied, SearchesFail)


def group_of(set_name: str, question_id: str) -> int:
    """The group id that a question's rollouts have, and so their seeds: 48 bits of its name, so
    that neither its place nor what else is asked changes them.
    """
    name = f"{set_name}\n{question_id}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest())


class Evaluation:
    """Asks questions under one environment, so many at once, and adds their rows.

    `questions`: by (set, id). `sampling`: temperature, and the seed of all.
    """

    def __init__(
        self,
        roll_out: RollOut,
        questions: Mapping[tuple[str, str], Question],
        rows: Rows,
        sampling: Sampling,
        *,
        in_flight: int,
        deadline_s: float,
    ) -> None:
        self._roll_out, self._questions, self._rows = roll_out, questions, rows
        self._sampling, self._in_flight, self._deadline_s = sampling, in_flight, deadline_s
        self._failing = 0  # rollouts in a row, by their searches

    async def run(self, asked: Sequence[Asked], report: Callable[[Row], None]) -> None:
        """Make these rollouts, begun in the order given; `report` is told of each row.

        Raises an ExceptionGroup of NOBODYS_FAULT, or of OSError where a row cannot be written, and
        SearchesFail.
        """
        waiting = iter(asked)
        async with asyncio.TaskGroup() as group:
            for _ in range(self._in_flight):
                group.create_task(self._work(waiting, report))
        environments = {each.environment for each in asked}
        rows = (row for row in self._rows.by_rollout.values() if row.environment in environments)
        if self._failing and all(row.failure for row in rows):
            raise SearchesFail("every rollout failed, the last ones by their searches")

    async def _work(self, waiting: Iterator[Asked], report: Callable[[Row], None]) -> None:
        for asked in waiting:
            row, error = await self._row(asked)
            self._rows.add(row)
            report(row)
            self._check(row, error)

    def _check(self, row: Row, error: Exception | None) -> None:
        """Raise SearchesFail where this row is one too many that failed by a search."""
        by_search = isinstance(error, RetrievalError) and not isinstance(error, BadQuery)
        self._failing = self._failing + 1 if by_search else 0
        if self._failing >= IN_A_ROW:
            raise SearchesFail(
                f"{IN_A_ROW} rollouts in a row failed by their searches, the last by {row.failure}"
            ) from error

    async def _row(self, asked: Asked) -> tuple[Row, Exception | None]:
        """The row, and the error that it was given up for."""
        question = self._questions[asked.set, asked.id]
        group_id = group_of(asked.set, asked.id)
        lease = Lease(group_id, asked.sample, "eval", question, self._sampling)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with asyncio.timeout(self._deadline_s):
                    rollout = await self._roll_out(lease)
                return row_of(asked, question, rollout, attempt), None
            except NOBODYS_FAULT:
                raise
            except TimeoutError as error:
                failure = f"TimeoutError: over {self._deadline_s:g} s (actors.rollout_deadline_s)"
                cause: Exception = error
            except (ActorError, RetrievalError) as error:
                failure, cause = f"{type(error).__name__}: {error}", error
            if failure.startswith(FINAL):
                break
        return failed_row(asked, question, failure, attempt), cause
