"""The demo command: what it launches, and what it says where its task cannot be prepared."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from configs.runtime.process import REPOSITORY, Exit
from scripts import cli
from scripts.command import terminal
from scripts.demo import encoder, task
from scripts.demo.errors import ColdStartFailed
from scripts.fleet import launch
from scripts.wiki.pipeline import pipeline


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words of each launch, on a task that is there already."""
    seen: list[list[str]] = []

    def train(options: launch.TrainOptions) -> int:
        seen.append([options.config, *options.overrides])
        return 3

    names = ("model", "train", "eval", "corpus", "held_out")
    files = task.DemoFiles(*map(Path, names))
    monkeypatch.setattr(task, "prepare", lambda *_: files)
    monkeypatch.setattr(encoder, "prepare_index", lambda *_: Path("dense"))
    monkeypatch.setattr(launch, "train", train)
    return seen


def test_the_run_is_launched_on_the_task_and_its_exit_code_kept(launched: list[list[str]]) -> None:
    assert cli.main(["demo", "--seed", "2", "learner.total_steps=4"]) == 3
    ((config, *settings),) = launched
    assert config.endswith("configs/demo.yaml")
    assert settings == [
        "model.path=model",
        "questions.train=train",
        "questions.eval=eval",
        "retrieval.corpus=corpus",
        "seed=2",
        "learner.total_steps=4",
    ]


def test_a_dense_index_is_searched_where_it_is_asked_for(launched: list[list[str]]) -> None:
    cli.main(["demo", "--retrieval", "dense"])
    assert "retrieval.index=dense" in launched[0]


def test_a_preparation_is_told_of_by_the_clock(
    launched: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ready, told = task.prepare, ""
    monkeypatch.setattr(terminal, "FIRST_S", 0.01)

    def prepare(*given: Any) -> task.DemoFiles:
        nonlocal told
        end = time.monotonic() + 20
        while not told and time.monotonic() < end:
            time.sleep(0.01)
            told += capsys.readouterr().err
        return ready(*given)

    monkeypatch.setattr(task, "prepare", prepare)
    assert cli.main(["demo"]) == 3 and launched
    assert told == "preparing the demo task (0 s)\n"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("learner.stepz=3", "unknown key 'learner.stepz'"),
        ("learner.lr=-1", "learner.lr = -1: "),
        ("run_dir=configs", "configs': it holds '"),
        ("actors.count=1000", "too little memory"),
        ("--seed=-1", "--seed -1: at least 0"),
        ("wikki", "TASK = 'wikki': name demo or wiki"),
        ("--quick", "--quick is for forage demo wiki: here say learner.total_steps=N"),
        ("--steps=3", "--steps is for forage demo wiki"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_prepared(
    word: str, said: str, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert cli.main(["demo", word]) == Exit.BAD_INPUT
    out, error = capsys.readouterr()
    assert said in error and error.count("\n") == 1 and not out


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("learner.stepz=3", "unknown key 'learner.stepz'"),
        ("run_dir=configs", "configs': it holds '"),
        ("actors.count=1000", "too little memory"),
        ("--steps=0", "--steps 0: at least 1"),
        ("model.path=x", "model.path is the wiki task's own: drop the override; a model, text and"),
        ("questions.train=x", "questions.train is the wiki task's own"),
        ("retrieval.corpus=x", "retrieval.corpus is the wiki task's own"),
    ],
)
def test_the_wiki_task_is_refused_before_anything_is_fetched(
    word: str, said: str, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(pipeline, "build", None)
    assert cli.main(["demo", "wiki", word]) == Exit.BAD_INPUT
    out, error = capsys.readouterr()
    assert said in error and error.count("\n") == 1 and not out


def test_a_task_that_cannot_be_made_is_one_line(monkeypatch: Any, capsys: Any) -> None:
    def prepare(*_: object) -> None:
        raise ColdStartFailed("no start")

    monkeypatch.setattr(task, "prepare", prepare)
    assert cli.main(["demo"]) == Exit.FAILED
    assert capsys.readouterr().err == "forage: no start; try another SEED\n"


CACHED = """
import sys
from pathlib import Path
from scripts.demo import task
from scripts.fleet import launch
cache = Path(sys.argv[1])
(cache / f"demo-0-{task.digest_with('0', task._SOURCES)}").mkdir()
task.prepare(cache, 0, print)
print([name for name in ("torch", "transformers", "vllm") if name in sys.modules])
"""


@pytest.mark.slow
def test_a_cached_task_is_launched_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CACHED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
