"""One delivery of the log against the payload that it carries, field by field."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from scripts.runs.group_book import Group
from scripts.runs.record.facts import Delivered, Summary
from scripts.runs.record.rollout import Rollout, rollout_of


@dataclass(frozen=True)
class Expected:
    """What the run's record says of any of its rollouts: its seed, the temperature of this one, and
    the newest version that any weights can have had by then.
    """

    seed: int
    temperature: float | None
    newest: int


@dataclass(frozen=True)
class Checked:
    """What is believed of a delivery, and each way in which its record and payload disagree."""

    summary: Summary
    reference: bytes | None
    faults: tuple[str, ...]


def check(fact: Delivered, group: Group | None, expected: Expected) -> Checked:
    """Compare what a record claims with what its payload holds; the payload is believed."""
    if fact.compacted is not None:
        return Checked(fact.summary, None, tuple(_of_what_is_left(fact, group)))
    try:
        rollout = rollout_of(fact.payload)
    except ValueError as error:
        return Checked(fact.summary, None, (f"payload: {error}",))
    faults = [*_of_summary(fact.summary, rollout.summary), *_of_record(fact, rollout)]
    if group is not None:
        faults += [*_of_group(fact, rollout, group), *_of_run(rollout, group, expected)]
    return Checked(rollout.summary, rollout.reference, tuple(dict.fromkeys(faults)))


def _of_what_is_left(fact: Delivered, group: Group | None) -> Iterator[str]:
    """Of a payload that was compacted away only its record is left, and a sum of its versions."""
    said, left = fact.summary, fact.compacted
    assert left is not None
    if fact.payload:
        yield f"payload: compacted away, but {len(fact.payload)} bytes are there"
    least, most = said.oldest_version * said.action_tokens, said.newest_version * said.action_tokens
    if not least <= left.version_sum <= most:
        yield f"version_sum: {left.version_sum} was left, the record says {least} to {most}"
    yield from (
        f"{name}: the record of the delivery says {own}, its summary {claimed}"
        for name, own, claimed in (
            ("group_id", fact.group_id, said.group_id),
            ("sibling", fact.sibling, said.sibling),
        )
        if own != claimed
    )
    if group is not None and said.question_id != group.question.id:
        yield _differs("question_id", group.question.id, said.question_id)


def _of_summary(claimed: Summary, found: Summary) -> Iterator[str]:
    for name in msgspec.structs.fields(Summary):
        said, is_so = getattr(claimed, name.encode_name), getattr(found, name.encode_name)
        if said != is_so:
            yield _differs(name.encode_name, said, is_so)


def _of_record(fact: Delivered, rollout: Rollout) -> Iterator[str]:
    found = rollout.summary
    for name, said, is_so in (
        ("group_id", fact.group_id, found.group_id),
        ("sibling", fact.sibling, found.sibling),
        ("actor_id", fact.actor_id, rollout.actor_id),
    ):
        if said != is_so:
            yield _differs(name, said, is_so)


def _of_group(fact: Delivered, rollout: Rollout, group: Group) -> Iterator[str]:
    found = rollout.summary
    if found.question_id != group.question.id:
        yield _differs("question_id", group.question.id, found.question_id)
    if found.kind != group.kind:
        yield _differs("kind", group.kind, found.kind)
    if group.kind == "train":
        version = group.version
        yield from (
            f"{where}oldest_version: {oldest} in a group opened under {version}"
            for where, oldest, _ in _spans(rollout)
            if oldest < version
        )
    granted = group.granted.get((fact.actor_id, fact.sibling))
    if granted and rollout.attempt not in granted:
        yield _differs("attempt", " or ".join(map(str, sorted(granted))), rollout.attempt)
    if group.reference is not None and rollout.reference != group.reference:
        yield "reference_tokens: not those of its siblings: another question's answer"


def _of_run(rollout: Rollout, group: Group, expected: Expected) -> Iterator[str]:
    yield from (
        f"{where}newest_version: {newest}, and no step beyond {expected.newest} was sampled"
        for where, oldest, newest in _spans(rollout)
        if oldest < 0 or newest > expected.newest
    )
    if rollout.seed != expected.seed:
        yield _differs("seed", expected.seed, rollout.seed)
    if expected.temperature not in (None, rollout.temperature):
        yield _differs("temperature", expected.temperature, rollout.temperature)


def _spans(rollout: Rollout) -> Iterator[tuple[str, int, int]]:
    """Each sequence's oldest and newest version, behind its place where there are several."""
    for place, (oldest, newest) in enumerate(rollout.spans):
        yield f"sequences[{place}]: " if len(rollout.spans) > 1 else "", oldest, newest


def _differs(name: str, said: object, found: object) -> str:
    return f"{name}: the record says {said}, its payload {found}"
