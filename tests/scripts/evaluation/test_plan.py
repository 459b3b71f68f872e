"""The plan of an evaluation: sets of questions, the model's configuration, settings."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.load import ConfigError, leaves, parse
from configs.schema import Config
from scripts.evaluation import plan
from scripts.evaluation.plan import SETTINGS, Settings, agree, configured, load_sets
from scripts.setup.model_source import find
from tests.scripts.conftest import Folder


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"answers": ["x"], **row}) + "\n" for row in rows))
    return path


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Rows of three sets, as forage data prepare mixes them."""
    sources = ("nq", "popqa", "nq", "bamboogle", "nq")
    rows = (
        {"id": f"{source}/test/{n}", "question": f"q{n}", "data_source": source}
        for n, source in enumerate(sources)
    )
    return write(tmp_path / "eval.jsonl", *rows)


def test_a_prepared_file_is_as_many_sets_as_it_names(prepared: Path) -> None:
    sets = load_sets([str(prepared)])
    found = {each.name: [question.text for question in each.questions] for each in sets}
    assert found == {"nq": ["q0", "q2", "q4"], "popqa": ["q1"], "bamboogle": ["q3"]}
    assert list(found) == ["nq", "popqa", "bamboogle"]


def test_a_limit_takes_the_first_of_each_set(prepared: Path) -> None:
    sets = load_sets([str(prepared)], 2)
    assert [[q.text for q in each.questions] for each in sets] == [["q0", "q2"], ["q1"], ["q3"]]


def test_other_files_are_sets_of_their_own_name_or_a_given_one(tmp_path: Path) -> None:
    own = write(tmp_path / "own.jsonl", {"question": "who?"})
    other = write(tmp_path / "a=b.jsonl", {"question": "what?", "data_source": "nq"})
    names = [each.name for each in load_sets([str(own), f"mine={own}", f"x={other}", str(other)])]
    assert names == ["own", "mine", "x", "nq"]


def test_two_sets_of_one_name_are_told_apart_by_the_user(tmp_path: Path, prepared: Path) -> None:
    test = write(tmp_path / "nq.jsonl", {"question": "again?"})
    with pytest.raises(
        ConfigError, match=r"a set named 'nq' is in .*eval.jsonl too.*--sets OTHER="
    ):
        load_sets([str(prepared), str(test)])
    assert len(load_sets([str(prepared), f"nq-dev={test}"])) == 4


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no file there"),
        ("", "no questions"),
        ('{"question": "who?", "answers": []}\n', "q.jsonl:1: answers is []"),
        ('{"question": "who?"}\n', "found no answers in its columns question"),
        ("{\n", "q.jsonl:1: not JSON"),
    ],
)
def test_what_is_no_set_is_named(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "q.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as raised:
        load_sets([f"mine={path}"])
    assert said in str(raised.value) and f"--sets mine={path}" in str(raised.value)


def test_every_row_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", {"question": "who?"}, {"question": ""})
    said = r"1 of 2 rows cannot be used: .*:2: question is empty.*: forage data prepare lists"
    with pytest.raises(ConfigError, match=said):
        load_sets([str(path)])


def test_every_field_that_is_named_exists() -> None:
    known = {name for name, _ in leaves(msgspec.to_builtins(Config()))}
    assert {*plan._WITHOUT_EFFECT, *plan._SET_BY} <= known


def test_a_runs_port_is_not_taken_from_it(folder: Folder, checkpointed: Path) -> None:
    folder.edited("retrieval.port", 8123)
    config = configured(find(str(checkpointed)), str(checkpointed / "config.yaml"), [])
    assert config.retrieval.port == 0
    given = configured(find(str(checkpointed)), None, ["retrieval.port=8124"])
    assert given.retrieval.port == 8124


def test_recorded_searches_are_not_taken_from_it(folder: Folder, checkpointed: Path) -> None:
    folder.edited("retrieval.recorded", "runs/old")
    config = configured(find(str(checkpointed)), str(checkpointed / "config.yaml"), [])
    assert config.retrieval.recorded == ""
    given = configured(find(str(checkpointed)), None, ["retrieval.recorded=runs/old"])
    assert given.retrieval.recorded == "runs/old"


BASE = "model: {path: /models/a}\nactors: {max_turns: 4}\n"


def settings(
    *overrides: str, weights: str = "w1", temperature: float = 0.0, exact: bool = False
) -> Settings:
    return Settings.of(parse(BASE, overrides, "test"), weights, temperature, exact)


def refused(recorded: Path, other: Settings) -> str:
    before = (recorded / SETTINGS).read_bytes()
    with pytest.raises(ConfigError) as raised:
        agree(recorded, other)
    assert (recorded / SETTINGS).read_bytes() == before
    return str(raised.value)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
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
    recorded: Path, other: Settings, said: str
) -> None:
    message = refused(recorded, other)
    assert said in message and message.count(" there, ") == 1 and str(recorded) in message


@pytest.mark.parametrize(
    "override",
    [
        "model.path=/moved/a",
        "retrieval.port=8123",
        "learner.lr=1",
        "actors.count=8",
        "retrieval.timeout_s=5",
        "questions.eval_limit=9",
        "actors.temperature=0.7",
    ],
)
def test_what_changes_no_answer_may_change(recorded: Path, override: str) -> None:
    agree(recorded, settings(override))


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


def test_settings_that_cannot_be_read_are_named(recorded: Path) -> None:
    (recorded / SETTINGS).write_text("{")
    assert f"{recorded / SETTINGS}: the settings of an evaluation" in refused(recorded, settings())


def test_they_are_read_as_they_were_written(recorded: Path) -> None:
    read = msgspec.json.decode((recorded / SETTINGS).read_bytes(), type=Settings)
    assert read == settings()


def test_the_engines_own_arguments_are_on_record() -> None:
    asked = parse("", ["actors.engine.kv_cache_dtype=fp8"], "test")
    here, there = (Settings.of(each, "w", 0.0, False) for each in (asked, parse("", [], "test")))
    said = "actors.engine = {} there, {'kv_cache_dtype': 'fp8'} here"
    assert here.differences(there) == [said]
