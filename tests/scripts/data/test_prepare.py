"""Data sets in their real layouts → one schema, with every refusal and overlap accounted for."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from replay.question_files import QuestionsError
from replay.questions import load_questions
from scripts import cli
from scripts.data import data_sets, prepare
from scripts.data.data_sets import HOPS, hops_of
from tests.scripts.terminals import recording, run_in_terminal

# The splits that FlashRAG has of each set, and the ids that its rows have.
SPLITS = {
    "nq": ("train", "dev", "test"), "triviaqa": ("train", "dev", "test"), "popqa": ("test",),
    "hotpotqa": ("train", "dev"), "2wikimultihopqa": ("train", "dev"), "musique": ("train", "dev"),
    "bamboogle": ("test",),
}  # fmt: skip
USED = {name: "test" if "test" in splits else "dev" for name, splits in SPLITS.items()}


def flashrag(folder: Path) -> Path:
    for name, splits in SPLITS.items():
        for split in splits:
            path = folder / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = (
                {
                    "id": f"2hop__{i}_9" if name == "musique" else f"{split}_{i}",
                    "question": f"what is {name} {split} {i}",
                    "golden_answers": [f"answer {i}", str(i)],
                    "metadata": {"type": "bridge"} if name == "hotpotqa" else None,
                }
                for i in range(3)
            )
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def prepared(out: Path, kind: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(out / f"{kind}.parquet").to_pylist()
    return rows


def run(tmp_path: Path, *options: str) -> Path:
    given = [str(tmp_path / "out"), "--from", str(flashrag(tmp_path / "flashrag")), *options]
    assert cli.main(["data", "prepare", *given]) == 0
    return tmp_path / "out"


def test_search_r1s_sets_are_prepared_and_can_be_asked(tmp_path: Path) -> None:
    out = run(tmp_path)
    train, held_out = prepared(out, "train"), prepared(out, "eval")
    assert [row["data_source"] for row in train] == ["nq"] * 3 + ["hotpotqa"] * 3
    assert {(row["data_source"], row["split"]) for row in held_out} == set(USED.items())
    assert held_out[0] == {
        "id": "nq/test/test_0",
        "question": "what is nq test 0",
        "answers": ["answer 0", "0"],
        "hops": 1,
        "data_source": "nq",
        "split": "test",
    }
    questions = load_questions(out / "eval.parquet")
    assert [question.id for question in questions] == [row["id"] for row in held_out]
    assert {q.id.split("/")[0]: q.hops for q in questions} == {**HOPS, "musique": 2}


def test_what_is_asked_in_both_is_told_and_may_be_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = list[str]()
    monkeypatch.setattr(prepare, "status", recording(shown))
    own = tmp_path / "own.jsonl"
    asked = ["What is NQ test 0?", "something else ?"]
    own.write_text("".join(json.dumps({"question": q, "answers": ["x"]}) + "\n" for q in asked))
    out = run(tmp_path, "--train", f"nq,{own}")
    report = json.loads((out / "report.json").read_text())
    assert report["asked_in_both"] == {"train": {"own": 1}, "eval": {"nq": 1}}
    assert report["rows"]["train"] == {"nq": 3, "own": 2}
    assert shown == ["comparing and writing the questions"]
    out = run(tmp_path, "--train", f"nq,{own}", "--drop-overlap")
    assert [row["question"] for row in prepared(out, "train")][3:] == ["something else ?"]


def test_bad_rows_are_named_and_the_rest_is_prepared(tmp_path: Path) -> None:
    folder = flashrag(tmp_path / "flashrag")
    path = folder / "nq" / "train.jsonl"
    fine = {"question": "again", "golden_answers": ["x"]}
    bad = [fine | {"id": "a", "golden_answers": []}, fine | {"id": "train_0"}]
    path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in bad) + "{cut")
    out = tmp_path / "out"
    assert cli.main(["data", "prepare", str(out), "--from", str(folder)]) == 0
    refused = [json.loads(line) for line in (out / "refused.jsonl").read_text().splitlines()]
    assert [(row["file"], row["row"]) for row in refused] == [(str(path), n) for n in (4, 5, 6)]
    assert "answers is []" in refused[0]["why"] and "another row too" in refused[1]["why"]
    assert "not JSON" in refused[2]["why"]
    assert json.loads((out / "report.json").read_text())["refused"] == {str(path): 3}


def test_two_files_of_one_name_are_two_sets_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = flashrag(tmp_path / "flashrag")
    one, other = (str(folder / name / "train.jsonl") for name in ("nq", "musique"))
    given = [str(tmp_path / "out"), "--eval", "", "--train"]
    assert cli.main(["data", "prepare", *given, f"{one},{other}"]) == 2
    assert f"two sets are named 'train': write NAME={other}" in capsys.readouterr().err
    assert cli.main(["data", "prepare", *given, f"{one},musique={other}"]) == 0
    rows = prepared(tmp_path / "out", "train")
    assert [row["data_source"] for row in rows] == ["train"] * 3 + ["musique"] * 3
    assert rows[3]["id"] == "musique/train/2hop__0_9" and rows[3]["hops"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--train", "nq,squad"], "flashrag/squad' holds no train.jsonl: name another --from"),
        (["--train", "mine.jsonl"], "'mine.jsonl': no file there: name a file, or one of nq,"),
        (["--train", "/none/a=b/x.jsonl"], "'/none/a=b/x.jsonl': no file there: name a file"),
        (["--train", "mine=x.jsonl"], "'mine=x.jsonl': no file there: name a file"),
        (["--train", "=x.jsonl"], "'=x.jsonl' has no name before its '=': write NAME=FILE"),
        (["--train", "none.json"], "'none.json': no file there: name a file, or one of nq,"),
        (["--train", "list.json"], "list.json: one JSON list: write a row a line, jq -c '.[]' "),
        (["--train", "own=list.json"], "list.json: one JSON list: write a row a line, jq -c "),
        (["--train", "table.csv"], "table.csv: this is CSV: Forage reads JSONL and parquet: "),
    ],
)
def test_what_is_not_there_or_no_questions_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text('[{"question": "who?", "answers": ["me"]}]')
    Path("table.csv").write_text("question,answers\nwho?,me\n")
    folder = flashrag(tmp_path / "flashrag")
    given = [str(tmp_path / "out"), "--from", str(folder), *options]
    assert cli.main(["data", "prepare", *given]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_sets_that_are_fetched_are_named_first_and_how_to_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(name: str, *_: object) -> None:
        raise QuestionsError(f"{name}: no network")

    monkeypatch.setattr(data_sets, "_download", download)
    own = flashrag(tmp_path) / "nq" / "train.jsonl"
    assert cli.main(["data", "prepare", str(tmp_path / "out"), "--train", str(own)]) == 2
    first, last = capsys.readouterr().err.splitlines()
    assert first == (
        f"forage: fetching from the Hub ({data_sets.REPOSITORY}): {', '.join(HOPS)}; to do "
        'without, name your own, --train FILE --eval FILE, or no set, --eval ""'
    )
    assert last == "forage: nq: no network"
    assert cli.main(["data", "prepare", str(tmp_path / "out"), "--train", "nq", "--eval", ""]) == 2
    assert ": nq; to do without" in capsys.readouterr().err


def test_columns_are_mapped_in_what_is_no_known_set(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"problem": "who?", "truth": {"names": ["me"]}, "question": "not this"}\n')
    columns = ("question=problem", "answers=truth.names")
    words = [f"questions.columns.{each}" for each in columns]
    out = run(tmp_path, *words, "--train", f"nq,{own}", "--eval", str(own))
    train = prepared(out, "train")
    assert [row["question"] for row in train] == [
        *(f"what is nq train {i}" for i in range(3)),
        "who?",
    ]
    assert train[3]["answers"] == ["me"] == prepared(out, "eval")[0]["answers"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "questions.columns.question=q",
            "there is no column 'q' (questions.columns.question), onl",
        ),
        ("questions.columns.qestion=q", "did you mean 'questions.columns.question'?"),
        ("questions.train=own.jsonl", "questions.train: only questions.columns.* are read here"),
        ("own.jsonl", "own.jsonl: only questions.columns.* are read here: --train and --eval name"),
    ],
)
def test_a_word_that_maps_no_column_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, said: str
) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"problem": "who?", "answers": ["me"]}\n')
    given = [str(tmp_path / "out"), word, "--train", str(own), "--eval", ""]
    assert cli.main(["data", "prepare", *given]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_several_files_are_one_set_as_in_a_run(tmp_path: Path) -> None:
    for number, word in enumerate(("who", "where")):
        row = {"question": f"{word}?", "answers": ["me"]}
        (tmp_path / f"part-{number}.jsonl").write_text(json.dumps(row) + "\n")
    out = run(tmp_path, "--train", f"own={tmp_path}/part-*.jsonl", "--eval", "")
    assert [row["question"] for row in prepared(out, "train")] == ["who?", "where?"]


@pytest.mark.parametrize("name", ["squad", "x=squad"])
def test_a_name_of_no_known_set_is_refused_with_what_may_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert cli.main(["data", "prepare", str(tmp_path / "out"), "--train", name, "--eval", ""]) == 2
    wanted = f"{name!r} is no set we know: name a file, OWNER/NAME on the Hub, or one of nq, "
    assert wanted in capsys.readouterr().err


def test_a_file_without_a_usable_row_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "x"}]), own)
    assert (
        cli.main(["data", "prepare", str(tmp_path / "out"), "--train", str(own), "--eval", ""]) == 2
    )
    assert "no row can be used: " in (said := capsys.readouterr().err)
    assert "own.parquet:1: found no question in its columns text" in said


@pytest.mark.parametrize(
    ("source", "id", "told", "hops"),
    [
        ("nq", "x", 0, 1),
        ("musique", "3hop1__5", 0, 3),
        ("musique", "4hop__1", 0, 4),
        ("own", "x", 2, 2),
    ],
)
def test_hops_are_the_sets_or_the_ids(source: str, id: str, told: int, hops: int) -> None:
    assert hops_of(source, id, told) == hops


def test_a_terminal_shows_how_many_rows_have_been_read(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"question": "who?", "answers": ["x"]}\n')
    given = ["data", "prepare", str(tmp_path / "out"), "--train", f"own={own}", "--eval", ""]
    code, said = run_in_terminal(["-m", "scripts.cli", *given])
    assert code == 0 and "1 rows" in said
