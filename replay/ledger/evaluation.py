"""One evaluation: every question rolled out greedily (sibling 0) and, where
`learner.eval_temperature` says so, sampled (sibling 1).

It is finished once every question is answered or given up (it failed
`replay.max_question_failures` times); nothing of it is ever trained on.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from replay.log.summary import Summary
from replay.protocol import EvalResult
from replay.trajectory import Question


@dataclass
class Evaluation:
    """The evaluation of one step.

    `pending`: questions not yet opened; `answered`: question id → its summaries, by sibling;
    `first_group`: no group of it has a lower id.
    """

    step: int
    pending: deque[Question]
    total: int
    siblings: int = 2
    first_group: int = 0
    answered: dict[str, tuple[Summary, ...]] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)
    delivered: int = 0  # rollouts, of siblings · total
    result: EvalResult | None = None

    @property
    def complete(self) -> bool:
        """True where nothing more will come."""
        return len(self.answered) + len(self.given_up) == self.total

    @property
    def progress(self) -> tuple[int, int]:
        """Rollouts done or given up, and of how many."""
        given_up = self.siblings * len(self.given_up)
        return self.delivered + given_up, self.siblings * self.total


def summarise_evaluation(evaluation: Evaluation, questions: Sequence[Question]) -> EvalResult:
    """Return exact match over the answered questions; the unscorable are left out, never 0."""
    answered = [q for q in questions if q.id in evaluation.answered]
    greedy = [evaluation.answered[q.id][0] for q in answered]
    is_sampled = evaluation.siblings > 1
    sampled = [evaluation.answered[q.id][1] for q in answered] if is_sampled else []
    everything = greedy + sampled
    return EvalResult(
        step=evaluation.step,
        questions=len(answered),
        em=_mean_reward(greedy),
        sampled_em=_mean_reward(sampled) if is_sampled else None,
        em_by_hops=_by_hops(answered, greedy),
        sampled_em_by_hops=_by_hops(answered, sampled) if is_sampled else {},
        searches=fmean(s.searches for s in greedy) if greedy else 0.0,
        oldest_version=min((s.oldest_version for s in everything), default=0),
        newest_version=max((s.newest_version for s in everything), default=0),
    )


def _mean_reward(summaries: Sequence[Summary]) -> float:
    rewards = [s.reward for s in summaries if s.reward is not None]
    return fmean(rewards) if rewards else 0.0


def _by_hops(questions: Sequence[Question], summaries: Sequence[Summary]) -> dict[str, float]:
    hops: dict[str, list[Summary]] = {}
    for question, summary in zip(questions, summaries, strict=True):
        hops.setdefault(str(question.hops), []).append(summary)
    return {name: _mean_reward(found) for name, found in sorted(hops.items())}
