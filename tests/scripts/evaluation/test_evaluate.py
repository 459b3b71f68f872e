"""The evaluation as a whole, short of an engine: what is refused, resumed and reported."""

import asyncio
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.load import ConfigError, parse
from configs.runtime.process import REPOSITORY, Exit
from replay.trajectory import Question
from scripts import cli
from scripts.evaluation import evaluate
from scripts.evaluation.engine import Stopped
from scripts.evaluation.plan import Plan, Settings, check_rows
from scripts.evaluation.rows import QuestionSet, Rows
from scripts.evaluation.tables import Bars
from tests.scripts.evaluation.cases import SETS, Answering
from tests.scripts.parsing import parsed

CONFIG = parse("", (), "test")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Two environments, two sets, two samples."""
    return Plan(
        name="run-step-80",
        configs={"search_r1": CONFIG, "no_search": CONFIG},
        sets=SETS,
        temperature=1.0,
        samples=2,
        exact=False,
        settings=Settings.of(CONFIG, "digest", 1.0, False),
        folder=tmp_path,
    )


def go_on(plan: Plan, rows: Rows) -> Answering:
    """Make what has no row; what was made."""
    todo = {
        name: [each for each in asked if each not in rows.by_rollout]
        for name, asked in plan.asked.items()
    }
    answering = Answering()
    with Bars() as bars:
        ask = evaluate.asking(plan, rows, todo, bars)
        for name in plan.configs:
            asyncio.run(ask(name, [answering]))
    return answering


def test_killed_half_way_and_resumed_it_reports_the_same(plan: Plan, tmp_path: Path) -> None:
    with Rows(tmp_path / "whole.jsonl") as rows:
        assert len(go_on(plan, rows).leases) == 24
        whole = evaluate.reported(plan, rows.by_rollout)
    lines = (tmp_path / "whole.jsonl").read_bytes()
    (tmp_path / "cut.jsonl").write_bytes(lines[: len(lines) // 2])
    with Rows(tmp_path / "cut.jsonl") as rows:
        done = len(rows.by_rollout)
        assert 0 < done < 24 and len(go_on(plan, rows).leases) == 24 - done
        assert evaluate.reported(plan, rows.by_rollout) == whole
        evaluate.make(plan, rows)  # nothing is left: no engine starts


def test_rows_of_other_questions_are_refused(plan: Plan, tmp_path: Path) -> None:
    with Rows(tmp_path / "rows.jsonl") as rows:
        go_on(plan, rows)
        check_rows(plan, rows)
        other = QuestionSet("nq", Path("nq.jsonl"), (Question("nq-1", "question 1 ?", ("z",)),))
        changed = Plan(**{**vars(plan), "sets": (other,)})
        with pytest.raises(ConfigError, match=r"nq question 'nq-1' was .*'answer 1'.* is .*'z'"):
            check_rows(changed, rows)


def test_overrides_may_stand_behind_any_option() -> None:
    words = (
        "run --sets a b=c.jsonl questions=d.jsonl seed=4 "
        "--environment rag no_search actors.max_turns=2 --exact"
    )
    options = parsed("evaluate", *words.split())
    assert options.sets == ("a", "b=c.jsonl", "questions=d.jsonl")
    assert options.environment == ("rag", "no_search")
    assert options.overrides == ("seed=4", "actors.max_turns=2") and options.exact


def test_the_command_that_goes_on_gives_the_same_options(tmp_path: Path) -> None:
    words = "run seed=4 --sets 'a b' c --samples 4 --temperature 0.5 --exact --out x --weights ema"
    options = parsed("evaluate", *shlex.split(words), "--json", str(tmp_path / "y.json"))
    forage, *again = shlex.split(evaluate.command_of(options))
    assert forage == "forage" and parsed(*again) == options


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """refused(options, model, sets): what is said of them, before anything is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "unanswered.jsonl").write_text('{"question": "who?", "answers": []}\n')
    (tmp_path / "q.jsonl").write_text('{"question": "who?", "answers": ["me"]}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    before = set(tmp_path.rglob("*"))

    def run(options: str = "", model: str = "model", sets: str = "q.jsonl") -> str:
        config = REPOSITORY / "configs" / "base.yaml"
        words = [model, "--sets", *sets.split(), "--config", str(config), *options.split()]
        assert cli.main(["evaluate", *words]) == Exit.BAD_INPUT
        assert set(tmp_path.rglob("*")) == before
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sets": "none.jsonl"}, "--sets none.jsonl: 'none.jsonl': no file there"),
        ({"sets": "q.jsonl empty.jsonl"}, "--sets empty.jsonl: empty.jsonl: no questions"),
        ({"sets": "unanswered.jsonl"}, "unanswered.jsonl:1: answers is []"),
        ({"sets": "q.jsonl q.jsonl"}, "a set named 'q' is in q.jsonl too"),
        ({"model": "none"}, "MODEL = 'none': no run (config.yaml)"),
        ({"options": "--weights ema"}, "--weights ema: 'model' is a model folder and has no"),
        ({"options": "--samples 4"}, "--samples 4 with --temperature 0: greedy samples"),
        ({"options": "--samples 0"}, "--samples 0: at least 1"),
        ({"options": "--temperature -1"}, "--temperature -1.0: give 0 (greedy) or more"),
        ({"options": "--temperature nan"}, "--temperature nan: give 0 (greedy) or more"),
        ({"options": "--limit -1"}, "--limit -1: give 0 (every question) or more"),
        ({"options": "--json none/x.json"}, "--json 'none/x.json': there is no such folder"),
        ({"options": "--json model"}, "--json 'model': it is a folder: name a file in it"),
        ({"options": "model.path=x"}, "model.path is what MODEL says: drop the override"),
        ({"options": "run_dir=x"}, "run_dir is what --out says: drop the override"),
        ({"options": "actors.max_turn=1"}, "unknown key 'actors.max_turn' (value 1): did you mean"),
    ],
)
def test_bad_input_is_named(refused: Callable[..., str], given: dict[str, Any], said: str) -> None:
    assert said in refused(**given)


def test_an_environment_that_does_not_exist_is_named(refused: Callable[..., str]) -> None:
    said = refused("--environment nosuch")
    assert "environment" in said and "nosuch" in said


@pytest.mark.parametrize(
    ("error", "code", "cause"),
    [
        (KeyboardInterrupt("interrupted by SIGINT"), Exit.INTERRUPTED, "interrupted by SIGINT: "),
        (OSError(28, "No space left on device"), Exit.FAILED, ""),
        (Stopped("EngineDead: gone"), Exit.FAILED, ""),
    ],
)
def test_an_early_end_says_why_and_how_to_go_on(
    plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    cause: str,
) -> None:
    def make(plan: Plan, rows: Rows) -> None:
        raise error

    monkeypatch.setattr(evaluate, "planned", lambda options: plan)
    monkeypatch.setattr(evaluate, "make", make)
    assert cli.main(["evaluate", "model", "--sets", "q.jsonl"]) == code
    out, err = capsys.readouterr()
    command = "to go on: forage evaluate model --sets q.jsonl"
    assert out == f"{cause}0 of 24 rollouts are in {plan.folder}; {command}\n"
    if not cause:
        assert err == f"forage: {error}\n"
