"""A small evaluation: two sets, and a rollout that answers by rule, without engine or server."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from replay.protocol import Lease
from replay.trajectory import (
    Question,
    Sampling,
    Search,
    StopReason,
    TokenSequence,
    Trajectory,
    Turn,
)
from scripts.evaluation.rows import Asked, QuestionSet, Row, row_of
from tests.replay.conftest import trajectory_for

NQ = tuple(Question(f"nq-{n}", f"question {n} ?", (f"answer {n}", "x"), 1) for n in range(4))
HOTPOT = tuple(Question(f"h-{n}", f"and {n} ?", (f"answer {n}",), 2) for n in range(2))
SETS = (QuestionSet("nq", Path("nq.jsonl"), NQ), QuestionSet("hotpot", Path("h.jsonl"), HOTPOT))
BY_ID = {(each.name, q.id): q for each in SETS for q in each.questions}


def rollout_of(lease: Lease, answer: str | None) -> Trajectory:
    """One search, then this answer."""
    turns = tuple(
        Turn(
            action_tokens=np.arange(3, dtype=np.int32),
            behaviour_logprobs=np.zeros(3, np.float32),
            policy_versions=np.zeros(3, np.int32),
            observation_tokens=np.arange(4 - 4 * turn, dtype=np.int32),
            searches=(Search("who", ("p1", "p2"), 0.25, "ok"),) if not turn else (),
        )
        for turn in range(2)
    )
    return msgspec.structs.replace(
        trajectory_for(lease, "evaluation", reward=0.0),  # what training would give is not asked
        sequences=(TokenSequence(np.arange(5, dtype=np.int32), turns),),
        stop_reason=StopReason.TURN_LIMIT if answer is None else StopReason.ANSWERED,
        answer=answer,
        timings={"total_s": 0.5},
    )


def row(asked: Asked, answer: str | None) -> Row:
    """The row of a rollout that ended with this answer."""
    question = BY_ID[asked.set, asked.id]
    return row_of(asked, question, rollout_of(lease_of(question), answer), 1)


def lease_of(question: Question) -> Lease:
    """Some lease of the question."""
    return Lease(1, 0, "eval", question, Sampling(0.0, 0))


@dataclass
class Answering:
    """Rolls out: even questions are answered right; what stands in `errors` is raised first."""

    errors: dict[str, list[Exception]] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)

    async def __call__(self, lease: Lease) -> Trajectory:
        self.leases.append(lease)
        await asyncio.sleep(0)
        if waiting := self.errors.get(lease.question.id):
            raise waiting.pop(0)
        number = int(lease.question.id.rpartition("-")[2])
        return rollout_of(lease, None if number % 2 else f"answer {number}")
