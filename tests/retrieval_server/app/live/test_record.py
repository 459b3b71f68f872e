"""Answers on record: found again, by other processes too; torn, foreign and missing ones."""

import json
from pathlib import Path

import pytest

from retrieval_server.app.live.record import BUDGET_SPENT, QUERY_REFUSED, Answers, Scope
from retrieval_server.protocol import BadRecord, Document

SCOPE = Scope("serper")
PAGE = [Document("https://a", "t\ns")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "live" / "answers.jsonl"


def writer(path: Path, scope: Scope = SCOPE) -> Answers:
    return Answers(path, scope, writes=True)


def reader(path: Path) -> Answers:
    return Answers(path, SCOPE, writes=False)


def test_an_answer_is_found_again_also_by_others(path: Path) -> None:
    one, other = writer(path), writer(path)
    assert one.find("q") is None
    made = one.add("q", PAGE)
    assert one.find("q") == other.find("q") == reader(path).find("q") == made
    other.add("r", [])
    again = one.find("r")
    assert again is not None and again.passages == [] and not again.error and len(one) == 2


def test_another_scope_is_another_search(path: Path) -> None:
    writer(path).add("q", PAGE)
    assert writer(path, Scope("serper", country="de")).find("q") is None
    assert writer(path, Scope("serpapi")).find("q") is None


def test_a_spent_budget_is_replayed_but_asked_again(path: Path) -> None:
    live = writer(path)
    live.add("q", [], BUDGET_SPENT)
    live.add("refused", [], QUERY_REFUSED)
    assert live.find("q") is None
    refused, told = live.find("refused"), reader(path).find("q")
    assert refused is not None and refused.error == QUERY_REFUSED
    assert told is not None and told.error == BUDGET_SPENT
    live.add("q", PAGE)
    live.add("q", [], BUDGET_SPENT)
    bought = reader(path).find("q")
    assert bought is not None and bought.passages == PAGE
    assert len(path.read_text().splitlines()) == 3


def test_half_a_line_of_a_killed_process_is_dropped(path: Path) -> None:
    writer(path).add("q", PAGE)
    with path.open("ab") as file:
        file.write(b'{"scope":{"kind":"serper"},"que')
    assert len(reader(path)) == 1
    live = writer(path)
    live.add("r", PAGE)
    assert live.find("q") and live.find("r")
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize("text", ["no json\n", '{"query": 1}\n', "\n"])
def test_what_is_no_record_is_refused(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(BadRecord, match=r"answers\.jsonl: the line at byte 0 is no answer"):
        reader(path)


def test_a_record_that_is_not_there_is_refused(path: Path) -> None:
    with pytest.raises(BadRecord, match="No such file"):
        reader(path)
    path.mkdir(parents=True)
    with pytest.raises(BadRecord, match="directory"):
        reader(path)
