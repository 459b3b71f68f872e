"""Question files of other projects, row for row as those write them."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from replay.questions import QuestionsError, load_questions, read_questions
from replay.trajectory import Question

ASKED = "who wrote it?"


def search_r1(source: str, number: int, target: Any = ("Ann", "Bo")) -> dict[str, Any]:
    """A row of nq_search.py: FlashRAG's columns are inherited, and ids repeat across data sets."""
    return {
        "id": f"train_{number}",
        "question": ASKED,
        "golden_answers": list(target),
        "metadata": None,
        "data_source": source,
        "prompt": [{"role": "user", "content": f"Answer the given question. Question: {ASKED}\n"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": list(target)}},
        "extra_info": {"split": "train", "index": number},
    }


def verl(source: str, number: int) -> dict[str, Any]:
    """A row of verl's preprocess_search_r1_dataset.py: the question is in extra_info alone."""
    truth = {"target": ["Ann"]}
    created = {"ground_truth": truth, "question": ASKED, "data_source": source}
    return {
        "data_source": f"searchR1_{source}",
        "prompt": [{"role": "system", "content": "…"}, {"role": "user", "content": ASKED}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "index": number,
            "need_tools_kwargs": True,
            "question": ASKED,
            "split": "train",
            "tools_kwargs": {"search": {"create_kwargs": created}},
        },
        "metadata": None,
    }


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_search_r1s_parquet_is_read_as_it_is(tmp_path: Path) -> None:
    rows = [search_r1("nq", 0), search_r1("hotpotqa", 0, ("1,000",))]
    assert load_questions(written(tmp_path / "train.parquet", rows)) == (
        Question("nq/train_0", ASKED, ("Ann", "Bo")),
        Question("hotpotqa/train_0", ASKED, ("1,000",)),
    )


def test_verls_parquet_is_read_as_it_is(tmp_path: Path) -> None:
    found = load_questions(written(tmp_path / "t.parquet", [verl("nq", 0), verl("nq", 1)]))
    assert found[1] == Question("searchR1_nq/1", ASKED, ("Ann",))


def test_flashrags_lines_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "dev.jsonl"
    row = {"id": "dev_0", "question": ASKED, "golden_answers": ["Ann"], "metadata": {"type": "x"}}
    path.write_text(
        json.dumps(row) + "\n" + json.dumps(row | {"id": "dev_1", "golden_answers": "B"})
    )
    assert load_questions(path) == (
        Question("dev_0", ASKED, ("Ann",)),
        Question("dev_1", ASKED, ("B",)),
    )


def test_asearchers_lines_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "Base-35k.jsonl"
    row = {"question": ASKED, "answer": ["Ann"], "source": "x", "aug_answer": ["A."], "qid": "b-0"}
    other = row | {"qid": "b-1", "answer": "Bo"}
    path.write_text(json.dumps(row) + "\n" + json.dumps(other))
    assert load_questions(path) == (
        Question("b-0", ASKED, ("Ann",)),
        Question("b-1", ASKED, ("Bo",)),
    )


def test_our_own_parquet_keeps_its_ids(tmp_path: Path) -> None:
    row = {"id": "nq/test/0", "question": ASKED, "answers": ["A"], "hops": 2, "data_source": "nq"}
    path = written(tmp_path / "test.parquet", [row])
    assert load_questions(path) == (Question("nq/test/0", ASKED, ("A",), 2),)


def test_rows_of_several_layouts_may_stand_in_one_file(tmp_path: Path) -> None:
    ours = {"id": "a", "question": ASKED, "answers": ["A"], "golden_answers": None}
    theirs = {"id": None, "question": None, "answers": None} | verl("nq", 4)
    found = load_questions(written(tmp_path / "t.parquet", [theirs | ours, theirs]))
    expected = Question("searchR1_nq/a", ASKED, ("A",)), Question("searchR1_nq/4", ASKED, ("Ann",))
    assert found == expected


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            {"golden_answers": [], "reward_model": None},
            r"t.parquet:2: answers is \[\]; give at least",
        ),
        ({"question": None}, "t.parquet:2: Object missing required field `question`"),
        (
            {"golden_answers": None, "reward_model": None},
            "t.parquet:2: Object missing required field",
        ),
    ],
)
def test_a_bad_row_of_parquet_is_named(tmp_path: Path, fault: dict[str, Any], said: str) -> None:
    rows = [search_r1("nq", 0), search_r1("nq", 1) | fault, search_r1("nq", 2)]
    found = read_questions(written(tmp_path / "t.parquet", rows))
    assert len(found.questions) == 2 and found.unusable == 1
    assert re.search(said, found.faults[0])


def test_two_rows_of_parquet_of_one_id_are_refused(tmp_path: Path) -> None:
    with pytest.raises(QuestionsError, match=r"t.parquet:2: id 'nq/train_0' is that of line 1 too"):
        read_questions(written(tmp_path / "t.parquet", [search_r1("nq", 0), search_r1("nq", 0)]))


def test_a_parquet_without_questions_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(QuestionsError, match=r"2 of 2 rows .*t.parquet:1: .*`question`"):
        load_questions(written(tmp_path / "t.parquet", rows))


def test_what_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("no")
    with pytest.raises(QuestionsError, match=r"t.parquet: cannot be read as parquet"):
        load_questions(tmp_path / "t.parquet")
    with pytest.raises(QuestionsError, match="cannot be read as parquet"):
        load_questions(tmp_path / "none.parquet")
