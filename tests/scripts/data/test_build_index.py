"""The command: what it says of bad input, and that a killed build ends in the same index."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.load import ConfigError
from configs.runtime.process import Exit
from scripts import cli
from scripts.data import build_index
from scripts.data.build_index import IndexOptions
from tests.retrieval_server.encoders import make_encoder
from tests.scripts.terminals import run_in_terminal, told_by_command


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = ({"id": f"p{i}", "contents": f"town {i}\nthe mayor is {i * 7}"} for i in range(2500))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_index_is_built_and_said(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["index", str(corpus), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "2,500 passages, bm25s" in said
    assert "retrieval.index=" in said


def test_tantivy_is_built_where_it_is_named(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["index", str(corpus), str(out), "--kind", "tantivy"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2,500 passages, tantivy" in said
    assert said.endswith(f"retrieval.index={out} retrieval.kind=tantivy")


@pytest.mark.slow
def test_what_is_done_says_how_much_it_was(corpus: Path, tmp_path: Path) -> None:
    words = ["-m", "scripts.cli", "index", str(corpus), str(tmp_path / "out")]
    code, told = run_in_terminal(words)
    ends = [line for line in told.splitlines() if "reading the corpus" in line]
    assert code == 0 and "2500/2500" in ends[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bm25", "tantivy", "dense"])
def test_libraries_say_nothing_where_there_is_no_terminal(tmp_path: Path, kind: str) -> None:
    (corpus := tmp_path / "corpus.jsonl").write_text('{"id": "a", "contents": "bore\\nkelu"}\n')
    how = ["--kind", kind]
    if kind == "dense":
        how = ["--encoder", str(make_encoder(tmp_path / "encoder"))]
    out, said = told_by_command("index", str(corpus), str(tmp_path / "out"), *how)
    ours = [f"{tmp_path}/encoder says nothing of pooling or prefixes: mean pooling, no prefix"]
    assert said == ours * (kind == "dense")
    assert len(out) == 1 and out[0].startswith("1 passages, ")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["none.jsonl", "out"], "'none.jsonl' does not exist: name a file of passages"),
        (["CORPUS", "out", "--factory", "Flat"], "--factory is for dense indexes: name an"),
        (["CORPUS", "out", "--encoder", "none"], "'none' holds no encoder: name a folder"),
        (["CORPUS", "out", "--kind", "tantivy", "--encoder", "x"], "--kind = 'tantivy' is of an"),
        (["CORPUS", "out", "--threads", "0"], "--threads 0: at least 1"),
    ],
)
def test_bad_input_is_named_before_anything_is_made(
    corpus: Path, tmp_path: Path, given: list[str], said: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    words = [str(corpus) if part == "CORPUS" else part for part in given]
    assert cli.main(["index", *words]) == Exit.BAD_INPUT
    assert said in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError(122, "Disk quota exceeded"),
        OSError("4000 requested and 496 written"),  # numpy's words
        ValueError("An IO error occurred: 'No space left on device (os error 28)'"),  # tantivy's
        RuntimeError("write error in x: 49107 != 512000 (No space left on device)"),  # FAISS's
    ],
)
def test_a_full_disk_is_named_whoever_meets_it(
    error: Exception, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(build_index, "build_bm25", raising(error))
    out = tmp_path / "out"
    assert cli.main(["index", str(corpus), str(out)]) == Exit.BAD_INPUT
    assert f"the disk of {out} is full: make room there\n" in capsys.readouterr().err


def test_what_is_no_full_disk_is_left_as_it_is(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = IndexOptions(corpus=corpus, out=tmp_path / "out")
    monkeypatch.setattr(build_index, "build_bm25", raising(RuntimeError("a fault")))
    with pytest.raises(RuntimeError, match="a fault"):
        build_index.index(options)
    monkeypatch.setattr(build_index, "build_bm25", raising(PermissionError(13, "not yours", "x")))
    with pytest.raises(ConfigError, match=r"^\[Errno 13\] not yours: 'x'$"):
        build_index.index(options)


def raising(error: Exception) -> Callable[..., None]:
    """A function that only raises."""

    def fails(*_: object) -> None:
        raise error

    return fails


@pytest.mark.slow
def test_a_killed_build_resumes_to_the_identical_index(corpus: Path, tmp_path: Path) -> None:
    encoder = make_encoder(tmp_path / "encoder")
    command = [sys.executable, "-m", "scripts.cli", "index", str(corpus)]
    options = ["--encoder", str(encoder), "--factory", "HNSW16", "--threads", "1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*command, str(whole), *options], check=True, timeout=120)
    process = subprocess.Popen([*command, str(killed), *options])
    recipe, deadline = killed / "building.json", time.monotonic() + 120
    while not re.search(r'"encoded":[1-9]', recipe.read_text() if recipe.exists() else ""):
        assert process.poll() is None, "the build ended before its first block was seen"
        assert time.monotonic() < deadline
    process.kill()
    process.wait()
    subprocess.run([*command, str(killed), *options], check=True, timeout=120)
    for name in ("index.faiss", "starts.npy", "manifest.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
