"""The result of an evaluation, reckoned again from the rollouts that its payloads hold."""

from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from scripts.runs.group_book import Group
from scripts.runs.record.facts import PARTS, EvalResult, SetResult, Summary

_GREEDY, _SAMPLED = 0, 1  # siblings
_UNNAMED = "other"  # the set of questions without one
_LEAST_TOLD = 0.9  # of the rollouts, for a part's mean


def result_of(step: int, groups: Iterable[Group]) -> EvalResult:
    """Return what the answered groups of one evaluation come to."""
    answered = list({group.question.id: group for group in groups if group.whole}.values())
    greedy, sampled = _rollouts(answered)
    hops = [str(group.question.hops) for group in answered]
    everything, whole = greedy + sampled, _set_result(answered)
    return EvalResult(
        step=step,
        questions=whole.questions,
        em=whole.em,
        sampled_em=whole.sampled_em,
        em_by_hops=_by_hops(hops, greedy),
        sampled_em_by_hops=_by_hops(hops, sampled) if sampled else {},
        searches=whole.searches,
        oldest_version=min((each.oldest_version for each in everything), default=0),
        newest_version=max((each.newest_version for each in everything), default=0),
        parts=whole.parts,
        sampled_parts=whole.sampled_parts,
        sets={name: _set_result(of) for name, of in _sets(answered).items()},
    )


def _rollouts(answered: Sequence[Group]) -> tuple[list[Summary], list[Summary]]:
    """Return the greedy rollouts, and the sampled ones where there are any."""
    both = any(group.size > 1 for group in answered)
    sampled = [group.rollouts[_SAMPLED] for group in answered] if both else []
    return [group.rollouts[_GREEDY] for group in answered], sampled


def _sets(answered: Sequence[Group]) -> dict[str, list[Group]]:
    named = any(group.question.source for group in answered)
    names = {group.question.source or _UNNAMED for group in answered} if named else set[str]()
    return {
        name: [group for group in answered if (group.question.source or _UNNAMED) == name]
        for name in names
    }


def _set_result(answered: Sequence[Group]) -> SetResult:
    greedy, sampled = _rollouts(answered)
    return SetResult(
        questions=len(answered),
        em=_mean(greedy),
        sampled_em=_mean(sampled) if sampled else None,
        searches=fmean(each.searches for each in greedy) if greedy else 0.0,
        parts=_parts(greedy),
        sampled_parts=_parts(sampled),
    )


def _parts(rollouts: Sequence[Summary]) -> dict[str, float]:
    told = {name: [r.parts[name] for r in rollouts if name in r.parts] for name in PARTS}
    return {
        name: fmean(values)
        for name, values in told.items()
        if name != "em" and values and len(values) >= _LEAST_TOLD * len(rollouts)
    }


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
