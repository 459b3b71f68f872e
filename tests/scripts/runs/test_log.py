"""The log of a run's directory: what is said where there is none, and while it is read."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from configs.load import parse, save
from configs.schema import Config
from configs.sentinels import SentinelsConfig
from learner.health.sentinels import FILE_NAME as SENTINELS
from learner.health.sentinels import Sentinels
from replay.log import compaction, event_log, tail
from replay.log.event_log import FILE_NAME
from scripts import cli
from scripts.command import terminal
from scripts.runs.record import frames
from scripts.runs.show import rollouts
from tests.scripts.conftest import RecordedRun

SYNC = "`forage sync` made it and keeps no event log: its losses and last evaluation are in "
NONE = "no events.log there: a run has one once it has started, and `forage sync` keeps none"
LEFT = {
    "summary.json": SYNC,
    "steps.json": "`forage relearn` made it: its curve is ",
    "engine.log": NONE,
}
COMMANDS = ("plot", "show", "audit", "compact", "relearn")


@pytest.fixture
def run(make_recorded_run: Callable[..., RecordedRun], tmp_path: Path) -> RecordedRun:
    """A run that every command can read, of several segments."""
    Tokenizer(WordLevel({str(n): n for n in range(20)}, unk_token="0")).save(
        str(tmp_path / "tokenizer.json")
    )
    made = make_recorded_run(segment_bytes=1000)
    save(parse("", [f"model.path={tmp_path}"], ""), made.path / "config.yaml")
    made.evaluate(0)
    for step in range(3):
        made.train(step)
    made.log.close()
    return made


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_of_another_format_is_bad_input(
    run: RecordedRun, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for log in run.path.glob(f"{FILE_NAME}*"):
        content = bytearray(log.read_bytes())
        content[8] = 9
        log.write_bytes(content)
    capsys.readouterr()
    assert cli.main([command, str(run.path)]) == 2
    said = capsys.readouterr().err
    assert "format version 9, this program reads" in said and said.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("file", LEFT)
def test_a_directory_without_a_log_is_called_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, command: str
) -> None:
    save(parse("", [], ""), tmp_path / "config.yaml")
    (tmp_path / file).write_text("{}")
    assert cli.main([command, str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"forage: RUN = {str(tmp_path)!r}: {LEFT[file]}")
    assert said.count("\n") == 1
    if file == "summary.json":
        assert f"`forage ask {tmp_path}` asks its model" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_log_that_lacks_its_first_segment_is_damaged_and_not_missing(
    run: RecordedRun, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (run.path / FILE_NAME).unlink()
    assert cli.main([command, str(run.path)]) in (1, 2)
    assert f"{FILE_NAME}: this segment of the event log is missing" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS[:-1])
def test_what_takes_long_to_read_is_told_of_beside_what_is_printed(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch, capsys: Any, command: str
) -> None:
    monkeypatch.setattr(terminal, "FIRST_S", 60.0)  # also on a busy machine
    assert cli.main([command, str(run.path)]) == 0
    quick = capsys.readouterr()
    assert quick.out and not quick.err
    monkeypatch.setattr(terminal, "FIRST_S", 0.02)
    for module in (event_log, tail, compaction, frames):
        monkeypatch.setattr(module, "opened", slowly(module.opened))
    assert cli.main([command, str(run.path)]) == 0
    slow = capsys.readouterr()
    assert " MB of events.log" in slow.err and re.search(r" \(\d+ s\)\n", slow.err)
    assert slow.out == quick.out or command == "compact"  # which did its work before


def slowly(opened: Callable[[Path], BinaryIO]) -> Callable[[Path], BinaryIO]:
    def waits(path: Path) -> BinaryIO:
        time.sleep(0.1 * (path.name == FILE_NAME))
        return opened(path)

    return waits


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--step 9", "no rollout matches: the run has steps 1 to 3\n"),
        ("--question nobody", "no rollout matches: it asked no question 'nobody', but "),
        ("--step 9 --question nobody", "the run has steps 1 to 3; it asked no question 'nobody'"),
        (
            "--step 1 --question {other}",
            "matches: question '{other}' did not train step 1, but 2\n",
        ),
    ],
)
def test_what_is_not_in_a_run_is_told_with_what_is(
    run: RecordedRun, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    by_step = [{shown[0].id for shown in rollouts(run.path, step=step)} for step in (1, 2)]
    other = min(by_step[1] - by_step[0])
    assert cli.main(["show", str(run.path), *words.format(other=other).split()]) == 0
    assert said.format(other=other) in capsys.readouterr().err


def test_the_sentinels_that_fired_stand_before_the_rollouts(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    sentinels = Sentinels(Config(run_dir=str(run.path)))
    for step in range(1, 13):
        sentinels.judge(step, {"learner/current_ess": 0.1})
    with (run.path / SENTINELS).open("ab") as file:
        file.write(b'{"step": 13, "gauges": {}, "fired": ["\\u001b[2Jess"]}\nno line\n')
    assert cli.main(["show", str(run.path)]) == 0
    first, second, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("sentinel ess, steps 10-12: a fifth of the batch no longer counts")
    assert second == "sentinel [2Jess, step 13" and others[0].startswith("question ")
    assert cli.main(["show", str(run.path), "--step", "2"]) == 0
    assert "sentinel" not in capsys.readouterr().out


def test_rollbacks_stand_behind_what_fired(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    given = Config(run_dir=str(run.path), sentinels=SentinelsConfig(ess="rollback"))
    sentinels = Sentinels(given)
    for step in range(1, 11):
        sentinels.judge(step, {"learner/current_ess": 0.1}, [0])
    assert cli.main(["show", str(run.path)]) == 0
    fired, back, *_ = capsys.readouterr().out.splitlines()
    assert fired.startswith("sentinel ess, step 10: ")
    assert back == (
        "rollback 1 at step 10: weights of step 0 restored; learning rate 0.5 times the configured "
        "one from step 11"
    )


def test_rollouts_are_shown_without_scores_that_cannot_be_read(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / "evaluations.json").write_text('{"1": {"greedy": 0.5}}')
    assert cli.main(["show", str(run.path)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("question ") and "show: without scores: " in told.err


def test_whoever_asks_for_a_few_is_told_that_there_are_more(run: RecordedRun, capsys: Any) -> None:
    more = "show: the first 1; others by --limit N, --step N or --question ID\n"
    assert cli.main(["show", str(run.path), "--limit", "1"]) == 0
    assert capsys.readouterr().out.endswith(more)
    assert cli.main(["show", str(run.path), "--limit", "100"]) == 0
    assert "others by --limit" not in capsys.readouterr().out


def test_a_run_that_has_just_begun_has_nothing_to_show(
    make_recorded_run: Callable[..., RecordedRun], run: RecordedRun, capsys: Any
) -> None:
    config = (run.path / "config.yaml").read_text()
    fresh = make_recorded_run()
    fresh.log.close()
    (fresh.path / "config.yaml").write_text(config)
    assert cli.main(["show", str(fresh.path)]) == 0
    assert "show: no rollout matches: none has arrived yet\n" in capsys.readouterr().err
    assert cli.main(["show", str(fresh.path), "--step", "1"]) == 0
    assert "show: no rollout matches: no step was trained yet\n" in capsys.readouterr().err
