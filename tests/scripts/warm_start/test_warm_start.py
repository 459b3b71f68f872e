"""A warm start from files and from a run: the model it leaves, going on, and what is refused."""

import io
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.prompt import load_tokenizer, tokenizer_digest
from configs.load import ConfigError
from configs.runtime.process import Exit
from learner.errors import BadCheckpoint
from scripts import cli
from scripts.command import terminal
from scripts.warm_start import warm_start
from scripts.warm_start.demonstrations import BadDemonstrations
from tests.scripts.conftest import RecordedRun
from tests.scripts.parsing import parsed
from tests.scripts.terminals import recording, told_by_command

THINGS = ("mayor", "information", "answer", "action", "previous", "search")
BEGUN = "held-out loss before the first step"


@pytest.fixture
def given(tmp_path: Path, spelling_model_path: Path) -> list[str]:
    """A command line: six demonstrations, a small model, four steps of two rows."""
    torch.set_num_threads(1)
    search = {
        "action": "<search> mayor of bore </search>",
        "passages": [{"id": "1", "title": "bore", "text": "the mayor of bore is kelu ."}],
    }
    rows = [
        {
            "question": f"what is the {thing}",
            "turns": [search, {"action": "<answer> kelu </answer>"}],
        }
        for thing in THINGS
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: {spelling_model_path}, dtype: float32, max_model_len: 400}}\n"
        "questions: {prompt: '{question}', chat_template: false}\n"
        "learner: {lr: 1e-3, warmup_steps: 2, eval_every: 2, checkpoint_every: 2,"
        " micro_batch_tokens: 300}\n"
    )
    options = ["--rows", "2", "--steps", "4", "--held-out", "0.2"]
    return [str(tmp_path / "c.yaml"), "--demonstrations", str(tmp_path / "d.jsonl"), *options]


class Warm:
    """Warm starts in this process, without signals: its words, and how it ended."""

    def __init__(self) -> None:
        self._said = io.StringIO()
        self._console = Console(file=self._said, width=200)

    def __call__(self, *words: str, stops: tuple[str, ...] = ()) -> int:
        return self.run(self.prepare(*words), lambda: stops)

    def run(self, plan: warm_start.Plan, listen: Callable[[], tuple[str, ...]] = tuple) -> int:
        return warm_start.run(plan, self._console, listen)

    def prepare(self, *words: str) -> warm_start.Plan:
        options = parsed("warm-start", *words)
        return warm_start.prepare(options, warm_start.settings(options), self._console)

    @property
    def said(self) -> str:
        return self._said.getvalue()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_interrupted_warm_start_goes_on_to_the_same_weights(
    given: list[str], tmp_path: Path, spelling_model_path: Path
) -> None:
    whole, parts, warm = tmp_path / "whole", tmp_path / "parts", Warm()
    assert warm(*given, "--out", str(whole)) == 0
    assert warm(*given, "--out", str(parts), stops=("SIGINT",)) == Exit.INTERRUPTED
    assert "SIGINT: saved after step 1" in warm.said and not (parts / "model").exists()
    assert warm(*given, "--out", str(parts)) == 0
    assert equal(weights(parts), weights(whole))
    assert not equal(weights(whole), weights(spelling_model_path.parent))
    losses = [json.loads((folder / "losses.json").read_text()) for folder in (whole, parts)]
    assert losses[0] == losses[1] and list(losses[0]) == ["0", "2", "4"]
    assert losses[0]["4"] < losses[0]["0"]
    assert (whole / "checkpoints" / "best").resolve().name == "step-4"


def test_where_it_goes_on_is_read_when_nobody_else_learns_there(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, first, second = [*given, "--out", str(tmp_path / "out")], Warm(), Warm()
    early = second.prepare(*words)
    assert first(*words, stops=("SIGINT",)) == Exit.INTERRUPTED
    assert second.run(early) == 0
    assert BEGUN in first.said and BEGUN not in second.said
    assert "step 2/4" in capsys.readouterr().out


def test_until_there_is_a_step_to_finish_nobody_listens(given: list[str], tmp_path: Path) -> None:
    warm, measured = Warm(), list[bool]()

    def listen() -> tuple[str, ...]:
        measured.append(BEGUN in warm.said)
        return ()

    assert warm.run(warm.prepare(*given, "--out", str(tmp_path / "out")), listen) == 0
    assert measured == [True]


def test_without_a_terminal_lines_say_what_is_under_way(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(terminal, "FIRST_S", 0.001)
    monkeypatch.setattr(terminal, "EVERY_S", 0.01)
    warm = Warm()
    plan = warm.prepare(*given, "--out", str(tmp_path / "out"))
    warm.run(plan)
    said = capsys.readouterr().err
    for line in ("reading the demonstrations (", "loading the model (", "measuring the loss ("):
        assert line in said
    assert "learning: " in said and " of 4 (" in said


@pytest.mark.slow
def test_libraries_say_nothing_where_there_is_no_terminal(given: list[str], tmp_path: Path) -> None:
    own = (r"\d demonstrations to learn from, ", r"measuring the loss of ", f"{BEGUN}: ",
           r"step 1/1  loss ", r"the model of step 1, the ", r"model\.path=/")  # fmt: skip
    words = ["--steps", "1", "--out", str(tmp_path / "out")]
    out, said = told_by_command("warm-start", *given, *words)
    assert said == []
    assert [line for line, begins in zip(out, own, strict=True) if not re.match(begins, line)] == []


def test_what_is_left_is_a_model_folder_with_its_tokenizer(
    given: list[str],
    tmp_path: Path,
    spelling_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm, shown = Warm(), list[str]()
    monkeypatch.setattr(warm_start, "status", recording(shown))
    assert warm(*given, "--out", str(tmp_path / "out"), "--steps", "1", "--held-out", "0") == 0
    assert (shown[0], shown[-1]) == ("loading the tokenizer", "writing the model")
    folder = tmp_path / "out" / "model"
    assert f"model.path={folder}" in warm.said
    digests = {
        tokenizer_digest(load_tokenizer(str(path))) for path in (folder, spelling_model_path)
    }
    assert len(digests) == 1
    assert AutoModelForCausalLM.from_pretrained(folder).config.max_position_embeddings == 512
    assert (tmp_path / "out" / "config.yaml").is_file()
    assert not (tmp_path / "out" / "losses.json").exists()


def test_the_model_left_is_the_best_of_the_checkpoints_that_were_measured(
    given: list[str], tmp_path: Path
) -> None:
    out, warm = tmp_path / "out", Warm()
    words = [*given, "--out", str(out), "learner.eval_every=1", "learner.keep_checkpoints=1"]
    assert warm(*words, stops=("SIGTERM",)) == Exit.INTERRUPTED
    losses = json.loads((out / "losses.json").read_text())
    (out / "losses.json").write_text(json.dumps(losses | {"1": 0.0}))
    assert warm(*words) == 0
    assert "the model of step 1, the best, with a held-out loss of 0.0000" in warm.said
    first, last = (out / "checkpoints" / name for name in ("best", "step-4"))
    assert first.resolve().name == "step-1" and equal(weights(out), weights(first))
    assert not equal(weights(out), weights(last))


def test_epochs_become_steps_and_what_is_learnt_is_said(given: list[str], tmp_path: Path) -> None:
    warm = Warm()
    words = [word for word in given if word not in ("--steps", "4")]
    plan = warm.prepare(*words, "--out", str(tmp_path / "out"), "--epochs", "2")
    assert plan.config.learner.total_steps == 5
    assert "5 demonstrations to learn from, 1 held out" in warm.said
    assert not (tmp_path / "out").exists()


def test_a_run_s_rewarded_trajectories_are_learnt(
    make_recorded_run: Callable[..., RecordedRun],
    given: list[str],
    tmp_path: Path,
    spelling_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = list[str]()
    shown = lambda text: told.append(text) or nullcontext()  # noqa: E731
    monkeypatch.setattr("scripts.warm_start.warm_start.status", shown)
    digest = tokenizer_digest(load_tokenizer(str(spelling_model_path)))
    run = make_recorded_run(str(spelling_model_path), digest=digest)
    run.deliver_all()
    words = [given[0], "--from-run", str(run.path), "--out", str(tmp_path / "out")]
    warm = Warm()
    assert warm(*words, "--held-out", "0", "--rows", "2") == 0
    assert "rewarded below 1" in warm.said
    assert told[:2] == ["loading the tokenizer", "reading the demonstrations"]  # a log may be long
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()


def test_bad_rows_are_named_before_anything_is_made(given: list[str], tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(path.read_text() + '{"question": "who", "turns": []}\n')
    out = ["--out", str(tmp_path / "out")]
    with pytest.raises(BadDemonstrations, match=r"d\.jsonl:7: turns number 0"):
        Warm().prepare(*given, *out)
    warm = Warm()
    assert len(warm.prepare(*given, *out, "--skip-bad").curriculum.learnt) == 5
    assert f"left out: {path}:7" in warm.said and not (tmp_path / "out").exists()


def test_it_goes_on_only_with_the_same_demonstrations_and_settings(
    given: list[str], tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert Warm()(*given, *out, stops=("SIGTERM",)) == Exit.INTERRUPTED
    with pytest.raises(BadCheckpoint, match=r"learner\.lr = 0\.001 there, 0\.5 here"):
        Warm()(*given, *out, "learner.lr=0.5")
    with pytest.raises(ConfigError, match=r"rows = 2 there, 3 here"):
        Warm()(*given, *out, "--rows", "3")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.path=none"], "model.path = "),
        (["model.max_model_len=100000"], "max_position_embeddings 512"),
        (["learner.lr=fast"], "learner.lr"),
    ],
)
def test_bad_settings_end_with_exit_code_2(
    given: list[str], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert cli.main(["warm-start", *given, *words]) == Exit.BAD_INPUT
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--demonstrations", "a", "--from-run", "b"],
        [],
        ["--demonstrations", "a", "--held-out", "1"],
        ["--demonstrations", "a", "--epochs", "0"],
        ["--demonstrations", "a", "--epochs", "inf"],
        ["--demonstrations", "a", "--epochs", "nan"],
        ["--demonstrations", "a", "--epochs", "1e308"],
        ["--from-run", "a", "--reward", "nan"],
    ],
)
def test_a_command_that_means_nothing_is_refused_by_name(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["warm-start", "c.yaml", *words]) == Exit.BAD_INPUT
    assert (words[-2] if words else "--from-run") in capsys.readouterr().err


def test_a_tokenizer_that_cannot_be_loaded_is_named(given: Any, inputs: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"model\.path = .*its tokenizer cannot be loaded"):
        Warm().prepare(*given, f"model.path={inputs['model.path']}")
