"""The result of an evaluation, reckoned again from the rollouts that its payloads hold."""

from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from scripts.runs.group_book import Group
from scripts.runs.record.facts import EvalResult, Summary

_GREEDY, _SAMPLED = 0, 1  # siblings


def result_of(step: int, groups: Iterable[Group]) -> EvalResult:
    """Return what the answered groups of one evaluation come to."""
    answered = {group.question.id: group for group in groups if group.whole}
    greedy = [group.rollouts[_GREEDY] for group in answered.values()]
    both = any(group.size > 1 for group in answered.values())
    sampled = [group.rollouts[_SAMPLED] for group in answered.values()] if both else []
    hops = [str(group.question.hops) for group in answered.values()]
    everything = greedy + sampled
    return EvalResult(
        step=step,
        questions=len(answered),
        em=_mean(greedy),
        sampled_em=_mean(sampled) if both else None,
        em_by_hops=_by_hops(hops, greedy),
        sampled_em_by_hops=_by_hops(hops, sampled) if both else {},
        searches=fmean(each.searches for each in greedy) if greedy else 0.0,
        oldest_version=min((each.oldest_version for each in everything), default=0),
        newest_version=max((each.newest_version for each in everything), default=0),
    )


def differences(claimed: EvalResult, groups: Sequence[Group]) -> Iterable[str]:
    """Yield each field in which a result on record is not that of its payloads."""
    if standing := sum(not group.whole for group in groups):
        yield f"it is finished, but {standing} of its groups still stand"
    found = msgspec.structs.asdict(result_of(claimed.step, groups))
    for name, said in msgspec.structs.asdict(claimed).items():
        # With no answer at all, nothing says whether sampled rollouts were asked for.
        if said != found[name] and (found["questions"] or said):
            yield f"{name}: the record says {said}, the payloads {found[name]}"


def _mean(rollouts: Sequence[Summary]) -> float:
    rewards = [each.reward for each in rollouts if each.reward is not None]
    return fmean(rewards) if rewards else 0.0


def _by_hops(hops: Sequence[str], rollouts: Sequence[Summary]) -> dict[str, float]:
    return {
        name: _mean([each for each, its in zip(rollouts, hops, strict=True) if its == name])
        for name in sorted(set(hops))
    }
