"""One evaluation: every question rolled out greedily (sibling 0) and, where
`learner.eval_temperature` says so, sampled (sibling 1).

It is finished once every question is answered or given up (it failed
`replay.max_question_failures` times); nothing of it is ever trained on.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from configs.rewards import EVALUATED
from replay.log.summary import Summary
from replay.protocol import EvalResult, SetResult
from replay.questions import sets_of
from replay.trajectory import Question

LEAST_TOLD = 0.9  # of the rollouts: a judge that is down must not make a mean of a few


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
    everything, whole = greedy + sampled, _result_of(evaluation, answered)
    return EvalResult(
        step=evaluation.step,
        questions=whole.questions,
        em=whole.em,
        sampled_em=whole.sampled_em,
        em_by_hops=_by_hops(answered, greedy),
        sampled_em_by_hops=_by_hops(answered, sampled) if is_sampled else {},
        searches=whole.searches,
        oldest_version=min((s.oldest_version for s in everything), default=0),
        newest_version=max((s.newest_version for s in everything), default=0),
        parts=whole.parts,
        sampled_parts=whole.sampled_parts,
        sets={name: _result_of(evaluation, of) for name, of in sets_of(answered).items()},
    )


def _result_of(evaluation: Evaluation, answered: Sequence[Question]) -> SetResult:
    greedy = [evaluation.answered[q.id][0] for q in answered]
    is_sampled = evaluation.siblings > 1
    sampled = [evaluation.answered[q.id][1] for q in answered] if is_sampled else []
    return SetResult(
        questions=len(answered),
        em=_mean_reward(greedy),
        sampled_em=_mean_reward(sampled) if is_sampled else None,
        searches=fmean(s.searches for s in greedy) if greedy else 0.0,
        parts=_mean_parts(greedy),
        sampled_parts=_mean_parts(sampled),
    )


def _mean_parts(summaries: Sequence[Summary]) -> dict[str, float]:
    """The mean of each part but exact match that enough of the rollouts tell."""
    means: dict[str, float] = {}
    for name in EVALUATED:
        known = [s.parts[name] for s in summaries if name in s.parts]
        if name != "em" and known and len(known) >= LEAST_TOLD * len(summaries):
            means[name] = fmean(known)
    return means


def _mean_reward(summaries: Sequence[Summary]) -> float:
    rewards = [s.reward for s in summaries if s.reward is not None]
    return fmean(rewards) if rewards else 0.0


def _by_hops(questions: Sequence[Question], summaries: Sequence[Summary]) -> dict[str, float]:
    hops: dict[str, list[Summary]] = {}
    for question, summary in zip(questions, summaries, strict=True):
        hops.setdefault(str(question.hops), []).append(summary)
    return {name: _mean_reward(found) for name, found in sorted(hops.items())}
