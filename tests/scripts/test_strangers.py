"""Whoever opens a stranger's run, by any command, runs none of its code, shows no secret, sends no
request and prints no escape; what a record does not decide is refused by name.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from configs import trust
from configs.runtime.process import Exit
from scripts import cli
from scripts.command.options import flag
from scripts.fleet import launch
from tests.scripts.strangers import (
    DECIDES,
    STRANGERS,
    Stranger,
    counts_hops_in_formulas,
    watching,
)

OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
COMMANDS = (
    "show RUN",
    "show RUN --step 9 --question x",
    "audit RUN",
    "resume RUN",
    "ask RUN who?",
    "ask RUN/checkpoints/step-1 who?",
    "evaluate RUN --sets HOME/q.jsonl",
    "scale RUN 2",
    "compact RUN",
)
FURTHER = (  # which take longer, or differ in little
    "plot RUN",
    "show RUN --step 1",
    "resume RUN --prepare-only",
    "ask RUN/checkpoints/step-1/model who?",
    "evaluate RUN/checkpoints/step-1 --sets HOME/q.jsonl",
    "evaluate RUN --sets HOME/q.jsonl --environment rag",
    "plan HOME/own.yaml --like RUN --steps 1",
    "data audit HOME/own.yaml --searches RUN --list",
    "relearn RUN",
    "warm-start HOME/own.yaml --from-run RUN --out HOME/run/warm",
    "sync HOME/own.yaml run_dir=HOME/run/new --recorded RUN",
    "try HOME/own.yaml who? --say x retrieval.recorded=RUN",
    "train HOME/own.yaml run_dir=HOME/run/new retrieval.recorded=RUN",
)
# By its first word: what a command does not read it does not refuse.
READ_BY = {
    "resume": "",
    "ask": "model.trust_remote_code|environment|retrieval",
    "evaluate": "model.trust_remote_code|environment|retrieval|actors",
}


@pytest.fixture
def stranger(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stranger]:
    made = Stranger.made(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "run", lambda *_: Exit.DONE)  # no process is started
    yield made
    made.run.log.close()


def test_whatever_names_a_run_is_opened_on_strangers() -> None:
    opening = [*COMMANDS, *FURTHER]
    for name in (name for name in cli.COMMANDS if not name.startswith("bench ")):
        for each in fields(get_type_hints(cli.COMMANDS[name].function())["options"]):
            if each.name == "run" or each.metadata["metavar"] == "RUN":
                words = "RUN" if each.metadata["positional"] else f"{flag(each.name)} RUN"
                named = [line for line in opening if line.startswith(f"{name} ") and words in line]
                assert named, f"{name}: {words}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", STRANGERS)
def test_opening_a_stranger_s_run_does_no_harm(
    kind: str, stranger: Stranger, capsys: pytest.CaptureFixture[str]
) -> None:
    opened_by(COMMANDS, kind, stranger, capsys)


@pytest.mark.soak("commands")
@pytest.mark.parametrize("kind", STRANGERS)
def test_nor_does_any_other_command(
    kind: str, stranger: Stranger, capsys: pytest.CaptureFixture[str]
) -> None:
    opened_by(FURTHER, kind, stranger, capsys)


def test_a_run_s_configurations_on_record_are_all_looked_at(
    stranger: Stranger, capsys: pytest.CaptureFixture[str]
) -> None:
    opened_by(["relearn RUN"], "says it in the log alone", stranger, capsys)
    said = opened("relearn RUN", stranger, capsys)
    assert "model.trust_remote_code = True" in said and "events.log says so, not you" in said


def test_nothing_is_written_where_links_lead(
    stranger: Stranger, capsys: pytest.CaptureFixture[str]
) -> None:
    opened_by(["plot RUN"], "links out", stranger, capsys)
    assert not (stranger.path / "curve.png").is_symlink()
    said = opened("resume RUN", stranger, capsys).splitlines()
    mine = stranger.home / "mine"
    assert f"logs' is a link to '{mine}', which would be written to: remove it, or" in said[1]
    assert len(said) == 4


def test_a_curve_is_drawn_of_any_words(
    stranger: Stranger, capsys: pytest.CaptureFixture[str]
) -> None:
    counts_hops_in_formulas(stranger)
    assert opened("plot RUN", stranger, capsys).endswith("curve.png\n")


def opened_by(
    commands: Sequence[str], kind: str, stranger: Stranger, capsys: pytest.CaptureFixture[str]
) -> None:
    """Open a stranger's run by each command."""
    STRANGERS[kind](stranger)
    stranger.run.log.close()
    kept = stranger.others
    with watching(stranger.home / "secret") as watch:
        for command in commands:
            said = opened(command, stranger, capsys)
            where = f"{command}: {said}"
            assert watch.seen == [], where
            assert not (stranger.home / "canary").exists(), where
            assert OBEYED.search(said) is None, f"{command}: {said!r}"
            if kind in DECIDES and command.split()[0] in READ_BY:
                refused(stranger, command, said)
    assert stranger.others == kept


def opened(command: str, stranger: Stranger, capsys: pytest.CaptureFixture[str]) -> str:
    """All that a command says of the run; it ends in a way that is known."""
    words = command.replace("HOME", str(stranger.home)).split()
    words = [word.replace("RUN", str(stranger.path)) for word in words]
    code = cli.main(words)
    said = capsys.readouterr()
    assert code in {*Exit}, said.err
    return said.out + said.err


def refused(stranger: Stranger, command: str, said: str) -> None:
    fields = set(re.findall(r"^(?:forage: )?(\S+) = .+ says so, not you", said, re.M))
    read = READ_BY[command.split()[0]]
    expected = {field for field in stranger.said & {*trust.FIELDS} if re.match(read, field)}
    assert fields == expected, f"{command}: {said}"
