"""Which sets a file holds, and what is no set."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.load import ConfigError
from scripts.eval_sets import load_sets


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"answers": ["x"], **row}) + "\n" for row in rows))
    return path


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Rows of three sets, as scripts/prepare_data.py mixes them."""
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
        (None, "there is no file"),
        ("", "no questions"),
        ('{"question": "who?", "answers": []}\n', "q.jsonl:1: answers is []"),
        ('{"question": "who?"}\n', "missing required field `answers`"),
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
    said = r"1 of 2 rows cannot be used: .*:2: question is empty.*: scripts/prepare_data.py lists"
    with pytest.raises(ConfigError, match=said):
        load_sets([str(path)])
