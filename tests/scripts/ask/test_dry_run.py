"""`forage try`: what is played, what is printed of it, and what is refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.errors import EnvironmentFailed, ProgramFailed, ToolFailed
from configs.load import ConfigError
from configs.runtime.process import REPOSITORY
from scripts.ask.dry_run import TryOptions, try_question

Play = Callable[..., str]
AGENT = """
import json, os, urllib.request

def ask(text):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"prompt": text}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
        return json.load(reply)["choices"][0]["text"]

def answer(question):
    ask(question["question"])
    return ask("In short:").strip()
"""
NO_PASSAGES = "retrieval.top_k=0"


def code_of(page: str, number: int) -> str:
    """The n-th Python block of a page of the documentation."""
    text = (REPOSITORY / "docs" / page).read_text()
    return text.split("```python\n")[1 + number].split("```")[0]


@pytest.fixture
def play(
    tmp_path: Path,
    spelling_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Play:
    """play(*words, **options): what `forage try` prints; modules of tmp_path can be imported."""
    (tmp_path / "try.yaml").write_text("questions: {chat_template: false}\n")
    (tmp_path / "train.jsonl").write_text(
        '{"id": "first", "question": "what is two and three?", "answers": ["5"]}\n'
        '{"id": "second", "question": "guess", "answers": ["42"]}\n'
    )
    monkeypatch.syspath_prepend(tmp_path)

    def run(*words: str, **options: object) -> str:
        paths = f"model.path={spelling_model_path}", f"questions.train={tmp_path / 'train.jsonl'}"
        given: dict[str, Any] = options
        try_question(TryOptions(str(tmp_path / "try.yaml"), (*paths, *words), **given))
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("wanted", ["train-99", "{folder}/train.jsonl"])
def test_what_is_meant_as_a_row_is_no_question(play: Play, tmp_path: Path, wanted: str) -> None:
    with pytest.raises(
        ConfigError, match=r"no row of questions\.train or questions\.eval has this"
    ):
        play(NO_PASSAGES, wanted.format(folder=tmp_path), say=("<answer> 5 </answer>",))


def test_a_program_is_played_too(play: Play, tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENT)
    program = f"environment.program.entry_point={tmp_path}/agents.py:answer"
    words = ("environment.name=program", program)
    shown = play(*words, say=(" Two and three, or so.", " 5"))
    prompt, first, other, second, *_ = re.split(r"\n(?=prompt|turn)", shown)[1:]
    assert "what is two and three?" in prompt and "Two and three, or so." in first
    assert prompt.startswith("prompt: ") and other.startswith("prompt: ") and "In short" in other
    assert second.startswith("turn 2: ") and "trained on" in second
    assert "answered: answer '5'; 2 turns, 0 malformed, 0 searches" in shown


def test_a_program_that_wants_another_text_is_told_in_one_line(
    play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tolerant = AGENT.replace(
        '    return ask("In short:")', '    try: ask("So?")\n    except: return ""'
    )
    (tmp_path / "agents.py").write_text(AGENT)
    (tmp_path / "tolerant.py").write_text(tolerant)
    for name in ("agents", "tolerant"):
        program = f"environment.program.entry_point={tmp_path}/{name}.py:answer"
        with pytest.raises(ConfigError) as refused:
            play("environment.name=program", program, say=(" 5",))
        said = "--say: 1 text, but the program makes another call: give one more text"
        assert str(refused.value) == said and caplog.text == ""


def test_a_program_s_fault_names_file_and_line_below_what_it_said(
    play: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text(
        "import sys\n\n"
        "def answer(question):\n    print('so far', file=sys.stderr)\n    {}['nope']\n"
    )
    said = r"bad\.py:answer': the program ended with exit status 1: KeyError: 'nope' \(bad\.py:5\)"
    with pytest.raises(ProgramFailed, match=said):
        program = f"environment.program.entry_point={tmp_path}/bad.py:answer"
        play("environment.name=program", program, say=(" 5",))
    shown = capsys.readouterr().out
    assert "the end of the program's standard error\nso far\nTraceback" in shown


def test_the_documented_environment_is_played_without_a_corpus(play: Play, tmp_path: Path) -> None:
    (tmp_path / "my_games.py").write_text(code_of("environments.md", 1))
    said = ("<answer> 50 </answer>", "I do not know", "<answer> 42 </answer>")
    shown = play("environment.name=my_games:Guessing", "second", say=said)
    assert "question second, accepted answers: 42" in shown
    assert "Guess a number from 0 to 99" in shown and "lower" in shown and "higher" in shown
    assert "answered: answer '42'; 3 turns, 1 malformed, 0 searches" in shown
    assert re.search(r"reward 1, mode strict\n +em +1 x 1\n", shown)


def test_the_documented_tool_and_reward_are_used(play: Play, tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(code_of("environments.md", 0))
    (tmp_path / "my_rewards.py").write_text(code_of("rewards.md", 0))
    shown = play(
        NO_PASSAGES, "environment.tools=['my_tools:calculator']", "rewards.custom=my_rewards:cited",
        "rewards.weights.custom=0.2",
        say=("<calculator> 2 + 3 </calculator>", "<answer> 5 </answer>"),
    )  # fmt: skip
    assert "question first, accepted answers: 5" in shown
    observation = shown.split("observation 1: ")[1].split("turn 2: ")[0]
    assert "5" in observation and "not trained on" in observation
    assert re.search(r"custom +0 x 0.2", shown) and "reward 1," in shown


def test_masks_show_each_token_and_whether_it_is_trained_on(play: Play) -> None:
    shown = play(NO_PASSAGES, say=("<answer> 5 </answer>",), masks=True)
    assert re.search(r"^0 \|.*\|$", shown, re.M) and re.search(r"^1 \|.*\|$", shown, re.M)


def test_the_model_plays_where_nobody_else_does(play: Play) -> None:
    shown = play("environment.name=no_search", "model.max_model_len=256")
    assert "turn 1: " in shown and "1 turns, " in shown


def test_a_question_of_one_s_own_has_the_answers_given(play: Play) -> None:
    shown = play(NO_PASSAGES, "who?", gold=("Kelu",), say=("<answer> kelu </answer>",))
    assert "accepted answers: Kelu" in shown and "reward 1," in shown
    shown = play(NO_PASSAGES, "who?", say=("<answer> kelu </answer>",))
    assert "unscorable (question: the question has no accepted answer)" in shown


def test_an_environment_s_fault_names_file_and_line(play: Play, tmp_path: Path) -> None:
    code = code_of("environments.md", 1).replace("answers[0]", "answers[7]")
    (tmp_path / "bad_games.py").write_text(code)
    line = next(n for n, each in enumerate(code.splitlines(), 1) if "answers[7]" in each)
    with pytest.raises(EnvironmentFailed, match=rf"IndexError: .* \(bad_games\.py:{line}\)"):
        play("environment.name=bad_games:Guessing", say=("x",))


def test_a_tool_s_fault_names_file_and_line(play: Play, tmp_path: Path) -> None:
    (tmp_path / "bad_tools.py").write_text(
        'def broken(text: str):\n    "It breaks."\n    return 1 / 0\n'
    )
    with pytest.raises(ToolFailed, match=r"ZeroDivisionError: .* \(bad_tools\.py:3\)"):
        play(
            NO_PASSAGES,
            "environment.tools=['bad_tools:broken']",
            "environment.tool_errors=fail",
            say=("<broken> x </broken>",),
        )


def test_turns_are_typed_until_a_stop(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["<think> easy", "</think>", "<answer> 5 </answer>"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    shown = play(NO_PASSAGES, typed=True)
    assert "answered: answer '5'; 1 turns" in shown


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (
            (NO_PASSAGES,),
            {"say": ("<search> x </search>",)},
            "--say: 1 text, but the rollout goes on: give one",
        ),
        ((), {"say": ("x",)}, "nothing can be searched"),
        (
            ("environment.program.command=[python3,x.py]",),
            {"say": ("x",)},
            "acts on nothing .*: set environment.name=program, or leave .*command out",
        ),
        ((NO_PASSAGES, "questions.train=", "questions.eval="), {"say": ("x",)}, "no QUESTION"),
        ((NO_PASSAGES, "questions.train=nix.jsonl"), {"say": ("x",)}, "questions.train = 'nix"),
        ((NO_PASSAGES, "model.path="), {"say": ("x",)}, "model.path = '': no tokenizer there"),
        (
            (NO_PASSAGES, "model.path=nix"),
            {"say": ("x",)},
            "'nix': no tokenizer there, which --say",
        ),
        (("a", "b"), {"say": ("x",)}, "'b': one question at a time"),
        ((), {"gold": ("x",)}, "--gold is for a QUESTION"),
        ((), {"say": ("x",), "typed": True}, "--say and --typed"),
        ((), {"temperature": -1.0}, "--temperature -1.0"),
    ],
)
def test_what_cannot_be_played_is_refused(
    play: Play, words: tuple[str, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        play(*words, **options)
