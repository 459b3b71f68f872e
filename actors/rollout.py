"""The multi-turn loop: policy and environment take turns until the environment names a StopReason.

Tokens in, tokens out: every turn's prompt is the exact concatenation of the prompt's ids, all
action ids and all observation ids; nothing decoded is ever tokenised again. Errors of the policy,
of retrieval and of the parts of the reward pass through by name.
"""

import hashlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import msgspec

from actors.environments.base import NOTHING, Environment, Outcome, Retriever
from actors.environments.registry import acting
from actors.errors import PromptTooLong
from actors.policies.base import Completion, Policy, priority_of, read_only
from actors.prompt import Prompter, Tokens, end_tokens
from actors.rewards.scorer import Rewards
from actors.rewards.transcript import Transcript, in_words
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Question, StopReason, TokenSequence, Trajectory, Turn
from retrieval_server.protocol import Passage

_ends = lru_cache(8)(end_tokens)  # files of the model's folder, read once


def turn_seed(seed: int, group_id: int, sibling: int, turn: int, attempt: int = 0) -> int:
    """Return a turn's sampling seed: 63 bits of blake2b over (seed, group, sibling, turn), and the
    attempt from the second on.
    """
    again = f" {attempt}" if attempt else ""
    text = f"{seed} {group_id} {sibling} {turn}{again}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


@dataclass
class _Clock:
    """Seconds by name, from the start of the rollout; and the time of day, which does not step
    back while one lasts.
    """

    started: float = field(default_factory=time.perf_counter)
    epoch: float = field(default_factory=lambda: time.time() - time.perf_counter())
    generate_s: float = 0.0
    retrieve_s: float = 0.0

    def now(self) -> float:
        """Seconds since the epoch."""
        return self.epoch + time.perf_counter()

    def timings(self) -> dict[str, float]:
        return {
            "total_s": time.perf_counter() - self.started,
            "generate_s": self.generate_s,
            "retrieve_s": self.retrieve_s,
        }


async def rollout(
    lease: Lease,
    *,
    policy: Policy,
    retriever: Retriever,
    prompter: Prompter,
    rewards: Rewards,
    config: Config,
    actor_id: str,
) -> Trajectory:
    """Roll one lease out. Raises ActorError or RetrievalError, infrastructure's faults."""
    clock = _Clock()
    made = acting(lease, retriever=retriever, prompter=prompter, config=config)
    async with made as environment:
        played = await _play(lease, policy, environment, clock)
    sequences = (TokenSequence(environment.prompt, played.turns),)
    ends = _ends(prompter, config.model.path)
    transcribe = partial(_transcript, lease, played, sequences, prompter, ends)
    score = await rewards.score(lease, played.last.answer, transcribe)
    return Trajectory(
        group_id=lease.group_id,
        sibling=lease.sibling,
        question_id=lease.question.id,
        kind=lease.kind,
        actor_id=actor_id,
        sampling=lease.sampling,
        sequences=sequences,
        stop_reason=played.stop_reason,
        answer=played.last.answer,
        reward=score.reward,
        reward_cause=score.cause,
        reward_parts=score.parts,
        timings=clock.timings(),
        attempt=lease.attempt,
        reference_tokens=reference_of(lease.question, prompter),
    )


def reference_of(question: Question, prompter: Prompter) -> Tokens:
    return prompter.foreign(question.answers[0]) if question.answers else NOTHING


@dataclass(frozen=True, eq=False)
class _Played:
    """The turns, the passages shown before and in them, and the outcome of the last turn."""

    turns: tuple[Turn, ...]
    passages: tuple[Passage, ...]
    last: Outcome
    stop_reason: StopReason


async def _play(lease: Lease, policy: Policy, environment: Environment, clock: _Clock) -> _Played:
    turns, shown = list[Turn](), list[Passage](environment.passages)
    context: list[int] = environment.prompt.tolist()
    while True:
        started_at = clock.now()
        completion = await _complete(lease, policy, environment, context, len(turns), clock)
        stamps = completion.stamps(started_at, clock.now())
        context += completion.tokens.tolist()
        outcome = await environment.step(completion.tokens, len(context))
        # A turn's searches are asked together.
        clock.retrieve_s += max((search.seconds for search in outcome.searches), default=0.0)
        context += outcome.observation_tokens.tolist()
        shown += outcome.passages
        turns.append(_turn(completion, outcome, stamps))
        if outcome.stop is not None:
            return _Played(tuple(turns), tuple(shown), outcome, outcome.stop)


async def _complete(
    lease: Lease,
    policy: Policy,
    environment: Environment,
    context: list[int],
    turn: int,
    clock: _Clock,
) -> Completion:
    budget = environment.budget(len(context))
    if not budget:
        raise PromptTooLong(
            f"question {lease.question.id!r} takes {len(context)} tokens: "
            "raise model.max_model_len or shorten it"
        )
    asked = time.perf_counter()
    seed = turn_seed(lease.sampling.seed, lease.group_id, lease.sibling, turn, lease.attempt)
    completion = await policy.complete(
        context,
        temperature=lease.sampling.temperature,
        seed=seed,
        max_tokens=budget,
        stops=environment.stops,
        priority=priority_of(lease),
    )
    clock.generate_s += time.perf_counter() - asked
    return completion


def _turn(completion: Completion, outcome: Outcome, stamps: tuple[float, float, float]) -> Turn:
    started_at, first_token_at, ended_at = stamps
    return Turn(
        action_tokens=read_only(completion.tokens),
        behaviour_logprobs=read_only(completion.logprobs),
        policy_versions=read_only(completion.versions),
        observation_tokens=read_only(outcome.observation_tokens),
        searches=outcome.searches,
        malformed=outcome.malformed,
        reward=float(outcome.reward),
        info=msgspec.json.encode(outcome.info).decode() if outcome.info else "",
        started_at=started_at,
        first_token_at=first_token_at,
        ended_at=ended_at,
    )


def _transcript(
    lease: Lease,
    played: _Played,
    sequences: Sequence[TokenSequence],
    prompter: Prompter,
    ends: Collection[int],
) -> Transcript:
    return Transcript(
        question=lease.question,
        answer=played.last.answer,
        stop_reason=played.stop_reason,
        sequences=in_words(sequences, prompter, ends),
        passages=played.passages,
        opened=played.last.opened,
    )
