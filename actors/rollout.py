"""The multi-turn loop: policy and environment take turns until the environment names a StopReason.

Consumes a lease; produces its Trajectory; waits for the policy and for retrieval, each unblocked by
its reply or its named error. Tokens in, tokens out: every turn's prompt is the exact concatenation
of the prompt's ids, all action ids and all observation ids; nothing decoded is ever tokenised
again.
"""

import hashlib
import time
from dataclasses import dataclass, field

from actors.environment import Environment, Outcome, Retriever
from actors.policy import Completion, Policy, PromptTooLong
from actors.prompt import Prompter
from actors.reward import exact_match
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Trajectory, Turn


def turn_seed(seed: int, group_id: int, sibling: int, turn: int) -> int:
    """The sampling seed of one turn: 63 bits of blake2b over (seed, group, sibling, turn)."""
    text = f"{seed} {group_id} {sibling} {turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


@dataclass
class _Clock:
    """Seconds by name, from the start of the rollout."""

    started: float = field(default_factory=time.perf_counter)
    generate_s: float = 0.0
    retrieve_s: float = 0.0

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
    config: Config,
    actor_id: str,
) -> Trajectory:
    """Roll one lease out. Raises ActorError or RetrievalError: infrastructure's faults, never a
    reward."""
    environment = Environment(lease, retriever=retriever, prompter=prompter, config=config)
    clock, turns = _Clock(), list[Turn]()
    prompt = prompter.question(lease.question)
    context: list[int] = prompt.tolist()
    outcome: Outcome | None = None
    while outcome is None or outcome.stop is None:
        completion = await _complete(lease, policy, environment, context, len(turns), clock)
        context += completion.tokens.tolist()
        outcome = await environment.step(completion.tokens, len(context))
        clock.retrieve_s += sum(search.seconds for search in outcome.searches)
        context += outcome.observation_tokens.tolist()
        turns.append(_turn(completion, outcome))
    reward, cause = _reward(lease, outcome.answer)
    return Trajectory(
        group_id=lease.group_id,
        sibling=lease.sibling,
        question_id=lease.question.id,
        kind=lease.kind,
        actor_id=actor_id,
        sampling=lease.sampling,
        prompt_tokens=prompt,
        turns=tuple(turns),
        stop_reason=outcome.stop,
        answer=outcome.answer,
        reward=reward,
        reward_cause=cause,
        reward_parts={} if reward is None else {"em": reward},
        timings=clock.timings(),
    )


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
    seed = turn_seed(lease.sampling.seed, lease.group_id, lease.sibling, turn)
    completion = await policy.complete(
        context, temperature=lease.sampling.temperature, seed=seed, max_tokens=budget
    )
    clock.generate_s += time.perf_counter() - asked
    return completion


def _turn(completion: Completion, outcome: Outcome) -> Turn:
    return Turn(
        action_tokens=completion.tokens,
        behaviour_logprobs=completion.logprobs,
        policy_versions=completion.versions,
        observation_tokens=outcome.observation_tokens,
        searches=outcome.searches,
        malformed=outcome.malformed,
    )


def _reward(lease: Lease, answer: str | None) -> tuple[float | None, str]:
    """Exact match; no answer is the policy's own fault (0), no gold answer nobody's (None)."""
    if not lease.question.answers:
        return None, "the question has no accepted answer"
    return (0.0 if answer is None else exact_match(answer, lease.question.answers)), ""
