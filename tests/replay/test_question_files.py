"""Files of other kinds in the place of questions are refused with what makes them readable."""

import subprocess
from pathlib import Path

import pytest

from replay.question_files import QuestionsError
from replay.questions import load_questions
from replay.trajectory import Question

ROWS = [["id", "question", "answers"], ["1", "who, then?", "Zoë"], ["2", "where?", "here"]]
TABLES = [("t.csv", ","), ("my t.csv", ","), ("t.tsv", "\t"), ("t.jsonl", ","), ("t.csv", ";")]


@pytest.mark.parametrize(("name", "comma"), TABLES)
def test_a_table_is_named_and_its_remedy_makes_questions_of_it(
    tmp_path: Path, name: str, comma: str
) -> None:
    table = tmp_path / name
    lines = [comma.join(f'"{cell}"' if "," in cell else cell for cell in row) for row in ROWS]
    table.write_text("\ufeff" + "\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(QuestionsError, match="this is CSV: Forage reads JSONL and parquet") as said:
        load_questions(table)
    _, _, command = str(said.value).partition("JSONL and parquet: ")
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    written = Path(tmp_path, command.rpartition("> ")[2].strip("'"))
    assert load_questions(written) == (
        Question("1", "who, then?", ("Zoë",)),
        Question("2", "where?", ("here",)),
    )
