"""Answers on record: found again, by other processes too; torn, foreign and missing ones."""

import json
import os
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


@pytest.mark.parametrize("text", ["a letter", '{"query":"q"', '{"scope":{"kind":"serper"}}', "\0"])
def test_a_file_of_somebody_elses_is_left_as_it_is(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    if text.startswith('{"scope":'):
        assert writer(path).add("q", PAGE) and len(reader(path)) == 1
        return
    for opened in (writer, reader):
        with pytest.raises(BadRecord, match=r"answers\.jsonl: what .* in retrieval\.live\.record"):
            opened(path)
    assert path.read_text() == text


@pytest.mark.parametrize("size", range(1, 9))
def test_the_first_bytes_of_a_line_are_cut_off(path: Path, size: int) -> None:
    path.parent.mkdir()
    path.write_text('{"scope":'[:size])
    assert writer(path).add("q", PAGE) == reader(path).find("q")


def test_what_cannot_be_written_is_kept_until_it_can(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live, away = writer(path), path.with_suffix(".away")
    path.rename(away)
    made = live.add("q", PAGE)
    assert live.find("q") == made and "is not on record, nothing is paid" in caplog.text
    with pytest.raises(BadRecord, match=r"answers\.jsonl: No such file .*see that it is there"):
        live.settle()
    path.touch()
    with pytest.raises(BadRecord, match="another file than it was"):
        live.settle()
    away.rename(path)
    live.settle()
    assert reader(path).find("q") == live.find("q") == made
    live.close()
    assert len(path.read_text().splitlines()) == 1


def test_a_record_that_was_cut_short_is_not_written_to(path: Path) -> None:
    live = writer(path)
    live.add("q", PAGE)
    os.truncate(path, 0)
    with pytest.raises(BadRecord, match="shorter"):
        live.find("r")
    assert live.add("r", PAGE) == live.find("r") and not path.stat().st_size


def test_what_is_lost_at_the_end_is_said(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    live = writer(path)
    path.unlink()
    live.add("q", PAGE)
    live.close()
    assert "1 answers that were paid for are lost" in caplog.text
