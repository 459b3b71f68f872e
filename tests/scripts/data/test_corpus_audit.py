"""How many questions have their answer in the corpus, in the top k and in recorded searches."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from replay.log.history import Searched
from replay.trajectory import Kind, Question, Search
from scripts import cli
from scripts.data.reach import Answers
from tests.replay.conftest import record_searches
from tests.retrieval_server.encoders import make_encoder

CORPUS = {
    "p0": '"Rome"\nThe capital of Italy, on the Tiber.',
    "p1": '"Romeo and Juliet"\nA play by Shakespeare.',
    "p2": '"Zoë\'s Café"\nIn Malmö; opened in 1990.',
    "p3": '"New"\nYork City is big, New York Times is not.',
    "p4": '"Tiber"\nA river. It flows.',
}
TRAIN: list[dict[str, Any]] = [
    {"id": "t0", "question": "capital of italy", "answers": ["Rome"]},  # rank 0: p0, by its title
    {"id": "t1", "question": "play by shakespeare", "answers": ["Juli"]},  # part of a word only
    {"id": "t2", "question": "what opened in 1990", "answers": ["nothing", "malmö"]},  # an alias
    {"id": "t3", "question": "big", "answers": ["new york city"]},  # spans the title of p3
    {"id": "t4", "question": "a river", "answers": ["Italy"]},  # p4 is first, p0 is not a hit
    {"id": "t5", "question": "tiber river", "answers": ["capital of Italy!"]},  # p4, then p0
]
EVAL: list[dict[str, Any]] = [
    {"question": "zoë", "answers": ["Zoë’s"]},  # another apostrophe: another word
    {"question": "who?", "answers": ["Shakespeare"]},  # in p1, which this does not find
    {"question": "rome", "answers": ["The"]},  # of which nothing is left
    {"question": "Rome", "answers": ["the Tiber"]},  # p0; p1 has another word
]
Run = Callable[..., dict[str, Any]]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The command line."""
    corpus = [{"id": id, "contents": contents} for id, contents in CORPUS.items()]
    (tmp_path / "config.yaml").write_text(f"retrieval: {{corpus: {tmp_path}/c.jsonl, top_k: 2}}\n")
    write(tmp_path / "c.jsonl", corpus)
    return [
        str(tmp_path / "config.yaml"),
        f"questions.train={write(tmp_path / 'train.jsonl', TRAIN)}",
        f"questions.eval={write(tmp_path / 'eval.jsonl', EVAL)}",
    ]


@pytest.fixture
def audited(words: list[str], tmp_path: Path) -> Run:
    """audited(*more words) → what `--json` holds."""

    def run(*more: str) -> dict[str, Any]:
        path = tmp_path / "figures.json"
        assert cli.main(["data", "audit", *words, *more, "--json", str(path)]) == 0
        figures: dict[str, Any] = json.loads(path.read_text())
        return figures

    return run


def test_the_counts_are_those_counted_by_hand(audited: Run) -> None:
    report = audited()
    assert report["passages"] == 5 and report["index"].startswith("bm25")
    train, evaluation = report["files"]["train"], report["files"]["eval"]
    assert [train[name] for name in ("questions", "with_answers", "anywhere")] == [6, 6, 5]
    assert train["top"] == {"1": 3, "2": 4, "3": 4, "10": 4, "100": 4}
    assert train["missing"] == ["t1"]
    assert [evaluation[name] for name in ("questions", "with_answers", "anywhere")] == [4, 3, 2]
    assert evaluation["top"] == dict.fromkeys(("1", "2", "3", "10", "100"), 1)
    assert evaluation["missing"] == ["eval-1", "eval-3"]


def test_a_search_that_finds_nothing_counts_as_such(audited: Run, tmp_path: Path) -> None:
    rows = [{"question": "zzz ?", "answers": ["qqq"]}]
    files = [
        f"questions.{kind}={write(tmp_path / f'{kind}.jsonl', rows)}" for kind in ("train", "eval")
    ]
    found = audited(*files)["files"]["train"]
    assert (found["questions"], found["anywhere"]) == (1, 0)


def test_eval_questions_that_are_also_in_train_are_counted(
    audited: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audited()["eval_in_train"] == 0
    assert "memory" not in capsys.readouterr().out
    again = [{"question": "The capital of  Italy?", "answers": ["Rome"]}, *EVAL]
    both = write(tmp_path / "both.jsonl", again)
    assert audited(f"questions.eval={both}")["eval_in_train"] == 1
    said = "1 of 5 eval questions are also in train: their EM shows memory, not skill\n"
    assert said in capsys.readouterr().out
    assert audited("questions.train=")["eval_in_train"] == 0


def test_a_built_index_is_searched(audited: Run, tmp_path: Path) -> None:
    corpus, built = str(tmp_path / "c.jsonl"), str(tmp_path / "bm25")
    assert cli.main(["index", corpus, built]) == 0
    again = audited(f"retrieval.index={built}", "retrieval.corpus=")
    assert (again["corpus"], again["files"]) == (built, audited()["files"])


def test_a_dense_index_finds_all_sooner_or_later(audited: Run, tmp_path: Path) -> None:
    built, encoder = str(tmp_path / "dense"), make_encoder(tmp_path / "encoder")
    assert cli.main(["index", str(tmp_path / "c.jsonl"), built, "--encoder", str(encoder)]) == 0
    report = audited(f"retrieval.index={built}")
    assert not report["index"].startswith("bm25")
    assert report["files"]["train"]["top"]["10"] == report["files"]["train"]["anywhere"] == 5


@pytest.mark.parametrize(
    ("answer", "text", "held"),
    [
        ("Rome", "in Rome.", True),
        ("Rome", "Romeo", False),
        ("rome", "(ROME)", True),
        ("U.S.", "the US army", True),  # punctuation goes, as it does for the reward
        ("Paris", "Paris,France", False),  # so that these are one word
        ("the who", "Who is it", True),  # articles go
        ("gone with wind", "Gone with the\nWind", True),
        ("Malmö", "MALMÖ", True),
        ("Malmo", "Malmö", False),
        ("new york", "york new york", True),
        ("new york", "new, old york", False),
        ("a b c d", "b c d", True),
        ("", "anything", False),
        ("!?", "!?", False),
    ],
)
def test_an_answer_is_held_whole_words_in_a_row(answer: str, text: str, held: bool) -> None:
    answers = Answers([Question("q", "?", (answer,)), Question("r", "?", ("no such",))])
    found = answers.found_in(text)
    assert [not found.isdisjoint(of) for of in answers.of] == [held, False]


def test_answers_that_begin_alike_are_told_apart() -> None:
    answers = Answers([Question(a, "?", (a,)) for a in ("x", "x y", "x y z", "x z", "y")])
    assert answers.found_in("q x y w") == {"x", "x y", "y"}


def searched(
    kind: Kind, row: dict[str, Any], sibling: int, *searches: tuple[str, ...] | None
) -> Searched:
    """A rollout that searched once a turn; None: the search was skipped."""
    question = Question(row["id"], row["question"], tuple(row["answers"]))
    turns = tuple(
        (Search("?", ids or (), 0.1, "skipped" if ids is None else "ok" if ids else "empty"),)
        for ids in searches
    )
    group = int(row["id"][1:]) if kind == "train" else 10**12
    return Searched(1.0, "actor", kind, question, group, sibling, 0, turns)


def test_what_recorded_searches_brought(
    audited: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = [
        searched("train", TRAIN[0], 0, ("p1", "p4"), ("p4", "p0"), ()),  # the second brought it
        searched("train", TRAIN[0], 1, ("p1",), None),
        searched("train", TRAIN[1], 0, ("p1", "p9")),  # p9 is not in the corpus
        searched("train", TRAIN[4], 0, None),  # never searched
        searched("eval", TRAIN[0] | {"id": "eval-1"}, 0, ("p0",)),  # another text than eval-1's
    ]
    run = record_searches(tmp_path / "run", Config(), *rollouts)
    files = audited("--searches", str(run))["files"]
    assert files["train"]["recorded"] == {
        "questions": {"made": 3, "answered": 1},
        "rollouts": {"made": 4, "answered": 1},
        "searches": {"made": 5, "answered": 1},
    }
    assert files["eval"]["recorded"]["rollouts"] == {"made": 0, "answered": 0}
    said, left_out = capsys.readouterr()
    assert "1 (33.3%)" in said and "1 (25.0%)" in said and "1 (20.0%)" in said
    assert "without 1 rollouts of questions that the configuration does not name" in left_out
    assert f"without 1 passages that {tmp_path}/c.jsonl does not hold" in left_out


def test_questions_without_an_answer_are_listed(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "audit", *words, "--list"]) == 0
    said = capsys.readouterr().out
    assert "5 (83.3%)" in said and "in the top 100 for the question" in said
    assert "train t1: play by shakespeare [Juli]\n" in said
    assert "eval eval-3: rome [The]\n" in said and "train t0:" not in said


def test_as_many_questions_as_the_run_would_ask(audited: Run) -> None:
    report = audited("questions.eval_limit=2", "questions.train=")
    assert list(report["files"]) == ["eval"] and report["files"]["eval"]["questions"] == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["retrieval.corpus="], "retrieval.corpus is empty: name the passages"),
        (["retrieval.corpus=/none"], "'/none' does not exist"),
        (["questions.train=", "questions.eval="], "name a file of questions"),
        (["questions.eval=/none"], "questions.eval = '/none': no file there: name a JSONL or"),
        (["retrieval.top=1"], "did you mean 'retrieval.top_k'"),
        (["--searches", "/none"], "/none/events.log: cannot be read"),
        (["--json", "/none/x.json"], "--json '/none/x.json': there is no such folder"),
    ],
)
def test_bad_input_is_named(
    words: list[str], more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", "audit", *words, *more]) == 2
    assert said in capsys.readouterr().err
