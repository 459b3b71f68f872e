"""The rollout of a lease by a program that calls the policy through the gateway.

A program's calls are merged into sequences (`merging.py`), audited id for id, and scored once: by
the answer that it gave, by its own judgement (the part `environment`), or by what the run's other
parts make of its text. What is the policy's fault earns a reward; what is the program's or
infrastructure's is a failed lease, with a name.
"""

import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

import msgspec

from actors.environments import registry
from actors.environments.base import Retriever
from actors.errors import ProgramFailed, TooManyCalls
from actors.gateway.calls import Call
from actors.gateway.completing import Verified
from actors.gateway.merging import merged
from actors.gateway.program import Ended, Programs, result_of, shown
from actors.gateway.searches import SessionSearches, with_reward, with_searches
from actors.gateway.server import Gateway
from actors.gateway.sessions import Result, Session
from actors.policies.base import Policy
from actors.prompt import Prompter, end_tokens
from actors.rewards.scorer import Rewards
from actors.rewards.transcript import Transcript, in_words
from actors.rollout import reference_of
from actors.token_audit import TokenAudit
from configs.schema import Config
from replay.codec import encode_trajectory
from replay.protocol import CodecError, Lease
from replay.trajectory import StopReason, TokenSequence, Trajectory

logger = logging.getLogger(__name__)
_MEND = "correct it"
_WHERE_THE_POLICY_DOES_IT = (
    f"{_MEND}, or set environment.program.failures=score where it fails by what the policy says"
)


class ProgramRollouts:
    """Rolls leases out by programs that call a gateway."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: Config,
        *,
        policy: Policy,
        prompter: Prompter,
        rewards: Rewards,
        actor_id: str,
        verified: Verified,
    ) -> AsyncIterator[Self]:
        """Start a gateway, and make what runs programs; end both. Raises ActorError."""
        async with AsyncExitStack() as stack:
            gateway = await Gateway.start(policy, prompter, config, verified)
            stack.push_async_callback(gateway.close)
            programs = await stack.enter_async_context(Programs(config.environment.program))
            yield cls(
                gateway,
                programs,
                prompter=prompter,
                rewards=rewards,
                config=config,
                actor_id=actor_id,
            )

    def __init__(
        self,
        gateway: Gateway,
        programs: Programs,
        *,
        prompter: Prompter,
        rewards: Rewards,
        config: Config,
        actor_id: str,
    ) -> None:
        self._gateway, self._programs, self._prompter = gateway, programs, prompter
        self._rewards, self._config, self._actor_id = rewards, config, actor_id
        self._audit = TokenAudit(prompter, config)
        self._ends = end_tokens(prompter, config.model.path)
        self._has_search = registry.searches(config)
        self._rolled_out = self._calls = 0
        self._told = False

    async def roll(self, lease: Lease, retriever: Retriever) -> Trajectory:
        """Roll a lease out. Raises ActorError or RetrievalError, no fault of the policy's."""
        try:
            return await self._rolled(lease, retriever)
        except ProgramFailed as error:
            named = shown(self._config.environment.program)
            raise ProgramFailed(f"{named}: {error}", error.errors) from error

    async def _rolled(self, lease: Lease, retriever: Retriever) -> Trajectory:
        began = time.perf_counter()
        session = self._gateway.open(lease)  # it waits for its turn: no deadline but the rollout's
        searches = SessionSearches(
            retriever,
            self._config.retrieval.top_k,
            most=self._config.environment.gateway.searches,
            ended=lambda: len(session.calls),
            special=self._prompter.special_texts,
            keep=self._config.rewards.reads_passages,
        )
        session.searches = searches if self._has_search else None
        try:
            ended = await self._programs.run(_question(lease), self._given(session))
        finally:
            unanswered = session.unanswered
            session.close()
        try:
            result = self._result(session, ended, unanswered)
        except ProgramFailed as error:
            self._programs.refuse(ended)
            error.errors = ended.errors
            raise
        sequences = merged(session.calls)
        self._audit.check(sequences, session.calls)
        self._note(session.calls, result)
        played = with_searches(with_reward(sequences, result.reward), searches.made)
        trajectory = await self._scored(lease, session, played, result, searches)
        timings = {
            "total_s": time.perf_counter() - began,
            "generate_s": sum(call.ended_at - call.started_at for call in session.calls),
            "retrieve_s": sum(search.seconds for _, search in searches.made),
        }
        return recorded(msgspec.structs.replace(trajectory, timings=timings))

    def gauges(self) -> dict[str, float]:
        """Return the numbers of gateway and programs, and the mean count of a rollout's calls."""
        sources = (self._audit, self._gateway, self._programs)
        told = {name: value for each in sources for name, value in each.gauges().items()}
        return told | {"actor/calls_per_rollout": self._calls / max(self._rolled_out, 1)}

    def _given(self, session: Session) -> dict[str, str]:
        """The variables that a program finds its session by."""
        url = self._gateway.url
        given = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": session.key}
        return given | ({"FORAGE_RETRIEVAL_URL": f"{url}/retrieve"} if self._has_search else {})

    def _result(self, session: Session, ended: Ended, unanswered: bool) -> Result:
        """What the program came to: as it posted, else as it printed. Raises ProgramFailed, or what
        policy or retrieval met that kept it from an answer.
        """
        asked = self._config.environment.program
        fault, said = ended.fault(asked), session.result
        if said is None and not fault:
            said = result_of(ended)
        met = session.fault or (session.searches.fault if session.searches else None)
        if met is not None and said in (None, Result(None, None)):
            raise met
        if said is None and unanswered:  # what was too slow for it, it did not choose
            raise ProgramFailed(f"{fault}, with a call or a search that was not answered")
        if said is None and asked.failures == "fail":
            raise ProgramFailed(f"{fault}: {_WHERE_THE_POLICY_DOES_IT if session.calls else _MEND}")
        if not session.calls:
            raise ProgramFailed(
                f"{fault or 'the program ended well'}, without one completed call of the policy: "
                "let it ask OPENAI_BASE_URL with OPENAI_API_KEY"
            )
        return said or Result(None, None)

    def _note(self, calls: Sequence[Call], result: Result) -> None:
        self._rolled_out += 1
        self._calls += len(calls)
        if result.reward is not None and not self._told:
            self._told = True
            if not self._config.rewards.weights.environment:
                logger.warning(
                    "the program gives rewards, which act on nothing: rewards.weights.environment "
                    "is 0"
                )

    def _stop_reason(self, session: Session, result: Result) -> StopReason:
        if result.answer is not None:
            return StopReason.ANSWERED
        if session.spent:
            return StopReason.TURN_LIMIT
        return StopReason.CONTEXT_LIMIT if session.full else StopReason.UNANSWERED

    async def _scored(
        self,
        lease: Lease,
        session: Session,
        sequences: tuple[TokenSequence, ...],
        result: Result,
        searches: SessionSearches,
    ) -> Trajectory:
        stop_reason = self._stop_reason(session, result)

        def transcribe() -> Transcript:
            return Transcript(
                question=lease.question,
                answer=result.answer,
                stop_reason=stop_reason,
                sequences=in_words(sequences, self._prompter, self._ends),
                passages=tuple(searches.passages),
            )

        score = await self._rewards.score(lease, result.answer, transcribe)
        return Trajectory(
            group_id=lease.group_id,
            sibling=lease.sibling,
            question_id=lease.question.id,
            kind=lease.kind,
            actor_id=self._actor_id,
            sampling=lease.sampling,
            sequences=sequences,
            stop_reason=stop_reason,
            answer=result.answer,
            reward=score.reward,
            reward_cause=score.cause,
            reward_parts=score.parts,
            attempt=lease.attempt,
            reference_tokens=reference_of(lease.question, self._prompter),
        )


def recorded(trajectory: Trajectory) -> Trajectory:
    """Return it. Raises TooManyCalls where no record could hold it."""
    try:
        encode_trajectory(trajectory)
    except CodecError as error:
        raise TooManyCalls(f"no record holds what the program did: {error}") from error
    return trajectory


def _question(lease: Lease) -> str:
    """What a program reads: the question as JSON."""
    asked = lease.question
    told = {
        "id": asked.id,
        "question": asked.text,
        "answers": asked.answers,
        "fields": asked.fields,
        "kind": lease.kind,
        "attempt": lease.attempt,
    }
    return json.dumps(told)
