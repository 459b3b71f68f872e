"""Corpora load as written; a bad line is named with its field, its value and the remedy."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_server.corpus import load_corpus
from retrieval_server.protocol import CorpusError, Document

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
rows = st.dictionaries(text, text.filter(str.strip), min_size=1, max_size=8)
faults = st.sampled_from(
    [
        ('{"id": "x"', "is not a passage"),
        ("[1]", "is not a passage"),
        ("12", "is not a passage"),
        ('{"id": "x"}', "field 'contents' is missing"),
        ('{"contents": "x"}', "field 'id' is missing"),
        ("{}", "fields 'id' and 'contents' are missing"),
        ('{"title": "x", "text": "y"}', "fields 'id' and 'contents' are missing"),
        ('{"id": "x", "title": "x", "text": "y"}', "field 'contents' is missing"),
        ('{"id": "x", "contents": " \\n"}', "contents = "),
        ('{"id": "x", "contents": 3}', "contents = '3'"),
        ('{"id": "x", "contents": null}', "contents = 'null'"),
        ('{"id": "", "contents": "x"}', "id = "),
        ('{"id": true, "contents": "x"}', "id = 'true'"),
        ('{"id": 1.5, "contents": "x"}', "id = '1.5'"),
        ('{"id": "x", "contents": "\\ud800"}', "is not a passage"),
    ]
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus") / "c.jsonl"


def _lines(rows: dict[str, str]) -> list[str]:
    return [json.dumps({"id": id, "contents": contents}) for id, contents in rows.items()]


@given(rows=rows)
def test_every_row_loads_in_order(path: Path, rows: dict[str, str]) -> None:
    path.write_text("\n".join(_lines(rows)))
    assert list(load_corpus(path)) == [Document(id, contents) for id, contents in rows.items()]


@given(rows=rows, fault=faults, at=st.integers(0, 8))
def test_a_bad_line_is_named(
    path: Path, rows: dict[str, str], fault: tuple[str, str], at: int
) -> None:
    lines = _lines(rows)
    number = min(at, len(lines))
    lines.insert(number, fault[0])
    path.write_text("\n".join(lines))
    with pytest.raises(CorpusError) as caught:
        load_corpus(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{number + 1}: ")
    assert fault[1] in message
    assert "write one JSON object per line" in message


@pytest.mark.parametrize("ids", [None, (7, 9)])
def test_a_title_and_a_text_are_told_how_to_become_contents(
    write_corpus: Callable[..., Path], ids: tuple[int, int] | None
) -> None:
    given: list[dict[str, object]] = [{"title": "Zoë", "text": "a"}, {"title": "Y", "text": "b"}]
    if ids:
        given = [{"id": id} | row for id, row in zip(ids, given, strict=True)]
    path = write_corpus(*given)
    with pytest.raises(CorpusError, match="'title' and 'text' are not read as they are") as caught:
        load_corpus(path)
    _, _, command = str(caught.value).partition("as they are: ")
    command = command.partition(" > ")[0].replace("CORPUS", str(path)) + f" > {path}.new"
    subprocess.run(["bash", "-c", command], check=True)
    first, second = (str(id) for id in ids or (0, 1))
    assert list(load_corpus(f"{path}.new")) == [
        Document(first, "Zoë\na"),
        Document(second, "Y\nb"),
    ]


@given(rows=rows, again=st.data())
def test_a_duplicate_id_names_both_lines(
    path: Path, rows: dict[str, str], again: st.DataObject
) -> None:
    first = again.draw(st.integers(0, len(rows) - 1))
    lines = _lines(rows)
    path.write_text("\n".join([*lines, lines[first]]))
    with pytest.raises(CorpusError, match=rf":{len(lines) + 1}: id = .*:{first + 1};"):
        load_corpus(path)


def test_blank_lines_are_skipped_and_counted(write_corpus: Callable[..., Path]) -> None:
    path = write_corpus({"id": 7, "contents": "a\nb"}, "", "  ", "{")
    with pytest.raises(CorpusError, match=":4: "):
        load_corpus(path)
    assert list(load_corpus(write_corpus({"id": 7, "contents": "a\nb"}, ""))) == [
        Document("7", "a\nb")
    ]


def test_bytes_that_are_not_utf8_are_named(path: Path) -> None:
    path.write_bytes(b'{"id": "a", "contents": "b"}\n{"id": "x", "contents": "\xff"}\n')
    with pytest.raises(CorpusError, match=":2: contents = "):
        load_corpus(path)


def test_a_missing_an_empty_and_a_folder_path(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(CorpusError, match=r"'.*/none' does not exist: name a file of passages"):
        load_corpus(tmp_path / "none")
    with pytest.raises(CorpusError, match="is not a file"):
        load_corpus(tmp_path)
    with pytest.raises(CorpusError, match="holds no passages"):
        load_corpus(tmp_path / "empty")


def test_long_values_are_cut_in_messages(write_corpus: Callable[..., Path]) -> None:
    with pytest.raises(CorpusError) as caught:
        load_corpus(write_corpus("x" * 100_000))
    assert len(str(caught.value)) < 500
