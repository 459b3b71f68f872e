"""What one seed measured, as one small file: all that its figures need, without its models.

It lies in `--out` as `measured-SEED-SETTINGS.json`; `--add` takes it on another machine.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from configs.load import ConfigError
from configs.runtime.files import write_durably
from replay.log.event_log import FILE_NAME, read
from scripts.bench.wiki.rollouts import before_and_after, curve, first_of_each, reader
from scripts.bench.wiki.seed import (
    METHODS,
    PIECES,
    SAMPLINGS,
    START,
    SUPERVISED,
    TRAINED,
    TRAINING,
    Fact,
    Seed,
    code_digest,
)
from scripts.evaluation.rows import Row
from scripts.runs.show import rollouts


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What one rollout came to. `ended` False: it failed, and the rest says nothing."""

    em: float
    ended: bool = True
    answered: bool = True
    turns: int = 1
    malformed: int = 0  # turns
    action_tokens: int = 0
    searches: int = 0
    query_words: int = 0  # of all searches


class Measured(msgspec.Struct, kw_only=True):
    """One seed. `settings`: what other seeds must share, by field; `left`: the pieces that are not
    there; `otherwise`: those that other code than `code` made; `lacking`: how many questions its
    file has less than was asked for; `faults`: what of its run should never be above 0.
    """

    seed: int
    settings: dict[str, Any]
    machine: dict[str, Any]
    code: str
    left: list[str]
    otherwise: list[str]
    lacking: int
    faults: dict[str, int]
    steps: int
    facts: dict[str, Fact]
    outcomes: dict[str, dict[str, dict[str, Outcome]]]  # by method, sampling, question
    curve: dict[str, Any] | None
    models: dict[str, Any]
    seconds: dict[str, float]
    shown: list[dict[str, Any]]


def outcome_of(row: Row) -> Outcome:
    """What a row of an evaluation came to."""
    return Outcome(
        em=row.em,
        ended=not row.failure,
        answered=row.answer is not None,
        turns=row.turns,
        malformed=row.malformed,
        action_tokens=row.action_tokens,
        searches=len(row.searches),
        query_words=sum(len(search.query.split()) for search in row.searches),
    )


def measured_of(
    seed: Seed, out: Path, settings: dict[str, Any], machine: dict[str, Any]
) -> Measured:
    """All that is there of a seed; by the machine and the code that `out` names, where no piece
    came to it since. Raises WikiError.
    """
    trained = seed.is_done(TRAINING)
    outcomes = {
        name: {
            how: {id: outcome_of(row) for id, row in seed.rows(name, how).items()}
            for how in SAMPLINGS
        }
        for name in METHODS
    }
    found = Measured(
        seed=seed.number,
        settings=settings,
        machine=machine,
        code=code_digest(),
        left=seed.left,
        otherwise=seed.made_otherwise,
        lacking=seed.lacking,
        faults=seed.faults if trained else {},
        steps=seed.steps if trained else 0,
        facts=seed.facts,
        outcomes=outcomes,
        curve=curve(read(seed.plan.run / FILE_NAME)) if trained else None,
        models=_models(seed),
        seconds=seed.seconds,
        shown=_shown(seed) if trained else [],
    )
    there = path(out, seed)
    kept = _read(there) if there.exists() else None
    if kept and (kept.left, kept.settings, kept.outcomes) == (seed.left, settings, outcomes):
        by = {"machine": kept.machine, "code": kept.code, "otherwise": kept.otherwise}
        return msgspec.structs.replace(found, **by)
    return found


def keep(measured: Measured, out: Path, seed: Seed) -> None:
    """Write it, once any of its pieces is there."""
    if len(measured.left) < len(PIECES):
        write_durably(path(out, seed), msgspec.json.encode(measured))


def path(out: Path, seed: Seed) -> Path:
    """The file of a seed."""
    return out / f"measured-{seed.number}-{seed.plan.settings_digest}.json"


def added(files: Iterable[Path]) -> dict[int, Measured]:
    """The seeds of these files. Raises ConfigError for one that is none, or not whole."""
    found: dict[int, Measured] = {}
    for file in files:
        named = f"--add {str(file)!r}"
        try:
            one = _read(file)
        except OSError as error:
            raise ConfigError(f"{named}: {error.strerror}: name what --out holds") from error
        if one is None:
            raise ConfigError(
                f"{named}: no measured-….json of this version: give the command that made it "
                "again, with this version"
            )
        if one.left:
            raise ConfigError(f"{named}: {one.left[0]} is left: finish it where it was begun")
        if one.seed in found:
            raise ConfigError(f"{named}: seed {one.seed} is there twice: drop one of the files")
        found[one.seed] = one
    return found


def check_alike(seeds: Mapping[int, Measured], here: Mapping[str, Any]) -> None:
    """Raise ConfigError where seeds have other settings than are wanted here."""
    for number, one in seeds.items():
        for name in sorted(here.keys() | one.settings.keys()):
            its, value = (of.get(name, "not known") for of in (one.settings, here))
            if its != value:
                raise ConfigError(
                    f"--add, seed {number}: {name} {its} there, {value} here: measure both with "
                    "the same options, and give them"
                )


def _read(file: Path) -> Measured | None:
    """What a file tells; None where it is none of this version. Raises OSError."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Measured)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    asked = [found.outcomes.get(name, {}).get(how) for name in METHODS for how in SAMPLINGS]
    known = all(each is not None and each.keys() <= found.facts.keys() for each in asked)
    whole = found.left or all(each and each.keys() == found.facts.keys() for each in asked)
    return found if known and whole else None


def _models(seed: Seed) -> dict[str, Any]:
    """The steps of each model, what each measurement on validation reached; None where it is not
    there yet.
    """
    choice, learnt = seed.choice, seed.learnt
    tried = {str(each.steps): each.sampled_em for each in choice.candidates}
    measured = {str(each.steps): each.sampled_em for each in learnt.measured}
    best = learnt.best if seed.is_done(SUPERVISED) else None
    return {
        START: {"steps": choice.chosen, "sampled_em": tried[str(choice.chosen)], "tried": tried}
        if choice.chosen
        else None,
        SUPERVISED: {"steps": best.steps, "sampled_em": best.sampled_em, "measured": measured}
        if best
        else None,
        TRAINED: seed.steps if seed.plan.is_trained else None,
    }


def _shown(seed: Seed) -> list[dict[str, Any]]:
    """The rollouts before and after."""
    kinds = ((id, fact.kind) for id, fact in seed.facts.items())
    words = reader(seed.plan.files.model)
    return before_and_after(rollouts(seed.plan.run), first_of_each(kinds), seed.steps, words)
