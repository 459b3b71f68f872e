"""A large corpus is scanned once: its offsets hold while it is the same file."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from retrieval_server import digests, offsets
from retrieval_server.corpus import Passages, load_corpus
from retrieval_server.protocol import CorpusError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "forage" / "offsets"


@pytest.fixture
def corpus(write_corpus: Callable[..., Path]) -> Path:
    return write_corpus(*({"id": f"p{i}", "contents": f"text {i}"} for i in range(9)), "")


def _load(path: Path) -> Passages:
    return load_corpus(path, large_bytes=1)


def _spoil(path: Path, later_ns: int = 0) -> None:
    """Make no passage of the first line; size and time of change stay, but for so much."""
    seen = path.stat()
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns + later_ns))


def test_what_was_scanned_is_not_scanned_again(corpus: Path, cache: Path) -> None:
    first, told = _load(corpus), list[int]()
    _spoil(corpus)
    again = load_corpus(corpus, progress=told.append, large_bytes=1)
    assert again.starts.tolist() == first.starts.tolist() and told == [9]
    assert again[8].contents == "text 8"
    with pytest.raises(CorpusError, match=r"corpus\.jsonl:1: .* is not a passage"):
        load_corpus(corpus)  # it is no large one
    assert len(list(cache.iterdir())) == 1


def test_a_corpus_that_changed_is_scanned_again(corpus: Path, cache: Path) -> None:
    _load(corpus)
    _spoil(corpus, later_ns=1)
    with pytest.raises(CorpusError, match="is not a passage"):
        _load(corpus)


def test_a_corpus_in_another_s_place_is_scanned(corpus: Path, cache: Path, tmp_path: Path) -> None:
    _load(corpus)
    seen, other = corpus.stat(), tmp_path / "other"
    other.write_bytes(corpus.read_bytes().replace(b'"p8"', b'"p7"'))
    os.utime(other, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    other.replace(corpus)
    with pytest.raises(CorpusError, match="already used at"):
        _load(corpus)


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: data[:-8],
        lambda data: data + bytes(8),
        lambda data: data[:-1] + b"\x01",
        lambda data: b"{}" + data[2:],
        lambda data: b"",
        lambda data: data.replace(b'"passages":9', b'"passages":8'),
    ],
)
def test_what_is_damaged_is_done_without(
    corpus: Path, cache: Path, harm: Callable[[bytes], bytes]
) -> None:
    _load(corpus)
    (place,) = cache.iterdir()
    place.write_bytes(harm(place.read_bytes()))
    assert offsets.remembered(digests.stamp(corpus)) is None
    assert len(_load(corpus)) == 9
    assert offsets.remembered(digests.stamp(corpus)) is not None


def test_where_nothing_can_be_kept_it_is_scanned(corpus: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.touch()
    assert [each.id for each in _load(corpus)] == [each.id for each in _load(corpus)]


def test_corpora_read_long_ago_are_forgotten(corpus: Path, cache: Path, tmp_path: Path) -> None:
    for number in range(10):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(corpus.read_bytes())
        _load(path)
    assert len(list(cache.iterdir())) == 8
    assert offsets.remembered(digests.stamp(tmp_path / "9.jsonl")) is not None


def test_the_digest_is_that_of_the_bytes(corpus: Path, cache: Path) -> None:
    passages = _load(corpus)
    with corpus.open("rb") as file:
        other = Passages(file, passages.starts, "corpus")
    assert passages.digest() == digests.mark([corpus]).blake3 == other.digest()
    passages = _load(corpus)
    corpus.unlink()
    assert passages.digest() == other.digest()
