"""A program's searches, asked through its session as Search-R1's `POST /retrieve`: so a program
needs no key of the run, and each search is on record with the turn that it followed.

The text of a special token in a passage is broken up: a program may write passages into a prompt's
text, where that would become the token.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from actors.environments.base import Retriever, search_records
from actors.gateway.protocol import Refused, decoded
from configs.environment import GatewayConfig
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

Made = tuple[int, Search]  # a search, and how many calls had ended when it was asked
_Place = tuple[int, int]  # of a turn: its sequence, and its number there


class SessionSearches:
    """The searches of one session. `made`: those that were answered; `passages`: what they brought,
    where `keep` says so; `fault`: the error of retrieval that they met, which is none of the
    program's; None again once a search that was begun later is answered.
    """

    def __init__(
        self,
        retriever: Retriever,
        top_k: int,
        *,
        most: int = GatewayConfig().searches,
        ended: Callable[[], int] = lambda: 0,
        special: Sequence[str] = (),
        keep: bool = False,
        free: bool = False,
    ) -> None:
        """`most`: searches in all; `ended`: counts the session's calls that have ended; `special`:
        the texts of special tokens; `free`: there may be any number, and none is on record.
        """
        self._retriever, self._top_k, self._most, self._ended = retriever, top_k, most, ended
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self._keep, self._free = keep, free
        self._behind: Counter[int] = Counter()  # searches by the turn that they are on record with
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
        ended = self._admit(len(asked.wanted))
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
        if not self._free:
            records = search_records(asked.wanted, found, time.perf_counter() - started)
            self.made += [(ended, each) for each in records]
        if self._keep:
            self.passages += [passage for group in found for passage in group]
        return _reply([list(map(self._shown, group)) for group in found], asked.return_scores)

    def _admit(self, queries: int) -> int:
        """Count these searches; return how many calls have ended. Raises Refused where they are too
        many.
        """
        if queries > MAX_SEARCHES:
            raise Refused(
                f"queries: {queries} in one request, over {MAX_SEARCHES}: ask for fewer at once",
                param="queries",
            )
        if self._free:
            return 0
        if self._behind.total() + queries > self._most:
            raise _too_many(f"{self._most} searches (environment.gateway.searches)", "searches")
        ended = self._ended()
        turn = max(ended, 1)  # what comes before the first call is on record with that one
        if self._behind[turn] + queries > MAX_SEARCHES:
            said = f"{MAX_SEARCHES} searches after one call of the policy, which a record holds"
            raise _too_many(said, "searches_of_a_call")
        self._behind[turn] += queries
        return ended

    def _shown(self, passage: Passage) -> Passage:
        if self._special is None or not self._special.search(passage.contents):
            return passage
        broken = self._special.sub(_broken, passage.contents)
        return msgspec.structs.replace(passage, contents=broken)


def _too_many(said: str, code: str) -> Refused:
    return Refused(f"with this request it is more than {said}", status=429, code=code)


def _broken(found: re.Match[str]) -> str:
    """Return a special token's text as other tokens: a space follows its first character."""
    return f"{found[0][0]} {found[0][1:]}"


def with_searches(
    sequences: Sequence[TokenSequence], made: Sequence[Made]
) -> tuple[TokenSequence, ...]:
    """Put each search on record with the turn that ended last before it was asked, or with the
    first one.
    """
    ends = sorted(_ends(sequences))
    found: dict[_Place, list[Search]] = {}
    for ended, search in made:
        found.setdefault(ends[max(ended, 1) - 1][1], []).append(search)
    return _changed(sequences, {place: {"searches": (*of,)} for place, of in found.items()})


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
