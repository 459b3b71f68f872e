"""A program's searches, asked through its session as Search-R1's `POST /retrieve`: so a program
needs no key of the run, and each search is on record with the turn that it followed.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from actors.environments.base import Retriever, search_records
from actors.gateway.protocol import Refused, decoded
from replay.codec import MAX_SEARCHES
from replay.trajectory import Search, TokenSequence
from retrieval_server.protocol import (
    BadQuery,
    Document,
    Passage,
    PlainReply,
    RetrievalError,
    RetrieveRequest,
    ScoredDocument,
    ScoredReply,
)

Made = tuple[float, Search]  # a search, and when its queries were answered
_Place = tuple[int, int]  # of a turn: its sequence, and its number there


class SessionSearches:
    """The searches of one session. `made`: those that were answered; `passages`: what they brought;
    `fault`: the error of retrieval that they met, which is none of the program's; None again once a
    search that was begun later is answered.
    """

    def __init__(self, retriever: Retriever, top_k: int) -> None:
        self._retriever, self._top_k = retriever, top_k
        self.made: list[Made] = []
        self.passages: list[Passage] = []
        self.fault: RetrievalError | None = None
        self._fault_at = 0.0

    async def answer(self, body: bytes) -> PlainReply | ScoredReply:
        """Answer a request's body. Raises Refused."""
        asked = decoded(body, RetrieveRequest)
        top_k = self._top_k if asked.topk is None else asked.topk
        if not asked.wanted or not top_k:
            return _reply([[] for _ in asked.wanted], asked.return_scores)
        started = time.perf_counter()
        try:
            found = await self._retriever.retrieve(asked.wanted, top_k)
        except BadQuery as error:
            raise Refused(str(error), param="queries") from error
        except RetrievalError as error:
            self.fault, self._fault_at = error, time.perf_counter()
            said = f"{type(error).__name__}: {error}"
            raise Refused(said, status=503, code="retrieval_failed") from error
        if started >= self._fault_at:
            self.fault = None
        records = search_records(asked.wanted, found, time.perf_counter() - started)
        self.made += [(time.time(), each) for each in records]
        self.passages += [passage for group in found for passage in group]
        return _reply(found, asked.return_scores)


def with_searches(
    sequences: Sequence[TokenSequence], made: Sequence[Made]
) -> tuple[TokenSequence, ...]:
    """Put each search on record with the turn that ended last before it was answered, or with the
    first one; of each turn's the first `MAX_SEARCHES`, as many as a record holds.
    """
    ends = _ends(sequences)
    found: dict[_Place, list[Search]] = {}
    for at, search in made:
        place = max((each for each in ends if each[0] <= at), default=min(ends))[1]
        found.setdefault(place, []).append(search)
    return _changed(
        sequences, {place: {"searches": (*of[:MAX_SEARCHES],)} for place, of in found.items()}
    )


def with_reward(
    sequences: Sequence[TokenSequence], reward: float | None
) -> tuple[TokenSequence, ...]:
    """Put what the program gave on record with the turn that ended last."""
    given = {} if reward is None else {max(_ends(sequences))[1]: {"reward": float(reward)}}
    return _changed(sequences, given)


def _ends(sequences: Sequence[TokenSequence]) -> list[tuple[float, _Place]]:
    """When each turn ended, and its place."""
    return [
        (turn.ended_at, (place, number))
        for place, each in enumerate(sequences)
        for number, turn in enumerate(each.turns)
    ]


def _changed(
    sequences: Sequence[TokenSequence], changes: Mapping[_Place, Mapping[str, Any]]
) -> tuple[TokenSequence, ...]:
    replace = msgspec.structs.replace
    return tuple(
        replace(
            each,
            turns=tuple(
                replace(turn, **changes.get((place, number), {}))
                for number, turn in enumerate(each.turns)
            ),
        )
        for place, each in enumerate(sequences)
    )


def _reply(found: Sequence[Sequence[Passage]], scores: bool) -> PlainReply | ScoredReply:
    groups = [[Document(each.id, each.contents) for each in group] for group in found]
    if not scores:
        return PlainReply(groups)
    return ScoredReply(
        [
            [ScoredDocument(shown, each.score) for shown, each in zip(group, row, strict=True)]
            for group, row in zip(groups, found, strict=True)
        ]
    )
