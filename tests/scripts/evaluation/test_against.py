"""The other side of a comparison: what may be named, and what is refused before any work."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from configs.load import ConfigError, parse
from configs.runtime.files import write_json
from scripts.evaluation import against
from scripts.evaluation.against import Other, other_of, unlike
from scripts.evaluation.plan import SETTINGS, EvaluateOptions, Plan, Settings
from scripts.evaluation.rows import FILE_NAME, Rows
from tests.scripts.evaluation.cases import SETS, row

CONFIG = parse("", (), "test")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """One environment, two sets."""
    return Plan(
        name="step-80",
        configs={"rag": CONFIG},
        sets=SETS,
        temperature=0.0,
        samples=1,
        exact=False,
        settings=Settings.of(CONFIG, "weights", 0.0, False),
        folder=tmp_path / "ours",
    )


@pytest.fixture
def made(plan: Plan, tmp_path: Path) -> Path:
    """The folder of an evaluation of the first question of each set, of another seed."""
    folder = tmp_path / "theirs"
    other = parse("", ["seed=9"], "test")
    write_json(folder / SETTINGS, Settings.of(other, "others", 0.0, False))
    with Rows(folder / FILE_NAME) as rows:
        for each in plan.asked["rag"]:
            if each.id.endswith("0"):
                rows.add(row(each, "answer 0"))
    return folder


@pytest.fixture
def named(plan: Plan) -> Callable[[str], Other | None]:
    """named(against): what is found."""
    return lambda given: other_of(EvaluateOptions("run", ("x.jsonl",), against=given), plan)


def test_the_folder_of_an_evaluation_is_read(
    named: Callable[[str], Other], plan: Plan, made: Path
) -> None:
    other = named(str(made))
    assert (other.name, other.plan, len(other.rows)) == ("theirs", None, 2)
    assert unlike(plan, other) == ["seed = 0 here, 9 there"]


def test_a_folder_without_a_common_rollout_is_refused(
    named: Callable[[str], Other], made: Path
) -> None:
    (made / FILE_NAME).write_bytes(b"")
    with pytest.raises(ConfigError, match="it holds no rollout of these sets, environments and"):
        named(str(made))


def test_rows_of_other_questions_are_refused(named: Callable[[str], Other], made: Path) -> None:
    path = made / FILE_NAME
    path.write_bytes(path.read_bytes().replace(b"question 0 ?", b"question 9 ?"))
    with pytest.raises(ConfigError, match=r"question 9 \?' there and is 'question 0 \?' here"):
        named(str(made))


def test_the_folder_that_is_written_is_no_other(
    named: Callable[[str], Other], plan: Plan, made: Path
) -> None:
    made.rename(plan.folder)
    with pytest.raises(ConfigError, match="MODEL is evaluated into it"):
        named(str(plan.folder))


def test_a_model_is_evaluated_by_the_same_options_beside_it(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EvaluateOptions("run", ("x.jsonl",), limit=3, out=tmp_path, against="step-0")
    asked = list[EvaluateOptions]()
    theirs = replace(plan, settings=msgspec.structs.replace(plan.settings, weights="others"))
    monkeypatch.setattr(against, "planned", lambda given: asked.append(given) or theirs)
    other = other_of(options, plan)
    assert other is not None and other.plan is theirs
    beside = replace(options, model="step-0", out=tmp_path / "against", against=None)
    assert asked == [beside]
    monkeypatch.setattr(against, "planned", lambda given: plan)
    with pytest.raises(ConfigError, match="these are the weights of MODEL = 'run' too"):
        other_of(options, plan)


def test_without_against_there_is_no_other(plan: Plan) -> None:
    assert other_of(EvaluateOptions("run", ("x.jsonl",)), plan) is None
