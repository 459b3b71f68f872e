"""Large files are read once: what is remembered holds while they are the same files."""

import os
from pathlib import Path

import pytest
from blake3 import blake3

from retrieval_server.digests import mark


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "forage" / "digests.json"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "part_aa", tmp_path / "part_ab"]
    for path in made:
        path.write_bytes(path.name.encode() * 100)
    return made


def overwrite_unseen(path: Path) -> None:
    """Other bytes, the same size and time of change."""
    seen = path.stat()
    path.write_bytes(b"x" * seen.st_size)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def test_a_mark_is_of_the_files_one_after_another(files: list[Path], cache: Path) -> None:
    whole = b"".join(path.read_bytes() for path in files)
    found = mark(files)
    assert (found.bytes, found.blake3) == (len(whole), blake3(whole).hexdigest(length=16))
    assert not cache.exists()


def test_a_large_file_is_read_once(files: list[Path], cache: Path) -> None:
    first = mark(files, large_bytes=1)
    overwrite_unseen(files[0])
    assert mark(files, large_bytes=1) == first != mark(files)
    assert not list(cache.parent.glob("*.json.*"))


def test_a_file_that_changed_is_read_again(files: list[Path], cache: Path) -> None:
    first = mark(files, large_bytes=1)
    seen = files[1].stat()
    overwrite_unseen(files[1])
    os.utime(files[1], ns=(seen.st_atime_ns, seen.st_mtime_ns + 1))
    assert mark(files, large_bytes=1) == mark(files) != first


@pytest.mark.parametrize("held", [b"", b"{}", b'[{"stamps": 3}]'])
def test_what_cannot_be_read_or_written_is_done_without(
    files: list[Path], cache: Path, held: bytes
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(held)
    assert mark(files, large_bytes=1) == mark(files)
    cache.unlink()
    cache.mkdir()
    assert mark(files, large_bytes=1) == mark(files)
