"""Index folders: what is interrupted ends in the same bytes, and only what agrees is opened."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from configs.retrieval import RetrievalConfig
from retrieval_server.encoder import Encoder
from retrieval_server.index import build
from retrieval_server.index.bm25 import BM25Index
from retrieval_server.index.build import build_bm25, build_dense
from retrieval_server.index.open_index import look, open_index
from retrieval_server.protocol import BadIndex, CorpusError
from tests.retrieval_server.encoders import make_encoder

ROWS = [
    {"id": f"p{i}", "contents": f"town {i}\nthe mayor of town {i} is {i * 7}"} for i in range(70)
]
QUERIES = ["mayor of town 3", "14", "town"]


class _Killed(BaseException):
    pass


def _quiet(step: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return Encoder(make_encoder(tmp_path_factory.mktemp("encoders") / "tiny"))


@pytest.fixture
def corpus(write_corpus: Callable[..., Path]) -> Path:
    return write_corpus(*ROWS)


@pytest.fixture
def dense(tmp_path: Path, corpus: Path, encoder: Encoder) -> Path:
    build_dense(corpus, tmp_path / "dense", encoder, "HNSW8", 1, _quiet)
    return tmp_path / "dense"


def _bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("form", ["c.jsonl", "c.jsonl.gz"])
def test_a_bm25_folder_finds_what_the_index_in_memory_finds(
    tmp_path: Path, corpus: Path, form: str
) -> None:
    packed = tmp_path / form
    packed.write_bytes(
        gzip.compress(corpus.read_bytes()) if form.endswith("gz") else corpus.read_bytes()
    )
    made = build_bm25(packed, tmp_path / "out", _quiet)
    passages, index = open_index(RetrievalConfig(index=str(tmp_path / "out")))
    again = BM25Index(row["contents"] for row in ROWS)
    assert index.search(QUERIES, 5) == again.search(QUERIES, 5)
    assert [each.contents for each in passages] == [row["contents"] for row in ROWS]
    assert (made.kind, made.unpacked, made.passages) == ("bm25", form.endswith("gz"), 70)


def test_a_dense_folder_finds_the_passage_itself(dense: Path) -> None:
    told = json.loads((dense / "manifest.json").read_text())["parameters"]
    assert (told["neighbours"], told["bytes_per_vector"]) == (8, 128)
    passages, index = open_index(RetrievalConfig(index=str(dense)))
    rows = index.search([row["contents"] for row in ROWS], 1)
    assert [passages[row[0].position].id for row in rows] == [row["id"] for row in ROWS]


@pytest.mark.parametrize("killed_at", ["reading the corpus", "encoding", "indexing"])
def test_a_build_killed_anywhere_resumes_to_the_same_bytes(
    tmp_path: Path, corpus: Path, encoder: Encoder, dense: Path, killed_at: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def progress(step: str, done: int, total: int) -> None:
        if step == killed_at and (done > 0 or step != "encoding"):
            raise _Killed

    monkeypatch.setattr(build, "BLOCK", 16)  # the same with and without a kill
    whole, out = tmp_path / "whole", tmp_path / "out"
    build_dense(corpus, whole, encoder, "HNSW8", 1, _quiet)
    with pytest.raises(_Killed):
        build_dense(corpus, out, encoder, "HNSW8", 1, progress)
    build_dense(corpus, out, encoder, "HNSW8", 1, _quiet)
    assert _bytes(out) == _bytes(whole)


def test_what_is_encoded_is_not_encoded_again(
    tmp_path: Path, corpus: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BLOCK", 16)
    seen: list[tuple[str, int]] = []

    def progress(step: str, done: int, total: int) -> None:
        seen.append((step, done))
        if (step, done) == ("encoding", 48) and ("encoding", 0) in seen:
            raise _Killed

    with pytest.raises(_Killed):
        build_dense(corpus, tmp_path / "out", encoder, "Flat", 1, progress)
    seen.clear()
    build_dense(corpus, tmp_path / "out", encoder, "Flat", 1, progress)
    assert [done for step, done in seen if step == "encoding"] == [48, 64, 70]


def test_embeddings_that_went_missing_are_made_again(
    tmp_path: Path, corpus: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BLOCK", 16)
    whole, out = tmp_path / "whole", tmp_path / "out"
    build_dense(corpus, whole, encoder, "Flat", 1, _quiet)
    with pytest.raises(_Killed):
        build_dense(corpus, out, encoder, "Flat", 1, lambda step, *_: _kill(step, "indexing"))
    embeddings = out / "embeddings.f32"
    embeddings.write_bytes(embeddings.read_bytes()[: 4 * encoder.dimension * 20])
    build_dense(corpus, out, encoder, "Flat", 1, _quiet)
    assert _bytes(out) == _bytes(whole)


def test_parts_cannot_be_mapped(
    tmp_path: Path, corpus: Path, dense: Path, encoder: Encoder
) -> None:
    for part in ("part_aa", "part_ab"):
        (tmp_path / part).write_bytes((dense / "index.faiss").read_bytes())
    asked = RetrievalConfig(
        corpus=str(corpus), index=str(tmp_path), encoder=str(encoder.path), map_index=True
    )
    with pytest.raises(BadIndex, match=r"retrieval\.map_index = True: parts cannot be mapped"):
        open_index(asked)


def test_the_fingerprint_is_of_the_vectors_and_their_use(
    tmp_path: Path, corpus: Path, dense: Path, encoder: Encoder
) -> None:
    used = msgspec.structs.replace(encoder.usage, query_prefix="query: ")
    other = Encoder(encoder.path, used)
    build_dense(corpus, tmp_path / "other", other, "HNSW8", 1, _quiet)
    folders = (dense, dense, tmp_path / "other")
    first, same, another = (open_index(RetrievalConfig(index=str(f)))[1] for f in folders)
    assert first.name == another.name
    assert first.fingerprint == same.fingerprint != another.fingerprint


def test_a_folder_of_something_else_is_refused(
    tmp_path: Path, corpus: Path, encoder: Encoder, dense: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    with pytest.raises(BadIndex, match="full' is not empty: name a new folder"):
        build_bm25(corpus, tmp_path / "full", _quiet)
    with pytest.raises(BadIndex, match="holds an index already"):
        build_bm25(corpus, dense, _quiet)
    out = tmp_path / "half"
    with pytest.raises(_Killed):
        build_dense(corpus, out, encoder, "Flat", 1, lambda step, *_: _kill(step, "encoding"))
    with pytest.raises(BadIndex, match="half an index of another kind, corpus, encoder or use"):
        build_bm25(corpus, out, _quiet)


def _kill(step: str, at: str) -> None:
    if step == at:
        raise _Killed


def _cut(folder: Path) -> None:
    path = folder / "index.faiss"
    path.write_bytes(path.read_bytes()[:-100])


def _damage(folder: Path) -> None:
    data = bytearray((folder / "index.faiss").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "index.faiss").write_bytes(data)


def _edit(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_cut, r"index\.faiss' has \d+ bytes instead of \d+: copy it again"),
        (_damage, r"index\.faiss' is damaged"),
        (lambda folder: (folder / "starts.npy").unlink(), r"starts\.npy' is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "no index, or one half built"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "cannot be read"),
        (_edit(format=99), "of format 99, this is 1"),
    ],
)
def test_a_folder_with_a_fault_is_refused(
    dense: Path, fault: Callable[[Path], None], said: str
) -> None:
    fault(dense)
    with pytest.raises(BadIndex, match=said):
        look(RetrievalConfig(index=str(dense)))


def test_another_corpus_or_encoder_is_refused(tmp_path: Path, corpus: Path, dense: Path) -> None:
    other = make_encoder(tmp_path / "other", seed=1)
    asked = RetrievalConfig(index=str(dense), encoder=str(other))
    with pytest.raises(BadIndex, match=r"was built with the encoder '.*tiny', and '.*other' is an"):
        look(asked)
    (tmp_path / "changed.jsonl").write_text(corpus.read_text().replace("mayor", "major"))
    asked = RetrievalConfig(index=str(dense), corpus=str(tmp_path / "changed.jsonl"))
    with pytest.raises(BadIndex, match=r"was built from '.*', 70 passages, and '.*changed"):
        look(asked)
    corpus.unlink()
    with pytest.raises(CorpusError, match="does not exist"):
        look(RetrievalConfig(index=str(dense)))


def test_parts_of_a_faiss_file_are_served_with_corpus_and_encoder(
    tmp_path: Path, corpus: Path, encoder: Encoder, dense: Path
) -> None:
    data = (dense / "index.faiss").read_bytes()
    parts = tmp_path / "e5"
    parts.mkdir()
    (parts / "part_aa").write_bytes(data[:999])
    (parts / "part_ab").write_bytes(data[999:])
    asked = RetrievalConfig(corpus=str(corpus), index=str(parts), encoder=str(encoder.path))
    look(asked)
    _, index = open_index(asked)
    built = open_index(RetrievalConfig(index=str(dense)))[1]
    assert index.search(QUERIES, 5) == built.search(QUERIES, 5)
    with pytest.raises(BadIndex, match=r"name its encoder \(retrieval\.encoder\)"):
        look(msgspec.structs.replace(asked, encoder=""))
    corpus.write_text("\n".join(corpus.read_text().splitlines()[1:]))
    with pytest.raises(BadIndex, match=r"holds 70 vectors, and .* 69 passages"):
        open_index(asked)
