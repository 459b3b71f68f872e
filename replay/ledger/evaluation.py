"""One evaluation: every question rolled out twice, greedy (sibling 0) and at T = 1 (sibling 1).

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

    `pending`: questions not yet opened; `answered`: question id → its two summaries.
    """

    step: int
    pending: deque[Question]
    total: int
    answered: dict[str, tuple[Summary, ...]] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)
    delivered: int = 0  # rollouts, of 2 · total
    result: EvalResult | None = None

    @property
    def complete(self) -> bool:
        """True where nothing more will come."""
        return len(self.answered) + len(self.given_up) == self.total

    @property
    def progress(self) -> tuple[int, int]:
        """Rollouts done or given up, and of how many."""
        return self.delivered + 2 * len(self.given_up), 2 * self.total


def summarise_evaluation(evaluation: Evaluation, questions: Sequence[Question]) -> EvalResult:
    """Return exact match over the answered questions; the unscorable are left out, never 0."""
    answered = [q for q in questions if q.id in evaluation.answered]
    greedy, sampled = ([evaluation.answered[q.id][i] for q in answered] for i in (0, 1))
    everything = greedy + sampled
    return EvalResult(
        step=evaluation.step,
        questions=len(answered),
        em=_mean_reward(greedy),
        sampled_em=_mean_reward(sampled),
        em_by_hops=_by_hops(answered, greedy),
        sampled_em_by_hops=_by_hops(answered, sampled),
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
