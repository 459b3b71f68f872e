"""The choice of the start, with a warm start and an evaluation that only write what they would."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.wiki.packages import WikiError
from scripts.wiki.pipeline import start
from scripts.wiki.pipeline.start import Recipe, choose, read
from scripts.wiki.wiki import WikiFiles

FILES = WikiFiles(*(Path("/wiki") / name for name in WikiFiles.__dataclass_fields__))


class Commands:
    """Stands in for `forage`: `em` by steps; `asked`: the commands in order."""

    def __init__(self, em: dict[int, float]) -> None:
        self.em, self.asked = em, list[list[str]]()
        self.interrupts = ""

    def __call__(self, words: Sequence[str], log: Path) -> None:
        self.asked.append(list(words))
        out = Path(words[words.index("--out") + 1])
        if words[0] == self.interrupts:
            self.interrupts = ""
            raise KeyboardInterrupt
        if words[0] == "warm-start":
            (out / "model").mkdir(parents=True, exist_ok=True)
            (out / "checkpoints" / "step-2").mkdir(parents=True, exist_ok=True)
            return
        out.mkdir()
        em = self.em[int(out.name.removeprefix("step-"))]
        figures = {"failures": {}, "scores": {"em": {"mean": em}}}
        (out / "report.json").write_text(json.dumps({"methods": {"s": {"asked": figures}}}))

    @property
    def names(self) -> list[str]:
        return [words[0] for words in self.asked]


@pytest.fixture
def commands() -> Commands:
    return Commands({6: 0.0, 8: 0.1, 10: 0.25, 12: 0.5})


def chosen(
    commands: Commands, folder: Path, recipe: Recipe | None = None
) -> tuple[Path, start.Choice]:
    return choose(folder, ["seed=0"], FILES, recipe or Recipe(), lambda line: None, commands)


def test_the_fewest_steps_that_reach_the_bound_are_chosen(
    commands: Commands, tmp_path: Path
) -> None:
    model, choice = chosen(commands, tmp_path / "start")
    assert choice.chosen == 10 and [each.steps for each in choice.candidates] == [6, 8, 10]
    assert model.is_dir() and not (model.parent / "checkpoints").exists()
    model.rename(tmp_path / "elsewhere")
    with pytest.raises(WikiError, match=rf"model {model} is gone: remove {tmp_path / 'start'} and"):
        chosen(commands, tmp_path / "start")
    assert commands.names == ["warm-start", "evaluate"] * 3
    warm, evaluation = commands.asked[-2:]
    assert warm[warm.index("--steps") + 1] == "10" and warm[-1] == "seed=0"
    assert "asked=/wiki/validation" in evaluation and "/wiki/demonstrations" in warm
    assert evaluation[evaluation.index("--temperature") + 1] == "1.0"


def test_what_was_chosen_is_not_chosen_again(commands: Commands, tmp_path: Path) -> None:
    assert start.chosen(tmp_path) is None
    first = chosen(commands, tmp_path)
    assert start.chosen(tmp_path) == first[0]
    commands.asked.clear()
    assert chosen(commands, tmp_path) == first and not commands.asked


@pytest.mark.parametrize("left", ["checkpoints", "checkpoints.old"])
def test_a_kill_before_the_checkpoints_are_gone_is_made_up_for(
    left: str, commands: Commands, tmp_path: Path
) -> None:
    chosen(commands, tmp_path)
    assert start.is_chosen(tmp_path)
    (tmp_path / "warm" / left / "step-2").mkdir(parents=True)
    assert not start.is_chosen(tmp_path)
    chosen(commands, tmp_path)
    assert start.is_chosen(tmp_path) and not (tmp_path / "warm" / left).exists()


@pytest.mark.parametrize("where", ["warm-start", "evaluate"])
def test_an_interrupted_choice_goes_on_with_the_same_candidate(
    where: str, commands: Commands, tmp_path: Path
) -> None:
    commands.em[6] = 0.1
    with pytest.raises(WikiError):
        chosen(commands, tmp_path, Recipe(last=6))
    commands.asked, commands.interrupts = [], where
    with pytest.raises(KeyboardInterrupt):
        chosen(commands, tmp_path)
    assert [each.steps for each in read(tmp_path).candidates] == [6]
    assert chosen(commands, tmp_path)[1].chosen == 10
    assert {words[words.index("--out") + 1] for words in commands.asked} == {
        *(str(tmp_path / name) for name in ("warm", "step-8", "step-10"))
    }


def test_a_start_that_is_out_of_reach_is_said_with_the_best(
    commands: Commands, tmp_path: Path
) -> None:
    with pytest.raises(WikiError, match=r"of 0.7: the best had 0.500 after 12: take another seed"):
        chosen(commands, tmp_path, Recipe(last=12, least_em=0.7))
    assert read(tmp_path).chosen == 0


def test_a_record_that_cannot_be_read_is_named(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / start.CHOICE).write_text("{")
    with pytest.raises(WikiError, match=r"choice\.json cannot be read .*: remove "):
        chosen(commands, tmp_path)
