"""A folder of rows belongs to one model and one setting; everybody else is refused by name."""

from pathlib import Path

import msgspec
import pytest

from configs.load import ConfigError, parse
from scripts.eval_settings import FILE_NAME, Settings, agree

BASE = "model: {path: /models/a}\nactors: {max_turns: 4}\n"


def settings(
    *overrides: str, weights: str = "w1", temperature: float = 0.0, exact: bool = False
) -> Settings:
    return Settings.of(parse(BASE, overrides, "test"), weights, temperature, exact)


def refused(folder: Path, other: Settings) -> str:
    before = (folder / FILE_NAME).read_bytes()
    with pytest.raises(ConfigError) as raised:
        agree(folder, other)
    assert (folder / FILE_NAME).read_bytes() == before
    return str(raised.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    agree(tmp_path / "out", settings())
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (settings(weights="w2"), "weights of /models/a = 'w1' there, 'w2' here"),
        (settings("actors.max_turns=2"), "actors.max_turns = 4 there, 2 here"),
        (settings("retrieval.top_k=5"), "retrieval.top_k = 3 there, 5 here"),
        (settings("seed=1"), "seed = 0 there, 1 here"),
        (settings(temperature=1.0), "--temperature = 0.0 there, 1.0 here"),
        (settings(exact=True), "--exact = False there, True here"),
    ],
)
def test_another_evaluation_is_refused_by_what_differs(
    folder: Path, other: Settings, said: str
) -> None:
    message = refused(folder, other)
    assert said in message and message.count(" there, ") == 1 and str(folder) in message


@pytest.mark.parametrize(
    "override",
    [
        *("model.path=/moved/a", "retrieval.port=8123", "learner.lr=1", "actors.count=8"),
        *("retrieval.timeout_s=5", "questions.eval_limit=9", "actors.temperature=0.7"),
    ],
)
def test_what_changes_no_answer_may_change(folder: Path, override: str) -> None:
    agree(folder, settings(override))


def test_a_corpus_that_has_changed_is_another(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("1")
    agree(tmp_path / "out", settings(f"retrieval.corpus={corpus}"))
    corpus.write_text("22")
    said = refused(tmp_path / "out", settings(f"retrieval.corpus={corpus}"))
    assert "retrieval.corpus (bytes) = 1 there, 2 here" in said


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("work of years")
    with pytest.raises(ConfigError, match="holds something else than an evaluation"):
        agree(tmp_path, settings())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out '.*file/out': Not a directory: name a folder"):
        agree(tmp_path / "file" / "out", settings())


def test_settings_that_cannot_be_read_are_named(folder: Path) -> None:
    (folder / FILE_NAME).write_text("{")
    assert f"{folder / FILE_NAME}: the settings of an evaluation" in refused(folder, settings())


def test_they_are_read_as_they_were_written(folder: Path) -> None:
    read = msgspec.json.decode((folder / FILE_NAME).read_bytes(), type=Settings)
    assert read == settings()
