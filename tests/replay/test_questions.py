"""Question files, and the endless supply made of them."""

import json
import re
from itertools import islice
from pathlib import Path

import pytest

from replay.questions import NAMED_ROWS, Questions, QuestionsError, load_questions, read_questions
from replay.trajectory import Question

FIVE = tuple(Question(f"q{i}", "text", ("a",)) for i in range(5))


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def row(**fields: object) -> str:
    return json.dumps({"question": "what ?", "answers": ["x"]} | fields, ensure_ascii=False)


def draw(supply: Questions, count: int) -> list[str]:
    return [supply.next().id for _ in range(count)]


def test_rows_become_questions_named_after_file_and_row(tmp_path: Path) -> None:
    path = written(tmp_path, row(hops=2, answers=["x", "y"]), "", row(id="own"), row(id=7))
    questions = load_questions(path)
    assert questions[0] == Question("train-1", "what ?", ("x", "y"), 2)
    assert [q.id for q in questions] == ["train-1", "own", "7"]


def test_limit_reads_the_first_rows(tmp_path: Path) -> None:
    assert len(load_questions(written(tmp_path, row(), row(), row()), limit=2)) == 2


def test_a_line_separator_inside_a_text_is_no_line_end(tmp_path: Path) -> None:
    assert load_questions(written(tmp_path, row(question="a\u2028b")))[0].text == "a\u2028b"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"train.jsonl:2: not JSON"),
        ("[1]", r"train.jsonl:2: .*object"),
        (row(answers="x"), r"train.jsonl:2: .*answers"),
        (row(answers=[]), r"train.jsonl:2: answers is \[\]; give at least one"),
        (row(answers=[" "]), r"train.jsonl:2: answers is"),
        (row(question=" "), r"train.jsonl:2: question is empty, got ' '"),
        (row(hops=-1), r"train.jsonl:2: hops is -1"),
        ('{"answers": ["x"]}', r"train.jsonl:2: .*question"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path, row(), line, row())
    found = read_questions(path)
    assert [question.id for question in found.questions] == ["train-1", "train-3"]
    assert found.unusable == len(found.faults) == 1 and re.search(message, found.faults[0])
    assert found.told() == f"1 of 3 rows cannot be used: {found.faults[0]}"
    with pytest.raises(QuestionsError, match=f"{message}.*: forage data prepare lists"):
        load_questions(path)


def test_two_rows_of_one_id_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, row(id="first"), row(), row(id="first"))
    with pytest.raises(QuestionsError, match=r"train.jsonl:3: id 'first' is that of line 1 too"):
        read_questions(path)


def test_bad_rows_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path, row(), row(answers=[]), row(), "{", row())
    said = read_questions(path).told()
    assert re.match(r"2 of 5 rows cannot be used: .*:2: answers is \[\]; .* \(and 1 more\)$", said)
    assert not read_questions(written(tmp_path, row())).told()


def test_only_the_first_are_kept(tmp_path: Path) -> None:
    bad, good = [row(answers=[])] * 90, [row()] * 90
    found = read_questions(written(tmp_path, *bad, *good))
    assert found.unusable == 90 and len(found.faults) == NAMED_ROWS


@pytest.mark.parametrize("rows", [(row(answers=[]), "{"), (row(), "{", "{")])
def test_a_file_of_other_rows_is_refused(tmp_path: Path, rows: tuple[str, ...]) -> None:
    with pytest.raises(QuestionsError, match=r"2 of \d rows cannot be used: .*: name a file of"):
        read_questions(written(tmp_path, *rows))


def test_an_empty_or_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(QuestionsError, match="no questions"):
        load_questions(written(tmp_path, ""))
    with pytest.raises(QuestionsError, match=r"absent.jsonl: cannot be read"):
        load_questions(tmp_path / "absent.jsonl")


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(QuestionsError, match="UTF-8"):
        load_questions(path)


def test_each_epoch_asks_every_question_in_its_own_order() -> None:
    first, second = (draw(supply := Questions(FIVE, 3), 5), draw(supply, 5))
    assert sorted(first) == sorted(second) == [q.id for q in FIVE]
    assert first != second


def test_the_order_is_the_seeds() -> None:
    assert draw(Questions(FIVE, 3), 20) == draw(Questions(FIVE, 3), 20)
    assert draw(Questions(FIVE, 3), 20) != draw(Questions(FIVE, 4), 20)


def test_peek_takes_nothing() -> None:
    supply = Questions(FIVE, 3)
    assert supply.peek() == supply.peek() == supply.next()
    assert supply.cursor == 1


def test_a_requeued_question_comes_next_and_the_order_goes_on() -> None:
    supply, other = Questions(FIVE, 3), Questions(FIVE, 3)
    first = supply.next()
    supply.requeue(first)
    assert draw(supply, 1) == [first.id]
    assert draw(supply, 10) == draw(other, 11)[1:]


def test_a_retired_question_is_asked_no_more() -> None:
    supply = Questions(FIVE, 3)
    supply.requeue(FIVE[2])
    supply.retire("q2")
    supply.requeue(FIVE[2])
    assert "q2" not in draw(supply, 20)
    assert supply.retired == {"q2"}


def test_when_all_are_retired_there_is_none() -> None:
    supply = Questions(FIVE, 3)
    for question in islice(FIVE, 5):
        supply.retire(question.id)
    assert supply.peek() is None
    with pytest.raises(LookupError, match="all 5"):
        supply.next()


def test_a_supply_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Questions((), 0)
