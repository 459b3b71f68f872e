"""Gzipped lines and parquet are read as the plain lines are, and their faults are named."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrieval_server.corpus import STARTS, digest_of, load_corpus, reopen
from retrieval_server.protocol import CorpusError, Document

ROWS = [
    {"id": f"p{i}", "contents": f'"título {i}"\nline one\nline {i} \u2028 end'} for i in range(9)
]
DOCUMENTS = [Document(row["id"], row["contents"]) for row in ROWS]
contents = st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)


def _plain(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def _packed(path: Path) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n\n" for row in ROWS).encode()))
    return path


def _parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)
    return path


def test_every_form_gives_the_same_documents(tmp_path: Path) -> None:
    forms = [
        _plain(tmp_path / "c.jsonl"),
        _packed(tmp_path / "c.jsonl.gz"),
        _parquet(tmp_path / "c.parquet", list(ROWS)),
    ]
    assert all(list(load_corpus(form)) == DOCUMENTS for form in forms)
    (tmp_path / "folder").mkdir()
    _parquet(tmp_path / "folder/1.parquet", list(ROWS[:5]))
    _parquet(tmp_path / "folder/2.parquet", list(ROWS[5:]))
    assert list(load_corpus(tmp_path / "folder")) == DOCUMENTS


def test_positions_and_slices(tmp_path: Path) -> None:
    passages = load_corpus(_plain(tmp_path / "c.jsonl"))
    assert (passages[7], passages[2:4], len(passages)) == (DOCUMENTS[7], DOCUMENTS[2:4], 9)


def test_what_is_unpacked_can_be_opened_again(tmp_path: Path) -> None:
    packed = _packed(tmp_path / "c.jsonl.gz")
    passages = load_corpus(packed, tmp_path / "passages.jsonl")
    np.save(tmp_path / STARTS, passages.starts)
    packed.unlink()
    assert list(reopen(tmp_path, packed)) == DOCUMENTS


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(contents, min_size=1, max_size=9))
def test_any_text_survives_being_unpacked(tmp_path: Path, texts: list[str]) -> None:
    rows: list[dict[str, object]] = [{"id": i, "contents": text} for i, text in enumerate(texts)]
    found = load_corpus(_parquet(tmp_path / "c.parquet", rows))
    assert [document.contents for document in found] == texts


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"id": "a", "text": "x"}], r"no column 'contents', only id, text"),
        ([{"id": "a", "contents": "x"}, {"id": "a", "contents": "y"}], r":2: id = 'a': .*:1;"),
        ([{"id": "a", "contents": "x"}, {"id": "b", "contents": None}], r":2: contents = 'null'"),
        ([{"id": 1.5, "contents": "x"}], r":1: id = '1.5'"),
    ],
)
def test_faults_of_parquet_are_named(
    tmp_path: Path, rows: list[dict[str, object]], said: str
) -> None:
    with pytest.raises(CorpusError, match=said):
        load_corpus(_parquet(tmp_path / "c.parquet", rows))


@pytest.mark.parametrize("name", ["c.jsonl.gz", "c.parquet"])
def test_a_file_cut_short_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    make = {"c.jsonl.gz": _packed, "c.parquet": lambda path: _parquet(path, list(ROWS))}[name]
    whole = make(path).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorpusError, match=f"{name}' .*copy it again"):
        load_corpus(path)


def test_a_digest_follows_texts_and_order(
    tmp_path: Path, write_corpus: Callable[..., Path]
) -> None:
    first = load_corpus(write_corpus(*ROWS)).digest()
    assert load_corpus(write_corpus(*ROWS)).digest() == first
    assert load_corpus(write_corpus(*ROWS[::-1])).digest() != first
    assert digest_of(DOCUMENTS) != digest_of(DOCUMENTS[::-1])
