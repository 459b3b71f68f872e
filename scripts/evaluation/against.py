"""The other side of a comparison (`--against`): a model that is evaluated as well, or the folder of
an evaluation that was made before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from configs.load import ConfigError
from scripts.evaluation.plan import SETTINGS, EvaluateOptions, Plan, Settings, planned, recorded
from scripts.evaluation.rows import FILE_NAME, Asked, Row, Rows

FOLDER = "against"  # in --out


@dataclass(frozen=True)
class Other:
    """What is compared with. `plan`: of its evaluation, where that is to be made; else `rows`."""

    name: str
    settings: Settings
    plan: Plan | None
    rows: Mapping[Asked, Row]


def other_of(options: EvaluateOptions, plan: Plan) -> Other | None:
    """Find what `--against` names, None where it names nothing, with every check that needs no
    engine. Raises ConfigError.
    """
    if options.against is None:
        return None
    folder = Path(options.against)
    if (folder / SETTINGS).is_file():
        return _made_before(options.against, folder, plan)
    out = options.out / FOLDER if options.out else None
    try:
        theirs = planned(replace(options, model=options.against, against=None, out=out))
    except ConfigError as error:
        raise ConfigError(f"--against {options.against}: {error}") from error
    if theirs.settings.weights == plan.settings.weights:
        raise ConfigError(
            f"--against {options.against}: these are the weights of MODEL = {options.model!r} "
            "too: name other ones, such as …/checkpoints/step-N"
        )
    return Other(theirs.name, theirs.settings, theirs, {})


def _made_before(given: str, folder: Path, plan: Plan) -> Other:
    if folder.resolve() == plan.folder.resolve():
        raise ConfigError(f"--against {given}: MODEL is evaluated into it: name another --out")
    with Rows(folder / FILE_NAME) as found:
        rows = {asked: row for asked, row in found.by_rollout.items() if not row.open}
    asked = {each for every in plan.asked.values() for each in every}
    if not asked & rows.keys():
        raise ConfigError(
            f"--against {given}: it holds no rollout of these sets, environments and samples: "
            "evaluate the same ones there first, or name a model"
        )
    questions = {(each.name, q.id): q for each in plan.sets for q in each.questions}
    for each in asked & rows.keys():
        question, row = questions[each.set, each.id], rows[each]
        if (question.text, question.answers) != (row.question, row.gold):
            raise ConfigError(
                f"--against {given}: {each.set} question {each.id!r} was {row.question!r} there "
                f"and is {question.text!r} here: evaluate both on the same file"
            )
    return Other(folder.name, recorded(folder / SETTINGS), None, rows)


def unlike(plan: Plan, other: Other) -> list[str]:
    """The settings in which the two differ beside their weights."""
    ours, theirs = plan.settings.values, other.settings.values
    return [
        f"{name} = {ours.get(name)!r} here, {theirs.get(name)!r} there"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
