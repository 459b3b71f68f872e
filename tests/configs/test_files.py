"""Small files that survive a loss of power."""

import os
from pathlib import Path

import pytest

from configs.files import write_durably


def test_a_file_is_on_the_disk_before_it_has_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, events = tmp_path / "new" / "number", []
    forcing = os.fsync

    def fsync(fd: int) -> None:
        events.append((Path(f"/proc/self/fd/{fd}").resolve().name, path.exists()))
        forcing(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    write_durably(path, b"7\n")
    assert events == [("number.tmp", False), ("new", True)] and path.read_bytes() == b"7\n"


def test_a_file_that_cannot_be_written_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "number"
    write_durably(path, b"7\n")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_durably(path, b"8\n")
    assert path.read_bytes() == b"7\n"
