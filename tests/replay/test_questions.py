"""Question files, those of other projects row for row, and the endless supply made of them."""

import json
import re
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from configs.rewards import RewardsConfig, RewardWeights
from configs.schema import Config, QuestionColumns, QuestionsConfig
from replay.question_files import QuestionsError
from replay.questions import (
    MOST_SETS,
    NAMED_ROWS,
    Questions,
    load_questions,
    questions_of,
    read_questions,
    sets_of,
)
from replay.rows import MAX_EXTRA_CHARS
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


def test_a_single_answer_needs_no_list(tmp_path: Path) -> None:
    file = read_questions(written(tmp_path, row(answers="1500"), row(answer="y")))
    assert [question.answers for question in file.questions] == [("1500",), ("x",)]


@pytest.mark.parametrize("answers", [1500, [1500], ["x", 1500], 1.5, [True]])
def test_answers_that_are_no_text_are_told_how_to_be(tmp_path: Path, answers: Any) -> None:
    value = answers[-1] if isinstance(answers, list) else answers
    for fields in ({"answers": answers}, {"answers": None, "answer": answers}):
        with pytest.raises(QuestionsError) as refused:
            read_questions(written(tmp_path, row(**fields)))
        said = str(refused.value)
        assert f'write it as text: "{json.dumps(value)}"' in said, said
        assert "name a file of questions" not in said


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


@pytest.mark.parametrize("rows", [('{"text": "a"}', "{"), (row(), "{", "{")])
def test_a_file_of_other_rows_is_refused(tmp_path: Path, rows: tuple[str, ...]) -> None:
    with pytest.raises(QuestionsError, match=r"2 of \d rows cannot be used: .*: name a file of"):
        read_questions(written(tmp_path, *rows))


def test_an_empty_or_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(QuestionsError, match="no questions"):
        load_questions(written(tmp_path, ""))
    with pytest.raises(QuestionsError, match=r"absent.jsonl: no file there: name a JSONL or"):
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


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_search_r1s_parquet_is_read_as_it_is(tmp_path: Path) -> None:
    rows = [search_r1("nq", 0), search_r1("hotpotqa", 0, ("1,000",))]
    assert load_questions(parquet(tmp_path / "train.parquet", rows)) == (
        Question("nq/train_0", ASKED, ("Ann", "Bo"), source="nq"),
        Question("hotpotqa/train_0", ASKED, ("1,000",), source="hotpotqa"),
    )


def test_verls_parquet_is_read_as_it_is(tmp_path: Path) -> None:
    found = load_questions(parquet(tmp_path / "t.parquet", [verl("nq", 0), verl("nq", 1)]))
    assert found[1] == Question("searchR1_nq/1", ASKED, ("Ann",), source="searchR1_nq")


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
    path = parquet(tmp_path / "test.parquet", [row])
    assert load_questions(path) == (Question("nq/test/0", ASKED, ("A",), 2, source="nq"),)


def test_rows_of_several_layouts_may_stand_in_one_file(tmp_path: Path) -> None:
    ours = {"id": "a", "question": ASKED, "answers": ["A"], "golden_answers": None}
    theirs = {"id": None, "question": None, "answers": None} | verl("nq", 4)
    found = load_questions(parquet(tmp_path / "t.parquet", [theirs | ours, theirs]))
    expected = tuple(
        Question(id, ASKED, (answer,), source="searchR1_nq")
        for id, answer in (("searchR1_nq/a", "A"), ("searchR1_nq/4", "Ann"))
    )
    assert found == expected


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            {"golden_answers": [], "reward_model": None},
            r"t.parquet:2: answers is \[\]; give at least",
        ),
        ({"question": None}, "t.parquet:2: found no question in its columns "),
        (
            {"golden_answers": None, "reward_model": None},
            "t.parquet:2: found no answers in its columns ",
        ),
    ],
)
def test_a_bad_row_of_parquet_is_named(tmp_path: Path, fault: dict[str, Any], said: str) -> None:
    rows = [search_r1("nq", 0), search_r1("nq", 1) | fault, search_r1("nq", 2)]
    found = read_questions(parquet(tmp_path / "t.parquet", rows))
    assert len(found.questions) == 2 and found.unusable == 1
    assert re.search(said, found.faults[0])


def test_two_rows_of_parquet_of_one_id_are_refused(tmp_path: Path) -> None:
    with pytest.raises(QuestionsError, match=r"t.parquet:2: id 'nq/train_0' is that of line 1 too"):
        read_questions(parquet(tmp_path / "t.parquet", [search_r1("nq", 0), search_r1("nq", 0)]))


def test_a_parquet_without_questions_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(
        QuestionsError,
        match=r"2 of 2 rows .*t.parquet:1: found no question in its columns prompt, got",
    ):
        load_questions(parquet(tmp_path / "t.parquet", rows))


def test_what_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("no")
    with pytest.raises(QuestionsError, match=r"t.parquet: cannot be read as parquet"):
        load_questions(tmp_path / "t.parquet")
    with pytest.raises(QuestionsError, match=r"none.parquet: no file there"):
        load_questions(tmp_path / "none.parquet")


OTHERS = {"problem": "who ?", "truth": {"value": "A", "aliases": ["A", "B"]}, "key": 7}
MAPPED = QuestionColumns(question="problem", answers="truth.aliases", id="key")


def test_columns_of_other_names_are_read_alike_from_both_kinds_of_file(tmp_path: Path) -> None:
    wanted = (Question("7", "who ?", ("A", "B")),)
    lines = written(tmp_path, json.dumps(OTHERS))
    assert load_questions(lines, columns=MAPPED) == wanted
    assert load_questions(parquet(tmp_path / "t.parquet", [OTHERS]), columns=MAPPED) == wanted


def test_a_named_column_wins_over_a_known_one(tmp_path: Path) -> None:
    path = written(tmp_path, row(answer_list="theirs", id="1"), row(answer_list=["a"], id="2"))
    found = load_questions(path, columns=QuestionColumns(answers="answer_list"))
    assert [question.answers for question in found] == [("theirs",), ("a",)]


def test_a_column_reaches_into_each_struct_of_a_list(tmp_path: Path) -> None:
    path = written(tmp_path, row(refs=[{"text": "a"}, {"text": "b"}]))
    columns = QuestionColumns(answers="refs.text")
    assert load_questions(path, columns=columns)[0].answers == ("a", "b")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("column", ["prompt", "truth.text", "problem.text"])
def test_an_absent_column_is_refused_with_those_that_are_there(
    tmp_path: Path, kind: str, column: str
) -> None:
    path = tmp_path / f"t.{kind}"
    parquet(path, [OTHERS]) if kind == "parquet" else path.write_text(json.dumps(OTHERS))
    columns = QuestionColumns(question=column, answers="truth.value")
    with pytest.raises(QuestionsError) as refused:
        read_questions(path, columns=columns)
    said = f"{path}:1: there is no column {column!r} (questions.columns.question), only "
    _, _, listed = str(refused.value).partition(said)
    listed, _, remedy = listed.partition(": name one of them")
    assert {*listed.split(", ")} == {"problem", "truth.value", "truth.aliases", "key"}
    assert "questions.columns hold for train and eval alike" in remedy


def test_named_further_columns_go_with_the_question(tmp_path: Path) -> None:
    path = written(
        tmp_path, row(level="hard", meta={"hops": [1, 2]}, other=1), row(level=None, meta=0)
    )
    columns = QuestionColumns(extra=("level", "meta.hops"))
    with pytest.raises(
        QuestionsError, match=r"train.jsonl:2: there is no column 'meta.hops'.*extra"
    ):
        load_questions(path, columns=columns)
    first, second = load_questions(path, columns=QuestionColumns(extra=("level", "meta")))
    assert first.extra == '{"level":"hard","meta":{"hops":[1,2]}}'
    assert first.fields == {"level": "hard", "meta": {"hops": [1, 2]}}
    assert second.fields == {"level": None, "meta": 0}
    assert load_questions(path)[0].extra == "" and load_questions(path)[0].fields == {}


def test_further_columns_of_parquet_are_as_json_can_hold_them(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    table = {"question": ["what ?"], "answers": [["x"]], "day": [date(2026, 1, 2)], "raw": [b"ab"]}
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    (question,) = load_questions(path, columns=QuestionColumns(extra=("day", "raw")))
    assert question.fields == {"day": "2026-01-02", "raw": "YWI="}


def test_further_columns_that_are_too_long_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, row(page="x" * MAX_EXTRA_CHARS))
    words = (
        rf"train.jsonl:1: questions.columns.extra take \d+ characters .* at most {MAX_EXTRA_CHARS}"
    )
    with pytest.raises(QuestionsError, match=words):
        load_questions(path, columns=QuestionColumns(extra=("page",)))


def test_answers_may_be_missing_where_nothing_asks_for_them(tmp_path: Path) -> None:
    path = written(tmp_path, '{"question": "write a poem"}', row(), row(answers=[]))
    found = read_questions(path, need_answers=False)
    assert [question.answers for question in found.questions] == [(), ("x",), ()]
    assert not found.unusable
    with pytest.raises(QuestionsError, match="2 of 3 rows cannot be used"):
        read_questions(path)
    blank = written(tmp_path, row(answers=[" "]))
    with pytest.raises(QuestionsError, match="none of them empty"):
        read_questions(blank, need_answers=False)


def test_a_runs_train_questions_need_answers_where_its_rewards_do(tmp_path: Path) -> None:
    path = str(written(tmp_path, '{"question": "write a poem"}'))
    files = QuestionsConfig(train=path, eval=path)
    own = RewardsConfig(weights=RewardWeights(em=0.0, environment=1.0))
    assert len(questions_of(Config(questions=files, rewards=own), "train").questions) == 1
    for config, field in (
        (Config(questions=files), "train"),
        (Config(questions=files, rewards=own), "eval"),
    ):
        with pytest.raises(QuestionsError, match="found no answers in its columns question"):
            questions_of(config, field)


def test_a_star_stands_for_several_files_read_as_one(tmp_path: Path) -> None:
    for part in range(2):
        rows = [{"question": f"{part}{n}", "answers": ["a"]} for n in range(2)]
        parquet(tmp_path / f"train-{part}.parquet", rows)
    found = load_questions(tmp_path / "train-*.parquet")
    assert [question.text for question in found] == ["00", "01", "10", "11"]
    assert len({question.id for question in found}) == 4
    with pytest.raises(QuestionsError, match="no file there"):
        load_questions(tmp_path / "none-*.parquet")


def test_the_limit_of_an_evaluation_is_of_each_data_set(tmp_path: Path) -> None:
    lines = [row(data_source=source) for source in ("nq", "nq", "nq", "hotpotqa")] + [row(), row()]
    files = QuestionsConfig(eval=str(written(tmp_path, *lines)), eval_limit=2)
    found = questions_of(Config(questions=files), "eval").questions
    assert [question.source for question in found] == ["nq", "nq", "hotpotqa", "", ""]
    sets = {name: len(of) for name, of in sets_of(found).items()}
    assert sets == {"nq": 2, "hotpotqa": 1, "other": 2}
    assert sets_of(found[-2:]) == {}, "without a name there are no sets"


def test_another_column_may_name_the_data_set(tmp_path: Path) -> None:
    path = written(tmp_path, row(id=1, about={"kind": "film"}), row(id=1, about={"kind": "book"}))
    found = load_questions(path, columns=QuestionColumns(source="about.kind"))
    assert [(each.id, each.source) for each in found] == [("film/1", "film"), ("book/1", "book")]
    hops = load_questions(written(tmp_path, row(hops=2)), columns=QuestionColumns(source="hops"))
    assert hops[0].source == "2", "a number is a name"
    path = written(tmp_path, row(id=1, about={"kind": "film"}))
    with pytest.raises(QuestionsError, match=r"no column 'kind' \(questions\.columns\.source\)"):
        load_questions(path, columns=QuestionColumns(source="kind"))


@pytest.mark.parametrize("source", ["a\nb", "x" * 101])
def test_a_data_set_without_a_name_is_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(QuestionsError, match="is no name of 1 to 100 printable characters"):
        load_questions(written(tmp_path, row(data_source=source)))


def test_more_data_sets_than_are_told_apart_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, *(row(data_source=f"s-{n}") for n in range(MOST_SETS + 1)))
    with pytest.raises(QuestionsError, match="65 data sets, and an evaluation tells at most 64"):
        questions_of(Config(questions=QuestionsConfig(eval=str(path))), "eval")
